"""Both engines get a prompt at once, with a room that the router names: chunks move while prefill computes later ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from controlplane.waiting import until
from engines import BLOCK_TOKENS, Nursery, Prompt, client, tokens_of
from prompts import EVERY_PROMPT, NEW_TOKENS, PROMPTS, Oracle, random_prompt
from scene import TO_PREFILL, Scene, Side, check_nothing_is_lent, generate, prefill, rooms_open
from tiny_model import TinyModel

WIDE, SINGLE, CROWDED = "wide", "single", "crowded"
# Computed in sixteen chunks.
LONG = random_prompt(400, 2000)
FIRST = random_prompt(401, 40)
# The first of them leaves too few blocks for the second at an engine with these options.
HUNGRY = (random_prompt(402, 900), random_prompt(403, 900))
FEW_BLOCKS = ("--kv-cache-memory-bytes", str(6 << 20), "--max-model-len", "1024", "--no-scheduler-reserve-full-isl")
END_LIMIT_S = 150.0
CROWD = 30

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def answers(nursery: Nursery, model: TinyModel) -> Oracle:
    return Oracle(nursery, model, (*EVERY_PROMPT, LONG, FIRST, *HUNGRY))


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel) -> Iterator[Scene]:
    with Scene(nursery, model, [Side(WIDE, 2), Side(SINGLE, 1), Side(CROWDED, 1, extra=FEW_BLOCKS)]) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Empty the prefix caches, so that each test computes its own KV."""
    for engine in scene.engines.values():
        engine.forget_prefixes()


class Both:
    """Sends prompts to two engines as a router does that names rooms. `earlier` is what prefill answered before."""

    def __init__(self, scene: Scene, source: str, target: str) -> None:
        self.scene, self.target_name = scene, target
        self.source, self.target = scene.engines[source], scene.engines[target]
        self.earlier = prefill(self.source, FIRST)
        self.target.complete(FIRST, 1, self.earlier)

    def claim(self, threads: ThreadPoolExecutor, prompts: Sequence[Prompt], rooms: Sequence[int]) -> list[Future[Any]]:
        """Give decode the prompts; return its answers to come, when its first rank has asked for all of them."""
        asked = rooms_open(self.scene, self.target_name) + len(prompts)
        found = [
            threads.submit(self.target.complete, prompt, NEW_TOKENS, {**self.earlier, "longshore_room": room})
            for prompt, room in zip(prompts, rooms, strict=True)
        ]
        until(lambda: rooms_open(self.scene, self.target_name) == asked, "decode has asked for the rooms")
        return found

    def compute(self, prompt: Prompt, room: int) -> Mapping[str, Any]:
        """Give prefill a prompt; return the transfer parameters of its answer."""
        told: Mapping[str, Any] = self.source.complete(prompt, 1, {**TO_PREFILL, "longshore_room": room})[
            "kv_transfer_params"
        ]
        return told


def new_rooms(count: int) -> list[int]:
    return [secrets.randbelow(2**64) for _ in range(count)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(WIDE, SINGLE, id="TP2-TP1", marks=pytest.mark.shortest),
        pytest.param(SINGLE, WIDE, id="TP1-TP2"),
    ],
)
def test_prompts_that_decode_claims_before_prefill_has_them_give_the_tokens_of_one_engine_alone(
    scene: Scene, answers: Oracle, source: str, target: str
) -> None:
    both, rooms = Both(scene, source, target), new_rooms(len(PROMPTS))
    with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
        coming = both.claim(threads, PROMPTS, rooms)
        told = list(threads.map(both.compute, PROMPTS, rooms))
        found = [tokens_of(each.result()) for each in coming]
    assert found == [answers(prompt) for prompt in PROMPTS]
    # A router that keeps the last answer can use it for the next prompt.
    assert {each["longshore_life"] for each in told} == {both.earlier["longshore_life"]}
    check_nothing_is_lent(scene, END_LIMIT_S)


