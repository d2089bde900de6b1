"""Answers `/v1/plan`: the plan between two layouts, given in the query or by two registered instances. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from longshore_agent.settings import Settings
from longshore_spec.status import EngineStatus, InstanceStatus
from longshore_wire.claims import writer_count
from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.errors import LayoutError, LongshoreError, Reason
from longshore_wire.layout import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    PAGE_SIZE_MAX,
    PP_MAX,
    TP_MAX,
    Attention,
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
)
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.plan import Plan, Summary, plans
from longshore_wire.ways import Choice, Reach, Staging, Way, check_place, expected_way, is_near

# A plan lists every rank. The limit is that of a large cluster, so that one request cannot block the agent.
RANKS_MAX = 4096


def _number(value: object) -> object:
    """Return the number of a query's text, since pydantic does not convert text for a Literal of numbers."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


class PlanQuery(BaseModel):
    """The query of `/v1/plan`. `source` and `target` name registered instances, or the other fields give two layouts."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field("", description="A registered prefill instance; requires `target`.")
    target: str = Field("", description="A registered decode instance.")
    target_memory: Literal["device", "host"] = Field("device", description="The memory of its pages.")
    cache: str = Field("", max_length=100, description="A cache of these instances. Left out: the first one.")
    layers: int = Field(80, ge=1, le=LAYERS_MAX)
    kv_heads: int = Field(8, ge=1, le=HEADS_MAX)
    head_dim: int = Field(128, ge=1, le=HEAD_DIM_MAX)
    element_bytes: Annotated[Literal[1, 2, 4], BeforeValidator(_number)] = Field(
        2, description="Bytes of one element of the cache."
    )
    attention: Literal["HEADS", "LATENT"] = Field("HEADS", description="LATENT: MLA, one latent a token.")
    prefill_tp: int = Field(1, ge=1, le=TP_MAX)
    prefill_pp: int = Field(1, ge=1, le=PP_MAX)
    prefill_page_size: int = Field(64, ge=1, le=PAGE_SIZE_MAX, description="Tokens in one page.")
    prefill_order: Literal["NHD", "HND", "OPAQUE"] = "NHD"
    decode_tp: int = Field(1, ge=1, le=TP_MAX)
    decode_pp: int = Field(1, ge=1, le=PP_MAX)
    decode_page_size: int = Field(64, ge=1, le=PAGE_SIZE_MAX, description="Tokens in one page.")
    decode_order: Literal["NHD", "HND", "OPAQUE"] = "NHD"
    staging: Literal["Auto", "Always", "Never"] | None = Field(None, description="Left out: as the agent is set.")
    chunk_tokens: int | None = Field(None, ge=1, le=1 << 24, description="Left out: as the agent is set.")
    slab_bytes: int | None = Field(None, ge=1, le=1 << 40, description="Left out: a lane's buffer.")
    backend: Literal["NIXL", "Mooncake", "Loopback"] | None = Field(None, description="Left out: as the agent is set.")
    wire: str | None = Field(
        None, max_length=64, description="A wire's name, as peers have it. Left out: what the agent's self-test found."
    )


class PlanDefaults(msgspec.Struct, frozen=True):
    """Values for fields that a query omits: the agent's own settings."""

    staging: Staging = Staging.AUTO
    chunk_tokens: int = 8192
    slab_bytes: int = 64 << 20
    backend: str = "NIXL"
    ring_bytes: int = 4 << 30
    force_way: Way | None = None
    crossover: Crossover = WHOLE_PAGES

    @classmethod
    def of(cls, settings: Settings, crossover: Crossover = WHOLE_PAGES) -> PlanDefaults:
        """Return the defaults of an agent with these settings and this table."""
        return cls(
            settings.staging,
            settings.chunk_tokens,
            settings.lane_bytes,
            settings.backend.value,
            settings.ring_bytes,
            settings.force_way,
            crossover,
        )


