"""Checks a GPU worker's compilations and calls to the driver. Runs in a separate process, see `played_device`."""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from page_shapes import Shape, one_part, opened, page_ids
from played_device import DEVICE, copied, make_copier, on_device, play, staged, wait_compiled

from longshore_agent.kernels import device_copier as copier_module
from longshore_agent.kernels import device_kernel
from longshore_agent.kernels.copier import pool_view
from longshore_agent.memory import cuda
from longshore_wire.errors import LongshoreError


def first_rooms(near: Shape, fars: list[tuple[Shape, int]]) -> tuple[int, int, int]:
    """Register a pool, then copy a room of it into far pools with these numbers of heads.

    Returns:
        Kernels compiled when the pool was registered, kernels compiled by the rooms, and launches.
    """
    kernel, launches = play()
    copier, _ = make_copier()
    with ExitStack() as stack:
        source = on_device(stack.enter_context(opened(near, seed=1)))
        copier.prepare_pool(source, direct=True)
        at_registration = len(kernel.compiled)
        for far, heads in fars:
            target = on_device(stack.enter_context(opened(far, seed=None)))
            tokens = (0, 3 * near.page_size)
            sides = [
                pool_view(pool, page_ids(shape, tokens, 1, repeats=False), 0, range(shape.layers), range(heads))
                for pool, shape in ((source, near), (target, far))
            ]
            copied(copier, sides, tokens).end()
        return at_registration, len(kernel.compiled) - at_registration, len(launches)


def first_slabs(shape: Shape, counts: list[int]) -> tuple[int, int, int]:
    """Register a pool, then gather and scatter slabs with these numbers of heads.

    Returns:
        As `first_rooms`.
    """
    kernel, launches = play()
    copier, memory = make_copier()
    with opened(shape, seed=1) as pool:
        copier.prepare_pool(on_device(pool), direct=False)
        at_registration = len(kernel.compiled)
        tokens = (0, shape.page_size)
        pages = page_ids(shape, tokens, 1, repeats=False)
        for count in counts:
            view = pool_view(pool, pages, 0, range(shape.layers), range(count))
            for kind in ("gather", "scatter"):
                copier.submit(staged(kind, view, memory, tokens)).end()
        return at_registration, len(kernel.compiled) - at_registration, len(launches)


def arguments_of_launches(near: Shape, far: Shape, heads: int, kind: str) -> tuple[list[object], list[object]]:
    """Copy a room's slabs by launches bound to their shapes, and by launches made for each slab.

    Returns:
        For each of the first, and for each of the second: grid, threads, shared memory and all arguments, as the driver reads them.
    """
    play()
    seen: list[object] = []

    def launch(
        _: object, function: int, programs: object, threads: int, shared: int, stream: int, arguments: Any
    ) -> None:
        words = [ctypes.c_uint64.from_address(pointer).value for pointer in arguments]
        seen.append((function, programs, threads, shared, stream, words))

    cuda.launch = launch
    copier, memory = make_copier()
    size = max(near.page_size, far.page_size)
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        # Starts within a page if pages can be split.
        first = size if near.blob_bytes else size // 2
        room = (first, first + 4 * size - size // 2 * (not near.blob_bytes))
        sides = [
            pool_view(pool, page_ids(shape, room, 1, repeats=False), room[0] // shape.page_size, range(1), range(heads))
            for pool, shape in ((source, near), (target, far))
        ]

        def copy(tokens: tuple[int, int], number: int) -> None:
            if kind == "direct":
                copied(copier, sides, tokens).end()
            else:
                copier.submit(staged(kind, sides[kind == "scatter"], memory, tokens, number * 64)).end()

        slabs = [(first, min(first + size, room[1])) for first in range(*room, size)]
        for number, tokens in enumerate(slabs):
            copy(tokens, number)
        bound, count = list(seen), len(seen)
        for number, tokens in enumerate(slabs):
            copier._copies.clear()
            copy(tokens, number)
        return bound, seen[count:]


def untried_triton() -> tuple[list[str], int, list[int], list[str]]:
    """Copy twice with a version of Triton that was not tested.

    Returns:
        Whether each copy was queued, the launches by the driver, how many values each of Triton's own took, and what was logged.
    """
    kernel, launches = play()
    device_kernel.triton = SimpleNamespace(__version__="99.1.0")
    logged: list[str] = []
    device_kernel._log = SimpleNamespace(warning=lambda text, *values: logged.append(text % values))  # type: ignore[assignment]
    copier, memory = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with opened(shape, seed=1) as pool:
        view = pool_view(on_device(pool), page_ids(shape, tokens, 1, repeats=False), 0, range(1), range(shape.heads))
        copier.prepare_pool(pool, direct=False)
        queued = []
        for kind in ("gather", "scatter"):
            copy = copier.submit(staged(kind, view, memory, tokens))
            queued.append(kind if copy.passed() else "")
            copy.end()
    counts = [len(values) for _, values, _ in kernel.launched]
    assert all(constants.items() >= {"num_warps": 4}.items() for _, _, constants in kernel.launched)
    return queued, len(launches), counts, logged


def compiled_beside(*, fails: bool) -> dict[str, object]:
    """Copy into a pool of another page size, whose kernel's compilation the test delays, and meanwhile into one like ours.

    Returns:
        The queued and held copies before, during and after the compilation, and how often each thread compiled.
    """
    kernel, launches = play()
    compile_at_once, go_on, threads = kernel.warmup, threading.Event(), []

    def compile_slowly(*arguments: object, **constants: object) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        assert go_on.wait(60)
        if fails and len(threads) == 1:
            raise RuntimeError("no compiler")
        return compile_at_once(*arguments, **constants)

    copier, _ = make_copier()
    shapes = [Shape(layers=1), Shape(layers=1), Shape(layers=1, page_size=32)]
    tokens = (0, 32)
    with ExitStack() as stack:
        pools = [on_device(stack.enter_context(opened(shape, seed=1))) for shape in shapes]
        sides = [
            pool_view(pool, page_ids(shape, tokens, 1, repeats=False), 0, range(1), range(shape.heads))
            for pool, shape in zip(pools, shapes, strict=True)
        ]
        copier.prepare_pool(pools[0], direct=True)
        kernel.warmup = compile_slowly  # type: ignore[method-assign]
        found: dict[str, object] = {"first": [copier.submit(one_part(sides[0], sides[2], tokens)) for _ in range(3)]}
        found["held"] = any(pool.busy for pool in pools)
        copier.submit(one_part(sides[0], sides[1], tokens)).end()
        found["meanwhile"] = len(launches)
        go_on.set()
        wait_compiled()
        try:
            copier.submit(one_part(sides[0], sides[2], tokens)).end()
        except LongshoreError as error:
            found["error"] = f"{type(error).__name__} {error}"
            found["held after it"] = any(pool.busy for pool in pools)
            copied(copier, [sides[0], sides[2]], tokens).end()
        return found | {"launches": len(launches), "compiled by the main thread": threads}


def failed_compilation(text: str) -> list[str]:
    """Register a pool twice while compilations fail; return the errors."""
    kernel, _ = play()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    kernel.warmup = fail  # type: ignore[method-assign]
    errors = []
    with opened(Shape(), seed=1) as pool:
        for _ in range(2):
            try:
                copier_module.DeviceCopier(DEVICE, None, None).prepare_pool(on_device(pool), direct=True)
            except LongshoreError as error:
                errors.append(f"{error.reason.name} {error}")
    return errors
