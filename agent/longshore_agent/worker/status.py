"""Builds a worker's snapshot for its supervisor: the cores' rooms and peers as the types of `status.snapshot`.

Called by the worker's control thread. It updates the metrics and changes nothing else.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from longshore_agent.control.engine_link import EngineLink
from longshore_agent.control.peer_net import PeerNet
from longshore_agent.status.metric_table import WIRES
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import (
    ENDED_ROOMS_LISTED_MAX,
    LEFT_ROOMS_MAX,
    LEFT_SPANS_MAX,
    OPEN_ROOMS_LISTED_MAX,
    SPANS_LISTED_MAX,
    WorkerSnapshot,
)
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.engine_requests import EngineRequests
from longshore_agent.worker.moving import Mover
from longshore_spec.names import PROTECTIONS
from longshore_spec.status import (
    ATTACHED,
    CONNECTING,
    LOST,
    REFUSED,
    DataPortStatus,
    EngineStatus,
    LayoutStatus,
    PairStatus,
    PeerStatus,
    PoolStatus,
    RingStatus,
    RoomStatus,
    WorkerState,
)
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.granting import Granter
from longshore_wire.links import Link, PeerState
from longshore_wire.names import UNKNOWN_WIRE, room_name
from longshore_wire.peer_messages import RoomKey
from longshore_wire.plan import Pair
from longshore_wire.room import Ended, SourcePair, SourceRoom, TargetPair, TargetRoom
from longshore_wire.session import Session
from longshore_wire.states import SourcePairState, TargetPairState
from longshore_wire.target import TargetSession
from longshore_wire.ways import needs_wire

# The way of a pair of ranks that has nothing to move.
_NO_WAY = "none"
# Names of states in metrics and status.
_PEER_STATES = {
    PeerState.DIALING: CONNECTING,
    PeerState.ATTACHED: ATTACHED,
    PeerState.REFUSED: REFUSED,
    PeerState.LOST: LOST,
}
_TARGET_PAIR_STATES = {
    TargetPairState.WAITING: "claimed",
    TargetPairState.CLAIMED: "claimed",
    TargetPairState.OPEN: "open",
    TargetPairState.COMPLETE: "done",
    TargetPairState.ABORTING: "aborting",
    TargetPairState.CLOSED: "aborting",
}


class DescribedWorker(Protocol):
    """What a snapshot needs of a worker.

    Attributes:
        target: the core of the target's half, if any; also in `sessions`.
        engine: None: not connected yet, or gone.
    """

    config: WorkerConfig
    started_ns: int
    metrics: Metrics
    spans: SpanRecorder
    sessions: dict[Half, Session]
    target: TargetSession | None
    mover: Mover
    requests: EngineRequests
    net: PeerNet
    engine: EngineLink | None


def encode_last_snapshot(worker: DescribedWorker, now_ns: int) -> bytes:
    """Return the encoded WorkerSnapshot that the supervisor keeps after the worker's end: its last rooms and spans."""
    found = _snapshot(worker, None, now_ns)
    spans, ended = worker.spans.newest(limit=LEFT_SPANS_MAX), found.ended[:LEFT_ROOMS_MAX]
    cut = len(worker.spans) > len(spans) or worker.spans.lost_ns >= 0
    return msgspec.msgpack.encode(msgspec.structs.replace(found, ended=ended, spans=spans, spans_cut=cut))


def encode_snapshot(worker: DescribedWorker, name: str | None, now_ns: int) -> bytes:
    """Return an encoded WorkerSnapshot, with the spans of the room of this name."""
    return msgspec.msgpack.encode(_snapshot(worker, name, now_ns))


