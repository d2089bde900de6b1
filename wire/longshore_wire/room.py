"""The state of rooms at either end: pairs of ranks and slabs, by the tables of `states`, and the table of all rooms.

Used by the cores only. Makes no decisions on peers or rings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, NamedTuple, NoReturn, TypeVar

from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.effects import SECOND_NS, PairEnd, PairName, PeerId, Replica, RoomEnded, SessionConfig
from longshore_wire.engine_messages import CachePages, Half
from longshore_wire.errors import Reason, RoomError
from longshore_wire.names import room_name
from longshore_wire.peer_messages import Grant, PairKey, RoomKey
from longshore_wire.plan import Pair
from longshore_wire.ring import Region
from longshore_wire.slabs import SlabGrid
from longshore_wire.states import (
    SOURCE_BUSY,
    SOURCE_PAIR,
    SOURCE_ROOM,
    SOURCE_SLAB,
    TARGET_PAIR,
    TARGET_ROOM,
    TARGET_SLAB,
    SourceEvent,
    SourcePairEvent,
    SourcePairState,
    SourceRoomEvent,
    SourceRoomState,
    SourceSlab,
    TargetEvent,
    TargetPairEvent,
    TargetPairState,
    TargetRoomEvent,
    TargetRoomState,
    TargetSlab,
    step,
)
from longshore_wire.timers import Deadlines
from longshore_wire.ways import Open, Way, Why

# Maximum backoff of repeats, as a multiple of the first interval. More repeats do not help a busy peer.
BACKOFF_MAX = 16

_UNANSWERED = frozenset({TargetPairState.WAITING, TargetPairState.CLAIMED})
# In these states the source may write the region.
_WRITABLE = frozenset({TargetSlab.GRANTED, TargetSlab.QUARANTINED})


@dataclass(slots=True)
class SourcePair:
    """One target rank's claim on a room at this source."""

    pair: PairKey
    peer: PeerId
    route: Pair | None  # None: this source has nothing to send for the room
    way: Way
    grid: SlabGrid
    states: list[SourceSlab]
    target_pages: bytes = b""
    why: Why = Why.UNDECIDED
    binding: Binding = UNBOUND  # of the claim
    serial: int = 0  # of the claim
    tokens: tuple[int, int] = (0, 0)  # of the claim; the grid cuts layers of a slot instead
    grants: dict[int, Grant] = field(default_factory=dict)
    digest_key: bytes = b""  # empty: no digests
    digests: dict[int, bytes] = field(default_factory=dict)  # of the slabs that are written and not acknowledged
    ready_count: int = 0
    next_slab: int = 0  # for ways without grants
    busy_count: int = 0
    acked_count: int = 0
    attempts: int = 0
    state: SourcePairState = SourcePairState.OPEN
    name: PairName = field(init=False)  # in its room

    def __post_init__(self) -> None:
        self.name = (self.peer, self.pair.cache)

    def step(self, event: SourcePairEvent) -> None:
        """Change the pair's state."""
        self.state = step(SOURCE_PAIR, self.state, event)

    def step_slab(self, slab: int, event: SourceEvent) -> SourceSlab:
        """Change one slab's state and update the counts."""
        before = self.states[slab]
        after = self.states[slab] = step(SOURCE_SLAB, before, event)
        self.busy_count += (after in SOURCE_BUSY) - (before in SOURCE_BUSY)
        self.acked_count += (after is SourceSlab.ACKED) - (before is SourceSlab.ACKED)
        return after

    @property
    def done(self) -> bool:
        """Whether every slab has been acknowledged."""
        return self.acked_count == len(self.states)

    def abort(self) -> None:
        """Drop the slabs that have not started; drain those that a lane holds."""
        self.grants.clear()
        self.digests.clear()
        for slab, state in enumerate(self.states):
            if state is not SourceSlab.DROPPED and state is not SourceSlab.DRAINING:
                self.step_slab(slab, SourceEvent.ABORT)


