"""Computes who writes what to whom, how many slabs that takes, and how many rooms the ring holds. Pure.

Called by `inspect_manifests`. The plan, the ways and the slabs come from the functions of wire by which workers decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from longshore_spec import names
from longshore_spec.agent_config import AgentConfig, Target
from longshore_spec.agent_memory import host_worker_count, needed_bytes, rank_count, resources, staging_bytes
from longshore_spec.agent_pods import merged
from longshore_spec.manifest import Spec
from longshore_spec.node_groups import Group, groups
from longshore_spec.quantity import QuantityError, parse_quantity
from longshore_wire.claims import SLABS_MAX, writer_count
from longshore_wire.crossover import Crossover
from longshore_wire.errors import RingError
from longshore_wire.names import ENVIRONMENT_PREFIX, Wire
from longshore_wire.plan import Pair, Plan, Summary, plans
from longshore_wire.slabs import (
    GPU_SLAB_BYTES_MIN,
    SLAB_BYTES_MIN,
    SlabGrid,
    gpu_slab_bytes_max,
    slab_bytes,
    slab_limit_bytes,
    small_slab_bytes,
    staged_tokens,
)
from longshore_wire.ways import Choice, Reach, Staging, Way, Why, expected_way

CPU, GPU = "CPU", "GPU"
_HOST_WIRES = (Wire.SHARED_MEMORY.value, Wire.TCP.value, Wire.RDMA.value)
# Only GPU memory uses these.
_GPU_WIRES = (Wire.CUDA_IPC.value, Wire.NVLINK.value)
_PREFIX = ENVIRONMENT_PREFIX
_MEMORY = "memory"
_FAR, _NEAR = "two agents", "engines of one agent"


class PairSizes(msgspec.Struct, frozen=True, rename="camel"):
    """The slices of a cache that one source rank sends to one target rank. Intervals are half-open. Slabs are 0 if none is staged.

    Attributes:
        bytes_per_token: 0 of a slot.
        chunk_bytes, chunk_slabs: of a request of one chunk.
        room_slabs: of a room of the asked tokens.
    """

    cache: str
    source_rank: int
    target_rank: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    bytes_per_token: int
    chunk_bytes: int
    chunk_slabs: int
    room_slabs: int


class WayOf(msgspec.Struct, frozen=True, rename="camel"):
    """The way of all pairs of some caches over some wires, and its reason as in the metrics."""

    between: str
    caches: tuple[str, ...]
    wires: tuple[str, ...]
    way: str
    why: str
    meaning: str


class RingSizes(msgspec.Struct, frozen=True, rename="camel"):
    """The ring of the decode rank that takes most. `rooms` is how many rooms of `tokens` it holds whole at once."""

    ring_bytes: int
    tokens: int
    room_bytes: int
    room_slabs: int
    rooms: int
    chunk_tokens: int
    chunk_bytes: int
    chunk_slabs: int
    share_bytes: int


class RoleMemory(msgspec.Struct, frozen=True, rename="camel"):
    """Staging memory of a role. With decode's pages in host memory each rank has a second ring there."""

    role: str
    ranks_per_node: int
    rank_bytes: int
    memories: int
    node_bytes: int
    place: str


class AgentMemory(msgspec.Struct, frozen=True, rename="camel"):
    """Memory that the agent's pod on a node of these roles requests; `given` if the manifest has it."""

    roles: str
    request: str
    limit: str
    needed_bytes: int
    is_given: bool


