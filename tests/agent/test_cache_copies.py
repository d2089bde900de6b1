"""Plans and copies of caches with any planes, against an oracle over elements: staged, direct, in place, and their digests.

The states are those of real models, cut by the number of layers alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from cache_oracle import Memory, content, state_geometry

from longshore_agent.kernels.copier import Copy, Parts, Slab
from longshore_agent.kernels.cpu_copy import CpuCopier
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import PageTable, pieces_in_place
from longshore_client.memory import pool_geometry
from longshore_spec.status import LayoutStatus
from longshore_wire.layout import KVLayout, LayoutError, ModelShape, PageOrder, Parallel, Plane, PoolGeometry
from longshore_wire.plan import Pair, digests_bytes, plan
from longshore_wire.slabs import SlabGrid, Trailer, unseal

KEY = b"key of this test"
TOKENS = (0, 37)
COPIER = CpuCopier()


def kv(layers: int, key_bytes: int, value_bytes: int, heads: int = 8) -> ModelShape:
    return ModelShape(layers, (Plane(heads, key_bytes), Plane(heads, value_bytes)), 2)


def gdn(layers: int, *, by_row: bool) -> ModelShape:
    """Qwen3.5's state: conv in q, k and v, as [rows, dim] or [dim, rows], and the recurrent state."""
    row, rows = (256, 3) if by_row else (768, 1)
    conv = [Plane(heads, row, rows) for heads in (16, 16, 64)]
    return ModelShape(layers, (*conv, Plane(64, 512, 128)), 2)


def mamba2(layers: int, groups: int) -> ModelShape:
    """A conv state of x, B and C, with fewer groups than ranks, and the recurrent state."""
    return ModelShape(layers, (Plane(16, 64, 3), *(Plane(groups, 64, 3) for _ in range(2)), Plane(16, 256, 8)), 2)


@dataclass(frozen=True)
class Kind:
    """A cache on both sides.

    Attributes:
        orders, page_sizes: at the source and at the target.
        geometry: of a rank's memory with so many pages.
    """

    model: ModelShape
    orders: tuple[PageOrder, PageOrder] = (PageOrder.SLOT, PageOrder.SLOT)
    page_sizes: tuple[int, int] = (64, 64)
    geometry: Callable[[KVLayout, int], PoolGeometry] = state_geometry
    page_count: int = 5

    def layout(self, side: int, tp: int, pp: int = 1) -> KVLayout:
        return KVLayout(self.model, Parallel(tp=tp, pp=pp), self.page_sizes[side], self.orders[side])


NHD, HND, OPAQUE = PageOrder.NHD, PageOrder.HND, PageOrder.OPAQUE
KINDS = {
    "gdn [dim, rows]": Kind(gdn(2, by_row=False)),
    "gdn [rows, dim]": Kind(gdn(2, by_row=True)),
    "gdn, each plane apart": Kind(gdn(2, by_row=True), geometry=pool_geometry),
    # vLLM's groups overlay one allocation: five layers are two tensors with three ids.
    "gdn of 2 layers a page": Kind(gdn(5, by_row=True), page_sizes=(2, 2)),
    "gdn of 2 and 3 layers a page": Kind(gdn(5, by_row=True), page_sizes=(2, 3)),
    "mamba2, one group": Kind(mamba2(2, 1)),
    "mamba2, two groups": Kind(mamba2(3, 2), page_sizes=(1, 64)),
    "K and V of unequal width": Kind(kv(3, 384, 256), (NHD, NHD), (16, 16), pool_geometry),
    "K and V of unequal width, other pages": Kind(kv(3, 384, 256), (NHD, HND), (16, 4), pool_geometry, 10),
    "three equal planes": Kind(ModelShape(3, (Plane(4, 64),) * 3, 2), (NHD, HND), (16, 16), pool_geometry),
    "latents": Kind(ModelShape.latent(3, 576, 2), (NHD, NHD), (16, 64), pool_geometry),
    "index keys": Kind(ModelShape.latent(2, 16, 1), (OPAQUE, OPAQUE), (16, 16), pool_geometry),
    "block scales": Kind(kv(2, 8, 4), (NHD, NHD), (16, 16), pool_geometry),
}
# Unequal sizes; by each target rank, each head comes from one source rank.
TPS = [(1, 1), (4, 1), (1, 4), (4, 2), (2, 4), (8, 2), (16, 1), (2, 16), (8, 8), (8, 1), (1, 8), (3, 2)]
SIZES = [((tp, 1), (other, 1)) for tp, other in TPS]
STAGES = [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((1, 2), (4, 1))]


class Rank:
    """One rank's pool, with memory that the oracle knows."""

    def __init__(self, kind: Kind, layout: KVLayout, kept: ExitStack) -> None:
        self.layout = layout
        self.memory, handles = Memory.shared(layout, kind.geometry(layout, kind.page_count))
        self.pool = KVPool(layout, self.memory.geometry, handles)
        for handle in handles:
            os.close(handle)
        kept.callback(self.pool.close)
        order = np.random.default_rng(layout.rank).permutation(kind.page_count)
        self.table = PageTable(0, order[: layout.pages_of(*TOKENS)[1]].astype(np.int32))

    def parts(self, route: Pair, units: tuple[int, int], other: KVLayout | None = None) -> Parts:
        return self.table.parts(self.pool, route, units, other)