@dataclass(slots=True)
class Room:
    """The common state of a room at either end."""

    key: RoomKey
    _: KW_ONLY
    binding: Binding = UNBOUND  # of our engine's half
    reason: Reason = Reason.NONE
    text: str = ""
    bytes_moved: int = 0
    opened_ns: int = 0
    progress_ns: int = -1  # when it last had progress, less the time in which this side did not run

    @property
    def failed(self) -> bool:
        """Whether the room has failed."""
        return self.reason is not Reason.NONE


@dataclass(slots=True)
class SourceRoom(Room):
    """A room at its prefill rank: the engine's offers and the decode ranks' claims."""

    state: SourceRoomState = SourceRoomState.CLAIMED
    # By cache, the tokens that are offered.
    first_tokens: dict[int, int] = field(default_factory=dict)
    end_tokens: dict[int, int] = field(default_factory=dict)
    total_tokens: int = -1  # -1: unknown before `last`
    pairs: dict[PairName, SourcePair] = field(default_factory=dict)
    # Target ranks that must claim, each with the cache; None before the first claim.
    expected: frozenset[tuple[int, int]] | None = None
    claimer: Replica | None = None

    def step(self, event: SourceRoomEvent) -> None:
        """Change the room's state."""
        self.state = step(SOURCE_ROOM, self.state, event)

    @property
    def is_offered(self) -> bool:
        """Whether the engine has offered anything."""
        return bool(self.first_tokens)

    def may_have(self, capability: bytes) -> bool:
        """Whether this is the room of the request with this capability, by its offer, or by its claims before that."""
        if self.is_offered:
            return self.binding.capability == capability
        return all(pair.binding.capability == capability for pair in self.pairs.values())

    def slot_end(self, pair: SourcePair) -> int:
        """Return the end of what is offered of a slot, as its grid counts: all of it, with the last tokens."""
        return pair.grid.end_token if self.total_tokens >= 0 else -1

    def add_offers(self, ranges: Sequence[tuple[int, int, int]], names: Sequence[str], *, last: bool) -> None:
        """Extend the offered tokens. Raises RoomError without a change if they do not follow.

        Args:
            ranges: (cache, first token, end token), each cache at most once.
            names: of all caches of the layout.
            last: every cache is offered up to the total now.
        """
        for cache, first_token, end_token in ranges:
            follows = self.end_tokens.get(cache, first_token) == first_token
            if self.total_tokens >= 0 or not follows or not 0 <= first_token <= end_token:
                self._refuse_offer(cache, first_token, end_token, names)
        if last:
            self._check_last(ranges, names)
        for cache, first_token, end_token in ranges:
            self.first_tokens.setdefault(cache, first_token)
            self.end_tokens[cache] = end_token
        self.step(SourceRoomEvent.OFFER)
        if last:
            self.total_tokens = self.end_tokens[0]

    def _check_last(self, ranges: Sequence[tuple[int, int, int]], names: Sequence[str]) -> None:
        """Raise RoomError unless every cache ends at one token."""
        if len(names) == 1 == len(ranges):
            return
        ends = self.end_tokens | {cache: end_token for cache, _, end_token in ranges}
        total = max(ends.values(), default=-1)
        for cache, name in enumerate(names):
            if total < 0 or ends.get(cache, -1) != total:
                raise RoomError(
                    f"room {room_name(self.key.room)}: `last` comes with cache {name!r} offered up to "
                    f"{ends.get(cache, 0)} of {total} tokens: offer every cache up to the same token",
                    reason=Reason.TOKENS_MISSING,
                )

    def _refuse_offer(self, cache: int, first_token: int, end_token: int, names: Sequence[str]) -> NoReturn:
        """Raise RoomError for tokens that do not follow those of the cache."""
        name = f"room {room_name(self.key.room)}" + (f": cache {names[cache]!r}" if len(names) > 1 else "")
        if self.total_tokens >= 0:
            raise RoomError(
                f"{name}: tokens [{first_token}, {end_token}) come after `last` at {self.total_tokens}",
                reason=Reason.OFFER_AFTER_LAST,
            )
        if not 0 <= first_token <= end_token:
            raise RoomError(
                f"{name}: tokens [{first_token}, {end_token}) are not a range: give 0 <= first <= end",
                reason=Reason.TOKENS_MISSING,
            )
        before = self.end_tokens[cache]
        raise RoomError(
            f"{name}: tokens [{first_token}, {end_token}) do not follow those up to {before}: "
            f"offer chunks in order, the next begins at {before}",
            reason=Reason.TOKENS_OVERLAP if first_token < before else Reason.TOKENS_MISSING,
        )

    def ended(self) -> RoomEnded:
        """Return the effect of its end."""
        ends = tuple(
            PairEnd(each.peer, each.way if each.route else None, each.acked_count, each.pair.cache)
            for each in self.pairs.values()
        )
        return RoomEnded(Half.SOURCE, self.key, self.reason, self.text, self.bytes_moved, self.opened_ns, ends)

    @property
    def unfinished(self) -> bool:
        """Whether the engine has offered the room and waits for its end."""
        return self.state is SourceRoomState.OFFERED

    @property
    def missing(self) -> str:
        """Describe the message that the room waits for."""
        if self.state is SourceRoomState.CLAIMED:
            return "the prefill engine has not offered it"
        if self.expected is None:
            return "no decode rank has claimed it"
        unclaimed = sorted({rank for rank, _ in self.expected - {(peer.rank, cache) for peer, cache in self.pairs}})
        if unclaimed:
            return f"decode ranks {unclaimed} have not claimed it, or not all of its caches"
        if self.total_tokens < 0:
            return f"the prefill engine has offered its tokens up to {min(self.end_tokens.values())} and not said which are the last"
        waiting = sorted({pair.peer.rank for pair in self.pairs.values() if not pair.done})
        return f"decode ranks {waiting} have not acknowledged all slabs"

    @property
    def busy(self) -> bool:
        """Whether a lane holds a slab of this room."""
        return any(pair.busy_count for pair in self.pairs.values())

    @property
    def done(self) -> bool:
        """Whether `last` is set and every expected rank has all tokens of its claims."""
        if self.total_tokens < 0 or self.expected is None:
            return False
        done_count = 0
        for (peer, cache), pair in self.pairs.items():
            if pair.acked_count == len(pair.states) and (peer.rank, cache) in self.expected:
                done_count += 1
        return done_count == len(self.expected)


