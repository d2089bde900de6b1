"""Turns the cores' effects into slabs for the pipeline, and the ends of their lives into calls of the cores.

Called by the worker's control thread only. The runner that `resources` has made runs the lives, in this thread or in
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from longshore_agent.control.node_link import PoolMessage
from longshore_agent.errors import DeviceError, TransportError
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import (
    End,
    Ends,
    InboundEnd,
    InboundSlab,
    OutboundEnd,
    OutboundSlab,
    PageTable,
    WireProbe,
)
from longshore_agent.status.metric_table import named_wire
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.drain import Drain
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.ending import COPIES_LIMIT_S
from longshore_agent.worker.engine_requests import EngineRequests
from longshore_agent.worker.neighbour_pools import NeighbourPools
from longshore_agent.worker.resources import Resources
from longshore_wire.addresses import main_address
from longshore_wire.effects import DrainWriter, PeerAttached, PeerId, StartScatter, StartWrite
from longshore_wire.engine_messages import Half
from longshore_wire.errors import CodecError, Reason
from longshore_wire.names import UNKNOWN_WIRE, room_name
from longshore_wire.peer_messages import PEER, Attach, PairKey, PeerMessage, RoomKey
from longshore_wire.session import Session
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

Address = tuple[Half, PeerId]


class Mover:
    """See the module."""

    def __init__(
        self,
        config: WorkerConfig,
        metrics: Metrics,
        spans: SpanRecorder,
        tell: Callable[[PoolMessage, int | None], None],
    ) -> None:
        self.metrics = metrics
        self.ends = Ends()
        self.unsettled = False
        self.disconnected_count = 0
        # Slabs whose digests differed, and what was said of the newest.
        self.mismatch_count, self.mismatch = 0, ""
        self.failure = ""  # of the device: see `fail`
        self.counters: Counter[str] = Counter()
        self._drains: dict[tuple[PeerId, int], Drain] = {}
        self._gives_directly = config.gives_directly()
        self.resources = Resources(config, self.ends, metrics, spans)
        self._runner, self._copier = self.resources.runner, self.resources.copier
        self.peers = PeerBook()
        self._slabs: dict[tuple[Half, RoomKey], dict[int, OutboundSlab | InboundSlab]] = {}
        self._taken: list[End] = []
        self.neighbours = NeighbourPools(
            config.peer, self.resources.device, self.peers.attached, self.ends, tell, self._runner.send, self._copier
        )

    # -- the runner ------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """Stop using a device that has failed or hangs. Lives that are open then do not end."""
        self.failure = text

    def drive(self) -> bool:
        """Resume the lives whose waits have passed; return whether ends wait for `take_results`."""
        if self.failure:
            return False
        if self._runner.busy:
            self._taken += self._runner.advance()
        return bool(self._taken)

    def hurry(self) -> None:
        """Start the next write if the oldest has ended. Called between other work of the thread."""
        if not self.failure:
            self._runner.hurry()

    def prepare_pool(self, pool: KVPool) -> None:
        """Prepare a pool before its registration, so that no slab of it waits for that."""
        self._copier.prepare_pool(pool, direct=self._gives_directly)

    def prepare_pages(self, pool: KVPool, table: PageTable, half: Half, ways: frozenset[Way] = frozenset()) -> None:
        """Prepare the pages of a half of a room, or pages that were added to it.

        Args:
            ways: the ways of a source's slabs, as far as they were claimed.
        """
        if self.failure or not len(table.pages):
            return
        if half is Half.SOURCE and (Way.DIRECT in ways or (not ways and self._gives_directly)):
            self._copier.prepare_pages(pool, table.pages, to_write=False, direct=True)
        if not ways or ways - {Way.DIRECT}:
            self._copier.prepare_pages(pool, table.pages, to_write=half is Half.TARGET, direct=False)

    # -- peers -----------------------------------------------------------------------------------------------------

    def connect(self, half: Half, effect: PeerAttached) -> None:
        """Connect the transport to a peer; as a source, also probe the wire to a new one. Raises TransportError."""
        try:
            name = self.resources.transport.connect(effect.attach.metadata)
        except TransportError as error:
            self.peers.unreached(half, effect.peer, error)
            raise
        first = self.peers.add(half, effect.peer, name, effect.attach)
        probe = effect.attach.probe
        if half is Half.SOURCE and first and probe is not None:
            self._runner.probe(WireProbe(effect.peer, name, probe, effect.attach.epoch))

    def disconnect(self, half: Half, peer: PeerId) -> None:
        """Forget a peer of one half. If no half uses the peer, disconnect the transport from it.

        Writes of the peer may still land here.
        """
        name = self.peers.remove(half, peer)
        if half is Half.SOURCE:
            self.neighbours.pool_gone(peer)
        if name is not None:
            self.resources.transport.disconnect(name)
            self.disconnected_count += 1

    def notices(self) -> list[tuple[PeerId, PeerMessage]]:
        """Return the transport's notices of arrival. Count and drop invalid ones, and drop those of unknown peers."""
        found: list[tuple[PeerId, PeerMessage]] = []
        for name, data in self.resources.transport.notices():
            peer = self.peers.named(name)
            try:
                message = PEER.decode(data)
            except CodecError as error:
                self.counters[f"refused.{error.reason.name}"] += 1
                continue
            if peer is not None:
                found.append((peer, message))
        return found

    def drain(self, effect: DrainWriter, now_ns: int) -> None:
        """Begin to read all bytes that an ended life of a source had sent. `drained` returns that life afterwards."""
        key = (effect.peer, effect.epoch)
        if key not in self._drains:
            host = main_address(effect.address).rpartition(":")[0]
            self._drains[key] = Drain(host, now_ns)

    @property
    def drain_due_ns(self) -> int | None:
        """When to call `drained`; None: no writer is being drained."""
        return min(drain.due_ns for drain in self._drains.values()) if self._drains else None

    def drained(self, now_ns: int) -> list[tuple[PeerId, int]]:
        """Return each drained life of a source once. None of its bytes will land any more."""
        over = [key for key, drain in self._drains.items() if drain.is_over(now_ns)]
        for key in over:
            del self._drains[key]
        return over

    def claimed(self, source: SourceSession, peer: PeerId, claimed: PairKey) -> None:
        """Prepare the neighbour's pool and pages of a direct claim, whose tokens may be offered later."""
        room = source.rooms.get(claimed.key)
        pair = room.pairs.get((peer, claimed.cache)) if room is not None and not room.failed else None
        if pair is not None and pair.way is Way.DIRECT and pair.target_pages:
            self.neighbours.expect(peer, pair.pair.cache, pair.target_pages, pair.tokens[0])

    # -- slabs -----------------------------------------------------------------------------------------------------

    def start_write(self, effect: StartWrite, requests: EngineRequests, session: SourceSession, now_ns: int) -> None:
        """Begin the life of a slab at its source."""
        if self.failure:
            return
        name = self.peers.name(Half.SOURCE, effect.peer)
        if name is None:
            why = self.peers.why_unreached(effect.peer)
            session.cancel(effect.pair.key, why.reason, str(why), now_ns)
            session.write_failed(effect.peer, effect.pair, effect.slab, str(why), now_ns)
            return
        attach = self.peers.attached[Half.SOURCE, effect.peer]
        if effect.way is Way.STAGED and attach.ring is None:
            text = (
                f"rank {effect.peer.rank} of {effect.peer.instance} has granted ring memory, and has no ring any more"
            )
            session.write_failed(effect.peer, effect.pair, effect.slab, text, now_ns)
            return
        known = session.peers.get(effect.peer)
        wire = known.wire if known is not None else UNKNOWN_WIRE
        slab = OutboundSlab(
            effect,
            requests.pools[effect.pair.cache].kv_pool,
            requests.tables[Half.SOURCE, effect.pair.key][effect.pair.cache],
            name,
            attach,
            # A notice has no place for digests.
            transport_announces=not effect.digest_key and wire not in self.resources.transport.announced_by_message,
            wire=named_wire(wire, effect.way.label),
        )
        self._track(Half.SOURCE, slab)
        if effect.way is Way.DIRECT:
            self.neighbours.put(slab)
        else:
            self._runner.send(slab)

    def start_scatter(self, effect: StartScatter, requests: EngineRequests, now_ns: int) -> None:
        """Begin the life of a slab that has landed."""
        if self.failure:
            return
        key, cache = effect.pair.key, effect.pair.cache
        table = requests.tables[Half.TARGET, key][cache]
        slab = InboundSlab(effect, requests.pools[cache].kv_pool, table, now_ns)
        self._track(Half.TARGET, slab)
        self._runner.receive(slab)

    def cancel(self, half: Half, key: RoomKey) -> None:
        """Cancel a room's slabs. At a source, those whose copies have not begun are dropped at once."""
        for slab in self._slabs.get((half, key), {}).values():
            slab.cancelled = True
        if half is not Half.SOURCE:
            return
        self.neighbours.drop_cancelled()
        self._runner.drop_cancelled()

    def forget(self, half: Half, key: RoomKey) -> None:
        """Forget a released room, which has no slab left."""
        self._slabs.pop((half, key), None)

    def collect(self) -> None:
        """Take what threads have done: ends, and pools that were registered for a GPU. Called when `ends.wake` is readable."""
        self._taken += self.ends.take()
        self.neighbours.take_registered()

    def take_results(self, sessions: Mapping[Half, Session], now_ns: int) -> None:
        """Report the collected ends to the cores."""
        taken, self._taken = self._taken, []
        for end in taken:
            session = sessions[Half.TARGET if isinstance(end, InboundEnd) else Half.SOURCE]
            if isinstance(end, InboundEnd):
                assert isinstance(session, TargetSession)
                self._scattered(end, session, now_ns)
                continue
            assert isinstance(session, SourceSession)
            if isinstance(end, OutboundEnd):
                self._sent(end, session, now_ns)
            else:
                self._runner.end_probe(end.probe)
                session.wire_found(end.probe.peer, end.probe.epoch, end.wire, end.error, now_ns)

    def finish_copies(self) -> None:
        """Wait until a GPU touches no pages any more. A healthy GPU needs some milliseconds.

        Raises:
            DeviceError: it hangs or has failed. Only the end of this process takes the pages from it.
        """
        if self.failure:
            raise DeviceError(self.failure)
        self._runner.stop()
        self._copier.wait(COPIES_LIMIT_S)
        self.drive()

    def _track(self, half: Half, slab: OutboundSlab | InboundSlab) -> None:
        self._slabs.setdefault((half, slab.effect.pair.key), {})[id(slab)] = slab

    def _untrack(self, half: Half, slab: OutboundSlab | InboundSlab) -> None:
        self._slabs.get((half, slab.effect.pair.key), {}).pop(id(slab), None)

    def _note_mismatch(self, end: OutboundEnd | InboundEnd) -> None:
        if end.reason is Reason.DIGEST_MISMATCH:
            key = end.slab.effect.pair.key
            self.mismatch_count += 1
            self.mismatch = f"room {room_name(key.room)} of {key.instance}: {end.error}"

    def _sent(self, end: OutboundEnd, session: SourceSession, now_ns: int) -> None:
        slab, effect = end.slab, end.slab.effect
        self._untrack(Half.SOURCE, slab)
        self._note_mismatch(end)
        if end.error:
            self.unsettled = self.unsettled or not end.settled
            session.write_failed(
                effect.peer, effect.pair, effect.slab, end.error, now_ns, settled=end.settled, reason=end.reason
            )
            return
        if not end.dropped:
            self.metrics.later(self.metrics.add, "longshore_slabs_total", half="source", way=effect.way.label)
        payload_bytes = 0 if end.dropped else effect.payload_bytes
        session.write_done(
            effect.peer,
            effect.pair,
            effect.slab,
            payload_bytes,
            now_ns,
            announce=end.must_announce,
            digests=end.digests,
        )

    def _scattered(self, end: InboundEnd, session: TargetSession, now_ns: int) -> None:
        slab, effect = end.slab, end.slab.effect
        self._untrack(Half.TARGET, slab)
        self._note_mismatch(end)
        if end.reason is not Reason.NONE:
            session.scatter_failed(effect.peer, effect.pair, effect.slab, end.reason, end.error, now_ns)
            return
        if not end.dropped:
            self.metrics.later(self._count_delivered, effect.way.label, (now_ns - slab.landed_ns) / 1e9)
        session.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, now_ns)

    def _count_delivered(self, way: str, seconds: float) -> None:
        self.metrics.add("longshore_slabs_total", half="target", way=way)
        self.metrics.observe("longshore_stage_seconds", seconds, stage="deliver")


