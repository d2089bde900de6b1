"""Tests the order of reconciles: one at a time for each deployment, soon after a change, rarely while counts change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from operator_scene import Nobody

from longshore_operator import reconcile, work_queue
from longshore_operator.errors import ApiError
from longshore_operator.metrics import Metrics
from longshore_operator.reconcile import Reconciler
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import Key, World

A, B, C = Key("n", "a"), Key("n", "b"), Key("n", "c")


def run(play: Callable[[WorkQueue], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(play(WorkQueue()), 60)

    asyncio.run(main())


def test_a_key_that_is_added_twice_is_looked_at_once() -> None:
    async def play(queue: WorkQueue) -> None:
        queue.add([A, B])
        queue.add([A])
        assert [await queue.take(), await queue.take()] == [A, B]
        assert len(queue) == 0

    run(play)


def test_what_is_urgent_comes_before_what_waits_already() -> None:
    async def play(queue: WorkQueue) -> None:
        queue.add([A, B])
        queue.add([B], urgent=True)
        queue.add([B], urgent=True)
        assert [await queue.take(), await queue.take()] == [B, A]
        assert len(queue) == 0
        queue.add([C], urgent=True)
        assert await queue.take() == C

    run(play)


def test_what_happens_during_a_look_makes_another_one_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "PAUSE_S", 0.01)

    async def play(queue: WorkQueue) -> None:
        queue.add([A])
        await queue.take()
        queue.add([A])
        queue.done(A)
        queue.add([B])
        assert await queue.take() == B
        assert await queue.take() == A

    run(play)


def test_what_happens_during_a_rest_waits_for_its_end_and_a_change_of_the_spec_does_not() -> None:
    async def play(queue: WorkQueue) -> None:
        queue.add([A])
        queue.done(await queue.take())
        queue.add([A])
        queue.add([B])
        assert await queue.take() == B
        assert len(queue) == 1
        queue.add([A], urgent=True)
        assert await queue.take() == A
        queue.add([A], urgent=True)
        queue.done(A)
        assert await queue.take() == A

    run(play)


def test_a_failed_look_is_repeated_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "BACKOFFS_S", (0.01, 0.02, 3600.0))

    async def play(queue: WorkQueue) -> None:
        queue.add([A])
        for _ in range(3):
            queue.done(await queue.take(), failed=True)
        assert len(queue) == 1
        queue.add([A])
        queue.add([B])
        assert await queue.take() == B
        queue.add([A], urgent=True)
        assert await queue.take() == A

    run(play)


def test_a_look_can_be_asked_for_later() -> None:
    async def play(queue: WorkQueue) -> None:
        queue.add([A])
        queue.done(await queue.take(), again_s=0.01)
        assert await queue.take() == A

    run(play)


def test_a_fault_after_progress_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "BACKOFFS_S", (0.01, 3600.0))

    async def play(queue: WorkQueue) -> None:
        queue.add([A])
        for _ in range(5):
            queue.done(await queue.take(), failed=True, progress=True)

    run(play)


def test_a_bug_while_a_failure_is_told_leaves_the_other_deployments_their_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconcile, "FAILING_S", 0.0)

    async def play(queue: WorkQueue) -> None:
        worked: list[Key] = []

        class Failing(Reconciler):
            async def reconcile(self, key: Key) -> None:
                worked.append(key)
                if key == A:
                    raise ApiError("no answer", 500)
                done.set()

            def _observe(self, key: Key, *, keys_missing: bool = False, failure: str = "") -> None:
                raise KeyError(key, failure, keys_missing)

        async def ready() -> None:
            """Say nothing."""

        done = asyncio.Event()
        worker = Failing(World(), Nobody(), queue, Nobody(), Settings(), Metrics())  # type: ignore[arg-type]
        queue.add([A, B])
        task = asyncio.create_task(worker.work(ready))
        await asyncio.wait([task, asyncio.create_task(done.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert worked == [A, B]
        task.cancel()

    run(play)