@dataclass(slots=True)
class TargetPair:
    """This target's claim on a room at one source rank."""

    pair: PairKey
    peer: PeerId
    route: Pair | None  # None: the source only learns that this target needs nothing from it
    way: Way  # if `why` is UNDECIDED, the way without measurements
    why: Why = Why.DEFAULT
    open: Open | None = None  # None once the way is chosen
    grid: SlabGrid | None = None  # None before the Demand
    states: list[TargetSlab] = field(default_factory=list)
    regions: dict[int, Region] = field(default_factory=dict)
    ready_count: int = 0
    next_grant: int = 0
    done_count: int = 0
    draining_count: int = 0
    landed_count: int = 0  # their scatters, or the digests of their pages, are queued or running
    total_tokens: int = -1
    due_since_ns: int | None = None  # since when nothing has landed in memory granted for ready tokens
    queued: bool = False
    attempts: int = 0
    state: TargetPairState = TargetPairState.WAITING
    address: str = ""  # of the source, as the engine gave it
    named_engine: int = 0  # the life of the source's engine, as the engine gave it; 0: not known
    engine: int = 0  # the life of the source's engine; 0: not claimed yet
    serial: int = 0  # of the claim; below 0: of the ask; 0: neither was sent
    name: PairName = field(init=False)  # in its room

    def __post_init__(self) -> None:
        self.name = (self.peer, self.pair.cache)

    def step(self, event: TargetPairEvent) -> None:
        """Change the pair's state."""
        self.state = step(TARGET_PAIR, self.state, event)

    def step_slab(self, slab: int, event: TargetEvent) -> TargetSlab:
        """Change one slab's state and update the counts."""
        before = self.states[slab]
        after = self.states[slab] = step(TARGET_SLAB, before, event)
        self.done_count += (after is TargetSlab.DONE) - (before is TargetSlab.DONE)
        self.draining_count += (after is TargetSlab.DRAINING) - (before is TargetSlab.DRAINING)
        self.landed_count += (after is TargetSlab.LANDED) - (before is TargetSlab.LANDED)
        return after

    @property
    def source_engine(self) -> int:
        """The life of the source's engine that is told of the room's end: the one that got the claim, else the one that is named."""
        return self.engine or self.named_engine

    @property
    def exposed(self) -> bool:
        """Whether the source may write our memory: pages (if written in place) or regions of the ring."""
        if self.route is None or self.state not in (TargetPairState.CLAIMED, TargetPairState.OPEN):
            return False
        return self.way is not Way.STAGED or any(self.states[slab] in _WRITABLE for slab in self.regions)

    @property
    def has_bytes_due(self) -> bool:
        """Whether its writer has granted memory for ready tokens whose bytes have not landed."""
        if self.way is not Way.STAGED:
            return self.done_count + self.landed_count < self.ready_count
        return any(slab < self.ready_count and self.states[slab] is TargetSlab.GRANTED for slab in self.regions)

    @property
    def expects_bytes(self) -> bool:
        """Whether bytes may land outside the ring: pages written in place, or a probe of the wire."""
        return self.way is not Way.STAGED or self.open is not None

    @property
    def done(self) -> bool:
        """Whether every slab is in the pages. The slabs of a grid are exactly the claimed tokens."""
        return self.grid is not None and self.done_count == len(self.states)

    @property
    def done_tokens(self) -> int:
        """Number of tokens, of a slot of layers, in the pages. All slabs have the same length except the last."""
        if self.grid is None or not self.states:
            return 0
        first, end = self.grid.tokens(len(self.states) - 1)
        has_last = self.states[-1] is TargetSlab.DONE
        return (self.done_count - has_last) * self.grid.slab_tokens + has_last * (end - first)


