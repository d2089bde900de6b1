"""Tests the planner on memories filled with global element ids, which this file indexes by itself.

An element is (layer, K or V, head). `held` computes a rank's elements from the rule by which heads and layers are split. It
uses neither the planner nor the layout's arithmetic.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longshore_wire.errors import LayoutError
from longshore_wire.layout import Attention, KVLayout, ModelShape, PageOrder, Parallel
from longshore_wire.plan import Plan, plan, plans
from longshore_wire.ways import Staging, Way

Element = tuple[int, str, int]
KINDS = {Attention.HEADS: ("k", "v"), Attention.LATENT: ("latent",)}


def held(model: ModelShape, tp: int, pp: int, rank: int, stages: list[int] | None = None) -> set[Element]:
    """Return the elements that `rank` must hold.

    `stages` are layers a stage; None: even, the first stages take the rest.
    """
    stage, tp_rank = rank // tp, rank % tp
    counts = stages or [model.layers // pp + (1 if index < model.layers % pp else 0) for index in range(pp)]
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    if tp >= model.kv_heads:
        heads = [tp_rank * model.kv_heads // tp]
    else:
        heads = [head for head in range(model.kv_heads) if head * tp // model.kv_heads == tp_rank]
    return {(layer, kind, head) for layer in layers for kind in KINDS[model.attention] for head in heads}


def layout(model: ModelShape, tp: int, pp: int = 1, *, page_size: int = 16, **more: object) -> KVLayout:
    return KVLayout(model, Parallel(tp=tp, pp=pp), page_size, **more)  # type: ignore[arg-type]


def carry_out(
    made: Plan, model: ModelShape, sources: list[set[Element]], targets: list[set[Element]]
) -> list[Counter[Element]]:
    """Copy the pairs' slices between simulated memories; return how often each element of each target was written."""
    written: list[Counter[Element]] = [Counter() for _ in targets]
    element_bytes = model.head_dim * model.element_bytes
    for pair in made.pairs:
        moved = {
            (layer, kind, head)
            for layer in range(*pair.layers)
            for kind in KINDS[model.attention]
            for head in range(*pair.heads)
        }
        assert moved, "a pair moves something"
        assert moved <= sources[pair.source_rank], "a source reads only what it holds"
        assert pair.token_bytes == len(moved) * element_bytes
        written[pair.target_rank].update(moved)
    return written


def check_against_oracle(
    made: Plan, model: ModelShape, sources: list[set[Element]], targets: list[set[Element]]
) -> None:
    written = carry_out(made, model, sources, targets)
    for rank, elements in enumerate(targets):
        assert written[rank] == Counter(elements), "each element of a target is written exactly once, and nothing else"
    keys = [(pair.source_rank, pair.target_rank) for pair in made.pairs]
    assert len(set(keys)) == len(keys), "two ranks have one pair"
    load = Counter(pair.source_rank for pair in made.pairs)
    for rank, elements in enumerate(sources):
        replicas = [load[other] for other, theirs in enumerate(sources) if theirs == elements]
        assert max(replicas) - min(replicas) <= 1, f"replicas of rank {rank} share its readers"
    assert [rank for rank, _ in made.idle_sources] == [rank for rank in range(len(sources)) if not load[rank]]
    assert all(0 <= teller < len(targets) for _, teller in made.idle_sources)
    assert made.idle_targets == ()


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    return ModelShape.kv(
        layers=draw(st.integers(1, 13)),
        kv_heads=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        head_dim=draw(st.sampled_from([1, 64, 128])),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
    )


