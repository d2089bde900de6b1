"""Kernels that are compiled beside the thread which launches them: a second each, in which that one serves everybody else.

Used by `device_kernel`. One thread does this and nothing else; it asks no stream and touches no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor


class Compiling:
    """What is being compiled; asked by one thread."""

    def __init__(self) -> None:
        # One, as Triton does not promise to be safe for several; it is started when it is needed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._under_way: dict[Hashable, Future[object]] = {}

    def ended(self, key: Hashable, compile_it: Callable[[], object]) -> bool:
        """Whether `compile_it` has been called for `key`, beside this thread; begin it if nobody has. True once.

        Raises:
            Exception: whatever it raised, once; the next question begins anew.
        """
        found = self._under_way.get(key)
        if found is None:
            self._under_way[key] = self._thread.submit(compile_it)
            return False
        if not found.done():
            return False
        del self._under_way[key]
        found.result()
        return True