@dataclass(slots=True)
class TargetRoom(Room):
    """A room at its decode rank."""

    caches: tuple[CachePages, ...]  # by cache, what is wanted
    digest: bool = False
    pairs: dict[PairName, TargetPair] = field(default_factory=dict)
    ring_bytes: int = 0  # granted and not freed
    is_asked: bool = False  # the engine has no pages for it yet, and waits until prefill has offered it
    is_offered: bool = False  # of an asked room
    state: TargetRoomState = TargetRoomState.OPEN

    def step(self, event: TargetRoomEvent) -> None:
        """Change the room's state."""
        self.state = step(TARGET_ROOM, self.state, event)

    def ended(self) -> RoomEnded:
        """Return the effect of its end."""
        ends = tuple(
            PairEnd(each.peer, each.way if each.route else None, each.done_count, each.pair.cache)
            for each in self.pairs.values()
        )
        return RoomEnded(Half.TARGET, self.key, self.reason, self.text, self.bytes_moved, self.opened_ns, ends)

    @property
    def unfinished(self) -> bool:
        """Whether the engine waits for its end."""
        return self.state is TargetRoomState.OPEN

    @property
    def missing(self) -> str:
        """Describe the message that the room waits for."""
        if self.is_asked:
            return (
                "the decode engine has not claimed it" if self.is_offered else "the prefill engine has not offered it"
            )
        waiting = [pair for pair in self.pairs.values() if pair.state is not TargetPairState.COMPLETE]
        unanswered = sorted({pair.peer.rank for pair in waiting if pair.grid is None})
        if unanswered:
            return f"prefill ranks {unanswered} have not answered its claim"
        return f"prefill ranks {sorted({pair.peer.rank for pair in waiting})} have not sent all its slabs"

    @property
    def done(self) -> bool:
        """Whether every pair with something to send is complete."""
        return all(
            pair.route is None or pair.state is TargetPairState.COMPLETE or not self.wants(pair)
            for pair in self.pairs.values()
        )

    def wants(self, pair: TargetPair) -> bool:
        """Whether tokens of a pair's cache are wanted."""
        wanted = self.caches[pair.pair.cache]
        return wanted.first_token < wanted.end_token

    @property
    def answered(self) -> bool:
        """Whether every source has answered its claim."""
        return not any(pair.state in _UNANSWERED for pair in self.pairs.values())

    @property
    def exposed(self) -> bool:
        """Whether a writer may still write the pages of the failed room."""
        return any(
            pair.draining_count or (pair.state is TargetPairState.ABORTING and pair.way is not Way.STAGED)
            for pair in self.pairs.values()
        )


