"""The direct copy on a device against its reference, bit for bit: on GPUs, or in Triton's interpreter on a CPU.

As `kernel_checks`, which it follows: it runs in a process that has set TRITON_INTERPRET or not before it is imported.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from kernel_checks import fenced, on_device, settle
from page_shapes import Shape, contents, opened, page_ids

from longshore_agent.kernels import reference
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.direct import device_launch
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.view import pool_view
from longshore_wire.errors import LongshoreError

# Tokens; then layers and first head of the source, and of the target; then how many heads.
Request = tuple[tuple[int, int], range, int, range, int, int]


def check_direct(
    near: Shape, far: Shape, requests: list[Request], devices: tuple[str, str], tuning: Tuning | None = None
) -> int:
    """Copy each request and compare all of both sides, guards included; return the copied bytes.

    Args:
        devices: of the source, where the kernel runs, and of the target.
    """
    home, other = (torch.device(name) for name in devices)
    total = 0
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        source_pages, source_regions = on_device(source, home)
        target_pages, target_regions = _reached(target, home, other)
        stream = CopyStream(home)
        for seed, (tokens, near_layers, near_head, far_layers, far_head, heads) in enumerate(requests):
            first = [tokens[0] // shape.page_size for shape in (near, far)]
            ids = [
                page_ids(near, tokens, seed, repeats=True),
                page_ids(far, tokens, seed + 1, repeats=False),
            ]
            sides = (
                pool_view(source, ids[0], first[0], near_layers, range(near_head, near_head + heads)),
                pool_view(target, ids[1], first[1], far_layers, range(far_head, far_head + heads)),
            )
            lists = tuple(HeldPages(side.own_pool, side.pages, home, side.first_page) for side in sides)
            settle(home)
            planned = device_launch.plan_copy(
                sides, (source_pages, target_pages), (lists[0], lists[1]), tokens, stream, tuning or Tuning()
            )
            planned.queue()
            # Only what the launch itself promises: the bytes are there once its stream has passed it.
            stream.synchronize()
            found = [region.cpu().numpy() for region in target_regions]
            assert reference.copy(*sides, tokens) == planned.copied_bytes
            for region, expected in zip(found, contents(target), strict=True):
                assert np.array_equal(region, expected), (tokens, near_layers, far_layers, ids)
            total += planned.copied_bytes
        for region, before in zip(source_regions, contents(source), strict=True):
            assert np.array_equal(region.cpu().numpy(), before), "the copy wrote to the source"
    return total


def check_bound(near: Shape, far: Shape, heads: int, devices: tuple[str, str]) -> tuple[int, int]:
    """Copy rooms slab by slab with launches bound to their shapes, and compare all of the target.

    Args:
        devices: as of `check_direct`.
    Returns:
        How many launches were bound, and how many slabs were copied.
    """
    home, other = (torch.device(name) for name in devices)
    size = max(near.page_size, far.page_size)
    slab_tokens, slabs = 3 * size // 2, 0
    # Slabs of two shapes and a last one in each room; the second room begins many pages later, the third within a page.
    whole = 2 * size if size > 100 else 4 * size
    rooms = [(0, whole), (64 * near.page_size * far.page_size, whole), (size + size // 3, 2 * size)]
    bound: dict[tuple[int, ...], device_launch.BoundCopy] = {}
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        source_pages, _ = on_device(source, home)
        target_pages, target_regions = _reached(target, home, other)
        stream = CopyStream(home)
        for seed, (first, count) in enumerate(rooms):
            tokens = (first, first + count)
            # The source's list begins with pages that are not wanted, as where the target holds a prefix.
            begin = max(first - near.page_size, 0)
            sides = (
                pool_view(
                    source,
                    page_ids(near, (begin, first + count), seed, repeats=True),
                    begin // near.page_size,
                    range(near.layers),
                    range(near.heads - heads, near.heads),
                ),
                pool_view(
                    target,
                    page_ids(far, tokens, seed + 1, repeats=False),
                    first // far.page_size,
                    range(near.layers),
                    range(heads),
                ),
            )
            lists = tuple(HeldPages(side.own_pool, side.pages, home, side.first_page) for side in sides)
            settle(home)
            for slab in range(first, first + count, slab_tokens):
                tokens = (slab, min(slab + slab_tokens, first + count))
                key = device_launch.shape_of(sides, tokens)
                if key not in bound:
                    pages = (source_pages, target_pages)
                    planned = device_launch.plan_copy(sides, pages, (lists[0], lists[1]), tokens, stream)
                    bound[key] = device_launch.BoundCopy(planned)
                bound[key].queue((lists[0], lists[1]), tokens)
                slabs += 1
                reference.copy(*sides, tokens)
            stream.synchronize()
            for region, expected in zip(target_regions, contents(target), strict=True):
                assert np.array_equal(region.cpu().numpy(), expected), (near, far, first, count)
    return len(bound), slabs


def bound_refusals() -> list[str]:
    """Queue a bound copy where a token lies in no page, and where a target page stands twice; return the errors."""
    cpu = torch.device("cpu")
    found = []
    with opened(Shape(), seed=1) as source, opened(Shape(), seed=None) as target:
        (near, _), (far, regions) = on_device(source, cpu), on_device(target, cpu)
        ids = np.array([2, 1], dtype=np.int32)
        sides = (pool_view(source, ids, 0, range(3), range(4)), pool_view(target, ids, 0, range(3), range(4)))
        lists = (HeldPages(source, ids, cpu), HeldPages(target, ids, cpu))
        twice = HeldPages(target, np.array([3, 3], dtype=np.int32), cpu)
        copy = device_launch.BoundCopy(device_launch.plan_copy(sides, (near, far), lists, (0, 16), CopyStream(cpu)))
        for far_list, tokens in ((lists[1], (32, 48)), (twice, (0, 16))):
            try:
                copy.queue((lists[0], far_list), tokens)
            except LongshoreError as error:
                found.append(f"{type(error).__name__} {error.reason.name}")
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(regions, contents(target), strict=True))
    return found


def check_fences(near: Shape, far: Shape, tokens: tuple[int, int], *, at_end: bool) -> int:
    """Copy with every region beside a forbidden page, on a CPU; return the copied bytes."""
    cpu = torch.device("cpu")
    near, far = replace(near, guard_bytes=0), replace(far, guard_bytes=0)
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        kept, tables, regions = [], [], []
        for pool in (source, target):
            mappings, own = zip(*(fenced(n, at_end=at_end) for n in pool.geometry.region_bytes), strict=True)
            for index, region in enumerate(own):
                region.copy_(torch.from_numpy(pool.region(index).copy()))
            kept.append(mappings)
            tables.append(DevicePages(pool, [region.data_ptr() for region in own], cpu))
            regions.append(own)
        ids = [page_ids(shape, tokens, 1, repeats=False) for shape in (near, far)]
        sides = (
            pool_view(source, ids[0], 0, range(near.layers), range(near.heads)),
            pool_view(target, ids[1], 0, range(far.layers), range(far.heads)),
        )
        lists = tuple(HeldPages(side.own_pool, side.pages, cpu) for side in sides)
        planned = device_launch.plan_copy(sides, (tables[0], tables[1]), (lists[0], lists[1]), tokens, CopyStream(cpu))
        planned.queue()
        reference.copy(*sides, tokens)
        for region, after in zip(regions[1], contents(target), strict=True):
            assert np.array_equal(region.numpy(), after)
        assert all(kept)
    return planned.copied_bytes


def refusal(fault: str) -> tuple[str, str, bool]:
    """Copy with one fault; return the error's kind, what it says, and whether any byte of the target has changed."""
    cpu = torch.device("cpu")
    with opened(Shape(), seed=1) as source, opened(Shape(head_dim=32 if "model" in fault else 64), seed=None) as target:
        near, _ = on_device(source, cpu)
        far, regions = on_device(target, cpu)
        ids = np.array([2, 1], dtype=np.int32)
        far_ids = np.array([3, 3], dtype=np.int32) if "twice" in fault else ids
        if "range" in fault:
            far_ids = np.array([3, 12], dtype=np.int32)
        heads = range(3) if "heads" in fault else range(4)
        layers = range(1, 4) if "layers" in fault else range(3)
        tokens = (0, 33) if "pages" in fault else (0, 32)
        stream = CopyStream(torch.device("meta")) if "stream" in fault else CopyStream(cpu)
        try:
            sides = (pool_view(source, ids, 0, range(3), range(4)), pool_view(target, far_ids, 0, layers, heads))
            lists = tuple(HeldPages(side.own_pool, side.pages, cpu) for side in sides)
            device_launch.plan_copy(sides, (near, far), (lists[0], lists[1]), tokens, stream).queue()
            kind, message = "", ""
        except LongshoreError as error:
            kind, message = f"{type(error).__name__} {error.reason.name}", str(error)
        same = all(np.array_equal(a.numpy(), b) for a, b in zip(regions, contents(target), strict=True))
        return kind, message, not same


def _reached(pool: object, home: torch.device, other: torch.device) -> tuple[DevicePages, list[torch.Tensor]]:
    """The target's regions on its device, and their table on the source's, which reaches them."""
    pages, regions = on_device(pool, other)
    if home == other:
        return pages, regions
    # A copy to the other device lets kernels of the first one reach its memory.
    torch.empty(1, device=other).copy_(torch.empty(1, device=home))
    settle(home)
    settle(other)
    return DevicePages(pages.pool, [region.data_ptr() for region in regions], home), regions
