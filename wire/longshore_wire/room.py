"""One room's bookkeeping at either end: pairs of ranks and the states of their slabs. Obeys `states`.

Held by the sessions only. Decides nothing about peers, rings or time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longshore_wire.crossover import Open, Why
from longshore_wire.effects import PeerId
from longshore_wire.errors import Reason, RoomError
from longshore_wire.intervals import Coverage
from longshore_wire.peer_messages import Grant, PairKey, RoomKey, TargetMemory
from longshore_wire.plan import Pair, Way
from longshore_wire.ring import Region
from longshore_wire.slabs import SlabGrid
from longshore_wire.states import (
    SOURCE_BUSY,
    SOURCE_SLAB,
    TARGET_SLAB,
    SourceEvent,
    SourceSlab,
    TargetEvent,
    TargetSlab,
    step,
)


@dataclass(slots=True)
class SourcePair:
    """What one target rank claims of a room from this source."""

    pair: PairKey
    peer: PeerId
    route: Pair | None  # None: this source has nothing for the room and is only told so
    way: Way
    grid: SlabGrid
    states: list[SourceSlab]
    target_pages: bytes = b""
    why: Why = Why.UNDECIDED
    grants: dict[int, Grant] = field(default_factory=dict)
    ready_count: int = 0
    next_slab: int = 0  # of a way that needs no grants
    busy_count: int = 0
    acked_count: int = 0
    attempts: int = 0
    awaits_ack: bool = False  # we told the target of our abort
    owes_ack: bool = False  # the target told us of its own

    def step(self, slab: int, event: SourceEvent) -> SourceSlab:
        """Move one slab and keep the counts."""
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
        """Drop what has not begun; what a lane holds drains."""
        self.grants.clear()
        for slab, state in enumerate(self.states):
            if state is not SourceSlab.DROPPED and state is not SourceSlab.DRAINING:
                self.step(slab, SourceEvent.ABORT)


@dataclass(slots=True)
class SourceRoom:
    """A request at its prefill rank: what the engine offers, and what decode ranks claim."""

    key: RoomKey
    engine: bool = False  # the engine has offered
    first_token: int = -1  # of what is offered; -1: nothing yet
    end_token: int = -1
    total_tokens: int = -1  # -1: `last` not said yet
    pairs: dict[PeerId, SourcePair] = field(default_factory=dict)
    expected: frozenset[int] | None = None  # target ranks that must claim; None before the first claim
    claimer: tuple[str, int] | None = None  # (instance, dp rank)
    reason: Reason = Reason.NONE
    text: str = ""
    failed: bool = False
    released: bool = False
    bytes_moved: int = 0
    opened_ns: int = 0

    def add_offer(self, first_token: int, end_token: int, *, last: bool) -> None:
        """Extend what is offered. Raises RoomError; then nothing has changed."""
        name = f"room {self.key.room}"
        if self.total_tokens >= 0:
            raise RoomError(
                f"{name}: tokens [{first_token}, {end_token}) come after `last` at {self.total_tokens}",
                reason=Reason.OFFER_AFTER_LAST,
            )
        if not 0 <= first_token <= end_token:
            raise RoomError(
                f"{name}: tokens [{first_token}, {end_token}) are no range: give 0 <= first <= end",
                reason=Reason.TOKENS_MISSING,
            )
        if self.end_token >= 0 and first_token != self.end_token:
            reason = Reason.TOKENS_OVERLAP if first_token < self.end_token else Reason.TOKENS_MISSING
            raise RoomError(
                f"{name}: tokens [{first_token}, {end_token}) do not follow those up to {self.end_token}: "
                f"offer chunks in order, the next begins at {self.end_token}",
                reason=reason,
            )
        if self.first_token < 0:
            self.first_token = first_token
        self.end_token = end_token
        self.engine = True
        if last:
            self.total_tokens = end_token

    @property
    def unfinished(self) -> bool:
        """Whether the engine has offered it and waits for its end."""
        return self.engine and not self.failed

    @property
    def busy(self) -> bool:
        """Whether a lane holds a slab of this room."""
        return any(pair.busy_count for pair in self.pairs.values())

    @property
    def done(self) -> bool:
        """Whether `last` was said and every expected rank has everything it claimed."""
        if self.total_tokens < 0 or self.expected is None:
            return False
        ranks = {peer.rank for peer, pair in self.pairs.items() if pair.done}
        return self.expected <= ranks


@dataclass(slots=True)
class TargetPair:
    """What this target wants of a room from one source rank."""

    pair: PairKey
    peer: PeerId
    route: Pair | None  # None: the source is only told that nothing is wanted from it
    way: Way  # where `why` is UNDECIDED, what it is if nothing was measured
    why: Why = Why.DEFAULT
    open: Open | None = None  # None once the way is chosen
    grid: SlabGrid | None = None  # None before the Demand
    states: list[TargetSlab] = field(default_factory=list)
    regions: dict[int, Region] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    ready_count: int = 0
    next_grant: int = 0
    done_count: int = 0
    draining_count: int = 0
    total_tokens: int = -1
    owed_since_ns: int | None = None  # nothing has landed since then in memory that was granted for ready tokens
    queued: bool = False
    attempts: int = 0
    aborting: bool = False
    confirmed: bool = False  # its writer will not write any more
    heard: bool = False  # the source knows that the room has failed

    def step(self, slab: int, event: TargetEvent) -> TargetSlab:
        """Move one slab and keep the counts."""
        before = self.states[slab]
        after = self.states[slab] = step(TARGET_SLAB, before, event)
        self.done_count += (after is TargetSlab.DONE) - (before is TargetSlab.DONE)
        self.draining_count += (after is TargetSlab.DRAINING) - (before is TargetSlab.DRAINING)
        return after

    @property
    def owes_bytes(self) -> bool:
        """Whether its writer has memory of ours for tokens that are ready, and they have not come."""
        return any(slab < self.ready_count and self.states[slab] is TargetSlab.GRANTED for slab in self.regions)

    @property
    def expects_bytes(self) -> bool:
        """Whether bytes may come outside the ring: pages written in place, or the probe that finds the wire out."""
        return self.way is not Way.STAGED or self.open is not None

    @property
    def told(self) -> bool:
        """Whether the source has answered the claim."""
        return self.grid is not None

    @property
    def complete(self) -> bool:
        """Whether the scattered intervals cover exactly what was claimed, and both sides know one total."""
        if self.grid is None or self.done_count != len(self.states):
            return False
        return self.coverage.covers(self.grid.first_token, self.grid.end_token)


@dataclass(slots=True)
class TargetRoom:
    """A request at its decode rank."""

    key: RoomKey
    first_token: int
    end_token: int
    page_count: int
    pages: bytes
    memory: TargetMemory
    digest: bool
    pairs: dict[PeerId, TargetPair] = field(default_factory=dict)
    ring_bytes: int = 0  # granted and not freed
    ended: bool = False  # the engine was told
    failed: bool = False
    released: bool = False
    reason: Reason = Reason.NONE
    text: str = ""
    bytes_moved: int = 0
    opened_ns: int = 0

    @property
    def unfinished(self) -> bool:
        """Whether the engine waits for its end."""
        return not self.ended

    @property
    def done(self) -> bool:
        """Whether every pair of the plan is complete and the totals agree."""
        for pair in self.pairs.values():
            if pair.route is None:
                continue
            if self.first_token < self.end_token and not (pair.complete and pair.total_tokens == self.end_token):
                return False
        return True
