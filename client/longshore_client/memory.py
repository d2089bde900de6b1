"""Memory that an engine shares with its agent: file descriptors, and where the pages lie in them.

Called by engines before `Client.register_pool`. Imports no tensor library: a tensor is used by its methods only.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from longshore_client.errors import ArgumentError
from longshore_wire.layout import KVLayout, PageOrder, PlaneGeometry, PoolGeometry


class SharedStorage(Protocol):
    """The part of `torch.UntypedStorage` that is used here."""

    def nbytes(self) -> int:
        """Return the size in bytes."""

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
    """Make anonymous shared memory of zeros; return (file descriptor, its mapping here).

    The memory lives while a descriptor or a mapping of it does, in any process; no file is left behind.
    The caller closes both. `name` only shows up in /proc.

    Raises:
        ArgumentError: `length_bytes` is not positive.
    """
    if length_bytes < 1:
        raise ArgumentError(f"length_bytes is {length_bytes}: give a positive number of bytes")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, length_bytes)
        return descriptor, mmap.mmap(descriptor, length_bytes)
    except OSError:
        os.close(descriptor)
        raise


def torch_region(tensor: CPUTensor) -> tuple[int, int, int]:
    """Move a torch CPU tensor's storage to shared memory in place; return (descriptor, offset, length) in bytes.

    The tensor and all its views keep working and see the same bytes; raw pointers taken before do not. It costs
    one copy of the storage, none if the storage is shared already. `offset` is where this tensor's first element
    lies in the region, `length` the size of the whole region (for `PoolGeometry.region_bytes`). The caller closes
    the descriptor; the tensor keeps its own. Call it before the engine hands out pointers, once a storage.

    Raises:
        ArgumentError: this is no tensor in CPU memory.
    """
    device = getattr(getattr(tensor, "device", None), "type", None)
    if device != "cpu":
        raise ArgumentError(f"tensor is on {device or type(tensor).__name__}: give a torch tensor on the CPU")
    storage = tensor.untyped_storage()
    descriptor, length_bytes = storage._share_fd_cpu_()
    return os.dup(descriptor), tensor.storage_offset() * tensor.element_size(), length_bytes


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
        offset: where plane 0 begins in the region, in bytes.
        order: None: the layout's own.
        region_bytes: size of the whole region; None: it ends with the last plane.
    Raises:
        LayoutError: the layout cannot exist.
        ArgumentError: another argument is out of range, or the region is too small.
    """
    layout.check()
    if page_count < 1 or offset < 0:
        raise ArgumentError(f"page_count is {page_count}, offset is {offset}: give page_count >= 1 and offset >= 0")
    order = layout.order if order is None else order
    layers, heads = len(layout.layers), len(layout.heads)
    planes = layers if order is PageOrder.OPAQUE else layers * layout.model.kinds
    row_bytes = layout.model.head_bytes
    page_bytes, token_stride, head_stride = {
        PageOrder.NHD: (layout.page_size * heads * row_bytes, heads * row_bytes, row_bytes),
        PageOrder.HND: (layout.page_size * heads * row_bytes, row_bytes, layout.page_size * row_bytes),
        PageOrder.OPAQUE: (heads * layout.opaque_bytes, 0, layout.opaque_bytes),
    }[order]
    plane_bytes = page_count * page_bytes
    end = offset + planes * plane_bytes
    if region_bytes is not None and region_bytes < end:
        raise ArgumentError(f"region_bytes is {region_bytes}: {planes} planes of {page_count} pages end at {end}")
    return PoolGeometry(
        page_count=page_count,
        region_bytes=(end if region_bytes is None else region_bytes,),
        planes=tuple(
            PlaneGeometry(0, offset + plane * plane_bytes, page_bytes, token_stride, head_stride)
            for plane in range(planes)
        ),
    )