class PairView(msgspec.Struct, frozen=True):
    """The slices that one source rank sends to one target rank; `end` is exclusive.

    Attributes:
        way, why: for a request of `chunk_tokens` tokens; `why` is the reason of the way, as in the metrics.
        staged_s, in_place_s: seconds of either way by the crossover table; none without an entry.
    """

    source_rank: int
    target_rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    bytes_per_token: int
    way: str
    why: str = ""
    staged_s: float | None = None
    in_place_s: float | None = None


class PlanView(msgspec.Struct, frozen=True):
    """A plan. `writes_per_chunk` and `slices_per_chunk` count all pairs; the latter as if each slice were one write.

    Attributes:
        way: the way of all pairs, or `Mixed`.
        backend, wire: the backend and wire for which the ways were chosen.
        rule: the name of the rule if `why` is `default`.
        cache: of the two instances; a room also moves the others.
        bytes_per_token, slot_bytes: over all pairs; a slot has no tokens.
        source_page_size, target_page_size: tokens.
    """

    way: str
    backend: str
    wire: str
    rule: str
    bytes_per_token: int
    chunk_tokens: int
    writes_per_chunk: int
    slices_per_chunk: int
    source_page_size: int
    target_page_size: int
    pairs: tuple[PairView, ...]
    idle_sources: tuple[int, ...]
    idle_targets: tuple[int, ...]
    cache: str = "kv"
    slot_bytes: int = 0


def answer(
    query: PlanQuery,
    instances: tuple[InstanceStatus, ...],
    defaults: PlanDefaults,
    wire: str = UNKNOWN_WIRE,
    engines: tuple[EngineStatus, ...] = (),
) -> PlanView:
    """Return the plan for `query`.

    Args:
        engines: the ranks of `instances` that are connected, with their pools.
        wire: the wire of a query that names none.
    Raises:
        LayoutError: the layouts are invalid or cannot exchange pages.
        RoomError: the source would refuse the chosen way.
        LongshoreError: reason UNKNOWN_INSTANCE; an instance is not registered here, or only one of two is named.
    """
    staging = defaults.staging if query.staging is None else Staging[query.staging.upper()]
    if query.source or query.target:
        named = (
            _registered("source", query.source, instances, "device"),
            _registered("target", query.target, instances, query.target_memory),
        )
        source, target = (side.layout.layout() for side in named)
    else:
        named = None
        source, target = _layout(query, "prefill"), _layout(query, "decode")
    for side, layout in (("source", source), ("target", target)):
        if layout.parallel.tp * layout.parallel.pp > RANKS_MAX:
            raise LayoutError(f"{side}: tp * pp is above {RANKS_MAX}, more than this page shows")
    chunk_tokens = query.chunk_tokens or defaults.chunk_tokens
    slab_bytes = query.slab_bytes or defaults.slab_bytes
    over = (query.backend or defaults.backend, wire if query.wire is None else query.wire)
    # Ranks of one target may use different devices. Each chooses the way of its own pairs.
    reaches = [_reach(named, rank, staging, engines) for rank in range(target.rank_count)]
    planned = [plans(source, target, staging=reach.staging, direct=reach.near) for reach in reaches]
    cache, name = _cache(query.cache, source)
    ways = []
    # The pairs of these plans differ only in their ways.
    for index, rank in enumerate(pair.target_rank for pair in planned[0][cache].pairs):
        found, reach = planned[rank][cache], reaches[rank]
        pair = found.open_pair(
            found.pairs[index],
            (0, chunk_tokens),
            lane_bytes=slab_bytes,
            ring_bytes=defaults.ring_bytes,
            writer_count=writer_count(planned[rank], rank),
        )
        choice = expected_way(pair, reach, defaults.crossover, over, force_way=defaults.force_way)
        check_place(choice.way, f"decode {query.target}", in_place=reach.target_in_place)
        check_place(choice.way, f"prefill {query.source}", in_place=reach.in_place)
        ways.append(choice)
    chosen = planned[0][cache].with_ways([choice.way for choice in ways])
    return _view(name, chosen, ways, chosen.summary(chunk_tokens, slab_bytes), chunk_tokens, over, defaults.crossover)


