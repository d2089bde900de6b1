"""Makes calls in threads, so many at a time. Used by each command that asks several agents or an API server.

These threads are daemons, unlike a ThreadPoolExecutor's: after an interrupt the process ends, although some still wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class Threads:
    """Calls under way. A context manager, whose end leaves out calls that have not begun, and waits for none.

    Args:
        count_max: calls at the same time.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0
        self._futures: list[Future[Any]] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for future in self._futures:
            future.cancel()
        for _ in range(self._count):
            self._calls.put(None)

    def submit(self, call: Callable[..., _T], *given: Any) -> Future[_T]:
        """Let a thread make a call; return what will have its result."""
        future: Future[_T] = Future()
        self._futures.append(future)
        self._calls.put(partial(_make, future, call, given))
        if self._count < self._count_max:
            self._count += 1
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for all calls, at most so long."""
        wait(self._futures, limit_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _make(future: Future[_T], call: Callable[..., _T], given: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = call(*given)
    except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
        future.set_exception(error)
    else:
        future.set_result(found)
