"""Checks a GPU worker's resources after a failed driver call or an endless copy.

Runs in a separate process, see `played_device`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from page_shapes import Shape, one_part, opened, page_ids
from played_device import (
    CPU,
    PlayedBytes,
    PlayedEvent,
    RefusingEvent,
    copied,
    make_copier,
    on_device,
    play,
    staged,
    stream_of,
)

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import device_copier as copier_module
from longshore_agent.kernels import device_launch
from longshore_agent.kernels.copier import Slab, pool_view
from longshore_agent.memory import cuda
from longshore_agent.memory import pools as pools_module
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_wire.errors import LongshoreError


def hung_device(limit_s: float, which: str) -> str:
    """Wait for a device that never ends the copies of one stream; return the error."""
    copier: Any = object.__new__(copier_module.DeviceCopier)
    copier._device = CPU
    copier._gathers, copier._scatters, copier._directs = (stream_of(CPU) for _ in range(3))
    copier.wait(limit_s)
    getattr(copier, which).stream = SimpleNamespace(query=lambda: False)
    try:
        copier.wait(limit_s)
    except LongshoreError as error:
        return f"{type(error).__name__} {error}"
    return ""


def failed_call(call: str, *, direct: bool) -> tuple[str, bool, int, int, int]:
    """Queue a scatter, or a direct copy, while one of the driver's calls fails, then one while none does.

    Args:
        call: "HostBytes", "Event", "launch", or an allocation on the device: "memory" for page ids, "table" for a pool's
        planes.
    Returns:
        The first copy's error; the state after it: whether a pool was held, the launches, and the events kept for reuse;
        and the launches at the end.
    """
    _, launches = play()
    works = {"HostBytes": PlayedBytes, "Event": PlayedEvent, "launch": cuda.launch}
    device_launch.torch = SimpleNamespace(
        empty=torch.empty,
        tensor=torch.tensor,
        int32=torch.int32,
        int64=torch.int64,
        OutOfMemoryError=torch.OutOfMemoryError,
    )
    copier, memory = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with opened(shape, seed=1) as source, opened(shape, seed=None) as target:
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in (source, target)]

        def queue() -> Any:
            if direct:
                return copied(copier, sides, tokens)
            return copier.submit(staged("scatter", sides[1], memory, tokens))

        def refuse(*_: object, **__: object) -> None:
            raise DeviceError("the driver refuses") if call in works else torch.OutOfMemoryError("no memory")

        if call == "memory":
            device_launch.torch.empty = refuse
        elif call == "table":
            device_launch.torch.tensor = refuse
        else:
            setattr(cuda, call, refuse)
        try:
            queue()
        except LongshoreError as error:
            text = f"{type(error).__name__} {error}"
        busy, count, events = source.busy or target.busy, len(launches), len(copier._events)
        device_launch.torch.empty, device_launch.torch.tensor = torch.empty, torch.tensor
        for name, value in works.items():
            setattr(cuda, name, value)
        copy = queue()
        assert (source.busy, target.busy) == (direct, True)
        copy.end()
        assert not source.busy
        assert not target.busy
        return text, busy, count, events, len(launches)


def hung_copy(passed_at_s: list[float], closed_at_s: tuple[float, float], asked_at_s: list[float]) -> list[str]:
    """Queue direct copies at second 100, of which each but the last passes when it is asked, and ask for the last one.

    Args:
        passed_at_s: when those before it are asked.
        closed_at_s: when the source's pool and the target's are unregistered.
        asked_at_s: when the last one is asked.
    Returns:
        What is heard each time: empty, or an error.
    """
    play()
    clock = [100.0]
    copier_module.time = pools_module.time = SimpleNamespace(monotonic=lambda: clock[0])  # type: ignore[assignment]
    copier, _ = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with opened(shape, seed=1) as source, opened(shape, seed=None) as target:
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in (source, target)]
        copies: list[Any] = [copied(copier, sides, tokens) for _ in (*passed_at_s, None)]
        copies[-1]._mark.passes = False
        heard = []
        for copy, second in [*zip(copies, passed_at_s, strict=False), *((copies[-1], each) for each in asked_at_s)]:
            for pool, closed_s in zip((source, target), closed_at_s, strict=True):
                if second >= closed_s and pool.closed_s is None:
                    clock[0] = closed_s
                    pool.close()
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
    """Queue a gather, scatter or direct copy whose event the driver refuses to record after the launch of its kernel.

    Returns:
        The number of launches, whether pools were held and the copy was complete while the device worked, whether they were
        unmapped then, the error of a device that fails meanwhile, and the same after the device's work.
    """
    _, launches = play()
    copier, memory = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    ids = page_ids(shape, tokens, 1, repeats=False)

    cuda.Event = RefusingEvent  # type: ignore[assignment, misc]
    with opened(shape, seed=1) as near, opened(shape, seed=None) as far:
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in (near, far)]
        if kind == "direct":
            held, stream, copy = (near, far), copier._directs, copied(copier, sides, tokens)
        else:
            stream = copier._gathers if kind == "gather" else copier._scatters
            view = sides[kind == "scatter"]
            held, copy = (view.own_pool,), copier.submit(staged(kind, view, memory, tokens))
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


def trailers(kind: str) -> list[object]:
    """Scatter a slab with a right trailer, one with a wrong trailer, and one whose trailer is not read.

    Args:
        kind: the slab's memory: "whole", or "short": without space for the trailer.
    Returns:
        Each copy's result, or the error.
    """
    _, launches = play()
    copier, _ = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    heard: list[object] = []
    with opened(shape, seed=1) as pool:
        view = pool_view(pool, page_ids(shape, tokens, 1, repeats=False), 0, range(1), range(shape.heads))
        payload_bytes = view.payload_bytes(tokens)
        memory = StagingBuffer(payload_bytes + (64 if kind == "whole" else 63))
        slab = Slab(memory, 0, payload_bytes)
        for accepts in (PlayedBytes.found.__eq__, b"another".__eq__, None):
            try:
                copy = copier.submit(one_part(slab, view, tokens, accepts=accepts))
                assert pool.busy
                assert copy.passed()
                heard.append(copy.end())
            except LongshoreError as error:
                heard.append(f"{type(error).__name__} {error}")
            assert not pool.busy
    return [*heard, len(launches)]


def closed_pools(near_closes: bool) -> tuple[str, bool, int]:
    """Queue a direct copy with one unmapped pool; return its error, whether the other pool is held, and the launches.

    Then release the objects made for that pool, by copying between others.
    """
    _, launches = play()
    copier, _ = make_copier()
    shape = Shape(layers=1)
    tokens = (0, shape.page_size)
    with ExitStack() as stack:
        pools = [on_device(stack.enter_context(opened(shape, seed=1))) for _ in range(4)]
        ids = page_ids(shape, tokens, 1, repeats=False)
        sides = [pool_view(pool, ids, 0, range(1), range(shape.heads)) for pool in pools]
        copied(copier, sides, tokens).end()
        copied(copier, [sides[0], sides[2]], tokens).end()
        leaving = 0 if near_closes else 1
        assert pools[leaving].close()
        try:
            copier.submit(one_part(sides[0], sides[1], tokens))
        except LongshoreError as error:
            text = f"{type(error).__name__} {error}"
        busy, count = any(pool.busy for pool in pools), len(launches)
        copied(copier, sides[2:], tokens).end()
        assert (pools[leaving], 0) not in copier._tables
        assert not any(pools[leaving] in pair for pair in copier._copies)
        assert (pools[2], 0) in copier._tables
        return text, busy, count