def _cache(asked: str, layout: KVLayout) -> tuple[int, str]:
    """Return the index and the name of a cache. Raises LayoutError if it is none of the layout's."""
    names = [cache.name for cache in layout.caches]
    if asked and asked not in names:
        raise LayoutError(f"cache is {asked!r}: the instances have {', '.join(names)}")
    return (names.index(asked) if asked else 0), asked or names[0]


def _reach(
    named: tuple[InstanceStatus, InstanceStatus] | None, rank: int, staging: Staging, engines: tuple[EngineStatus, ...]
) -> Reach:
    """Return the knowledge of target rank `rank`. Without named instances, both are on CPUs of different agents.

    A rank that has not registered is assumed to be on the device of the first one. A room is in one pool; of several,
    the least capable one counts.
    """
    if named is None or not named[1].ranks:
        return Reach.of(staging, near=False, in_place=True, target_in_place=True)
    source, target = named
    in_place = all(each.device == "cpu" for each in source.ranks)
    place = next((each for each in target.ranks if each.rank == rank), target.ranks[0])
    pools = [
        pool
        for each in engines
        if (each.instance, each.layout.dp_rank, each.memory) == (target.instance, target.layout.dp_rank, target.memory)
        and each.rank == place.rank
        for pool in each.pools
    ]
    near = is_near(
        source.agent,
        place.near,
        mappable=all(pool.mappable for pool in pools),
        adjacent=all(pool.adjacent for pool in pools),
    )
    # No transport writes an engine's pages on a GPU in place.
    return Reach.of(staging, near=near, in_place=in_place, target_in_place=place.device == "cpu")


def _registered(side: str, name: str, instances: tuple[InstanceStatus, ...], memory: str) -> InstanceStatus:
    for instance in instances:
        if (instance.instance, instance.memory) == (name, memory):
            return instance
    known = ", ".join(sorted(f"{instance.instance} ({instance.memory})" for instance in instances)) or "none"
    raise LongshoreError(
        f"{side}: no instance {name!r} with pages in {memory} memory is registered here; registered are: {known}",
        reason=Reason.UNKNOWN_INSTANCE,
    )


def _layout(query: PlanQuery, side: Literal["prefill", "decode"]) -> KVLayout:
    """Return the layout of rank 0 of one side, from which the planner derives the other ranks."""
    model = ModelShape.of(Attention[query.attention], query.layers, query.kv_heads, query.head_dim, query.element_bytes)
    if side == "prefill":
        parallel = Parallel(tp=query.prefill_tp, pp=query.prefill_pp)
        return KVLayout(model, parallel, query.prefill_page_size, PageOrder[query.prefill_order])
    parallel = Parallel(tp=query.decode_tp, pp=query.decode_pp)
    return KVLayout(model, parallel, query.decode_page_size, PageOrder[query.decode_order])


def _view(
    cache: str,
    found: Plan,
    ways: list[Choice],
    summary: Summary,
    chunk_tokens: int,
    over: tuple[str, str],
    crossover: Crossover,
) -> PlanView:
    return PlanView(
        way=summary.way,
        backend=over[0],
        wire=over[1],
        rule=crossover.default.name,
        bytes_per_token=summary.bytes_per_token,
        slot_bytes=summary.slot_bytes,
        cache=cache,
        chunk_tokens=chunk_tokens,
        writes_per_chunk=summary.writes_per_chunk,
        slices_per_chunk=summary.slices_per_chunk,
        source_page_size=found.runs.source_page_size,
        target_page_size=found.runs.target_page_size,
        pairs=tuple(
            PairView(
                source_rank=pair.source_rank,
                target_rank=pair.target_rank,
                first_layer=pair.layers[0],
                end_layer=pair.layers[1],
                first_head=pair.heads[0],
                end_head=pair.heads[1],
                bytes_per_token=0 if pair.slot else pair.token_bytes,
                way=pair.way.name.capitalize(),
                why=choice.why.label,
                staged_s=choice.staged_s,
                in_place_s=choice.in_place_s,
            )
            for pair, choice in zip(found.pairs, ways, strict=True)
        ),
        idle_sources=tuple(source for source, _ in found.idle_sources),
        idle_targets=found.idle_targets,
    )
