"""Runs `copy_checks` in a separate process, because Triton reads TRITON_INTERPRET only once, at its import."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Self

# Time limit of a call. The slowest takes some seconds, and so does the start of torch.
_CALL_TIMEOUT_S = 200.0


def _prepare(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def _call(module: str, name: str, arguments: tuple[object, ...], options: dict[str, object]) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments, **options)


class KernelProcess:
    """Runs functions of a test module that this process must not import. A call that ends the process fails, as do later ones."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._module = module
        # Forked from a process that has only loaded torch, since loading takes seconds and every process needs it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare, initargs=(environment,))

    def run(self, name: str, *arguments: object, **options: object) -> Any:
        call = self._pool.submit(_call, self._module, name, arguments, options)
        return call.result(timeout=_CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
