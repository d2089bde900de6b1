"""Decides by which way the bytes of a pair of ranks move, and over which wires. No other module does. Pure.

Called by the plan, the protocol cores, the agent's `/v1/plan` and `longshore analyze`. A way is decided in this order:

1. `planned_way`: by the layouts and by `transfer.staging`, the same for all pairs of a plan. `is_near` says whether a
   source may copy directly, and `staged_unless_forbidden` what `transfer.staging` means for pages on a GPU.
2. `given_way`: a forced way, ranks of one agent, or `transfer.staging` leave no choice. The pair is then decided
   when its room is claimed.
3. `chosen_way`: otherwise the target chooses the faster way by its crossover table, once it knows the source and the wire.
   `expected_way` is the same choice before there is a room.
4. `check_place`: each side refuses a way by which its own pages cannot be accessed. The claim has the way, and the source
   follows it or refuses the claim.
5. `AllowedWires`: a transport may write only over wires of the list `transfer.wires`. The source checks each write of a
   transport, the target each claim. Way DIRECT needs no wire: a worker copies into pages of its own node that it has mapped.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from longshore_wire.crossover import Crossover
from longshore_wire.errors import Reason, RoomError
from longshore_wire.names import ENVIRONMENT_PREFIX, ON_GPU, UNKNOWN_WIRE, WIDER_WIRES, Labelled, Wire
from longshore_wire.slabs import slab_limit_bytes

# Only GPU memory uses these. A self-test, which moves host memory, never finds them.
_GPU_WIRES = frozenset({Wire.CUDA_IPC, Wire.NVLINK})
_MAKE_THERE = "give the agents what such a wire needs (its NIC or GPUs)"
_LIST = f"transfer.wires ({ENVIRONMENT_PREFIX}WIRES)"


class Way(Labelled):
    """How the bytes of a pair are moved. Messages carry the number."""

    CONTIGUOUS = 0  # whole pages, written in place
    DIRECT = 1  # one kernel reads local pages and writes remote pages
    STAGED = 2  # gathered into a slab, one write, scattered
    SLICES = 3  # run by run, written in place: always possible


IN_PLACE = frozenset({Way.CONTIGUOUS, Way.SLICES, Way.DIRECT})


class Staging(Enum):
    """Whether staging buffers may, must or must not be used: `transfer.staging` of the configuration."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Why(Labelled):
    """The reason for a pair's way; claims carry the number."""

    UNDECIDED = 0  # the wire is not known yet
    FORCED = 1  # a setting names the way
    STAGING = 2  # transfer.staging is Always or Never, or pages of either side are on a GPU, where they must be staged
    NEAR = 3  # both ranks belong to one agent
    NO_RING = 5  # the target takes no staged bytes, or no slab of this pair
    MEASURED = 6  # the table has this backend and wire
    DEFAULT = 7  # the table has no such entry


class Choice(NamedTuple):
    """A pair's way, its reason, and the table's seconds of both ways; None without an entry."""

    way: Way
    why: Why
    staged_s: float | None = None
    in_place_s: float | None = None


class Open(NamedTuple):
    """The input of a choice for some tokens of a pair; `Plan.open_pair` makes it."""

    planned: Way
    in_place: Way  # CONTIGUOUS or SLICES
    unit_bytes: int
    total_bytes: int  # of the tokens
    run_count: int  # in the tokens
    can_stage: bool  # the target's ring takes slabs of the pair


class Reach(NamedTuple):
    """One target rank's knowledge of a source when it chooses the way.

    Attributes:
        staging: between the two.
        near: see `is_near`.
        in_place, target_in_place: whether a transport can access the pages of the source's and the target's worker.
    """

    staging: Staging
    near: bool
    in_place: bool
    target_in_place: bool

    @classmethod
    def of(cls, asked: Staging, *, near: bool, in_place: bool, target_in_place: bool) -> Reach:
        """Return it for `transfer.staging` as it was asked for."""
        staging = asked if near or target_in_place else staged_unless_forbidden(asked)
        return cls(staging, near, in_place, target_in_place)


