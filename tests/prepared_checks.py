"""What a GPU's worker compiles, and what it holds when a call to the driver fails: its code on a device played in the host's memory.

Runs in a process of its own, as `kernel_checks`: it imports torch, and replaces what would ask a driver.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from page_shapes import Shape, opened, page_ids

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import device_copier as copier_module
from longshore_agent.kernels import device_kernel, device_pages, held_pages
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.direct import device_launch
from longshore_agent.kernels.direct.triton_kernel import constants
from longshore_agent.kernels.gather import device_launch as gather_launch
from longshore_agent.kernels.scatter import device_launch as scatter_launch
from longshore_agent.kernels.view import View, payload_bytes, pool_view
from longshore_agent.memory import cuda
from longshore_agent.memory import pools as pools_module
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError
from longshore_wire.trailer import Trailer

CPU = torch.device("cpu")
DEVICE: Any = SimpleNamespace(index=0, name="GPU-0", enter=lambda: None)


@dataclass
class PlayedKernel:
    """Counts what is compiled, in the place of Triton's kernel."""

    compiled: list[dict[str, object]] = field(default_factory=list)

    def warmup(self, *_: object, **constants: object) -> Any:
        self.compiled.append(constants)
        return SimpleNamespace(function=1, metadata=SimpleNamespace(shared=0), _init_handles=lambda: None)


def _stream(_: torch.device) -> CopyStream:
    stream = CopyStream(CPU)
    stream.context = DEVICE
    return stream


def _played() -> tuple[PlayedKernel, list[tuple[object, ...]]]:
    """Replace driver and device; return what compiles, and the launches."""
    kernel, launches = PlayedKernel(), []
    modules: dict[Any, dict[str, Any]] = {
        device_launch: {"_KERNEL": device_kernel.DeviceKernel(kernel, constants)},
        device_kernel: {"torch": SimpleNamespace(cuda=SimpleNamespace(device=lambda _: nullcontext()))},
        copier_module: {
            "CopyStream": _stream,
            "torch": SimpleNamespace(
                device=lambda *_: CPU,
                zeros=torch.zeros,
                int32=torch.int32,
                cuda=SimpleNamespace(
                    set_device=lambda _: None, current_stream=lambda _: SimpleNamespace(synchronize=lambda: None)
                ),
            ),
        },
        cuda: {
            "copy_to_device": lambda _, target, source, length, stream: ctypes.memmove(target, source, length),
            "launch": lambda *arguments: launches.append(arguments),
            "Event": _PlayedEvent,
            "HostBytes": _PlayedBytes,
        },
    }
    for module, changes in modules.items():
        for name, value in changes.items():
            setattr(module, name, value)
    return kernel, launches


def first_rooms(near: Shape, fars: list[tuple[Shape, int]]) -> tuple[int, int, int]:
    """Register a pool, then copy a room of it into each far pool that takes so many heads.

    Returns:
        Kernels compiled when the pool was registered, kernels compiled by the rooms, and launches.
    """
    kernel, launches = _played()
    copier = copier_module.DeviceCopier(DEVICE, None, None)
    with ExitStack() as stack:
        source = _on_device(stack.enter_context(opened(near, seed=1)))
        copier.prepare_direct(source)
        at_registration = len(kernel.compiled)
        for far, heads in fars:
            target = _on_device(stack.enter_context(opened(far, seed=None)))
            tokens = (0, 3 * near.page_size)
            sides = [
                pool_view(pool, page_ids(shape, tokens, 1, repeats=False), 0, range(shape.layers), range(heads))
                for pool, shape in ((source, near), (target, far))
            ]
            _copied(copier, sides, tokens).end()
        return at_registration, len(kernel.compiled) - at_registration, len(launches)


def first_slabs(shape: Shape, counts: list[int]) -> tuple[int, int, int]:
    """Register a pool, then gather and scatter a slab of so many of its heads each.

    Returns:
        As `first_rooms`.
    """
    _, launches = _played()
    kernel = PlayedKernel()
    for module in (gather_launch, scatter_launch):
        module._KERNEL = device_kernel.DeviceKernel(kernel)
    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    copier._lanes, copier._ring = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2))
    with opened(shape, seed=1) as pool:
        copier.prepare(_on_device(pool))
        at_registration = len(kernel.compiled)
        tokens = (0, shape.page_size)
        pages = (page_ids(shape, tokens, 1, repeats=False), 0)
        for count in counts:
            chosen = (tokens, range(shape.layers), range(count))
            payload = payload_bytes(pool, *chosen)
            copier.gather(pool, pages, *chosen, 0, Trailer(1, 0, 0, 0, 0, 1, 1, 1, payload).seal(b"")).end()
            copier.scatter(pool, pages, *chosen, 0, payload).end()
        return at_registration, len(kernel.compiled) - at_registration, len(launches)


