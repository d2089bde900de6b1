"""The links of one protocol core to its peers: who they are, whether they live, and what is sent to them.

Owned by `SourceSession` and `TargetSession`, which tell it their role. It calls neither and knows no room: it changes the
state of a peer or reports what has happened to one, and the core decides what that means for its rooms.

The decode worker dials, so a link looks different from its two ends:

| | at a target, for a source | at a source, for a target |
|---|---|---|
| begins | with the address that a room names: `dial` sends an Attach and repeats it | with the target's Attach, which `attach` answers |
| lives | `beat` sends a Ping at each heartbeat | `answer_ping` answers it with a Pong |
| `silence` | is measured from the last message, and probed before the peer counts as lost | the same |
| ends | as LOST or REFUSED. The peer is kept while a room or an outcome needs it | the peer is forgotten |

An epoch names one life of a worker. A message of another life than the attached one changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from longshore_wire.addresses import main_address
from longshore_wire.effects import (
    Dial,
    Effect,
    PeerAttached,
    PeerGone,
    PeerId,
    ProbeLiveness,
    Send,
    SessionConfig,
    Stale,
)
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LayoutError, Reason
from longshore_wire.layout import KVLayout
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.peer_messages import (
    PROTOCOL_VERSION,
    Attach,
    PeerMessage,
    Ping,
    Pong,
    PoolInfo,
    RegionInfo,
    RoomKey,
)
from longshore_wire.room import Ended, SourcePair, TargetPair
from longshore_wire.timers import Deadlines
from longshore_wire.ways import AllowedWires, Way

# A write is split at ends of extents. Smaller extents would split it into too many pieces.
EXTENT_BYTES_MIN = 4096
# After this many intervals without a heartbeat, a probe asks whether the peer still listens.
PROBE_AFTER = 2
# A source finds its wire within 5 s (`Transport.probe_wire`) or reports Unknown. Its message may get lost.
WIRE_WAIT_NS = 6_000_000_000


class PeerState(Enum):
    """The state of a peer as this side knows it."""

    DIALING = "dialing"
    ATTACHED = "attached"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(slots=True)
class Outcome:
    """The end of a pair, not yet acknowledged by its source. Reason NONE: the pair is complete."""

    ended: Ended
    engine: int  # the life of the source's engine that had the room; 0: not known
    serial: int = 0  # of the claim; below 0: of the ask; 0: neither was sent
    attempts: int = 0


@dataclass(slots=True)
class Writer:
    """A life of a source that may still write our memory for aborted pairs."""

    address: str
    pair_count: int = 0
    listens_ns: int = -(1 << 62)  # when a probe last found a listener there
    visited_ns: int = -(1 << 62)  # when its address was last dialled although the source is attached elsewhere


@dataclass(slots=True)
class Link:
    """The link to one worker of another instance, in its current life."""

    peer: PeerId
    address: str = ""
    state: PeerState = PeerState.DIALING
    attach: Attach | None = None
    heard_ns: int = 0
    listens_ns: int = -1  # when a probe last confirmed that its process exists; -1: never
    absent_ns: int = -1  # total time in which its current life did not run, as it reports; -1: not reported
    absence_ns: int = 0  # the longest absence in its recent reports
    absence_reported_ns: int = 0
    # Number of the newest heartbeat of its current life. A source repeats our numbers; those before its Attach do not count.
    beat_number: int = 0
    dialled_ns: int = 0
    wire: str = UNKNOWN_WIRE
    wire_epoch: int = 0  # the life for which `wire` was found; 0: none
    wire_failure: str = ""  # why the probe failed
    wire_due_ns: int = 0  # a target waits for the wire until then
    rooms: dict[RoomKey, None] = field(default_factory=dict)  # in the order in which they were opened
    trouble: str = ""  # why it was last refused or lost; else empty
    # By cache, pools of `attach` whose geometry fits its layout. Pools of another Attach are different objects.
    sound_pools: dict[int, PoolInfo] = field(default_factory=dict)
    ways: set[Way] = field(default_factory=set)  # of all pairs claimed so far
    bytes_moved: int = 0  # of finished slabs of all pairs

    # The following fields are used at a target, for its sources.
    attempt: int = 0  # number of our newest Attach to it
    answered: int = 0  # number of the newest Attach that it has answered, or that only earlier lives have got
    named_epoch: int = 0  # the newest life that a room has named at an address that was dialled
    outcomes: dict[tuple[RoomKey, int], Outcome] = field(default_factory=dict)
    queued_epoch: int = 0  # the life for which outcomes of earlier lives' rooms were queued
    outcomes_until_ns: int = 0  # until then a later life must be sent the outcomes of ended rooms
    writers: dict[int, Writer] = field(default_factory=dict)  # by epoch
    home: str = ""  # the address that is dialled after a writer's; empty: no writer's address is dialled only to ask
    rival_since_ns: int | None = None  # since when a room names another address although the peer answers at `address`
    rival: str = (
        ""  # an address that only ended rooms name. It is dialled, to report their ends, if the peer is lost here
    )

    @property
    def epoch(self) -> int:
        """The epoch of the peer's current life; 0 before it attached."""
        return self.attach.epoch if self.attach else 0

    @property
    def has_wire(self) -> bool:
        """Whether the wire to the peer's current life is known."""
        return self.wire_epoch == self.epoch

    @property
    def found_wire(self) -> str:
        """The wire to the peer's current life; UNKNOWN_WIRE if it is not known."""
        return self.wire if self.has_wire else UNKNOWN_WIRE

    @property
    def is_lost(self) -> bool:
        """Whether it was lost or refused."""
        return self.state in (PeerState.LOST, PeerState.REFUSED)

    def claimed(self, key: RoomKey, way: Way | None) -> None:
        """Record a room with this peer, and the way of its slabs; None if no bytes move."""
        self.rooms[key] = None
        if way is not None:
            self.ways.add(way)

    def beat(self, number: int, absent_ns: int, lease_ns: int, now_ns: int) -> None:
        """Record a heartbeat of the current life. `absent_ns` is its reported total time of not running."""
        self.beat_number, self.heard_ns = number, now_ns
        growth_ns = max(0, absent_ns - self.absent_ns) if self.absent_ns >= 0 else 0
        self.absent_ns = absent_ns
        if growth_ns >= self.absence_ns or now_ns - self.absence_reported_ns >= lease_ns:
            self.absence_ns, self.absence_reported_ns = growth_ns, now_ns

    def listening(self, since_ns: int) -> list[Writer]:
        """Return the earlier lives that may still write and whose addresses have listened since then: the source may be there.

        The listener is that life, a later one or another worker. The last two prove that the writer has ended.
        """
        return [writer for writer in self.writers.values() if writer.listens_ns >= since_ns]

    def silence_limit_ns(self, timeout_ns: int, heartbeat_ns: int, now_ns: int) -> int:
        """Return how long this peer may be silent before it counts as lost.

        A peer that was absent recently may be absent again, so that time is added, up to the timeout. The limit doubles
        while probes confirm that its process exists, since it is then starved or stopped, but not gone.
        """
        limit_ns = timeout_ns + min(self.absence_ns, timeout_ns)
        listens = self.listens_ns >= 0 and now_ns - self.listens_ns <= 2 * heartbeat_ns
        return 2 * limit_ns if listens else limit_ns