# -- what is possible --------------------------------------------------------------------------------------------------


def is_near(agent: str, near: str, *, mappable: bool = True, adjacent: bool = True) -> bool:
    """Return whether a source's worker may copy into a target's pages by way DIRECT.

    Workers of a GPU reach the pages of their agent's GPUs and of its host memory; those of a CPU only the latter.

    Args:
        agent: of the source's endpoint.
        near: of the target: the agent in its own endpoint; empty: no worker may.
        mappable, adjacent: of the target's pool, as in `claims.Wanted`.
    """
    return mappable and near != "" and (agent == near or (adjacent and agent == f"{near}{ON_GPU}"))


def staged_unless_forbidden(asked: Staging) -> Staging:
    """Return the setting for pages that no transport accesses in place: ALWAYS, or NEVER if staging is forbidden."""
    return asked if asked is Staging.NEVER else Staging.ALWAYS


def staging_between(staging: Staging, neighbour_staging: Staging | None, *, near: bool) -> Staging:
    """Return the setting for a pair of ranks, of which neighbours may have another one than ranks of two agents."""
    return neighbour_staging if near and neighbour_staging is not None else staging


def may_be_direct(staging: Staging, force_way: Way | None) -> bool:
    """Return whether these settings permit way DIRECT between neighbours."""
    return staging is not Staging.ALWAYS if force_way is None else force_way is Way.DIRECT


def contradicts(staging: Staging, force_way: Way | None) -> bool:
    """Return whether `transfer.staging` excludes the forced way."""
    if force_way is Way.STAGED:
        return staging is Staging.NEVER
    return staging is Staging.ALWAYS and force_way is not None


def check_place(way: Way, engine: str, *, in_place: bool) -> None:
    """Raise RoomError if a way needs a transport to access pages of `engine` in place, and none can."""
    if way in IN_PLACE and way is not Way.DIRECT and not in_place:
        raise RoomError(
            f"way {way.name} has a transport read and write pages where they lie, and those of {engine} are on a GPU: "
            "have them staged (transfer.staging Auto or Always, and no forced way)",
            reason=Reason.UNSUPPORTED,
        )


# -- which way ---------------------------------------------------------------------------------------------------------


def planned_way(in_place: Way, staging: Staging, *, direct: bool) -> Way:
    """Return the way of every pair of a plan, whose in-place way is `in_place`.

    With even splits, pages are whole for all pairs or for none.
    """
    if staging is Staging.ALWAYS:
        return Way.STAGED
    if direct:
        return Way.DIRECT
    if staging is Staging.NEVER:
        return in_place
    return Way.CONTIGUOUS if in_place is Way.CONTIGUOUS else Way.STAGED


def given_way(planned: Way, force_way: Way | None, staging: Staging) -> tuple[Way, Why]:
    """Return a pair's way and its reason. With UNDECIDED `chosen_way` decides, and the way is the plan's default."""
    if force_way is not None:
        return force_way, Why.FORCED
    if planned is Way.DIRECT:
        return planned, Why.NEAR
    if staging is not Staging.AUTO:
        return planned, Why.STAGING
    return planned, Why.UNDECIDED


def chosen_way(
    left_open: Open, table: Crossover, over: tuple[str, str], *, in_place: bool, lane_bytes: int, ring_bytes: int
) -> Choice:
    """Choose the way of an undecided pair, once its source and wire are known.

    Args:
        over: backend and wire.
        in_place: whether a transport can access the source's pages.
        lane_bytes: the source's longest slab, payload and trailer.
        ring_bytes: the target's ring.
    """
    if not in_place:
        return Choice(Way.STAGED, Why.STAGING)
    if left_open.planned is not Way.STAGED and left_open.unit_bytes > slab_limit_bytes(lane_bytes, ring_bytes, 1):
        # Whole pages are written in place. Parts of pages are claimed anyway: the source's refusal names its buffer.
        left_open = left_open._replace(can_stage=False)
    return choose(left_open, table, over)