class Life(NamedTuple):
    """One life of a source worker with which a room was opened."""

    name: PairName
    epoch: int  # 0: none of its lives knows the room
    engine: int  # the life of its engine; 0: not known
    address: str = ""  # the only address at which the room's end is reported; empty: any


@dataclass(frozen=True, slots=True)
class Ended:
    """How a room ended. Kept for two leases and some time.

    Attributes:
        lives: at a target only: the lives of the sources of this room.
        opened_ns: when it opened here; 0 if it never did.
        binding: of our engine's half.
        shown: at a source only: the capability of the claim or ask that ended it before our engine's first offer; None: another
            end. Whoever shows another capability has another request.
        claimer: at a source only: the target that has all of the room's slabs.
    """

    reason: Reason
    text: str
    until_ns: int
    lives: tuple[Life, ...] = ()
    opened_ns: int = 0
    binding: Binding = UNBOUND
    shown: bytes | None = None
    claimer: Replica | None = None


N = TypeVar("N")


class Notes(OrderedDict[RoomKey, dict[PairName, tuple[N, int]]], Generic[N]):
    """What peers have said of rooms that our engine has not offered here, and until when each note is kept; oldest first."""

    def put(self, key: RoomKey, name: PairName, note: N, until_ns: int, rooms_max: int) -> None:
        """Record a peer's note on a cache of a room, in place of its last one. Drop the oldest ones above `rooms_max`."""
        self.setdefault(key, {})[name] = note, until_ns
        self.move_to_end(key)
        while len(self) > rooms_max:
            self.popitem(last=False)

    def due_ns(self) -> int:
        """Return when the oldest notes end."""
        return max(until_ns for _, until_ns in next(iter(self.values())).values())

    def forget(self, now_ns: int, open_rooms: Container[RoomKey], until_ns: int) -> None:
        """Drop the notes whose time is over. Those on a room that is open here are kept until `until_ns`."""
        while self and self.due_ns() <= now_ns:
            key, notes = self.popitem(last=False)
            if key in open_rooms:
                self[key] = {name: (note, until_ns) for name, (note, _) in notes.items()}


R = TypeVar("R", SourceRoom, TargetRoom)