def _snapshot(worker: DescribedWorker, name: str | None, now_ns: int) -> WorkerSnapshot:
    room = _numbered(worker, name)
    _count(worker)
    config = worker.config
    peers = tuple(_peers(worker))
    _count_wires(worker.metrics, peers)
    ring = worker.target.granter.ring if worker.target is not None else None
    ports = _data_ports(worker)
    spans = worker.spans.of_room(room, limit=SPANS_LISTED_MAX + 1) if room is not None else ()
    return WorkerSnapshot(
        worker=config.name,
        pid=os.getpid(),
        epoch=str(config.epoch),
        state=WorkerState.READY,
        state_age_s=(now_ns - worker.started_ns) / 1e9,
        mps=worker.mover.resources.mps,
        peer_access=config.peer_access(),
        engines=_engines(worker, now_ns),
        peers=peers,
        ring=RingStatus(ring.capacity_bytes, ring.used_bytes, ring.held_bytes, ring.rounds)
        if ring is not None
        else None,
        lanes=worker.mover.resources.runner.lanes(),
        data_path=max((port.protection for port in ports), key=PROTECTIONS.index, default=PROTECTIONS[0]),
        data_ports=ports,
        rooms_open=sum(len(session.rooms) for session in worker.sessions.values()),
        rooms_ended=sum(len(session.ended) for session in worker.sessions.values()),
        mismatches=worker.mover.mismatch_count,
        mismatch=worker.mover.mismatch,
        rooms=tuple(_open_rooms(worker, room, now_ns)),
        ended=tuple(_ended_rooms(worker, room)),
        spans=spans[-SPANS_LISTED_MAX:],
        spans_cut=len(spans) > SPANS_LISTED_MAX or _lost_spans(worker, room),
        metrics=worker.metrics.snapshot(),
    )


def _count(worker: DescribedWorker) -> None:
    metrics = worker.metrics
    for half, session in worker.sessions.items():
        _count_session(metrics, half, session, len(session.rooms))
        metrics.set("longshore_engines", int(worker.engine is not None), half=half.label)
    _count_peers(metrics, list(worker.sessions.values()))
    for lane in worker.mover.resources.runner.lanes():
        if lane.slabs:
            metrics.advance("longshore_lane_slabs_total", lane.slabs, lane=lane.lane)
            metrics.advance("longshore_lane_bytes_total", lane.bytes_moved, lane=lane.lane)
    if worker.target is not None:
        _count_ring(metrics, worker.target.granter)
    counters = worker.net.counters + worker.mover.counters
    for session in worker.sessions.values():
        counters += session.counters
    _count_refused(metrics, counters)
    metrics.advance("longshore_authentication_failures_total", worker.net.refused_count)


def _count_session(metrics: Metrics, half: Half, session: Session, rooms_open: int) -> None:
    """Update the gauges and counters of one core."""
    metrics.set("longshore_rooms_open", rooms_open, half=half.label)
    metrics.advance("longshore_retries_total", session.counters["retries"], message="all")
    for name, count in session.counters.items():
        kind, _, rest = name.partition(".")
        if kind == "claims":
            way, _, why = rest.partition(".")
            metrics.advance("longshore_claims_total", count, way=way, why=why)


def _count_peers(metrics: Metrics, sessions: list[Session]) -> None:
    """Update the gauge of peers."""
    counts = dict.fromkeys(_PEER_STATES.values(), 0)
    for session in sessions:
        for peer in session.peers.values():
            counts[_PEER_STATES[peer.state]] += 1
    for state, count in counts.items():
        metrics.set("longshore_peers", count, state=state)


def _count_ring(metrics: Metrics, granter: Granter) -> None:
    """Update the gauges and counters of the ring."""
    ring = granter.ring
    metrics.set("longshore_ring_capacity_bytes", ring.capacity_bytes)
    metrics.set("longshore_ring_used_bytes", ring.used_bytes + ring.held_bytes)
    metrics.set("longshore_ring_held_bytes", ring.held_bytes)
    metrics.advance("longshore_ring_rounds_total", ring.rounds)
    metrics.advance("longshore_credit_waits_total", granter.credit_waits)
    metrics.advance("longshore_credit_wait_seconds_total", granter.credit_wait_ns / 1e9)


def _count_refused(metrics: Metrics, counters: Mapping[str, int]) -> None:
    """Update the counters of refused messages."""
    for name, count in counters.items():
        kind, _, what = name.partition(".")
        if kind == "refused":
            metrics.advance("longshore_refused_messages_total", count, reason=what.lower())


def _data_ports(worker: DescribedWorker) -> tuple[DataPortStatus, ...]:
    ports = tuple(
        DataPortStatus(port.address, port.port, port.protection.value, port.refused_count)
        for port in worker.mover.resources.ports.describe()
    )
    for protection in PROTECTIONS[1:]:
        count = sum(port.protection == protection for port in ports)
        worker.metrics.set("longshore_data_ports", count, protection=protection)
    worker.metrics.advance("longshore_data_port_refusals_total", sum(port.refused for port in ports))
    return ports