def expected_way(
    left_open: Open,
    reach: Reach,
    table: Crossover,
    over: tuple[str, str],
    *,
    force_way: Way | None = None,
) -> Choice:
    """Return the choice of the decode side for a pair before there is a room. The plan was made with `reach`.

    Args:
        over: backend and wire.
    """
    way, why = given_way(left_open.planned, force_way, reach.staging)
    if why is not Why.UNDECIDED:
        return Choice(way, why)
    if not reach.in_place:
        return Choice(Way.STAGED, Why.STAGING)
    return choose(left_open, table, over)


def choose(left_open: Open, table: Crossover, over: tuple[str, str]) -> Choice:
    """Return the faster of staged and in place over a backend and wire."""
    run_bytes = left_open.total_bytes / left_open.run_count
    entry = table.entry(*over)
    staged_s = in_place_s = None
    if entry is not None:
        staged_s, in_place_s = entry.seconds(run_bytes, left_open.total_bytes)
        in_place, why = in_place_s < staged_s, Why.MEASURED
    else:
        rule, why = table.default, Why.DEFAULT
        whole = left_open.in_place is Way.CONTIGUOUS
        least = rule.contiguous_run_bytes_min if whole else rule.slices_run_bytes_min
        in_place = least is not None and run_bytes >= least
    if not left_open.can_stage and not in_place:
        in_place, why = True, Why.NO_RING
    return Choice(left_open.in_place if in_place else Way.STAGED, why, staged_s, in_place_s)


# -- over which wires --------------------------------------------------------------------------------------------------


class Ranked(Protocol):
    """A worker's identity, as texts on wires name it: see `effects.PeerId`."""

    @property
    def instance(self) -> str:
        """The engine instance."""

    @property
    def rank(self) -> int:
        """The rank within its replica."""


class AllowedWires(msgspec.Struct, frozen=True):
    """The list of names in `transfer.wires`; empty allows any wire."""

    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is a list."""
        return bool(self.names)

    def holds(self, wire: str) -> bool:
        """Whether a wire is allowed. An unknown wire is on no list; CudaIPC includes NVLink."""
        return not self.names or wire in self.names or WIDER_WIRES.get(wire) in self.names

    def fault(self, wire: str, source: Ranked, target: Ranked, failure: str = "") -> str:
        """Return why no transport may write from `source` to `target` over `wire`; empty if it may.

        Args:
            failure: why the probe failed; empty if it did not. The wire is unknown after a failure.
        """
        if self.holds(wire):
            return ""
        between = f"prefill {source.instance} rank {source.rank} reaches decode {target.instance} rank {target.rank}"
        if wire == UNKNOWN_WIRE:
            text = f"{between} over a wire that no probe could name{f' ({failure})' if failure else ''}"
            way_out = "or leave the list empty to allow any wire"
        else:
            text = f"{between} over {wire}"
            way_out = f"or add {wire} to the list"
        return f"{text}, and {_LIST} allows only {self}: {_MAKE_THERE}, {way_out}"

    def self_test_fault(self, wire: str) -> str:
        """Return why no peer can be reached over an allowed wire, if the wire of a self-test proves it; else an empty text.

        A self-test moves host memory within one host, where a transport uses shared memory even if it would use RDMA
        to another host. Only TCP is proof: a transport uses it as its last choice, within a host and between hosts.
        """
        if self.holds(wire) or wire != Wire.TCP or _GPU_WIRES.intersection(self.names):
            return ""
        return (
            f"it took {wire} inside this host, so nothing faster is there for it, and {_LIST} allows only {self}: "
            f"{_MAKE_THERE}, or add {wire} to the list"
        )

    def __str__(self) -> str:
        """Return the names for messages."""
        return ", ".join(sorted(self.names))


def needs_wire(ways: Collection[str]) -> bool:
    """Whether a peer needs a transport, by the ways of its rooms so far (status names). Without rooms it may need one."""
    return set(ways) != {Way.DIRECT.label}