def staged(source: Rank, target: Rank, route: Pair, units: tuple[int, int]) -> tuple[bytes, bytes]:
    """Move units through staging memory; return the digests of both sides."""
    payload_bytes = route.payload_bytes(*units)
    trailer = Trailer(1, 0, 0, 0, 0, 1, 1, 1, payload_bytes)
    with closing(StagingBuffer(payload_bytes + 256)) as buffer:
        slab = Slab(buffer, 64, payload_bytes)
        gathered = COPIER.submit(Copy(source.parts(route, units), slab, trailer.seal(KEY), digest_key=KEY))
        assert gathered.end()
        scattered = COPIER.submit(
            Copy(slab, target.parts(route, units), accepts=lambda data: unseal(data, KEY) == trailer, digest_key=KEY)
        )
        assert scattered.end()
        return gathered.digests.source, scattered.digests.target


def direct(source: Rank, target: Rank, route: Pair, units: tuple[int, int]) -> tuple[bytes, bytes]:
    """Copy units from pages to pages; return the digests of both sides."""
    near, far = source.parts(route, units, target.layout), target.parts(route, units, source.layout)
    copied = COPIER.submit(Copy(near, far, digest_key=KEY))
    assert copied.end()
    return copied.digests.source, copied.digests.target


def in_place(source: Rank, target: Rank, route: Pair, units: tuple[int, int]) -> tuple[bytes, bytes]:
    """Write units piece by piece; return the digests of both sides."""
    near, far = source.parts(route, units, target.layout), target.parts(route, units, source.layout)
    before = COPIER.digest(near, KEY).digests.source
    pieces = pieces_in_place(near, far)
    for begin, goal, length in zip(pieces.sources, pieces.targets, pieces.lengths, strict=True):
        ctypes.memmove(int(goal), int(begin), int(length))
    return before, COPIER.digest(far, KEY).digests.source


def cuts(route: Pair, page: int) -> Iterator[tuple[int, int]]:
    """Yield slabs of a few units, and then what is left."""
    first, end = route.units_of(*TOKENS)
    grid = SlabGrid(first, end, max(route.unit_tokens, 2 if route.slot else page))
    for slab in range(grid.count):
        yield grid.tokens(slab)


@pytest.mark.parametrize("sizes", SIZES + STAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_element_of_decodes_ranks_is_that_of_the_whole_state(
    kind: str, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    chosen = KINDS[kind]
    layouts = [chosen.layout(side, *size) for side, size in enumerate(sizes)]
    # Any of four data parallel replicas of decode.
    place = msgspec.structs.replace(layouts[1].parallel, dp=4, dp_rank=(SIZES + STAGES).index(sizes) % 4)
    layouts[1] = msgspec.structs.replace(layouts[1], parallel=place)
    try:
        planned = plan(*layouts, room=7)
    except LayoutError:
        heads = {plane.heads for plane in chosen.model.planes}
        assert any(count % tp and tp % count for tp, _ in sizes for count in heads)
        return
    for move in (staged, direct, in_place):
        with ExitStack() as kept:
            sources, targets = (
                [Rank(chosen, layout.at(rank), kept) for rank in range(layout.rank_count)] for layout in layouts
            )
            whole = content(11, layouts[0], TOKENS[1])
            for rank in sources:
                rank.memory.put(rank.memory.data, rank.table.pages.tolist(), whole, *TOKENS)
            for rank in targets:
                rank.memory.put(rank.memory.expected, rank.table.pages.tolist(), whole, *TOKENS)
            for pair in planned.pairs:
                source, target = sources[pair.source_rank], targets[pair.target_rank]
                for units in cuts(pair, min(chosen.page_sizes)):
                    near, far = move(source, target, pair, units)
                    assert near == far
                    assert len(near) == digests_bytes(pair, source.layout, units)
            assert all(rank.memory.intact() for rank in targets), (move.__name__, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_status_gives_a_layout_back(kind: str) -> None:
    layout = KINDS[kind].layout(0, 4).at(1)
    status = msgspec.json.decode(msgspec.json.encode(LayoutStatus.of(layout)), type=LayoutStatus)
    assert status.layout() == layout


def test_a_rank_that_sends_x_sends_b_and_c_too() -> None:
    """Replicas of a section are read where other sections come from: four pairs, not up to twelve."""
    kind = KINDS["mamba2, one group"]
    for room in range(32):
        planned = plan(kind.layout(0, 4), kind.layout(1, 2), room=room)
        assert [(pair.source_rank, pair.target_rank) for pair in planned.pairs] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        for target in range(2):
            pairs = planned.of_target(target)
            assert [sum(pair.sections[section] == (0, 1) for pair in pairs) for section in (1, 2)] == [1, 1]


def test_rooms_read_replicated_sections_from_all_ranks_alike() -> None:
    kind = KINDS["mamba2, one group"]
    rooms = [plan(kind.layout(0, 4), kind.layout(1, 1), room=room) for room in range(4000)]
    for section in (1, 2):
        read = [pair.source_rank for each in rooms for pair in each.pairs if pair.sections[section] == (0, 1)]
        assert all(900 < read.count(rank) < 1100 for rank in range(4))
