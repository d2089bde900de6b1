"""Damages what an agent's workers copy on a GPU, once for each time that a test asks for it.

Python imports this module in each process of an agent that has this folder in PYTHONPATH. The file `PLANT_FILE` has the
name of the damage. Only copies with digests are damaged.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE = "PLANT_FILE"
# Of a row of one head.
ROW_BYTES = 256
# Any byte of the first row.
BYTE = 5

Change = Callable[[bytes], bytes]


def flipped(data: bytes) -> bytes:
    """Change one bit."""
    return bytes([data[0] ^ 4])


def swapped(data: bytes) -> bytes:
    """Exchange the halves."""
    return data[len(data) // 2 :] + data[: len(data) // 2]


def stale(data: bytes) -> bytes:
    """Replace all by the bytes of another slab."""
    return bytes(byte ^ 0x55 for byte in data)


def change_memory(address: int, length_bytes: int, change: Change) -> None:
    """Change memory that the GPU can read, after all that the GPU was told to do so far."""
    import torch

    torch.cuda.synchronize()
    driver, held = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(length_bytes)
    place, size = ctypes.c_uint64(address), ctypes.c_size_t(length_bytes)
    assert driver.cuMemcpyDtoH_v2(held, place, size) == 0
    held.raw = change(held.raw)
    assert driver.cuMemcpyHtoD_v2(place, held, size) == 0
    torch.cuda.synchronize()


def place_of(side: Any) -> int:
    """Return the address of a byte in the first row of a side that begins with token 0."""
    from longshore_agent.kernels.copier import Slab

    if isinstance(side, Slab):
        return int(side.memory.address) + int(side.offset_bytes) + BYTE
    view = side[0].view
    group = view.planes[0]
    head = int(group.addresses[0]) + view.heads.start * group.head_stride
    return head + int(view.pages[0]) * int(group.page_stride) + BYTE


def changes(name: str, copy: Any) -> tuple[Callable[[], None] | None, Callable[[], None] | None]:
    """Return what to do between the source's digests and a copy, and what between it and the target's digests."""
    from longshore_agent.kernels.copier import Slab

    scatters, gathers = isinstance(copy.source, Slab), isinstance(copy.target, Slab)
    before, after = {
        "a bit in prefill's pages": (not scatters, False),
        "a bit in the lane": (False, gathers),
        "a bit in the ring": (scatters, False),
        "a bit in decode's pages": (False, not gathers),
        "swapped heads": (scatters, False),
        "a stale slab": (scatters, False),
    }.get(name, (False, False))
    change: Change = flipped
    begin, length_bytes = place_of(copy.source if before else copy.target), 1
    if name == "swapped heads":
        begin, length_bytes, change = begin - BYTE, 2 * ROW_BYTES, swapped
    elif name == "a stale slab" and scatters:
        begin, length_bytes, change = begin - BYTE, copy.source.payload_bytes, stale
    act = functools.partial(change_memory, begin, length_bytes, change)
    return (act if before else None), (act if after else None)


def plant(file: Path) -> None:
    """Replace methods of the copier on a GPU."""
    import msgspec
    import numpy as np

    from longshore_agent.kernels.device_copier import DeviceCopier
    from longshore_agent.kernels.device_digest import CopyDigests

    submit, calls, hold = DeviceCopier.submit, CopyDigests.calls, DeviceCopier._hold
    now: list[Any] = []

    def named() -> str:
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def submit_and_remember(self: DeviceCopier, copy: Any) -> Any:
        now[:] = [copy]
        return submit(self, copy)

    def calls_damaged(self: CopyDigests, copies: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        if not copies or not named():
            return calls(self, copies)
        before, after = changes(named(), now[0])
        return calls(self, [step for step in (before, *copies, after) if step is not None])

    def hold_shifted(self: DeviceCopier, view: Any, stream: Any, *purpose: Any, to_write: bool) -> Any:
        wrong = "a wrong page that is written" if to_write else "a wrong page that is read"
        if named() == wrong and not purpose:
            view = msgspec.structs.replace(view, pages=np.roll(view.pages, -1))
        return hold(self, view, stream, *purpose, to_write=to_write)

    DeviceCopier.submit, CopyDigests.calls, DeviceCopier._hold = submit_and_remember, calls_damaged, hold_shifted


if FILE in os.environ and "longshore_agent.worker.main" in sys.orig_argv:
    try:
        plant(Path(os.environ[FILE]))
    except Exception:  # noqa: BLE001 - whatever it is, the worker must not run undamaged
        # Python goes on without a module that it cannot import, and then nothing would be damaged.
        traceback.print_exc()
        os._exit(70)