def _engines(worker: DescribedWorker, now_ns: int) -> tuple[EngineStatus, ...]:
    if worker.engine is None:
        return ()
    pools = tuple(
        PoolStatus(
            number,
            pool.kv_pool.page_count,
            sum(length for _, length in pool.kv_pool.regions),
            pool.kv_pool.sealed,
            pool.kv_pool.adjacent,
        )
        for number, pool in worker.requests.pools.items()
    )
    config = worker.config
    roles = tuple(half.label for half in config.roles)
    layout = LayoutStatus.of(config.layout)
    memory = config.memory.label
    pid, connected_s = worker.engine.peer.pid, (now_ns - worker.engine.connected_ns) / 1e9
    return (EngineStatus(config.instance, config.layout.rank, roles, layout, pools, pid, memory, connected_s),)


def _peers(worker: DescribedWorker) -> Iterable[PeerStatus]:
    for half, session in worker.sessions.items():
        for peer in session.peers.values():
            yield PeerStatus(
                peer.peer.instance,
                peer.peer.dp_rank,
                peer.peer.rank,
                _PEER_STATES[peer.state],
                peer.wire,
                str(peer.epoch),
                error=_trouble(session, peer),
                ways=_ways(peer),
                memory=peer.peer.memory.label,
                half=half.label,
                bytes_moved=peer.bytes_moved,
            )


def _count_wires(metrics: Metrics, peers: Sequence[PeerStatus]) -> None:
    served = [peer for peer in peers if peer.state == ATTACHED and needs_wire(peer.ways)]
    # A peer may report any text as a wire's name.
    counts = Counter(peer.wire if peer.wire in WIRES else UNKNOWN_WIRE for peer in served)
    for wire in WIRES:
        metrics.set("longshore_peer_wires", counts[wire], wire=wire)


def _trouble(session: Session, peer: Link) -> str:
    if peer.state in (PeerState.REFUSED, PeerState.LOST):
        return peer.trouble
    return session.wire_fault(peer) if needs_wire(_ways(peer)) else ""


def _ways(peer: Link) -> tuple[str, ...]:
    return tuple(sorted(way.label for way in peer.ways))


def _numbered(worker: DescribedWorker, name: str | None) -> int | None:
    """Return the number of a room that this worker knows by its name; None: it knows none."""
    if name is None or name.isdigit():
        return int(name) if name else None
    sessions = worker.sessions.values()
    keys = (key for session in sessions for rooms in (session.rooms, session.ended) for key in rooms)
    return next((key.room for key in keys if room_name(key.room) == name), None)


def _open_rooms(worker: DescribedWorker, room: int | None, now_ns: int) -> Iterable[RoomStatus]:
    for half, session in worker.sessions.items():
        listed: list[SourceRoom | TargetRoom] = list(islice(session.rooms.values(), OPEN_ROOMS_LISTED_MAX))
        listed += [found for found in session.rooms.values() if found.key.room == room and found not in listed]
        for found in listed:
            yield _source(found, now_ns) if isinstance(found, SourceRoom) else _target(half, found, now_ns)


def _lost_spans(worker: DescribedWorker, room: int | None) -> bool:
    """Return whether spans of a room are no longer kept: the earliest of them ended after it opened."""
    return any(
        0 < found.opened_ns <= worker.spans.lost_ns
        for session in worker.sessions.values()
        for rooms in (session.rooms, session.ended)
        for key, found in rooms.items()
        if key.room == room
    )


def _ended_rooms(worker: DescribedWorker, room: int | None) -> Iterable[RoomStatus]:
    for half, session in worker.sessions.items():
        newest = list(islice(reversed(session.ended.items()), ENDED_ROOMS_LISTED_MAX))
        newest += [(key, end) for key, end in _asked(session, room) if key not in dict(newest)]
        for key, ended in newest:
            yield _status(half, key, "done" if ended.reason is Reason.NONE else "failed", (), ended.reason, ended.text)


def _asked(session: Session, room: int | None) -> Iterable[tuple[RoomKey, Ended]]:
    return [(key, ended) for key, ended in session.ended.items() if key.room == room] if room is not None else []