class RoomTable(Generic[R]):
    """The open and the ended rooms of one core, with the times at which they end or are forgotten.

    Attributes:
        lease_until_ns: when the rooms fail, unless their engine renews its lease.
    """

    def __init__(self, config: SessionConfig, half: Half, deadlines: Deadlines, now_ns: int) -> None:
        self.config = config
        self.open: dict[RoomKey, R] = {}
        self.ended: OrderedDict[RoomKey, Ended] = OrderedDict()
        self.lease_until_ns = now_ns + config.lease_ns
        self._half = half
        self._deadlines = deadlines

    def renew(self, now_ns: int) -> None:
        """Renew the leases of all rooms: the engine lives."""
        self.lease_until_ns = now_ns + self.config.lease_ns

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns`, in which this side did not run, for the engine's lease and the rooms' timeouts."""
        self._deadlines.absent_ns += late_ns
        self.lease_until_ns = min(now_ns + self.config.lease_ns, self.lease_until_ns + late_ns)

    def progress(self, room: R, now_ns: int) -> None:
        """Restart a room's timeout after progress."""
        if room.progress_ns < 0:
            self._deadlines.rooms.set(room.key, now_ns + self.config.room_timeout_ns)
        # Time in which this side did not run does not count.
        room.progress_ns = now_ns - self._deadlines.absent_ns

    def moved(self, room: R, payload_bytes: int, now_ns: int) -> None:
        """Count a finished slab for its room."""
        room.bytes_moved += payload_bytes
        self.progress(room, now_ns)

    def repeat_later(self, room: RoomKey, name: PairName, attempts: int, now_ns: int) -> None:
        """Set the time of repeat number `attempts`. The wait doubles up to BACKOFF_MAX times the first."""
        self._deadlines.repeats.set(
            (room, name), now_ns + self.config.retry_ns * min(1 << min(attempts, 30), BACKOFF_MAX)
        )

    def remember(
        self,
        key: RoomKey,
        reason: Reason,
        text: str,
        now_ns: int,
        lives: tuple[Life, ...] = (),
        longer_ns: int = 0,
        shown: bytes | None = None,
        claimer: Replica | None = None,
    ) -> None:
        """Record how a room ended, `longer_ns` longer than others, and forget the oldest ones above the limit."""
        # Whoever is refused with BUSY tries again, and this room does not come back.
        reason = Reason.CANCELLED if reason is Reason.BUSY else reason
        room, until_ns = self.open.get(key), self.remembered_until_ns(now_ns) + longer_ns
        opened_ns, binding = (0, UNBOUND) if room is None else (room.opened_ns, room.binding)
        self.ended[key] = Ended(reason, text, until_ns, lives, opened_ns, binding, shown, claimer)
        self.ended.move_to_end(key)
        while len(self.ended) > self.config.ended_rooms_max:
            self.ended.popitem(last=False)

    def remembered_until_ns(self, now_ns: int) -> int:
        """Return until when the outcome of a room that ends now is kept."""
        return now_ns + 2 * self.config.lease_ns

    def drop(self, room: R) -> None:
        """Remove an open room."""
        del self.open[room.key]
        self._deadlines.rooms.clear(room.key)

    def expired(self, now_ns: int) -> Iterator[tuple[RoomKey, Reason, str]]:
        """Yield the rooms to fail: those without progress for the room timeout; all, if the lease has ended."""
        yield from self._idle(now_ns)
        if not self.open or now_ns < self.lease_until_ns:
            return
        self.lease_until_ns = now_ns + self.config.lease_ns
        side = "prefill" if self._half is Half.SOURCE else "decode"
        text = f"the {side} engine did not renew its lease for {self.config.lease_ns / 1e9:.0f} s"
        for key in list(self.open):
            yield key, Reason.LEASE_EXPIRED, text

    def _idle(self, now_ns: int) -> Iterator[tuple[RoomKey, Reason, str]]:
        for key in self._deadlines.rooms.pop(now_ns):
            room = self.open.get(key)
            if room is None or room.failed:
                continue
            due_ns = room.progress_ns + self._deadlines.absent_ns + self.config.room_timeout_ns
            if due_ns > now_ns:
                self._deadlines.rooms.set(key, due_ns)
                continue
            text = f"nothing has happened in it for {self.config.room_timeout_ns / 1e9:g} s: {room.missing}"
            yield key, Reason.TIMED_OUT, text

    def forget(self, now_ns: int) -> None:
        """Forget the outcomes whose time is over."""
        while self.ended and next(iter(self.ended.values())).until_ns <= now_ns:
            self.ended.popitem(last=False)

    def next_due_ns(self) -> int | None:
        """Return the next time of the core's deadlines, of the lease, and of an outcome to forget; None: nothing is due."""
        due_ns = self._deadlines.next_ns()
        dues = [] if due_ns is None else [due_ns]
        if self.ended:
            # Rounded up, so that many ended rooms are dropped together.
            dues.append(-(-next(iter(self.ended.values())).until_ns // SECOND_NS) * SECOND_NS)
        if self.open:
            dues.append(self.lease_until_ns)
        return min(dues, default=None)
