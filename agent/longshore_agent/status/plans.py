"""What `/v1/plan` answers: the plan between two layouts, given in a query or by two registered instances. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from longshore_agent.settings import Settings
from longshore_agent.status.snapshot import InstanceStatus
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
from longshore_wire.plan import Plan, Staging, Summary, plan

# A plan names every rank; one request must not keep the agent busy with more than a large cluster has.
RANKS_MAX = 4096


class PlanQuery(BaseModel):
    """The query of `/v1/plan`: `source` and `target` name registered instances, or other fields give two layouts."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field("", description="A registered prefill instance; then `target` must be given too.")
    target: str = Field("", description="A registered decode instance.")
    layers: int = Field(80, ge=1, le=LAYERS_MAX)
    kv_heads: int = Field(8, ge=1, le=HEADS_MAX)
    head_dim: int = Field(128, ge=1, le=HEAD_DIM_MAX)
    element_bytes: Literal[1, 2, 4] = Field(2, description="Bytes of one number of the cache.")
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


class PlanDefaults(msgspec.Struct, frozen=True):
    """What a query that leaves it out means: the agent's own settings."""

    staging: Staging = Staging.AUTO
    chunk_tokens: int = 8192
    slab_bytes: int = 64 << 20
    direct: bool = True  # between instances that are registered here

    @classmethod
    def of(cls, settings: Settings) -> PlanDefaults:
        """Return what an agent with these settings does."""
        return cls(settings.staging, settings.chunk_tokens, settings.lane_bytes, settings.direct)


class PairView(msgspec.Struct, frozen=True):
    """What one source rank sends to one target rank; `end` is exclusive."""

    source_rank: int
    target_rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    bytes_per_token: int
    way: str


class PlanView(msgspec.Struct, frozen=True):
    """Who sends what to whom. `writes_per_chunk` and `slices_per_chunk` count all pairs, slices as if sent alone."""

    way: str
    bytes_per_token: int
    chunk_tokens: int
    writes_per_chunk: int
    slices_per_chunk: int
    pairs: tuple[PairView, ...]
    idle_sources: tuple[int, ...]
    idle_targets: tuple[int, ...]


def answer(query: PlanQuery, instances: tuple[InstanceStatus, ...], defaults: PlanDefaults) -> PlanView:
    """Return the plan that `query` asks for.

    Raises:
        LayoutError: the layouts cannot exist or exchange pages.
        LongshoreError: reason UNKNOWN_INSTANCE, an instance is not registered here, or only one of two is named.
    """
    if query.source or query.target:
        source, target = (_registered(side, getattr(query, side), instances) for side in ("source", "target"))
    else:
        source, target = _layout(query, "prefill"), _layout(query, "decode")
    for side, layout in (("source", source), ("target", target)):
        if layout.parallel.tp * layout.parallel.pp > RANKS_MAX:
            raise LayoutError(f"{side}: tp * pp is above {RANKS_MAX}, more than this page shows")
    staging = defaults.staging if query.staging is None else Staging[query.staging.upper()]
    chunk_tokens = query.chunk_tokens or defaults.chunk_tokens
    found = plan(source, target, staging=staging, direct=defaults.direct and bool(query.source))
    return _view(found, found.summary(chunk_tokens, query.slab_bytes or defaults.slab_bytes), chunk_tokens)


def _registered(side: str, name: str, instances: tuple[InstanceStatus, ...]) -> KVLayout:
    for instance in instances:
        if instance.instance == name:
            return instance.layout.layout()
    known = ", ".join(sorted({instance.instance for instance in instances})) or "none"
    raise LongshoreError(
        f"{side}: no instance {name!r} is registered here; registered are: {known}", reason=Reason.UNKNOWN_INSTANCE
    )


def _layout(query: PlanQuery, side: Literal["prefill", "decode"]) -> KVLayout:
    """Return the layout of rank 0 of one side; the planner makes the other ranks of it."""
    model = ModelShape(query.layers, query.kv_heads, query.head_dim, query.element_bytes, Attention[query.attention])
    if side == "prefill":
        parallel = Parallel(tp=query.prefill_tp, pp=query.prefill_pp)
        return KVLayout(model, parallel, query.prefill_page_size, PageOrder[query.prefill_order])
    parallel = Parallel(tp=query.decode_tp, pp=query.decode_pp)
    return KVLayout(model, parallel, query.decode_page_size, PageOrder[query.decode_order])


def _view(found: Plan, summary: Summary, chunk_tokens: int) -> PlanView:
    return PlanView(
        way=summary.way,
        bytes_per_token=summary.bytes_per_token,
        chunk_tokens=chunk_tokens,
        writes_per_chunk=summary.writes_per_chunk,
        slices_per_chunk=summary.slices_per_chunk,
        pairs=tuple(
            PairView(
                source_rank=pair.source_rank,
                target_rank=pair.target_rank,
                first_layer=pair.layers[0],
                end_layer=pair.layers[1],
                first_head=pair.heads[0],
                end_head=pair.heads[1],
                bytes_per_token=pair.token_bytes,
                way=pair.way.name.capitalize(),
            )
            for pair in found.pairs
        ),
        idle_sources=tuple(source for source, _ in found.idle_sources),
        idle_targets=found.idle_targets,
    )