def _source(room: SourceRoom, now_ns: int) -> RoomStatus:
    pairs = tuple(_source_pair(pair) for pair in room.pairs.values())
    state = "failed" if room.failed else "open"
    moving = [pair for pair in room.pairs.values() if pair.states]
    wanted = max((end - first for first, end in (pair.tokens for pair in moving)), default=0)
    # Caches may have prefixes of different lengths: what is left of the slowest counts.
    left = max(
        (
            _left(
                pair.tokens[1] - pair.tokens[0], pair.acked_count * pair.grid.slab_tokens, pair.route, is_done=pair.done
            )
            for pair in moving
        ),
        default=0,
    )
    done = wanted - max(left, 0)
    return _status(
        Half.SOURCE,
        room.key,
        state,
        pairs,
        room.reason,
        room.text,
        wanted=wanted,
        done=min(done, wanted),
        total=room.total_tokens,
        moved_bytes=room.bytes_moved,
        age_s=(now_ns - room.opened_ns) / 1e9,
    )


def _left(wanted: int, done: int, route: Pair | None, *, is_done: bool) -> int:
    """Return how many tokens of a pair are left. A slot has the state after all tokens once it is there, and none before."""
    if route is not None and route.slot:
        return 0 if is_done else wanted
    return wanted - done


def _target(half: Half, room: TargetRoom, now_ns: int) -> RoomStatus:
    pairs = tuple(_target_pair(pair) for pair in room.pairs.values())
    state = "failed" if room.failed else "open" if room.unfinished else "done"
    if room.is_asked:
        # The engine has claimed no tokens yet.
        age_s = (now_ns - room.opened_ns) / 1e9
        return _status(half, room.key, state, pairs, room.reason, room.text, age_s=age_s)
    wanted = max(each.end_token - each.first_token for each in room.caches)
    moving = [(pair, room.caches[pair.pair.cache]) for pair in room.pairs.values() if pair.route is not None]
    left = max(
        (
            _left(each.end_token - each.first_token, pair.done_tokens, pair.route, is_done=pair.done)
            for pair, each in moving
        ),
        default=wanted,
    )
    return _status(
        half,
        room.key,
        state,
        pairs,
        room.reason,
        room.text,
        wanted=wanted,
        done=wanted - left,
        total=max(each.end_token for each in room.caches),
        moved_bytes=room.bytes_moved,
        age_s=(now_ns - room.opened_ns) / 1e9,
    )


def _status(
    half: Half,
    key: RoomKey,
    state: str,
    pairs: Sequence[PairStatus],
    reason: Reason,
    text: str,
    *,
    wanted: int = 0,
    done: int = 0,
    total: int = -1,
    moved_bytes: int = 0,
    age_s: float = 0.0,
) -> RoomStatus:
    return RoomStatus(
        room=room_name(key.room),
        instance=key.instance,
        half=half.label,
        state=state,
        ways=tuple(sorted({pair.way for pair in pairs} - {_NO_WAY})),
        tokens_wanted=wanted,
        tokens_done=done,
        tokens_total=total,
        slabs_done=sum(pair.slabs_done for pair in pairs),
        slabs_total=sum(pair.slabs_total for pair in pairs),
        bytes_moved=moved_bytes,
        age_s=age_s,
        reason="" if reason is Reason.NONE else reason.name,
        text=text,
        pairs=tuple(pairs),
        why=tuple(sorted({pair.why for pair in pairs} - {""})),
    )


def _source_pair(pair: SourcePair) -> PairStatus:
    state = "done" if pair.done else "open" if pair.state is SourcePairState.OPEN else "aborting"
    return _pair(pair, state, pair.acked_count, pair.busy_count)


def _target_pair(pair: TargetPair) -> PairStatus:
    return _pair(pair, _TARGET_PAIR_STATES[pair.state], pair.done_count, len(pair.regions))


def _pair(pair: SourcePair | TargetPair, state: str, done_count: int, open_count: int) -> PairStatus:
    moves = pair.route is not None
    return PairStatus(
        pair.peer.instance,
        pair.peer.dp_rank,
        pair.peer.rank,
        pair.way.label if moves else _NO_WAY,
        state,
        done_count,
        len(pair.states),
        open_count,
        why=pair.why.label if moves else "",
        peer_memory=pair.peer.memory.label,
        cache=pair.pair.cache,
    )
