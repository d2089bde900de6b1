"""Makes the memory that an engine shares with its agent, and describes the pages in it.

Called by engines before `Client.register_pool`, and by that for duplicates of descriptors. Imports no tensor library: it uses only methods of a tensor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import msgspec

from longshore_client import arguments
from longshore_client.errors import ArgumentError
from longshore_wire.layout import PAGE_COUNT_MAX, KVLayout, PageOrder, PlaneGeometry, PoolGeometry

# The largest offset that a message can hold.
LENGTH_BYTES_MAX = 2**63 - 1
# No process can shrink the memory or add seals. An agent also maps it into workers of other engines of its node, which
# would die if they accessed truncated memory.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAP_FIXED = 0x10


class SharedStorage(Protocol):
    """The part of `torch.UntypedStorage` that is used here."""

    def nbytes(self) -> int:
        """Return the size in bytes."""

    def data_ptr(self) -> int:
        """Return the address of the first byte."""

    def is_shared(self) -> bool:
        """Return whether the bytes are in shared memory already."""

    def _share_fd_cpu_(self) -> tuple[int, int]:
        """Move the bytes to shared memory in place; return (file descriptor, size in bytes)."""


class CPUTensor(Protocol):
    """The part of `torch.Tensor` that is used here."""

    def untyped_storage(self) -> SharedStorage:
        """Return the storage that this tensor and all its views share."""

    def storage_offset(self) -> int:
        """Return this tensor's first element in the storage, in elements."""

    def element_size(self) -> int:
        """Return the size of an element in bytes."""


def create_region(length_bytes: int, name: str = "longshore-pages") -> tuple[int, mmap.mmap]:
    """Make zeroed anonymous shared memory; return (file descriptor, its mapping in this process).

    All pages are allocated at once, so they count as this process's memory, not as that of the agent that writes first.
    It cannot be shrunk. It exists while any process has a descriptor or a mapping of it; no file is left behind. The
    caller closes both. `name` appears only in /proc.

    Raises:
        ArgumentError: an argument is of another type or out of range, or there is not enough memory.
    """
    length_bytes = arguments.whole_number("length_bytes", length_bytes, 1, LENGTH_BYTES_MAX)
    descriptor, mapping = -1, None
    try:
        descriptor = _sealed_memory(length_bytes, arguments.text("name", name))
        mapping = mmap.mmap(descriptor, length_bytes)
        # After the mapping, which fails at once where so much could never be.
        os.posix_fallocate(descriptor, 0, length_bytes)
    except OSError as error:
        if mapping is not None:
            mapping.close()
        if descriptor >= 0:
            os.close(descriptor)
        raise ArgumentError(
            f"length_bytes is {length_bytes} and name is {name[: arguments.SHOWN_MAX]!r}: {error}"
        ) from error
    return descriptor, mapping


def torch_region(tensor: CPUTensor) -> tuple[int, int, int]:
    """Move a torch CPU tensor's storage to shared memory in place; return (descriptor, offset, length) in bytes.

    The tensor and all its views keep working and see the same bytes; raw pointers taken before do not. The call copies
    the storage twice, or never if it is already shared. The new memory cannot be shrunk. A storage that was already
    shared can; between engines of one agent its bytes then go through staging. `offset` is the place of this tensor's
    first element in the region, `length` the size of the whole region (for `PoolGeometry.region_bytes`). The caller
    closes the descriptor; the tensor keeps its own. Call it once for each storage, before the engine hands out
    pointers.

    Raises:
        ArgumentError: the argument is not a tensor in CPU memory, or there is not enough memory.
    """
    device = getattr(getattr(tensor, "device", None), "type", None)
    if device != "cpu":
        raise ArgumentError(f"tensor is on {device or type(tensor).__name__}: give a torch tensor on the CPU")
    storage = tensor.untyped_storage()
    was_shared = storage.is_shared()
    descriptor, length_bytes = storage._share_fd_cpu_()
    try:
        if was_shared:
            # Others than its owner must not be charged for pages that nobody has written yet.
            os.posix_fallocate(descriptor, 0, length_bytes)
        else:
            _seal(storage.data_ptr(), descriptor, length_bytes)
    except OSError as error:
        raise ArgumentError(f"tensor: its {length_bytes} bytes cannot be kept in shared memory: {error}") from error
    return os.dup(descriptor), tensor.storage_offset() * tensor.element_size(), length_bytes