def test_the_beginning_of_a_prompt_is_at_decode_while_prefill_has_not_computed_its_end(
    scene: Scene, answers: Oracle
) -> None:
    both, agent = Both(scene, WIDE, SINGLE), scene.agents[SINGLE]

    def slabs() -> float:
        return agent.metrics().total("longshore_slabs_total", half="target")

    (room,), before = new_rooms(1), slabs()
    with ThreadPoolExecutor(2) as threads:
        (coming,) = both.claim(threads, [LONG], [room])
        scene.hold.write_text(str(len(LONG) // 2))
        try:
            computed = threads.submit(both.compute, LONG, room)
            until(lambda: slabs() - before >= both.source.options.tp, "KV of each rank is at decode")
            assert not computed.done()
            assert not coming.done()
        finally:
            scene.hold.unlink()
        assert tokens_of(coming.result()) == answers(LONG)
        computed.result()


def test_a_prompt_that_prefill_preempts_is_offered_again_as_the_room_of_its_answer(
    scene: Scene, answers: Oracle
) -> None:
    both, (first, second), (room,) = Both(scene, CROWDED, SINGLE), HUNGRY, new_rooms(1)
    lent = prefill(both.source, first)
    with ThreadPoolExecutor(3) as threads:
        (coming,) = both.claim(threads, [second], [room])
        computed = threads.submit(both.compute, second, room)
        # Its KV has no place while that of the first prompt is lent, so the claim of its room fails.
        until(coming.done, "decode is told that the room is over", END_LIMIT_S)
        assert coming.exception() is not None
        assert tokens_of(both.target.complete(first, NEW_TOKENS, lent)) == answers(first)
        told = computed.result()
    assert both.source.metrics().total("vllm:num_preemptions_total") > 0
    assert tokens_of(both.target.complete(second, NEW_TOKENS, told)) == answers(second)
    check_nothing_is_lent(scene, END_LIMIT_S)


def test_clients_that_leave_both_engines_leave_no_block_lent(scene: Scene, answers: Oracle) -> None:
    both, (room,) = Both(scene, WIDE, SINGLE), new_rooms(1)
    transfer = {**both.earlier, "longshore_room": room}
    taken = scene.agents[WIDE].metrics().total("longshore_rooms_total", half="source")
    offer = {**TO_PREFILL, "longshore_room": room}
    with client(both.target, LONG, NEW_TOKENS, transfer), client(both.source, LONG, 1, offer):
        until(
            lambda: scene.agents[WIDE].metrics().total("longshore_rooms_open", half="source") > 0, "chunks are offered"
        )
    check_nothing_is_lent(scene, END_LIMIT_S)
    assert scene.agents[WIDE].metrics().total("longshore_rooms_total", half="source") > taken
    assert generate(both.source, both.target, PROMPTS[-1], NEW_TOKENS) == answers(PROMPTS[-1])


def test_more_prompts_than_both_caches_hold_are_all_answered_whatever_comes_first_at_either_engine(
    nursery: Nursery, model: TinyModel
) -> None:
    # Two prompts fit into a cache. Both engines get the prompts in opposite orders.
    prompts = [random_prompt(420 + number, 9 * BLOCK_TOKENS - 5) for number in range(CROWD)]
    small = ("--num-gpu-blocks-override", "20", "--max-model-len", str(10 * BLOCK_TOKENS))
    alone = Oracle(nursery, model, (*prompts, FIRST))
    with Scene(nursery, model, [Side("few", 1, extra=small), Side("less", 1, extra=small)]) as scene:
        both, rooms = Both(scene, "few", "less"), new_rooms(CROWD)
        with ThreadPoolExecutor(2 * CROWD) as threads:
            coming = both.claim(threads, prompts, rooms)
            told = [threads.submit(both.compute, *each) for each in zip(prompts[::-1], rooms[::-1], strict=True)]
            found = [tokens_of(each.result()) for each in coming]
            assert all(each.result() for each in told)
        assert found == [alone(prompt) for prompt in prompts]
        check_nothing_is_lent(scene, END_LIMIT_S)