class Links:
    """A core's peers, and its effects, messages to peers among them.

    Attributes:
        identity: by which peers know this worker.
        effects: what the world must do, in the order in which it must happen. `take_effects` takes them.
    """

    def __init__(self, config: SessionConfig, role: Half, deadlines: Deadlines) -> None:
        config.layout.check()
        self.config = config
        self.role = role
        self.identity = PeerId.of(config)
        self.peers: dict[PeerId, Link] = {}
        self.counters: Counter[str] = Counter()
        self.effects: list[Effect] = []
        self.has_probe = False  # a peer can probe the wire to this worker
        # Numbers Attaches and Pings over all peers and lives, so that late answers are recognised. Used by a target.
        self.asked_count = config.epoch
        self._deadlines = deadlines
        self._address = ""
        self._metadata = b""
        self._ring: RegionInfo | None = None
        self._pools: tuple[PoolInfo, ...] = ()
        self._probe: RegionInfo | None = None
        self._generation = 0

    def name(self, peer: PeerId) -> str:
        """Return a peer's name for messages."""
        return f"{'decode' if self.role is Half.SOURCE else 'prefill'} {peer.replica} rank {peer.rank}"

    # -- effects -------------------------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        """Return what the world must do, messages among it, in the order in which it must happen; and forget it."""
        effects, self.effects = self.effects, []
        return effects

    def emit(self, effect: Effect) -> None:
        """Add an effect."""
        self.effects.append(effect)

    def send(self, peer: PeerId, message: PeerMessage) -> None:
        """Send a message to a peer. It may get lost."""
        self.effects.append(Send(peer, message))

    def stale(self, message: PeerMessage) -> None:
        """Count a message that is ignored, since it belongs to another life, another grant or no room."""
        name = type(message).__name__
        self.counters[f"stale.{name}"] += 1
        self.effects.append(Stale(name))

    def probe(self, link: Link) -> None:
        """Ask whether the current life of a peer still listens."""
        self.effects.append(ProbeLiveness(link.peer, link.epoch, link.address))

    # -- this worker ---------------------------------------------------------------------------------------------------

    def describe(
        self,
        metadata: bytes,
        ring: RegionInfo | None,
        pools: Mapping[int, PoolInfo],
        probe: RegionInfo | None = None,
        address: str = "",
    ) -> None:
        """Set the data that peers need to write to this worker; send it to attached peers if it changed.

        Args:
            address: this worker's address for peers, see `addresses`.
        """
        self._metadata, self._ring, self._pools, self._probe = metadata, ring, tuple(pools.values()), probe
        self._address, self.has_probe = address, probe is not None
        self._generation += 1
        for link in self.peers.values():
            if link.state is PeerState.ATTACHED:
                self.send_attach(link)

    def send_attach(self, link: Link) -> None:
        """Send this worker's Attach: a target's has a new number, a source's answers the newest one."""
        if self.role is Half.TARGET:
            self.asked_count += 1
            link.attempt = self.asked_count
        config = self.config
        attach = Attach(
            version=PROTOCOL_VERSION,
            deployment=config.deployment,
            instance=config.instance,
            epoch=config.epoch,
            address=self._address,
            engine=config.engine,
            attempt=link.attempt,
            layout=config.layout,
            backend=config.backend,
            metadata=self._metadata,
            ring=self._ring,
            pools=self._pools,
            slab_bytes_max=config.slab_bytes_max,
            generation=self._generation,
            probe=self._probe,
            in_place=config.in_place,
            memory=config.memory,
        )
        self.send(link.peer, attach)

    # -- attaching -----------------------------------------------------------------------------------------------------

    def dial(self, link: Link, address: str, now_ns: int) -> None:
        """Dial a source at an address, where another life than the last known one may listen."""
        link.address, link.state, link.attach = address, PeerState.DIALING, None
        link.heard_ns = link.dialled_ns = now_ns
        link.listens_ns = -1
        self.emit(Dial(link.peer, address))
        self.send_attach(link)
        self._deadlines.peers.set(link.peer, now_ns + self.config.retry_ns)

    def fault_of(self, attach: Attach) -> tuple[Reason, str] | None:
        """Return why this peer is refused, and count it; None if it is accepted."""
        fault = self._fault_of(attach)
        if fault is not None:
            self.counters[f"refused.{fault[0].name}"] += 1
        return fault

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
            _check_caches(attach.layout, config.layout)
            for name, region in (("ring", attach.ring), ("probe", attach.probe)):
                _check_region(name, region)
        except LayoutError as error:
            return error.reason, str(error)
        return None

    def fault_of_name(self, peer: PeerId, attach: Attach) -> tuple[Reason, str] | None:
        """Return why the answering worker is not the dialled one, or None. Another worker may get a port that became free."""
        listener = PeerId.of(attach)
        if listener == peer:
            return None
        text = f"{self.name(listener)} listens at {attach.address}, and {self.name(peer)} was dialled there"
        return Reason.UNKNOWN_INSTANCE, text

    def is_answer(self, link: Link, attach: Attach) -> bool:
        """Whether a source's Attach answers one of ours, from where it was dialled. Late and older ones do not."""
        again = attach.attempt == link.answered and attach.epoch == link.epoch
        answers = link.answered < attach.attempt <= link.attempt or again
        is_here = main_address(attach.address) == main_address(link.address)
        return answers and is_here and attach.epoch >= link.epoch

    def attach(self, link: Link, attach: Attach, now_ns: int) -> None:
        """Record that a life of a peer is attached. A source answers with its own Attach."""
        is_target = self.role is Half.TARGET
        if is_target and link.attach is None:
            link.wire_due_ns = now_ns + WIRE_WAIT_NS
            link.absent_ns, link.beat_number = -1, self.asked_count
        if link.attach is None or attach.generation > link.attach.generation:
            link.attach = attach
            if not is_target:
                link.address = attach.address
            self.emit(PeerAttached(link.peer, attach))
        link.state, link.heard_ns = PeerState.ATTACHED, now_ns
        if is_target:
            self._deadlines.peers.set(link.peer, self._next_beat_ns(now_ns))
        else:
            link.attempt = max(link.attempt, attach.attempt)
            self._deadlines.peers.set(link.peer, now_ns + PROBE_AFTER * self.config.heartbeat_ns)
            self.send_attach(link)

    def detach(self, link: Link, state: PeerState, text: str) -> None:
        """Record that a peer is LOST or REFUSED, and why. A source forgets the peer."""
        if link.attach is not None:
            self.emit(PeerGone(link.peer, link.epoch))
        link.state, link.attach, link.trouble = state, None, text
        if self.role is Half.SOURCE:
            del self.peers[link.peer]

    def moved(self, peer: PeerId, payload_bytes: int) -> None:
        """Count a finished slab for its peer. A peer is forgotten after it was lost; then its rooms have failed."""
        if (link := self.peers.get(peer)) is not None:
            link.bytes_moved += payload_bytes

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def beat(self, link: Link, now_ns: int) -> None:
        """Send a source its heartbeat, or an Attach if it is not attached; at a source, set the time of the next check."""
        config = self.config
        if self.role is Half.SOURCE:
            due_ns = link.heard_ns + PROBE_AFTER * config.heartbeat_ns
            self._deadlines.peers.set(link.peer, due_ns if due_ns > now_ns else now_ns + config.heartbeat_ns)
            return
        for epoch, writer in link.writers.items():
            if epoch != link.epoch:
                self.emit(ProbeLiveness(link.peer, epoch, writer.address))
        if link.state is PeerState.LOST and now_ns - link.dialled_ns >= config.peer_timeout_ns:
            # The connection may have died without an error on our side.
            link.dialled_ns = now_ns
            if listening := link.listening(now_ns - 2 * config.heartbeat_ns):
                link.address = listening[0].address
            self.emit(Dial(link.peer, link.address))
        if link.state is PeerState.ATTACHED:
            self.asked_count += 1
            self.send(link.peer, Ping(config.epoch, self.asked_count, self._deadlines.absent_ns))
        else:
            self.send_attach(link)
        self._deadlines.peers.set(link.peer, self._next_beat_ns(now_ns))

    def _next_beat_ns(self, now_ns: int) -> int:
        """Return the next time to ping all peers. They share one time, so that an idle worker wakes up once."""
        return (now_ns // self.config.heartbeat_ns + 1) * self.config.heartbeat_ns

    def answer_ping(self, peer: PeerId, ping: Ping, now_ns: int) -> None:
        """Answer a target's heartbeat. Epoch 0 in the answer makes an unknown target attach again."""
        link = self.peers.get(peer)
        epoch = 0
        if link is not None and link.epoch == ping.epoch:
            if ping.number <= link.beat_number:
                self.stale(ping)
                return
            link.beat(ping.number, ping.absent_ns, self.config.lease_ns, now_ns)
            epoch = self.config.epoch
        self.send(peer, Pong(epoch, ping.epoch, ping.number, self._deadlines.absent_ns))

    def take_pong(self, link: Link, pong: Pong, now_ns: int) -> bool:
        """Take a source's answer to a heartbeat; return False if it shows that the attached life has ended."""
        newest = link.beat_number < pong.ping_number <= self.asked_count
        if link.attach is None or pong.ping_epoch != self.config.epoch or not newest:
            self.stale(pong)
        elif pong.epoch == link.epoch:
            link.beat(pong.ping_number, pong.absent_ns, self.config.lease_ns, now_ns)
        else:
            return False
        return True

    def silence(self, link: Link, now_ns: int) -> str:
        """Probe a silent peer. Return why it counts as lost, if it was silent for too long; else an empty text."""
        config, silence_ns = self.config, now_ns - link.heard_ns
        if silence_ns >= link.silence_limit_ns(config.peer_timeout_ns, config.heartbeat_ns, now_ns):
            dialled = f" at {link.address}" if self.role is Half.TARGET else ""
            return f"{self.name(link.peer)}{dialled} was silent for {silence_ns / 1e9:.1f} s"
        if silence_ns > PROBE_AFTER * config.heartbeat_ns and link.state is PeerState.ATTACHED:
            self.probe(link)
        return ""

    def peer_listens(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to ProbeLiveness: the process of that life exists, although it is silent."""
        link = self.peers.get(peer)
        if link is None:
            return
        if link.epoch == epoch:
            link.listens_ns = now_ns
        if epoch in link.writers:
            link.writers[epoch].listens_ns = now_ns

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns`, in which this side did not run, as silence of peers."""
        for link in self.peers.values():
            link.heard_ns = min(now_ns, link.heard_ns + late_ns)
            if link.rival_since_ns is not None:
                link.rival_since_ns = min(now_ns, link.rival_since_ns + late_ns)

    # -- wires ---------------------------------------------------------------------------------------------------------

    def wire_fault(self, link: Link) -> str:
        """Return why no transport may connect a peer with this worker; empty if one may or the wire is unknown."""
        return self._wire_fault(link) if link.has_wire else ""

    def wire_fault_of(self, pair: SourcePair | TargetPair, now_ns: int) -> str | None:
        """Return why no transport may write a pair's slabs; empty if one may, None while the wire may still be found."""
        if not self.config.wires or pair.route is None or pair.way is Way.DIRECT:
            return ""
        link = self.peers[pair.peer]
        if not link.has_wire and self.awaits_wire(pair, link, now_ns):
            return None
        return self._wire_fault(link)

    def awaits_wire(self, pair: SourcePair | TargetPair, link: Link, now_ns: int) -> bool:
        """Whether the unknown wire to a peer may still be found. At a target, the room looks again when its time is over."""
        if self.role is Half.TARGET:
            if now_ns >= link.wire_due_ns:
                return False
            self._deadlines.repeats.set((pair.pair.key, pair.name), link.wire_due_ns)
            return True
        if link.attach is not None and link.attach.probe is not None:
            return True
        link.wire_epoch, link.wire_failure = link.epoch, "it has no memory for a probe"
        return False

    def _wire_fault(self, link: Link) -> str:
        ends = (link.peer, self.identity) if self.role is Half.TARGET else (self.identity, link.peer)
        return AllowedWires(self.config.wires).fault(link.found_wire, *ends, link.wire_failure)


def _check_caches(theirs: KVLayout, ours: KVLayout) -> None:
    """Raise LayoutError unless a peer has the same caches of the same model."""
    one, other = (", ".join(cache.name for cache in layout.caches) for layout in (theirs, ours))
    if one != other:
        raise LayoutError(f"caches are {one} at the peer and {other} here")
    for far, near in zip(theirs.caches, ours.caches, strict=True):
        if far.model != near.model:
            which = f" of cache {near.name!r}" if ours.others else ""
            raise LayoutError(f"model{which} is {far.model} at the peer and {near.model} here")


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