class Sizes(msgspec.Struct, frozen=True, rename="camel"):
    """All numbers about a deployment.

    Attributes:
        replicas: ranks of prefill that hold the same heads; each pair reads from one of them.
        slot_bytes: of the recurrent states of a request, over all pairs.
        idle_sources, idle_targets: ranks of one replica that exchange nothing in one room.
        ring: None if no pair is staged.
    """

    devices: dict[str, str]
    caches: tuple[str, ...]
    replicas: int
    bytes_per_token: int
    slot_bytes: int
    writes_per_chunk: int
    slices_per_chunk: int
    ways: tuple[WayOf, ...]
    pairs: tuple[PairSizes, ...]
    idle_sources: tuple[int, ...]
    idle_targets: tuple[int, ...]
    ring: RingSizes | None
    memory: tuple[RoleMemory, ...]
    agents: tuple[AgentMemory, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings of prefill's and decode's agents by which slabs are cut."""

    slab_bytes_max: int
    slab_bytes_min: int
    lane_count: int
    ring_bytes: int
    share_divisor: int


def device_of(spec: Spec, role: str) -> str:
    """Return the device of a role's pages by the manifest: a GPU if the pods of its nodes see them."""
    found = (merged(spec, group, "")["gpus"] for group in groups(spec) if role in group.role_names)
    return GPU if any(found) else CPU


def limits_of(spec: Spec, device: str) -> Limits:
    """Return the limits of slabs from prefill's `device`, with the variables that the manifest gives to agents."""
    lane, lanes, ring = spec.prefill.staging.buffer_size, spec.prefill.staging.lanes, spec.decode.staging.pool_size
    prefill, decode = (variables(spec, role) for role in names.ROLES)
    if device == GPU:
        most, least = gpu_slab_bytes_max(lane, lanes), _size(prefill, "GPU_SLAB_BYTES_MIN", GPU_SLAB_BYTES_MIN)
    else:
        default = small_slab_bytes(SLAB_BYTES_MIN, lane, ring)
        most, least = lane, _size(prefill, "SLAB_BYTES_MIN", default)
    return Limits(most, least, lanes, ring, _size(decode, "RING_SHARE_DIVISOR", 4))


def variables(spec: Spec, role: str) -> Mapping[str, str]:
    """Return the environment that the manifest gives to the agents of a role."""
    group = next(group for group in groups(spec) if role in group.role_names)
    return {entry["name"]: entry.get("value", "") for entry in merged(spec, group, "").get("env", [])}


def _size(given: Mapping[str, str], name: str, default: int) -> int:
    try:
        return parse_quantity(given.get(f"{_PREFIX}{name}") or default)
    except QuantityError:
        # The agent refuses it at its start.
        return default


def pair_slabs(found: Sequence[Plan], pair: Pair, tokens: int, limits: Limits, page: int) -> SlabGrid:
    """Return the slabs of a staged pair for a room of `tokens`. Raises RingError if no unit fits a slab, or there are too many.

    Args:
        found: the plans of all caches, which share the ring.
        page: tokens of the larger page of both sides.
    """
    first, end = pair.units_of(0, tokens)
    cut = staged_tokens(
        end - first,
        (pair.unit_bytes, pair.unit_tokens),
        limit_bytes=slab_limit_bytes(
            limits.slab_bytes_max, limits.ring_bytes, writer_count(tuple(found), pair.target_rank)
        ),
        minimum_bytes=limits.slab_bytes_min,
        lane_count=limits.lane_count,
        page=1 if pair.slot else page,
    )
    grid = SlabGrid(first, end, cut)
    if grid.count > SLABS_MAX:
        raise RingError(
            f"a room of {tokens} tokens has {grid.count} slabs between two ranks, of at most {SLABS_MAX}: enlarge bufferSize and poolSize"
        )
    return grid


def sizes(spec: Spec, config: AgentConfig, tokens: int, table: Crossover, devices: Mapping[str, str]) -> Sizes:
    """Return the numbers of a valid deployment.

    Args:
        tokens: of a room.
        table: the agents' crossover table.
        devices: of each role's pages.
    Raises:
        RingError: a slab cannot hold one token, one opaque page or one layer of a slot, or a room has too many slabs.
    """
    limits, chunk = limits_of(spec, devices[names.PREFILL]), config.transfer.chunk_tokens
    plans, ways = _planned(spec, config, limits, table, devices, tokens)
    page = max(config.prefill.page_size, config.decode.page_size)
    is_staged = any(way.way == _word(Way.STAGED) for way in ways)
    cut: list[_Cut] = []
    for cache in config.model.all_caches:
        counts = [cache.kept(count) for count in (chunk, tokens)]
        for pair in plans[cache.name].pairs:
            grids = tuple(pair_slabs(tuple(plans.values()), pair, count, limits, page) for count in counts if is_staged)
            cut.append(_Cut(cache.name, pair, counts[0], grids))
    found = tuple(plans.values())
    summary = Summary.of_all(tuple(config.summaries().values()))
    return Sizes(
        devices=dict(devices),
        caches=tuple(plans),
        replicas=config.prefill.layout(config.model).replicas,
        bytes_per_token=summary.bytes_per_token,
        slot_bytes=summary.slot_bytes,
        writes_per_chunk=summary.writes_per_chunk,
        slices_per_chunk=summary.slices_per_chunk,
        ways=ways,
        pairs=tuple(map(_pair_sizes, cut)),
        idle_sources=tuple(rank for rank, _ in found[0].idle_sources),
        idle_targets=tuple(rank for rank in found[0].idle_targets if not any(plan.of_target(rank) for plan in found)),
        ring=_ring(cut, limits, chunk, tokens) if is_staged else None,
        memory=tuple(_role_memory(spec, role, devices) for role in names.ROLES),
        agents=tuple(_agent_memory(spec, group) for group in groups(spec)),
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A pair of a cache, the tokens of one chunk, and the slabs of a chunk and of a room; none if nothing is staged."""

    cache: str
    pair: Pair
    chunk_tokens: int
    grids: tuple[SlabGrid, ...]


def _planned(
    spec: Spec, config: AgentConfig, limits: Limits, table: Crossover, devices: Mapping[str, str], tokens: int
) -> tuple[dict[str, Plan], tuple[WayOf, ...]]:
    """Return the plan of each cache between two agents, and the ways between two agents and within one."""
    source, target = config.prefill.layout(config.model), config.decode.layout(config.model)
    caches = config.model.all_caches
    asked = config.transfer.staging
    target_on_gpu = devices[names.DECODE] == GPU and config.decode.target is Target.DEVICE
    places = {"in_place": devices[names.PREFILL] == CPU, "target_in_place": not target_on_gpu}
    far = Reach.of(asked, near=False, **places)
    wires = tuple(wire.value for wire in config.transfer.wires) or _HOST_WIRES + (
        _GPU_WIRES if GPU in devices.values() else ()
    )
    reaches = {_FAR: far} | ({_NEAR: Reach.of(asked, near=True, **places)} if _has_neighbours(spec, devices) else {})
    # The wires of each cache, then the caches that have equal wires.
    found: dict[tuple[str, Choice, str], list[str]] = {}
    made = {}
    for between, reach in reaches.items():
        made[between] = plans(source, target, staging=reach.staging, direct=reach.near)
        for cache, plan in zip(caches, made[between], strict=True):
            pair = plan.open_pair(
                plan.pairs[0],
                (0, cache.kept(tokens)),
                lane_bytes=limits.slab_bytes_max,
                ring_bytes=limits.ring_bytes,
                writer_count=writer_count(made[between], plan.pairs[0].target_rank),
            )
            for wire in wires if between == _FAR else ("",):
                choice = expected_way(pair, reach, table, (config.transfer.backend.value, wire))
                found.setdefault((between, Choice(choice.way, choice.why), cache.name), []).append(wire)
    joined: dict[tuple[str, Choice, tuple[str, ...]], list[str]] = {}
    for (between, choice, name), given in found.items():
        joined.setdefault((between, choice, tuple(filter(None, given))), []).append(name)
    ways = tuple(
        WayOf(between, tuple(named), given, _word(choice.way), choice.why.label, _meaning(choice, config))
        for (between, choice, given), named in joined.items()
    )
    return {cache.name: plan for cache, plan in zip(caches, made[_FAR], strict=True)}, ways


def _has_neighbours(spec: Spec, devices: Mapping[str, str]) -> bool:
    """Return whether a node may have engines of both roles whose agent copies directly. No CPU writes pages on a GPU."""
    if not any(group.roles == names.BOTH for group in groups(spec)):
        return False
    if variables(spec, names.DECODE).get(f"{_PREFIX}DIRECT", "true").strip().lower() in {"false", "0", "no", "off"}:
        return False
    return devices[names.PREFILL] == GPU or devices[names.DECODE] == CPU or spec.decode.target is Target.HOST


def _word(way: Way) -> str:
    return way.name.capitalize()


def _meaning(choice: Choice, config: AgentConfig) -> str:
    """Return the reason of a way in words."""
    given = config.transfer.staging
    staging = f"transfer.staging is {given.value}" if given is not Staging.AUTO else "pages are on a GPU"
    return {
        Why.STAGING: staging,
        Why.NEAR: "one copy from pages to pages",
        Why.NO_RING: "the ring takes no slab of this pair",
        Why.MEASURED: "measured to be faster",
        Why.DEFAULT: "both sides cut pages alike"
        if choice.way is Way.CONTIGUOUS
        else "the two sides cut pages differently",
    }.get(choice.why, choice.why.label)


def _pair_sizes(cut: _Cut) -> PairSizes:
    pair = cut.pair
    chunk_slabs, room_slabs = (grid.count for grid in cut.grids) if cut.grids else (0, 0)
    return PairSizes(
        cache=cut.cache,
        source_rank=pair.source_rank,
        target_rank=pair.target_rank,
        layers=pair.layers,
        heads=pair.heads,
        bytes_per_token=0 if pair.slot else pair.token_bytes,
        chunk_bytes=pair.payload_bytes(*pair.units_of(0, cut.chunk_tokens)),
        chunk_slabs=chunk_slabs,
        room_slabs=room_slabs,
    )


def _ring(cut: Sequence[_Cut], limits: Limits, chunk: int, tokens: int) -> RingSizes:
    ranks = sorted({each.pair.target_rank for each in cut})
    of_rank = ([each for each in cut if each.pair.target_rank == rank] for rank in ranks)
    room_bytes, room_slabs, chunk_bytes, chunk_slabs = max((*_taken(each, 1), *_taken(each, 0)) for each in of_rank)
    return RingSizes(
        ring_bytes=limits.ring_bytes,
        tokens=tokens,
        room_bytes=room_bytes,
        room_slabs=room_slabs,
        rooms=limits.ring_bytes // room_bytes,
        chunk_tokens=chunk,
        chunk_bytes=chunk_bytes,
        chunk_slabs=chunk_slabs,
        share_bytes=limits.ring_bytes // limits.share_divisor,
    )


def _taken(cut: Sequence[_Cut], which: int) -> tuple[int, int]:
    """Return the ring memory and the slabs of a chunk (`which` 0) or a room (1), of all sources and caches."""
    grids = [(each.pair, each.grids[which]) for each in cut]
    return sum(sum(_lengths(pair, grid)) for pair, grid in grids), sum(grid.count for _, grid in grids)


def _lengths(pair: Pair, grid: SlabGrid) -> Iterator[int]:
    """Yield the bytes of the slabs of a pair: all but the last one are alike."""
    whole = slab_bytes(pair.payload_bytes(*grid.tokens(0)))
    yield (grid.count - 1) * whole
    yield slab_bytes(pair.payload_bytes(*grid.tokens(grid.count - 1)))


def _role_memory(spec: Spec, role: str, devices: Mapping[str, str]) -> RoleMemory:
    ranks, each = rank_count(spec, role), staging_bytes(spec, role)
    rings = ranks + host_worker_count(spec, role)
    place = "host" if devices[role] == CPU else "GPU"
    if rings > ranks and devices[role] == GPU:
        place = "GPU and host"
    return RoleMemory(role, ranks, each, rings // ranks, rings * each, place)


def _agent_memory(spec: Spec, group: Group) -> AgentMemory:
    settings = merged(spec, group, "")
    rendered = resources(spec, group, settings)
    given = settings.get("resources", {})
    return AgentMemory(
        roles=group.roles,
        request=str(rendered.get("requests", {}).get(_MEMORY, "")),
        limit=str(rendered.get("limits", {}).get(_MEMORY, "")),
        needed_bytes=needed_bytes(spec, group, gpus=settings["gpus"]),
        is_given=any(_MEMORY in given.get(kind, {}) for kind in ("requests", "limits")),
    )
