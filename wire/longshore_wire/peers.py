"""State that a session keeps on each peer, and on ended rooms with it.

Used by the sessions. These types hold values only; `source_peers` and `target_peers` make the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from longshore_wire.effects import PeerId
from longshore_wire.errors import Reason
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.peer_messages import Attach, PoolInfo, RoomKey
from longshore_wire.ways import Way

# Claims that may overtake an older one: more than the open rooms of a worker.
SERIALS_MAX = 65_536


class PeerState(Enum):
    """The state of a peer as this side knows it."""

    DIALING = "dialing"
    ATTACHED = "attached"
    REFUSED = "refused"
    LOST = "lost"


class Life(NamedTuple):
    """One life of a source worker with which a room was opened."""

    peer: PeerId
    epoch: int  # 0: none of its lives knows the room
    engine: int  # the life of its engine; 0: not known


@dataclass(frozen=True, slots=True)
class Ended:
    """How a room ended. Kept for two leases and some time.

    Attributes:
        lives: at a target only: the lives of the sources of this room.
        opened_ns: when it opened here; 0 if it never did.
    """

    reason: Reason
    text: str
    until_ns: int
    lives: tuple[Life, ...] = ()
    opened_ns: int = 0


@dataclass(slots=True)
class Outcome:
    """The end of a pair, not yet acknowledged by its source. Reason NONE: the pair is complete."""

    ended: Ended
    serial: int = 0  # of the claim; 0: it was never claimed
    attempts: int = 0


@dataclass(slots=True)
class UsedSerials:
    """The used claims of a target's life. Its source has opened or aborted them, and ignores late copies.

    A target numbers its claims to each source from 1 on, so nearly all used numbers lie below `floor`.
    """

    epoch: int
    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, serial: int) -> bool:
        """Whether a claim was used."""
        return serial <= self.floor or serial in self.above

    def add(self, serial: int) -> None:
        """Note that a claim is used."""
        if serial not in self:
            self.above.add(serial)
        if len(self.above) > SERIALS_MAX:
            # Claims below the lowest known one are too old to be answered.
            self.floor = min(self.above) - 1
        while self.floor + 1 in self.above:
            self.floor += 1
            self.above.discard(self.floor)


@dataclass(slots=True)
class Writer:
    """A life of a source that may still write our memory for aborted pairs."""

    address: str
    pair_count: int = 0
    listens_ns: int = -(1 << 62)  # when a probe last found a listener there


@dataclass(slots=True)
class Peer:
    """One worker of another instance, in its current life."""

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
    # Pools of `attach` whose geometry fits its layout. Pools of another Attach are different objects.
    sound_pools: dict[int, PoolInfo] = field(default_factory=dict)
    ways: set[Way] = field(default_factory=set)  # of all pairs claimed so far
    bytes_moved: int = 0  # of finished slabs of all pairs

    # The following fields are used at a target, for its sources.
    attempt: int = 0  # number of our newest Attach to it
    answered: int = 0  # number of the newest Attach that it has answered
    outcomes: dict[RoomKey, Outcome] = field(default_factory=dict)
    queued_epoch: int = 0  # the life for which outcomes of earlier lives' rooms were queued
    outcomes_until_ns: int = 0  # until then a later life must be sent the outcomes of ended rooms
    writers: dict[int, Writer] = field(default_factory=dict)  # by epoch
    rival_since_ns: int | None = None  # since when a room names another address although the peer answers at `address`

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

    def address_of_writer(self, since_ns: int) -> str:
        """Return the address of an earlier life that may still write and has listened since then: the source may be there.

        The listener is that life, a later one or another worker. The last two prove that the writer has ended.
        """
        return next((each.address for each in self.writers.values() if each.listens_ns >= since_ns), "")

    def silence_limit_ns(self, timeout_ns: int, heartbeat_ns: int, now_ns: int) -> int:
        """Return how long this peer may be silent before it counts as lost.

        A peer that was absent recently may be absent again, so that time is added, up to the timeout. The limit doubles
        while probes confirm that its process exists, since it is then starved or stopped, but not gone.
        """
        limit_ns = timeout_ns + min(self.absence_ns, timeout_ns)
        listens = self.listens_ns >= 0 and now_ns - self.listens_ns <= 2 * heartbeat_ns
        return 2 * limit_ns if listens else limit_ns