class PeerBook:
    """Each peer's name at the transport and its Attach message. The two halves of a peer have separate entries.

    Attributes:
        attached: the newest Attach of each half of a peer.
    """

    def __init__(self) -> None:
        """Begin with no peer."""
        self.attached: dict[Address, Attach] = {}
        self._names: dict[Address, str] = {}
        self._peers: dict[str, PeerId] = {}
        self._unreached: dict[Address, TransportError] = {}

    def add(self, half: Half, peer: PeerId, name: str, attach: Attach) -> bool:
        """Record a peer's name at the transport; return whether it is new."""
        address = (half, peer)
        self._unreached.pop(address, None)
        first = address not in self.attached
        self._names[address], self._peers[name] = name, peer
        self.attached[address] = attach
        return first

    def remove(self, half: Half, peer: PeerId) -> str | None:
        """Forget a half of a peer. Return the name to disconnect; None: it had none, or the other half uses it."""
        address = (half, peer)
        self.attached.pop(address, None)
        self._unreached.pop(address, None)
        name = self._names.pop(address, None)
        if name is None or name in self._names.values():
            return None
        self._peers.pop(name, None)
        return name

    def unreached(self, half: Half, peer: PeerId, error: TransportError) -> None:
        """Record why the transport cannot serve an attached peer, for the failures of later rooms."""
        self._unreached[half, peer] = error

    def why_unreached(self, peer: PeerId) -> TransportError:
        """Return the error for a slab whose target has no name at the transport."""
        text = f"the transport does not know rank {peer.rank} of {peer.instance}"
        return self._unreached.get((Half.SOURCE, peer)) or TransportError(text)

    def name(self, half: Half, peer: PeerId) -> str | None:
        """Return a peer's name at the transport; None: it has none."""
        return self._names.get((half, peer))

    def named(self, name: str) -> PeerId | None:
        """Return the peer with this name at the transport; None: no peer has it."""
        return self._peers.get(name)