def _copied(copier: Any, sides: list[View], tokens: tuple[int, int]) -> Any:
    """Queue a direct copy, after its kernel was compiled."""
    while (copy := copier.direct((sides[0], sides[1]), tokens)) is None:
        _compiled()
    return copy


def _compiled() -> None:
    """Wait until the thread that compiles has done what it was given."""
    device_kernel._COMPILING._thread.submit(lambda: None).result()


def compiled_beside(*, fails: bool) -> dict[str, object]:
    """Copy into a pool of another page size, whose kernel takes as long as it is told to, and meanwhile into one like ours.

    Returns:
        What was queued and held before, during and after the compilation, and how often which thread compiled.
    """
    kernel, launches = _played()
    compile_at_once, go_on, threads = kernel.warmup, threading.Event(), []

    def compile_slowly(*arguments: object, **constants: object) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        assert go_on.wait(60)
        if fails and len(threads) == 1:
            raise RuntimeError("no compiler")
        return compile_at_once(*arguments, **constants)

    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    shapes = [Shape(layers=1), Shape(layers=1), Shape(layers=1, page_size=32)]
    tokens = (0, 32)
    with ExitStack() as stack:
        pools = [_on_device(stack.enter_context(opened(shape, seed=1))) for shape in shapes]
        sides = [
            pool_view(pool, page_ids(shape, tokens, 1, repeats=False), 0, range(1), range(shape.heads))
            for pool, shape in zip(pools, shapes, strict=True)
        ]
        copier.prepare_direct(pools[0])
        kernel.warmup = compile_slowly  # type: ignore[method-assign]
        found: dict[str, object] = {"first": [copier.direct((sides[0], sides[2]), tokens) for _ in range(3)]}
        found["held"] = any(pool.busy for pool in pools)
        copier.direct((sides[0], sides[1]), tokens).end()
        found["meanwhile"] = len(launches)
        go_on.set()
        _compiled()
        try:
            copier.direct((sides[0], sides[2]), tokens).end()
        except LongshoreError as error:
            found["error"] = f"{type(error).__name__} {error}"
            found["held after it"] = any(pool.busy for pool in pools)
            _copied(copier, [sides[0], sides[2]], tokens).end()
        return found | {"launches": len(launches), "compiled by the main thread": threads}


def failed_compilation(text: str) -> list[str]:
    """Register a pool twice while nothing can be compiled; return the errors."""
    kernel, _ = _played()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    kernel.warmup = fail  # type: ignore[method-assign]
    errors = []
    with opened(Shape(), seed=1) as pool:
        for _ in range(2):
            try:
                copier_module.DeviceCopier(DEVICE, None, None).prepare_direct(_on_device(pool))
            except LongshoreError as error:
                errors.append(f"{error.reason.name} {error}")
    return errors


def hung_device(limit_s: float, which: str) -> str:
    """Wait for a device that never ends the copies of one stream; return the error."""
    copier: Any = object.__new__(copier_module.DeviceCopier)
    copier._device = CPU
    copier._gathers, copier._scatters, copier._directs = (_stream(CPU) for _ in range(3))
    copier.wait(limit_s)
    getattr(copier, which).stream = SimpleNamespace(query=lambda: False)
    try:
        copier.wait(limit_s)
    except LongshoreError as error:
        return f"{type(error).__name__} {error}"
    return ""