def _sealed_memory(length_bytes: int, name: str) -> int:
    """Return a descriptor of zeroed memory that keeps its size, none of it allocated yet. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, length_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _seal(address: int, descriptor: int, length_bytes: int) -> None:
    """Replace the file behind a whole mapping, and behind its descriptor, with memory that keeps its size.

    torch shares by a file of /dev/shm, which cannot be sealed. No thread may write the mapping during the call. Raises
    OSError.
    """
    # torch has imported it; engines with other memory need it not.
    import ctypes

    fresh = _sealed_memory(length_bytes, "longshore-pages")
    try:
        copied_bytes = 0
        while copied_bytes < length_bytes:
            copied_bytes += os.sendfile(fresh, descriptor, copied_bytes, length_bytes - copied_bytes)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fresh, 0) != address:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {length_bytes} bytes: {os.strerror(number)}")
        # torch identifies the memory by this number, and passes it to processes with which it shares the tensor.
        os.dup2(fresh, descriptor, inheritable=False)
    finally:
        os.close(fresh)


def duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """Return a duplicate of each region's descriptor, which the caller closes. Raises ArgumentError if one is not open."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    except OSError as error:
        close_all(made)
        raise ArgumentError(f"regions[{len(made)}] is {descriptor}, which is not open: {error}") from error
    return tuple(made)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def pool_geometry(
    layout: KVLayout,
    page_count: int,
    *,
    offset: int = 0,
    order: PageOrder | None = None,
    region_bytes: int | None = None,
) -> PoolGeometry:
    """Return the geometry of the plain layout [plane][page][one page in `order`] without gaps, in one region.

    Planes are K of each local layer, then V of each local layer; for MLA, and for PageOrder.OPAQUE (a blob holds
    K and V), one plane a layer.

    Args:
        page_count: pages of a plane; at least 1.
        offset: beginning of plane 0 in the region, in bytes.
        order: None: the layout's order.
        region_bytes: size of the whole region; None: it ends with the last plane.
    Raises:
        LayoutError: the layout cannot exist.
        ArgumentError: another argument is out of range, or the region is too small.
    """
    layout = arguments.struct("layout", layout, KVLayout)
    layout.check()
    page_count = arguments.whole_number("page_count", page_count, 1, PAGE_COUNT_MAX)
    offset = arguments.whole_number("offset", offset, 0, LENGTH_BYTES_MAX)
    if region_bytes is not None:
        region_bytes = arguments.whole_number("region_bytes", region_bytes, 1, LENGTH_BYTES_MAX)
    if order is not None and not isinstance(order, PageOrder):
        raise ArgumentError(f"order is {order!r}: give a PageOrder, or None for the layout's own")
    order = layout.order if order is None else order
    planes, end = [], offset
    ordered = msgspec.structs.replace(layout, order=order)
    for section in ordered.sections:
        heads, rows, row_bytes = len(layout.heads_of(section.heads)), ordered.page_rows(section), section.row_bytes
        token_stride, head_stride = heads * row_bytes, row_bytes
        if order is PageOrder.HND:
            token_stride, head_stride = row_bytes, rows * row_bytes
        elif order is PageOrder.OPAQUE:
            token_stride = 0
        for _ in range(section.kinds * len(layout.layers)):
            planes.append(PlaneGeometry(0, end, rows * heads * row_bytes, token_stride, head_stride))
            end += page_count * rows * heads * row_bytes
    if end > LENGTH_BYTES_MAX:
        raise ArgumentError(f"page_count is {page_count}: {len(planes)} planes of so many pages end at byte {end}")
    if region_bytes is not None and region_bytes < end:
        raise ArgumentError(f"region_bytes is {region_bytes}: {len(planes)} planes of {page_count} pages end at {end}")
    return PoolGeometry(
        page_count=page_count,
        region_bytes=(end if region_bytes is None else region_bytes,),
        planes=tuple(planes),
    )
