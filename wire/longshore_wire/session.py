"""Base of both halves of a worker's protocol core: its identity, effects, leases, and ended rooms.

`SourceSession` (prefill) and `TargetSession` (decode) build on it. No socket, loop, clock or log: messages and
time are arguments; effects, messages to send among them, are returned as data, in the order in which they must happen.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import ClassVar

from longshore_wire.effects import SECOND_NS, Effect, PeerId, ProbeLiveness, Send, SessionConfig, Stale
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LayoutError, Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PROTOCOL_VERSION, Attach, PeerMessage, PoolInfo, RegionInfo, RoomKey
from longshore_wire.peers import Ended, Life, Peer, PeerState
from longshore_wire.plan import Plan, plan
from longshore_wire.room import Room, SourcePair, SourceRoom, TargetPair, TargetRoom
from longshore_wire.timers import Deadlines
from longshore_wire.ways import AllowedWires, Way

# Maximum backoff of repeats, as a multiple of the first interval. More repeats do not help a busy peer.
BACKOFF_MAX = 16
# A write is split at ends of extents. Smaller extents would split it into too many pieces.
EXTENT_BYTES_MIN = 4096
# After this many intervals without a heartbeat, a probe asks whether the peer still listens.
PROBE_AFTER = 2


class Session:
    """State and methods of both halves. The subclasses define `half`, `rooms` and `cancel`.

    Attributes:
        identity: by which peers know this worker.
    """

    half: ClassVar[Half]
    rooms: Mapping[RoomKey, SourceRoom | TargetRoom]

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        config.layout.check()
        self.config = config
        self.identity = PeerId.of(config)
        self.peers: dict[PeerId, Peer] = {}
        self.ended: OrderedDict[RoomKey, Ended] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self.lease_until_ns = now_ns + config.lease_ns
        self._address = ""
        self._effects: list[Effect] = []
        self._metadata = b""
        self._ring_region: RegionInfo | None = None
        self._pools: dict[int, PoolInfo] = {}
        self._probe: RegionInfo | None = None
        self._generation = 0
        self._deadlines = Deadlines()

    @property
    def rank(self) -> int:
        """This worker's rank within its replica."""
        return self.config.layout.rank

    def wire_fault(self, known: Peer) -> str:
        """Return why no transport may connect a peer with this worker; empty if one may or the wire is unknown."""
        return self._wire_fault(known) if known.has_wire else ""

    def _wire_fault(self, known: Peer) -> str:
        ends = (known.peer, self.identity) if self.half is Half.TARGET else (self.identity, known.peer)
        return AllowedWires(self.config.wires).fault(known.found_wire, *ends, known.wire_failure)

    def _name(self, peer: PeerId) -> str:
        """Return a peer's name for messages."""
        return f"{'decode' if self.half is Half.SOURCE else 'prefill'} {peer.replica} rank {peer.rank}"

    def take_effects(self) -> list[Effect]:
        """Return what the world must do, messages among it, in the order in which it must happen; and forget it."""
        effects, self._effects = self._effects, []
        return effects

    def describe(
        self,
        metadata: bytes,
        ring: RegionInfo | None,
        pools: dict[int, PoolInfo],
        probe: RegionInfo | None = None,
        address: str = "",
    ) -> None:
        """Set the data that peers need to write to this worker; send it to attached peers if it changed.

        Args:
            address: this worker's address for peers, see `addresses`.
        """
        self._metadata, self._ring_region, self._pools, self._probe = metadata, ring, dict(pools), probe
        self._address = address
        self._generation += 1
        for peer in self.peers.values():
            if peer.state is PeerState.ATTACHED:
                self._send_attach(peer)

    def renew(self, now_ns: int) -> None:
        """Renew the leases of all rooms: the engine lives."""
        self.lease_until_ns = now_ns + self.config.lease_ns

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns`, in which this side did not run, as silence of peers or for its engine's lease."""
        self._deadlines.absent_ns += late_ns
        for peer in self.peers.values():
            peer.heard_ns = min(now_ns, peer.heard_ns + late_ns)
            if peer.rival_since_ns is not None:
                peer.rival_since_ns = min(now_ns, peer.rival_since_ns + late_ns)
        self.lease_until_ns = min(now_ns + self.config.lease_ns, self.lease_until_ns + late_ns)

    @property
    def unfinished(self) -> bool:
        """Whether the engine waits for the end of a room."""
        return any(room.unfinished for room in self.rooms.values())

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room; unknown rooms are ignored."""
        raise NotImplementedError

    def fail_claimed(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room that sibling ranks share; at a target, that is every room."""
        self.fail_all(reason, text, now_ns)

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a peer that this side must not exchange bytes with."""
        raise NotImplementedError

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """Fail the rooms of a peer that is silent or gone."""
        raise NotImplementedError

    def peer_dead(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to ProbeLiveness: that life's address refuses connections, so its process has ended."""
        raise NotImplementedError

    def peer_listens(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to ProbeLiveness: the process of that life exists, although it is silent."""
        known = self.peers.get(peer)
        if known is not None and known.epoch == epoch:
            known.listens_ns = now_ns

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Handle one message of a peer."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> None:
        """Repeat unanswered messages, check peers, end idle rooms and leases. Call it at `next_due_ns` at the latest."""
        for key, peer in self._deadlines.repeats.pop(now_ns):
            self._repeat(key, peer, now_ns)
        for peer in self._deadlines.peers.pop(now_ns):
            self._beat(peer, now_ns)
        self._end_idle_rooms(now_ns)
        self._end_leases(now_ns)

    def sibling_failed(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room that a sibling rank has failed, even if this rank's engine asks for it only later."""
        if key in self.rooms:
            self.cancel(key, reason, text, now_ns)
        elif key not in self.ended:
            self._remember(key, reason, text, self._remembered_until_ns(now_ns))

    def fail_pool(self, pool: int, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room of a pool."""
        for key in [key for key in self.rooms if key.pool == pool]:
            self.cancel(key, reason, text, now_ns)

    def fail_all(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room."""
        for key in list(self.rooms):
            self.cancel(key, reason, text, now_ns)

    def next_due_ns(self) -> int | None:
        """Return when `tick` must be called at the latest, or None."""
        due_ns = self._deadlines.next_ns()
        dues = [] if due_ns is None else [due_ns]
        if self.ended:
            # Rounded up, so that many ended rooms are dropped together.
            dues.append(-(-next(iter(self.ended.values())).until_ns // SECOND_NS) * SECOND_NS)
        if self.rooms:
            dues.append(self.lease_until_ns)
        return min(dues, default=None)

    def _attach(self, attempt: int) -> Attach:
        config = self.config
        return Attach(
            version=PROTOCOL_VERSION,
            deployment=config.deployment,
            instance=config.instance,
            epoch=config.epoch,
            address=self._address,
            engine=config.engine,
            attempt=attempt,
            layout=config.layout,
            backend=config.backend,
            metadata=self._metadata,
            ring=self._ring_region,
            pools=tuple(self._pools.values()),
            slab_bytes_max=config.slab_bytes_max,
            generation=self._generation,
            probe=self._probe,
            in_place=config.in_place,
            memory=config.memory,
        )

    def _send_attach(self, known: Peer) -> None:
        raise NotImplementedError

    def _repeat(self, key: RoomKey, peer: PeerId, now_ns: int) -> None:
        """Repeat what a peer has not answered about a room."""
        raise NotImplementedError

    def _repeat_later(self, room: RoomKey, peer: PeerId, attempts: int, now_ns: int) -> None:
        """Set the time of repeat number `attempts`. The wait doubles up to BACKOFF_MAX times the first."""
        self._deadlines.repeats.set(
            (room, peer), now_ns + self.config.retry_ns * min(1 << min(attempts, 30), BACKOFF_MAX)
        )

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Handle the due time of a peer's heartbeat."""
        raise NotImplementedError

    def _awaits_wire(self, room: RoomKey, known: Peer, now_ns: int) -> bool:
        """Whether the unknown wire to a peer may still be found."""
        raise NotImplementedError

    def _wire_allows(self, room: Room, pair: SourcePair | TargetPair, now_ns: int) -> bool:
        """Whether a transport may write a pair's slabs. Not before the wire is known; if it is forbidden, the room fails."""
        if not self.config.wires or pair.route is None or pair.way is Way.DIRECT:
            return True
        known = self.peers[pair.peer]
        if not known.has_wire and self._awaits_wire(room.key, known, now_ns):
            return False
        fault = self._wire_fault(known)
        if fault:
            self.cancel(room.key, Reason.WIRE_NOT_ALLOWED, fault, now_ns)
        return not fault

    def _send(self, peer: PeerId, message: PeerMessage) -> None:
        self._effects.append(Send(peer, message))

    def _effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _stale(self, message: PeerMessage) -> None:
        name = type(message).__name__
        self.counters[f"stale.{name}"] += 1
        self._effect(Stale(name))

    def _remember(self, key: RoomKey, reason: Reason, text: str, until_ns: int, lives: tuple[Life, ...] = ()) -> None:
        room = self.rooms.get(key)
        self.ended[key] = Ended(reason, text, until_ns, lives, 0 if room is None else room.opened_ns)
        self.ended.move_to_end(key)
        while len(self.ended) > self.config.ended_rooms_max:
            self.ended.popitem(last=False)

    def _remembered_until_ns(self, now_ns: int) -> int:
        """Return until when the outcome of a room that ends now is kept."""
        return now_ns + 2 * self.config.lease_ns

    def _progress(self, room: Room, now_ns: int) -> None:
        """Restart a room's timeout after progress."""
        if room.progress_ns < 0:
            self._deadlines.rooms.set(room.key, now_ns + self.config.room_timeout_ns)
        # Time in which this side did not run does not count.
        room.progress_ns = now_ns - self._deadlines.absent_ns

    def _moved(self, room: Room, peer: PeerId, payload_bytes: int, now_ns: int) -> None:
        """Count a finished slab."""
        room.bytes_moved += payload_bytes
        # A peer is forgotten after it was lost; then its rooms have failed.
        if (known := self.peers.get(peer)) is not None:
            known.bytes_moved += payload_bytes
        self._progress(room, now_ns)

    def _end_idle_rooms(self, now_ns: int) -> None:
        """Fail rooms without progress for the room timeout."""
        for key in self._deadlines.rooms.pop(now_ns):
            room = self.rooms.get(key)
            if room is None or room.failed:
                continue
            due_ns = room.progress_ns + self._deadlines.absent_ns + self.config.room_timeout_ns
            if due_ns > now_ns:
                self._deadlines.rooms.set(key, due_ns)
                continue
            text = f"nothing has happened in it for {self.config.room_timeout_ns / 1e9:g} s: {room.missing}"
            self.cancel(key, Reason.TIMED_OUT, text, now_ns)

    def _check_silence(self, known: Peer, name: str, now_ns: int) -> bool:
        """Probe a silent peer; declare it lost if it was silent for too long. Return whether it is lost."""
        silence_ns = now_ns - known.heard_ns
        if silence_ns >= known.silence_limit_ns(self.config.peer_timeout_ns, self.config.heartbeat_ns, now_ns):
            self.peer_lost(known.peer, f"{name} was silent for {silence_ns / 1e9:.1f} s", now_ns)
            return True
        if silence_ns > PROBE_AFTER * self.config.heartbeat_ns and known.state is PeerState.ATTACHED:
            self._effect(ProbeLiveness(known.peer, known.epoch, known.address))
        return False

    def _end_leases(self, now_ns: int) -> None:
        if self.rooms and now_ns >= self.lease_until_ns:
            side = "prefill" if self.half is Half.SOURCE else "decode"
            text = f"the {side} engine did not renew its lease for {self.config.lease_ns / 1e9:.0f} s"
            self.fail_all(Reason.LEASE_EXPIRED, text, now_ns)
            self.lease_until_ns = now_ns + self.config.lease_ns
        while self.ended and next(iter(self.ended.values())).until_ns <= now_ns:
            self.ended.popitem(last=False)

    def _check_attach(self, attach: Attach) -> tuple[Reason, str] | None:
        """Return why this peer is refused, and count it; None if it is accepted."""
        wrong = self._fault_of(attach)
        if wrong is not None:
            self.counters[f"refused.{wrong[0].name}"] += 1
        return wrong

    def _fault_of(self, attach: Attach) -> tuple[Reason, str] | None:
        config = self.config
        if attach.version != PROTOCOL_VERSION:
            return Reason.UNKNOWN_VERSION, f"peer speaks protocol {attach.version}, this side {PROTOCOL_VERSION}"
        if attach.deployment != config.deployment:
            return Reason.LAYOUT_MISMATCH, f"peer belongs to {attach.deployment}, this worker to {config.deployment}"
        if attach.backend != config.backend:
            return Reason.UNSUPPORTED, f"peer uses backend {attach.backend}, this side {config.backend}"
        try:
            attach.layout.check()
            if attach.layout.model != config.layout.model:
                raise LayoutError(f"model is {attach.layout.model} at the peer and {config.layout.model} here")
            for name, region in (("ring", attach.ring), ("probe", attach.probe)):
                _check_region(name, region)
        except LayoutError as error:
            return error.reason, str(error)
        return None

    def _plan(self, source: KVLayout, target: KVLayout, room: int, *, direct: bool = False) -> Plan:
        staging = self.config.staging
        if direct and self.config.neighbour_staging is not None:
            staging = self.config.neighbour_staging
        return plan(source, target, staging=staging, direct=direct, room=room)


def _check_region(name: str, region: RegionInfo | None) -> None:
    """Raise LayoutError unless a peer's region is a range of addresses, cut into few extents."""
    if region is None:
        return
    if not 0 <= region.address < region.address + region.length_bytes < 2**63:
        raise LayoutError(
            f"{name} is {region.length_bytes} bytes at {region.address}: that is not a range of addresses"
        )
    if region.extent_bytes and region.extent_bytes < EXTENT_BYTES_MIN:
        raise LayoutError(f"{name} has extents of {region.extent_bytes} bytes: use {EXTENT_BYTES_MIN} or more, or 0")