def failed_call(call: str, *, direct: bool) -> tuple[str, bool, int, int]:
    """Queue a scatter, or a direct copy, while one of the driver's calls fails, then one while none does.

    Args:
        call: "HostBytes", "Event", "launch", or what takes the device's memory: "memory" page ids, "table" a pool's planes.
    Returns:
        The first one's error, whether a pool was held after it, the launches by then, and the launches by the end.
    """
    _, launches = _played()
    works = {"HostBytes": _PlayedBytes, "Event": _PlayedEvent, "launch": cuda.launch}
    scatter_launch._KERNEL = device_kernel.DeviceKernel(PlayedKernel())
    held_pages.torch = SimpleNamespace(empty=torch.empty, int32=torch.int32, OutOfMemoryError=torch.OutOfMemoryError)
    device_pages.torch = SimpleNamespace(
        tensor=torch.tensor, int64=torch.int64, OutOfMemoryError=torch.OutOfMemoryError
    )
    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    copier._ring = torch.zeros(1 << 20, dtype=torch.uint8)
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with opened(shape, seed=1) as source, opened(shape, seed=None) as target:
        chosen = (tokens, range(1), range(shape.heads))
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, *chosen[1:]) for pool in (source, target)]

        def queue() -> Any:
            if direct:
                return _copied(copier, sides, tokens)
            return copier.scatter(target, (ids, 0), *chosen, 0, payload_bytes(target, *chosen))

        def refuse(*_: object, **__: object) -> None:
            raise DeviceError("the driver refuses") if call in works else torch.OutOfMemoryError("no memory")

        if call == "memory":
            held_pages.torch.empty = refuse
        elif call == "table":
            device_pages.torch.tensor = refuse
        else:
            setattr(cuda, call, refuse)
        try:
            queue()
        except LongshoreError as error:
            text = f"{type(error).__name__} {error}"
        busy, count = source.busy or target.busy, len(launches)
        held_pages.torch.empty, device_pages.torch.tensor = torch.empty, torch.tensor
        for name, value in works.items():
            setattr(cuda, name, value)
        copy = queue()
        assert (source.busy, target.busy) == (direct, True)
        copy.end()
        assert not source.busy
        assert not target.busy
        return text, busy, count, len(launches)


def hung_copy(passed_at_s: list[float], closed_at_s: float, asked_at_s: list[float]) -> list[str]:
    """Queue direct copies at second 100, of which each but the last passes when it is asked, and ask for the last one.

    Args:
        passed_at_s: when those before it are asked.
        closed_at_s: when the target's pool is unregistered.
        asked_at_s: when the last one is asked.
    Returns:
        What is heard each time: empty, or an error.
    """
    _played()
    clock = [100.0]
    copier_module.time = pools_module.time = SimpleNamespace(monotonic=lambda: clock[0])  # type: ignore[assignment]
    copier = copier_module.DeviceCopier(DEVICE, None, None)
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with opened(shape, seed=1) as source, opened(shape, seed=None) as target:
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in (source, target)]
        copies: list[Any] = [_copied(copier, sides, tokens) for _ in (*passed_at_s, None)]
        copies[-1]._mark.passes = False
        heard = []
        for copy, second in [*zip(copies, passed_at_s, strict=False), *((copies[-1], each) for each in asked_at_s)]:
            if second >= closed_at_s and target.closed_s is None:
                clock[0] = closed_at_s
                target.close()
            clock[0] = second
            try:
                heard.append("" if copy.passed() is (copy is not copies[-1]) else "wrong")
            except LongshoreError as error:
                heard.append(f"{type(error).__name__} {error}")
        for copy in copies:
            copy.end()
    copier_module.time = pools_module.time = time
    return heard


def unmarked_copy(kind: str) -> dict[str, object]:
    """Queue a gather, scatter or direct copy whose event the driver refuses to record once its kernel is launched.

    Returns:
        How many launches there were, whether pools were held and the copy was over while the device worked, whether they were
        unmapped then, the error of a device that fails meanwhile, and all of it after the device has done its work.
    """
    _, launches = _played()
    gather_launch._KERNEL = scatter_launch._KERNEL = device_kernel.DeviceKernel(PlayedKernel())
    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    copier._lanes, copier._ring = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2))
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    chosen = (tokens, range(1), range(shape.heads))
    ids = page_ids(shape, tokens, 1, repeats=False)

    cuda.Event = _RefusingEvent  # type: ignore[assignment, misc]
    with opened(shape, seed=1) as near, opened(shape, seed=None) as far:
        if kind == "direct":
            sides = [pool_view(pool, ids, 0, *chosen[1:]) for pool in (near, far)]
            held, stream, copy = (near, far), copier._directs, _copied(copier, sides, tokens)
        elif kind == "gather":
            trailer = Trailer(1, 0, 0, 0, 0, 1, 1, 1, payload_bytes(near, *chosen)).seal(b"")
            held, stream = (near,), copier._gathers
            copy = copier.gather(near, (ids, 0), *chosen, 0, trailer)
        else:
            held, stream = (far,), copier._scatters
            copy = copier.scatter(far, (ids, 0), *chosen, 0, payload_bytes(far, *chosen))
        found: dict[str, object] = {"launches": len(launches)}
        device = stream.stream = SimpleNamespace(query=lambda: False)
        found |= {"held": [pool.busy for pool in held], "passed": copy.passed()}
        found["unmapped"] = [pool.close() for pool in held]

        def fail() -> None:
            raise RuntimeError("an illegal address")

        device.query = fail
        try:
            copy.passed()
        except LongshoreError as error:
            found["error"] = f"{type(error).__name__} {error}"
        device.query = lambda: True
        found["passed later"] = copy.passed()
        copy.end()
        found["unmapped later"] = [pool.wait_closed(0) for pool in held]
        return found