@st.composite
def parallel_sizes(draw: st.DrawFn, model: ModelShape) -> tuple[int, int]:
    fitting = [tp for tp in range(1, 17) if tp % model.kv_heads == 0 or model.kv_heads % tp == 0]
    return draw(st.sampled_from(fitting)), draw(st.integers(1, min(4, model.layers)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_target_element_is_written_exactly_once_from_a_source_that_holds_it(data: st.DataObject) -> None:
    model = data.draw(model_shapes())
    if data.draw(st.booleans()):
        model = ModelShape.latent(model.layers, model.head_dim, model.element_bytes)
    (source_tp, source_pp), (target_tp, target_pp) = data.draw(parallel_sizes(model)), data.draw(parallel_sizes(model))
    dp_rank = data.draw(st.integers(0, 3))
    target = KVLayout(model, Parallel(tp=target_tp, pp=target_pp, dp=4, dp_rank=dp_rank), page_size=16)
    source = layout(model, source_tp, source_pp)
    made = plan(
        source.at(data.draw(st.integers(0, source.rank_count - 1))),
        target.at(data.draw(st.integers(0, target.rank_count - 1))),
    )
    assert made == plan(source, target), "the plan does not depend on which rank's layouts are given"
    sources = [held(model, source_tp, source_pp, rank) for rank in range(source_tp * source_pp)]
    targets = [held(model, target_tp, target_pp, rank) for rank in range(target_tp * target_pp)]
    check_against_oracle(made, model, sources, targets)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "source_sizes", "target_sizes", "pair_count"),
    [
        (80, 8, (4, 1), (1, 1), 4),
        (80, 8, (1, 1), (4, 1), 4),
        (32, 12, (2, 1), (3, 1), 4),
        (32, 4, (8, 1), (4, 1), 4),
        (32, 4, (4, 1), (8, 1), 8),
        (94, 4, (1, 2), (1, 3), 4),
        (94, 4, (4, 3), (8, 2), 32),
        (61, 12, (3, 2), (4, 3), 24),
        (16, 1, (16, 1), (16, 1), 16),
    ],
)
def test_known_layouts_meet_the_oracle(
    layers: int, kv_heads: int, source_sizes: tuple[int, int], target_sizes: tuple[int, int], pair_count: int
) -> None:
    model = ModelShape.kv(layers, kv_heads, 128, 2)
    made = plan(layout(model, *source_sizes), layout(model, *target_sizes))
    sources = [held(model, *source_sizes, rank) for rank in range(source_sizes[0] * source_sizes[1])]
    targets = [held(model, *target_sizes, rank) for rank in range(target_sizes[0] * target_sizes[1])]
    check_against_oracle(made, model, sources, targets)
    assert len(made.pairs) == pair_count


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stages_that_were_given_their_layers_meet_the_oracle(data: st.DataObject) -> None:
    model = ModelShape.kv(20, 4, 8, 2)
    sides, told, memories = [], [], []
    for _ in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(1, 19), max_size=3)))
        stages = [end - first for first, end in zip([0, *cuts], [*cuts, 20], strict=True)]
        tp = data.draw(st.sampled_from([1, 2, 4, 8]))
        base = layout(model, tp, len(stages))
        ranks = []
        for rank in range(tp * len(stages)):
            first = sum(stages[: rank // tp])
            layer_range = (first, first + stages[rank // tp])
            ranks.append(msgspec.structs.replace(base.at(rank), layer_range=layer_range))
        sides.append(data.draw(st.permutations(ranks)))
        one = base.at(data.draw(st.integers(0, base.rank_count - 1)))
        told.append(msgspec.structs.replace(one, stage_layers=tuple(stages)))
        memories.append([held(model, tp, len(stages), rank, stages) for rank in range(len(ranks))])
    made = plan(sides[0], sides[1])
    check_against_oracle(made, model, memories[0], memories[1])
    assert plan(told[0], told[1]) == made, "one rank that knows all stages tells as much as all ranks"


@pytest.mark.parametrize(("kv_heads", "source_tp", "target_tp"), [(4, 8, 1), (1, 8, 2), (2, 16, 4)])
def test_readers_of_all_dp_ranks_together_use_every_replica_alike(
    kv_heads: int, source_tp: int, target_tp: int
) -> None:
    model = ModelShape.kv(4, kv_heads, 64, 2)
    load: Counter[int] = Counter()
    for dp_rank in range(8):
        target = KVLayout(model, Parallel(tp=target_tp, dp=8, dp_rank=dp_rank), page_size=16)
        load.update(pair.source_rank for pair in plan(layout(model, source_tp), target).pairs)
    assert len(load) == source_tp and len(set(load.values())) == 1


@settings(max_examples=60)
@given(
    replicas=st.sampled_from([2, 3, 4, 8]),
    first_room=st.integers(0, 2**64 - 1),
    step=st.sampled_from([1, 2, 7, 8, 64, 1000, 2**32]),
    dp_rank=st.integers(0, 3),
)
def test_rooms_whose_ids_follow_each_other_by_any_step_are_dealt_evenly_to_replicas(
    replicas: int, first_room: int, step: int, dp_rank: int
) -> None:
    model, rooms = ModelShape.kv(4, 2, 64, 2), 16 * replicas
    source = layout(model, 2 * replicas)
    target = KVLayout(model, Parallel(tp=2, dp=4, dp_rank=dp_rank), page_size=16)
    sources = [held(model, 2 * replicas, 1, rank) for rank in range(2 * replicas)]
    targets = [held(model, 2, 1, rank) for rank in range(2)]
    load: Counter[int] = Counter()
    for number in range(rooms):
        made = plan(source, target, room=(first_room + number * step) % 2**64)
        check_against_oracle(made, model, sources, targets)
        load.update(pair.source_rank for pair in made.pairs)
    assert len(load) == 2 * replicas
    assert min(load.values()) >= 16 // 2
    assert max(load.values()) <= 16 * 3 // 2


@pytest.mark.parametrize(("blob_bytes", "page_bytes"), [(0, 16 * 2 * 128 * 2), (1000, 1000)])
def test_a_pair_of_opaque_pages_carries_each_page_whole_that_its_tokens_touch(blob_bytes: int, page_bytes: int) -> None:
    model = ModelShape.kv(3, 8, 128, 2)
    opaque = {"order": PageOrder.OPAQUE, "blob_bytes": blob_bytes}
    (one, other) = plan(layout(model, 2, **opaque), layout(model, 1, **opaque)).pairs
    assert one.payload_bytes(16, 64) == 3 * 3 * 4 * page_bytes
    assert one.payload_bytes(0, 17) == 2 * 3 * 4 * page_bytes
    assert other.payload_bytes(32, 33) == 3 * 4 * page_bytes
    assert (16 * one.token_bytes - 3 * 4 * page_bytes) in range(16)


MLA = ModelShape.latent(61, 576, 2)


def test_an_mla_model_has_one_writer_for_each_reader_spread_over_the_source_ranks() -> None:
    made = plan(layout(MLA, 8), layout(MLA, 4))
    assert [pair.target_rank for pair in made.pairs] == [0, 1, 2, 3]
    assert len({pair.source_rank for pair in made.pairs}) == 4
    assert {pair.way for pair in made.pairs} == {Way.CONTIGUOUS}
    assert made.pairs[0].token_bytes == 61 * 576 * 2
    assert len(made.idle_sources) == 4


def test_a_latent_is_staged_when_staging_is_always_and_read_from_one_rank() -> None:
    made = plan(layout(MLA, 8), layout(MLA, 4), staging=Staging.ALWAYS)
    assert made.way is Way.STAGED
    assert [len(made.of_target(rank)) for rank in range(4)] == [1] * 4
    assert max(Counter(pair.source_rank for pair in made.pairs).values()) == 1


GQA = ModelShape.kv(80, 8, 128, 2)


@pytest.mark.parametrize(
    ("source", "target", "options", "way"),
    [
        (layout(GQA, 4), layout(GQA, 4), {}, Way.CONTIGUOUS),
        (layout(GQA, 4), layout(GQA, 4, 2), {}, Way.CONTIGUOUS),
        (layout(GQA, 16), layout(GQA, 8), {}, Way.CONTIGUOUS),
        (layout(GQA, 4), layout(GQA, 4), {"staging": Staging.ALWAYS}, Way.STAGED),
        (layout(GQA, 4), layout(GQA, 4), {"staging": Staging.NEVER}, Way.CONTIGUOUS),
        (layout(GQA, 4), layout(GQA, 4, page_size=64), {}, Way.STAGED),
        (layout(GQA, 4), layout(GQA, 4, order=PageOrder.HND), {}, Way.STAGED),
        (layout(GQA, 8), layout(GQA, 8, order=PageOrder.HND), {}, Way.CONTIGUOUS),
        (layout(GQA, 4), layout(GQA, 1), {}, Way.STAGED),
        (layout(GQA, 4), layout(GQA, 1), {"direct": True}, Way.DIRECT),
        (layout(GQA, 4), layout(GQA, 1), {"staging": Staging.NEVER}, Way.SLICES),
        (layout(GQA, 4), layout(GQA, 4, page_size=64), {"staging": Staging.NEVER}, Way.SLICES),
        (layout(GQA, 4, order=PageOrder.OPAQUE), layout(GQA, 1, order=PageOrder.OPAQUE), {}, Way.STAGED),
        (layout(GQA, 4, order=PageOrder.OPAQUE), layout(GQA, 4, order=PageOrder.OPAQUE), {}, Way.CONTIGUOUS),
        (layout(MLA, 4), layout(MLA, 1, page_size=1), {}, Way.STAGED),
    ],
)
def test_the_way_follows_from_heads_pages_orders_and_switches(
    source: KVLayout, target: KVLayout, options: dict[str, object], way: Way
) -> None:
    made = plan(source, target, **options)  # type: ignore[arg-type]
    assert {pair.way for pair in made.pairs} == {way}
    assert made.way is way


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (layout(GQA, 4), layout(ModelShape.kv(80, 4, 128, 2), 4), r"model\.planes\[0\]\.heads is 8 .* 4"),
        (layout(GQA, 4), layout(ModelShape.kv(79, 8, 128, 2), 4), r"model\.layers is 80 .* 79"),
        (layout(GQA, 4), layout(ModelShape.kv(80, 8, 64, 2), 4), r"model\.planes\[0\]\.row_bytes is 256 .* 128"),
        (layout(GQA, 4), layout(ModelShape.kv(80, 8, 128, 1), 4), r"model\.element_bytes is 2 .* 1"),
        (layout(GQA, 3), layout(GQA, 4), r"source: parallel\.tp is 3 and model\.planes\[0\]\.heads is 8"),
        (layout(GQA, 4), layout(GQA, 12), r"target: parallel\.tp is 12"),
        (layout(GQA, 4, order=PageOrder.OPAQUE), layout(GQA, 4), r"order is OPAQUE .* NHD"),
        (
            layout(GQA, 4, order=PageOrder.OPAQUE),
            layout(GQA, 4, order=PageOrder.OPAQUE, page_size=32),
            r"page_size is 16 .* 32",
        ),
        (
            layout(GQA, 4, order=PageOrder.OPAQUE, blob_bytes=9000),
            layout(GQA, 4, order=PageOrder.OPAQUE),
            r"blob_bytes is 9000 .* 8192",
        ),
        (layout(GQA, 4, 2, layer_range=(0, 50)), layout(GQA, 4), r"source: layer_range is \(0, 50\).*all ranks"),
        (layout(GQA, 4, layer_range=(0, 50)), layout(GQA, 4), r"layers is \(0, 50\) .* \(0, 80\)"),
    ],
)
def test_sides_that_cannot_exchange_pages_are_refused_by_field_with_both_values(
    source: KVLayout, target: KVLayout, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        plan(source, target)


def with_layers(rank: KVLayout, first: int, end: int) -> KVLayout:
    return msgspec.structs.replace(rank, layer_range=(first, end))


def test_an_instance_whose_ranks_contradict_each_other_is_refused() -> None:
    base = layout(GQA, 2, 2)
    ranks = [base.at(rank) for rank in range(4)]
    other_page = msgspec.structs.replace(ranks[3], page_size=32)
    cases = [
        (ranks[:3], r"ranks \[0, 1, 2\]"),
        ([*ranks[:3], ranks[0]], r"ranks \[0, 0, 1, 2\]"),
        ([*ranks[:3], other_page], "page_size is 16 on rank 0 and 32 on rank 3"),
        ([*ranks[:3], layout(GQA, 4).at(3)], "parallel.tp is 2 on rank 0 and 4 on rank 3"),
        ([*ranks[:3], with_layers(ranks[3], 50, 80)], r"\(40, 80\) on rank 2 and \(50, 80\) on rank 3"),
        ([*ranks[:2], *(with_layers(rank, 41, 80) for rank in ranks[2:])], r"\(0, 40\) on one stage and \(41, 80\)"),
        ([*ranks[:2], *(with_layers(rank, 39, 80) for rank in ranks[2:])], r"\(0, 40\) on one stage and \(39, 80\)"),
        ([], "no layout"),
    ]
    for given_ranks, message in cases:
        with pytest.raises(LayoutError, match=message):
            plan(given_ranks, layout(GQA, 1))


def test_the_summary_of_a_70b_model_from_tp4_to_tp1_is_that_of_the_resource() -> None:
    summary = plan(layout(GQA, 4, page_size=64), layout(GQA, 1, page_size=64)).summary(8192, 64 << 20)
    assert msgspec.to_builtins(summary) == {
        "way": "Staged",
        "pairs": 4,
        "bytes_per_token": 327680,
        "slot_bytes": 0,
        "writes_per_chunk": 40,
        "slices_per_chunk": 5242880,
    }


def flat_address(side: KVLayout, token: int, head: int, page_order: list[int]) -> int:
    """Return the offset of a token's head in one plane, in units of one head, for a dense pool."""
    page, slot = page_order[token // side.page_size], token % side.page_size
    local, heads = head - side.heads.start, len(side.heads)
    inner = slot * heads + local if side.order is PageOrder.NHD else local * side.page_size + slot
    return page * side.page_size * heads + inner


@settings(max_examples=100, deadline=None)
@given(
    tps=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    page_sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    orders=st.tuples(st.sampled_from([PageOrder.NHD, PageOrder.HND]), st.sampled_from([PageOrder.NHD, PageOrder.HND])),
    tokens=st.integers(1, 30),
)
def test_slices_in_the_summary_are_the_runs_that_are_contiguous_on_both_sides(
    tps: tuple[int, int], page_sizes: tuple[int, int], orders: tuple[PageOrder, PageOrder], tokens: int
) -> None:
    assume(page_sizes[0] != page_sizes[1] or tokens % page_sizes[0] == 0)
    model = ModelShape.kv(1, 4, 1, 1)
    sides = [
        layout(model, tp, page_size=page_size, order=order)
        for tp, page_size, order in zip(tps, page_sizes, orders, strict=True)
    ]
    made = plan(sides[0], sides[1], staging=Staging.NEVER)
    # Pages are not adjacent, so no run extends beyond a page's end.
    scattered = [index * 3 for index in range(tokens)]
    runs = 0
    for pair in made.pairs:
        ends = sides[0].at(pair.source_rank), sides[1].at(pair.target_rank)
        places = sorted(
            tuple(flat_address(side, token, head, scattered) for side in ends)
            for token in range(tokens)
            for head in range(*pair.heads)
        )
        steps = pairwise(places)
        runs += 2 * (1 + sum((after[0] - before[0], after[1] - before[1]) != (1, 1) for before, after in steps))
    assert made.summary(tokens, 1 << 20).slices_per_chunk == runs


def test_an_unchecked_layout_with_a_long_name_makes_no_long_text() -> None:
    model = ModelShape.kv(2, 4, 16, 2)
    ours = KVLayout(model, Parallel(), 16)
    for theirs in (
        msgspec.structs.replace(ours, name="n" * 60_000),
        msgspec.structs.replace(ours, others=(msgspec.structs.replace(ours, name="n" * 60_000),)),
    ):
        with pytest.raises(LayoutError, match="source: ") as caught:
            plans(theirs, ours)
        assert len(str(caught.value)) < 1000


def test_a_source_rank_is_idle_only_if_it_is_so_in_every_cache() -> None:
    kv = KVLayout(ModelShape.kv(4, 4, 16, 2), Parallel(tp=4), 16)
    latent = KVLayout(ModelShape.kv(4, 1, 16, 2), Parallel(), 16, name="latent")
    source = msgspec.structs.replace(kv, others=(latent,))
    target = msgspec.structs.replace(source, parallel=Parallel())
    first, second = plans(source, target)
    assert (first.idle_sources, second.idle_sources) == ((), ())
    assert (len(first.pairs), len(second.pairs)) == (4, 1)
    # Of four ranks with replicas in both caches, the rest are idle.
    alone = msgspec.structs.replace(
        latent, parallel=Parallel(tp=4), others=(msgspec.structs.replace(latent, name="index"),)
    )
    first, second = plans(alone, msgspec.structs.replace(alone, parallel=Parallel()), room=7)
    assert first.pairs[0].source_rank == second.pairs[0].source_rank
    assert {rank for rank, _ in first.idle_sources} == set(range(4)) - {first.pairs[0].source_rank}
    assert second.idle_sources == ()
