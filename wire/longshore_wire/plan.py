"""Plans which rank of one instance sends which layers and heads to which rank of another, and by which way.

Called by workers (both sides), the operator and the command line. Pure: two layouts in, a printable value out. Equal
layouts give equal plans, so both sides compute it independently. The plan intersects intervals of layers and heads, and
does not assume that one side's split divides the other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from math import lcm
from operator import attrgetter

import msgspec

from longshore_wire.errors import LayoutError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Plane
from longshore_wire.slabs import slab_limit_bytes
from longshore_wire.ways import Open, Staging, Way, planned_way

# A worker has few kinds of peers. Each pair of layouts is planned once for each replica, then looked up for every
# room.
_PLANS_KEPT_MAX = 256
# Knuth's multiplier, 2**64 divided by the golden ratio: multiples of it, modulo 2**64, lie evenly apart, by
# whatever step the ids of rooms grow. Steps of 2**32 and more are brought down first.
_GOLDEN = 0x9E3779B97F4A7C15
_heads_of = attrgetter("heads")
# Name for a plan that mixes several ways.
MIXED = "Mixed"


class Pair(msgspec.Struct, frozen=True):
    """The slices that one source rank sends to one target rank. Layers and heads are global, half-open intervals.

    A unit is indivisible: a token, all tokens of a page whose content is opaque, or one layer of a slot.

    Attributes:
        sections: heads of each section of the layout, some of them (0, 0): none.
        unit_bytes: of one unit in this pair.
        slot: the units are layers of a slot.
    """

    source_rank: int
    target_rank: int
    layers: tuple[int, int]
    sections: tuple[tuple[int, int], ...]
    unit_bytes: int
    way: Way
    unit_tokens: int = 1
    slot: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of the first section that has some."""
        return next(heads for heads in self.sections if heads != _NONE)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this pair; for opaque pages its share of the page, rounded up. Of a slot, of one layer."""
        return -(-self.unit_bytes // self.unit_tokens)

    def units_of(self, first_token: int, end_token: int) -> tuple[int, int]:
        """Return the interval that slabs of tokens [first, end) cut: these tokens, or all layers of a slot."""
        if self.slot and first_token < end_token:
            return self.layers
        return first_token, end_token

    def payload_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the units in an interval of `units_of`."""
        return (-(-end // self.unit_tokens) - first // self.unit_tokens) * self.unit_bytes

    def local_layers(self, layout: KVLayout) -> range:
        """Return this pair's layers as indexes into the layers of `layout`, one of the pair's two ranks."""
        return range(self.layers[0] - layout.layers.start, self.layers[1] - layout.layers.start)

    def local_heads(self, layout: KVLayout, section: int = 0) -> range:
        """Return this pair's heads of a section as indexes into those of `layout`, one of the pair's two ranks."""
        first, end = self.sections[section]
        own = layout.heads_of(layout.sections[section].heads).start if first < end else 0
        return range(first - own, end - own)


# The heads of a section of which a pair moves none.
_NONE = (0, 0)


def digests_bytes(pair: Pair, layout: KVLayout, units: tuple[int, int]) -> int:
    """Return the bytes of a slab's digests, 8 for each head of each plane that it moves, of one of its ranks.

    Args:
        units: of the slab.
    """
    layers = units[1] - units[0] if pair.slot else pair.layers[1] - pair.layers[0]
    heads = (
        section.kinds * (end - first) for section, (first, end) in zip(layout.sections, pair.sections, strict=True)
    )
    return 8 * layers * sum(heads)


class Summary(msgspec.Struct, frozen=True):
    """A plan's numbers for the operator's status. Counts are for one chunk, which ends the prompt, and all pairs.

    Attributes:
        bytes_per_token: 0 of slots.
        slot_bytes: of a request; 0 if the cache has tokens.
    """

    way: str
    pairs: int
    bytes_per_token: int
    slot_bytes: int
    writes_per_chunk: int
    slices_per_chunk: int

    @classmethod
    def of_all(cls, parts: Sequence[Summary]) -> Summary:
        """Return the numbers of several caches together."""
        ways = {part.way for part in parts}
        counts = (sum(getattr(part, name) for part in parts) for name in cls.__struct_fields__ if name != "way")
        return cls(ways.pop() if len(ways) == 1 else MIXED, *counts)


class Plan(msgspec.Struct, frozen=True):
    """All pairs of ranks between one replica of each side.

    Attributes:
        pairs: ordered by target rank, then source rank; two ranks have at most one pair.
        idle_sources: (source rank, target rank) for every source rank without a pair. That target rank informs
            the source rank, which then completes its half at once.
        idle_targets: target ranks without a pair, which complete at once.
        runs: the rule that counts the contiguous runs of a pair.
        in_place: the way of pairs that are neither staged nor direct: CONTIGUOUS or SLICES.
    """

    pairs: tuple[Pair, ...]
    idle_sources: tuple[tuple[int, int], ...]
    idle_targets: tuple[int, ...]
    runs: RunRule
    in_place: Way = Way.SLICES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all pairs, of a slot 0; replicated target heads count once for each replica."""
        return sum(pair.token_bytes for pair in self.pairs if not pair.slot)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all pairs; 0 if the cache has tokens."""
        return sum(pair.payload_bytes(*pair.layers) for pair in self.pairs if pair.slot)

    @property
    def way(self) -> Way:
        """The way of all pairs. They never differ in a plan, since with even splits either all pairs are whole or none."""
        ways = {pair.way for pair in self.pairs}
        assert len(ways) == 1, ways
        return ways.pop()

    def with_ways(self, ways: Sequence[Way]) -> Plan:
        """Return this plan with other ways, one for each pair, chosen for a number of tokens and a wire."""
        pairs = (msgspec.structs.replace(pair, way=way) for pair, way in zip(self.pairs, ways, strict=True))
        return msgspec.structs.replace(self, pairs=tuple(pairs))

    def open_pair(
        self, pair: Pair, tokens: tuple[int, int], *, lane_bytes: int, ring_bytes: int, writer_count: int = 0
    ) -> Open:
        """Return the input of a choice of the way for tokens [first, end), not empty, of a pair of this plan.

        Runs are counted as if the tokens began at a page. A prefix that ends within a page adds one or two.

        Args:
            lane_bytes, ring_bytes: the source's longest slab and the target's ring, which all writers share.
            writer_count: of the target, over all caches; 0: those of this plan.
        """
        writer_count = writer_count or len(self.of_target(pair.target_rank))
        units = pair.units_of(*tokens)
        return Open(
            planned=pair.way,
            in_place=self.in_place,
            unit_bytes=pair.unit_bytes,
            total_bytes=pair.payload_bytes(*units),
            run_count=self.runs.count(pair, units[1] - units[0]),
            can_stage=pair.unit_bytes <= slab_limit_bytes(lane_bytes, ring_bytes, writer_count),
        )

    def of_target(self, rank: int) -> tuple[Pair, ...]:
        """Return the pairs that write to target rank `rank`, by source rank."""
        return tuple(pair for pair in self.pairs if pair.target_rank == rank)

    def summary(self, chunk_tokens: int, slab_bytes: int) -> Summary:
        """Return the numbers of this plan for a status.

        Args:
            chunk_tokens: tokens of one chunk of a prompt, which begins at a page.
            slab_bytes: payload of one staged write.
        `writes_per_chunk` assumes that slabs are filled completely. Slabs are cut between tokens, so a pair whose
        tokens do not divide a slab makes about one more write.
        `slices_per_chunk` is the number of runs in the same chunk, for any way.
        """
        assert min(chunk_tokens, slab_bytes) > 0, (chunk_tokens, slab_bytes)
        writes = slices = 0
        for pair in self.pairs:
            first, end = pair.units_of(0, chunk_tokens)
            runs = self.runs.count(pair, end - first)
            slices += runs
            if pair.way is Way.STAGED:
                writes += -(-(end - first) * pair.token_bytes // slab_bytes)
            else:
                writes += 1 if pair.way is Way.DIRECT else runs
        ways = {pair.way for pair in self.pairs}
        name = ways.pop().name.capitalize() if len(ways) == 1 else MIXED
        return Summary(name, len(self.pairs), self.bytes_per_token, self.slot_bytes, writes, slices)


class RunRule(msgspec.Struct, frozen=True):
    """Counts the runs of bytes, contiguous on both sides, in a pair's tokens.

    Attributes:
        planes_per_layer: of each section: 2 if K and V are separate and equal.
        source_page_size, target_page_size: tokens.
        tokens_joined: adjacent tokens of a page are contiguous on both sides.
        heads_joined: adjacent heads are contiguous on both sides.
        slot_rows: rows of each section of a slot; empty: there are tokens.
    """

    planes_per_layer: tuple[int, ...]
    source_page_size: int
    target_page_size: int
    tokens_joined: bool
    heads_joined: bool
    slot_rows: tuple[int, ...] = ()

    def count(self, pair: Pair, units: int) -> int:
        """Return the number of runs in `units` tokens that begin at a page on both sides and fill whole pages.

        Of a slot, `units` are layers.
        """
        counted = units
        if self.slot_rows:
            held = (rows for rows, heads in zip(self.slot_rows, pair.sections, strict=True) if heads != _NONE)
            return units * sum(held)
        if self.tokens_joined:
            one, other = self.source_page_size, self.target_page_size
            counted = -(-units // one) + -(-units // other) - -(-units // lcm(one, other))
        # Heads of a section of which a pair moves none count as none.
        heads = (
            kinds * (min(end - first, 1) if self.heads_joined else end - first)
            for kinds, (first, end) in zip(self.planes_per_layer, pair.sections, strict=True)
        )
        return (pair.layers[1] - pair.layers[0]) * sum(heads) * counted


def plan(
    source: KVLayout | Sequence[KVLayout],
    target: KVLayout | Sequence[KVLayout],
    *,
    staging: Staging = Staging.AUTO,
    direct: bool = False,
    room: int = 0,
) -> Plan:
    """Return the plan in which every target rank gets each of its layers and heads exactly once.

    With Staging.AUTO whole pages are CONTIGUOUS and the rest is STAGED; `ways` may choose otherwise for a transfer.
    Each target rank reads replicated source heads from one replica. Readers are assigned to replicas round-robin, beginning
    at one that the room and the target's DP rank determine. Replicas differ by at most one pair within a plan, and rooms
    are distributed evenly.

    Args:
        source, target: the layout of any rank of each side, or of all ranks of one replica in any order. The latter
            is needed if `layer_range` sets the layers of pipeline stages.
        staging: whether slabs may, must or must not be used.
        direct: whether both sides' devices reach each other's memory; used with Staging.AUTO only.
        room: the id of the room.
    Raises:
        LayoutError: a layout is invalid or the two cannot exchange pages; names the side, the field and both values.
    """
    sources = (source,) if isinstance(source, KVLayout) else tuple(source)
    targets = (target,) if isinstance(target, KVLayout) else tuple(target)
    return _plan(sources, targets, staging, direct, _first_replica(sources, targets, room))


def plans(
    source: KVLayout, target: KVLayout, *, staging: Staging = Staging.AUTO, direct: bool = False, room: int = 0
) -> tuple[Plan, ...]:
    """Return the plan of each cache. A source rank is idle only if it has no pair in any cache, in the first plan.

    Raises:
        LayoutError: as `plan`; or the sides have other caches. Names the cache.
    """
    if not source.others and not target.others and source.name == target.name:
        return (plan(source, target, staging=staging, direct=direct, room=room),)
    firsts = tuple(
        _first_replica((near,), (far,), room) for near, far in zip(source.caches, target.caches, strict=False)
    )
    return _plans(source, target, staging, direct, firsts)


@lru_cache(maxsize=_PLANS_KEPT_MAX)
def _plans(
    source: KVLayout, target: KVLayout, staging: Staging, direct: bool, first_replicas: tuple[int, ...]
) -> tuple[Plan, ...]:
    for side, layout in (("source", source), ("target", target)):
        try:
            layout.check()
        except LayoutError as error:
            raise LayoutError(f"{side}: {error}") from error
    one, other = (", ".join(cache.name for cache in side.caches) for side in (source, target))
    _check_equal("caches", one, other, "a room moves all caches of a request")
    found = []
    for near, far, first in zip(source.caches, target.caches, first_replicas, strict=True):
        try:
            found.append(_plan((near,), (far,), staging, direct, first))
        except LayoutError as error:
            raise LayoutError(f"cache {near.name!r}: {error}") from error
    writers = {pair.source_rank for each in found for pair in each.pairs}
    idle = tuple(entry for entry in found[0].idle_sources if entry[0] not in writers)
    return (
        msgspec.structs.replace(found[0], idle_sources=idle),
        *(msgspec.structs.replace(each, idle_sources=()) for each in found[1:]),
    )


def _first_replica(sources: Sequence[KVLayout], targets: Sequence[KVLayout], room: int) -> int:
    """Return the replica for the first reader of a room. The layouts are not checked yet and may be empty."""
    if not sources or not targets:
        return 0
    fewest = min(map(_heads_of, sources[0].model.planes), default=1)
    replicas = max(1, sources[0].parallel.tp // max(1, fewest))
    dealt = ((room ^ room >> 32) * _GOLDEN % 2**64) * replicas >> 64
    return (targets[0].parallel.dp_rank + dealt) % replicas


@lru_cache(maxsize=_PLANS_KEPT_MAX)
def _plan(
    sources: tuple[KVLayout, ...],
    targets: tuple[KVLayout, ...],
    staging: Staging,
    direct: bool,
    first_replica: int,
) -> Plan:
    source = all_ranks("source", sources)
    target = all_ranks("target", targets)
    _check_exchange(source, target)
    in_place = Way.CONTIGUOUS if _whole(source[0], target[0]) else Way.SLICES
    way = planned_way(in_place, staging, direct=direct)
    pairs = _pairs(source, target, way, first_replica)
    writers = {pair.source_rank for pair in pairs}
    readers = {pair.target_rank for pair in pairs}
    return Plan(
        pairs=pairs,
        idle_sources=tuple((rank, rank % len(target)) for rank in range(len(source)) if rank not in writers),
        idle_targets=tuple(rank for rank in range(len(target)) if rank not in readers),
        runs=_run_rule(source[0], target[0]),
        in_place=in_place,
    )


def all_ranks(side: str, layouts: Sequence[KVLayout]) -> tuple[KVLayout, ...]:
    """Return the layouts of every rank of one replica, ordered by rank.

    Args:
        side: the name of these layouts in errors, for example `source`.
        layouts: that of one rank, which determines the others, or those of all ranks in any order.
    Raises:
        LayoutError: ranks disagree, are missing or repeated, or their layers leave gaps or overlap.
    """
    if not layouts:
        raise LayoutError(f"{side}: no layout is given: give one of any rank or those of all ranks")
    try:
        for layout in layouts:
            layout.check()
        first = layouts[0]
        if len(layouts) == 1:
            layouts = [first.at(rank) for rank in range(first.rank_count)]
        else:
            _check_same_instance(layouts)
        ranks = tuple(sorted(layouts, key=lambda layout: layout.rank))
        _check_layers(ranks)
    except LayoutError as error:
        raise LayoutError(f"{side}: {error}") from error
    return ranks


def _check_same_instance(layouts: Sequence[KVLayout]) -> None:
    """Raise LayoutError unless the layouts are all ranks of one replica, each once."""
    first = layouts[0]
    for layout in layouts:
        for name in ("model", "page_size", "order"):
            if getattr(layout, name) != getattr(first, name):
                raise LayoutError(
                    f"{name} is {getattr(first, name)} on rank {first.rank} and {getattr(layout, name)} "
                    f"on rank {layout.rank}: ranks of one instance share it"
                )
        for name in ("tp", "pp", "dp", "dp_rank"):
            one, other = getattr(first.parallel, name), getattr(layout.parallel, name)
            if one != other:
                raise LayoutError(
                    f"parallel.{name} is {one} on rank {first.rank} and {other} on rank {layout.rank}: "
                    f"give the ranks of one replica"
                )
    found = sorted(layout.rank for layout in layouts)
    if found != list(range(first.rank_count)):
        raise LayoutError(f"ranks {found} are given: give each of {first.rank_count} once")


def _check_layers(ranks: tuple[KVLayout, ...]) -> None:
    """Raise LayoutError if TP ranks of a stage hold different layers, or stages leave gaps or overlap."""
    for layout in ranks:
        leader = ranks[layout.parallel.pp_rank * layout.parallel.tp]
        if layout.layers != leader.layers:
            raise LayoutError(
                f"layer_range is {_ends(leader.layers)} on rank {leader.rank} and {_ends(layout.layers)} on rank "
                f"{layout.rank}: TP ranks of one stage hold the same layers"
            )
    stages = sorted((layout.layers for layout in _stage_leaders(ranks)), key=lambda layers: layers.start)
    for before, after in pairwise(stages):
        if before.stop != after.start:
            raise LayoutError(
                f"layer_range is {_ends(before)} on one stage and {_ends(after)} on the next: stages must neither "
                f"overlap nor leave layers out"
            )


def _check_exchange(source: tuple[KVLayout, ...], target: tuple[KVLayout, ...]) -> None:
    """Raise LayoutError if two valid sides cannot exchange pages."""
    one, other = source[0], target[0]
    _check_model(one.model, other.model)
    if PageOrder.SLOT in (one.order, other.order):
        _check_equal("order", one.order, other.order, "a slot has no tokens")
    if PageOrder.OPAQUE in (one.order, other.order):
        why = "an opaque page cannot be taken apart"
        _check_equal("order", one.order, other.order, why)
        _check_equal("page_size", one.page_size, other.page_size, why)
        _check_equal("blob_bytes", one.opaque_bytes, other.opaque_bytes, why)
    held = [
        _ends(range(min(r.layers.start for r in side), max(r.layers.stop for r in side))) for side in (source, target)
    ]
    _check_equal("layers", held[0], held[1], "both sides must hold the same layers")


def _check_equal(field: str, source: object, target: object, why: str) -> None:
    if source != target:
        shown = [value.name if isinstance(value, IntEnum) else value for value in (source, target)]
        raise LayoutError(f"{field} is {shown[0]} at the source and {shown[1]} at the target: {why}")


def _check_model(one: ModelShape, other: ModelShape) -> None:
    why = "both hold one model"
    for name in ("layers", "element_bytes", "kinds"):
        _check_equal(f"model.{name}", getattr(one, name), getattr(other, name), why)
    for index, (near, far) in enumerate(zip(one.planes, other.planes, strict=True)):
        for name in Plane.__struct_fields__:
            _check_equal(f"model.planes[{index}].{name}", getattr(near, name), getattr(far, name), why)


def _whole(source: KVLayout, target: KVLayout) -> bool:
    """Whether pages of both sides hold the same bytes in the same order."""
    if not _same_heads(source, target):
        return False
    if source.order is target.order is PageOrder.SLOT:
        return True
    return source.page_size == target.page_size and _same_order(source, target)


def _same_heads(source: KVLayout, target: KVLayout) -> bool:
    """Whether ranks of both sides have equally many heads of each section."""
    return all(len(source.heads_of(each.heads)) == len(target.heads_of(each.heads)) for each in source.sections)


def _same_order(source: KVLayout, target: KVLayout) -> bool:
    """Whether a page's bytes have one order on both sides; NHD and HND are the same for a single head or token."""
    if source.order is target.order:
        return True
    single = _has_one_head(source) and _has_one_head(target)
    single = single or source.page_size == target.page_size == 1
    return single and PageOrder.OPAQUE not in (source.order, target.order)


def _has_one_head(layout: KVLayout) -> bool:
    return all(len(layout.heads_of(each.heads)) == 1 for each in layout.sections)


def _run_rule(source: KVLayout, target: KVLayout) -> RunRule:
    """Return the rule that counts runs: which neighbours are contiguous on both sides."""
    opaque = source.order is PageOrder.OPAQUE
    whole = _same_heads(source, target) and _same_order(source, target)
    # With one token a page or one head, both orders are the same.
    by_head = [side.order is PageOrder.HND or _has_one_head(side) or side.page_size == 1 for side in (source, target)]
    by_token = [side.order is PageOrder.NHD or side.page_size == 1 for side in (source, target)]
    same_pages = source.page_size == target.page_size
    return RunRule(
        planes_per_layer=tuple(each.kinds for each in source.sections),
        source_page_size=source.page_size,
        target_page_size=target.page_size,
        tokens_joined=opaque or all(by_head) or whole,
        heads_joined=all(by_token) or (whole and same_pages),
        slot_rows=tuple(each.rows for each in source.sections) if source.order is PageOrder.SLOT else (),
    )


def _stage_leaders(ranks: tuple[KVLayout, ...]) -> tuple[KVLayout, ...]:
    """Return TP rank 0 of each stage."""
    return ranks[:: ranks[0].parallel.tp]


def _ends(interval: range) -> tuple[int, int]:
    return interval.start, interval.stop


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _pairs(
    source: tuple[KVLayout, ...], target: tuple[KVLayout, ...], way: Way, first_replica: int
) -> tuple[Pair, ...]:
    """Return a pair for every overlap of a stage and head group of the source with a rank of the target, in order."""
    found = _overlaps(source, target, way, first_replica)
    return tuple(sorted(found, key=lambda pair: (pair.target_rank, pair.source_rank)))


def _overlaps(
    source: tuple[KVLayout, ...], target: tuple[KVLayout, ...], way: Way, first_replica: int
) -> Iterator[Pair]:
    first, tp, slot = source[0], source[0].parallel.tp, source[0].order is PageOrder.SLOT
    # Readers assigned so far to the replicas of each (source stage, section, group of heads).
    turns: Counter[tuple[int, int, int]] = Counter()
    # Sections with more heads have fewer replicas to choose from.
    by_heads = sorted(range(len(first.sections)), key=lambda index: -first.sections[index].heads)
    for reader in target:
        for leader in _stage_leaders(source):
            layers = _overlap(leader.layers, reader.layers)
            if not layers:
                continue
            stage = leader.parallel.pp_rank
            held: dict[int, dict[int, range]] = {}
            for index in by_heads:
                total = first.sections[index].heads
                own, share = reader.heads_of(total), len(first.heads_of(total))
                replicas = max(1, tp // total)
                for group in range(own.start // share, (own.stop - 1) // share + 1):
                    heads = _overlap(range(group * share, (group + 1) * share), own)
                    ranks = range(group * replicas, (group + 1) * replicas)
                    # A rank that sends other sections to this reader sends this one, too.
                    chosen = [rank for rank in ranks if rank in held] or ranks
                    rank = chosen[(first_replica + turns[stage, index, group]) % len(chosen)]
                    turns[stage, index, group] += 1
                    held.setdefault(rank, {})[index] = heads
            for rank, found in held.items():
                yield Pair(
                    source_rank=stage * tp + rank,
                    target_rank=reader.rank,
                    layers=_ends(layers),
                    sections=tuple(_ends(found[each]) if each in found else _NONE for each in range(len(by_heads))),
                    unit_bytes=(1 if slot else len(layers))
                    * sum(len(heads) * first.sections[each].head_bytes for each, heads in found.items()),
                    way=way,
                    unit_tokens=first.unit_tokens,
                    slot=slot,
                )