def arguments_of_launches(near: Shape, far: Shape, heads: int) -> tuple[list[object], list[object]]:
    """Copy a room's slabs by launches that are bound to their shapes, and by such as are made for each slab.

    Returns:
        For each of the first, and for each of the second: grid, threads, shared memory and all arguments, as the driver reads them.
    """
    _played()
    seen: list[object] = []

    def launch(
        _: object, function: int, programs: object, threads: int, shared: int, stream: int, arguments: Any
    ) -> None:
        words = [ctypes.c_uint64.from_address(pointer).value for pointer in arguments.pointers]
        seen.append((function, programs, threads, shared, stream, words))

    cuda.launch = launch
    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    size = max(near.page_size, far.page_size)
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        # Within a page, where pages can be split.
        first = size if near.blob_bytes else size // 2
        room = (first, first + 4 * size - size // 2 * (not near.blob_bytes))
        sides = [
            pool_view(pool, page_ids(shape, room, 1, repeats=False), room[0] // shape.page_size, range(1), range(heads))
            for pool, shape in ((source, near), (target, far))
        ]
        slabs = [(first, min(first + size, room[1])) for first in range(*room, size)]
        for tokens in slabs:
            _copied(copier, sides, tokens).end()
        bound, count = list(seen), len(seen)
        pages = [copier._known(side.pool).pages for side in sides]
        lists = [copier.hold_direct(side.pool, (side.pages, side.first_page), to_write=False) for side in sides]
        for tokens in slabs:
            device_launch.plan_copy(
                (sides[0], sides[1]), (pages[0], pages[1]), (lists[0], lists[1]), tokens, copier._directs
            ).queue()
        return bound, seen[count:]


def closed_pools(near_closes: bool) -> tuple[str, bool, int]:
    """Queue a direct copy of which one pool is unmapped, return its error, whether the other is held after it, and launches.

    Then let go of what was made for that pool, by copying between others.
    """
    _, launches = _played()
    copier: Any = copier_module.DeviceCopier(DEVICE, None, None)
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with ExitStack() as stack:
        pools = [_on_device(stack.enter_context(opened(shape, seed=1))) for _ in range(4)]
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in pools]
        _copied(copier, sides, tokens).end()
        _copied(copier, [sides[0], sides[2]], tokens).end()
        leaving = 0 if near_closes else 1
        assert pools[leaving].close()
        try:
            copier.direct((sides[0], sides[1]), tokens)
        except LongshoreError as error:
            text = f"{type(error).__name__} {error}"
        busy, count = any(pool.busy for pool in pools), len(launches)
        _copied(copier, sides[2:], tokens).end()
        known = copier._pools
        assert pools[leaving] not in known
        assert all(pools[leaving] not in each.copies for each in known.values())
        assert pools[2] in known
        return text, busy, count


class _PlayedBytes:
    def __init__(self, *_: object) -> None:
        pass

    def fill(self, *_: object) -> None:
        pass


class _PlayedEvent:
    passes = True

    def __init__(self, *_: object) -> None:
        pass

    def passed(self) -> bool:
        return self.passes

    def record(self, *_: object) -> None:
        pass


class _RefusingEvent(_PlayedEvent):
    def record(self, *_: object) -> None:
        raise DeviceError("the driver refuses")


def _on_device(pool: KVPool) -> KVPool:
    pool.device = DEVICE
    return pool
