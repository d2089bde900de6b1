"""Copies rows from one view to another on a CPU. Gather, scatter and direct copy are this one operation.

Called by the pipeline's threads. This module checks the arguments and joins rows that are adjacent on both sides;
`rows` is the compiled loop, which checks nothing.
"""

from __future__ import annotations

import numpy as np

from longshore_agent.errors import ShapeError
from longshore_agent.kernels import rows
from longshore_agent.kernels.copier import Copy, Slab, Ticket
from longshore_agent.kernels.view import Numbers, Pages, View, check_fit, segments, slab_view
from longshore_agent.memory.pools import KVPool, PlaneRun
from longshore_agent.memory.staging import StagingBuffer
from longshore_wire.trailer import TRAILER_BYTES, SealedTrailer, aligned, slab_bytes


class _Over:
    """The ticket of a copy that ended inside `submit`."""

    def __init__(self, *, accepted: bool) -> None:
        self._accepted = accepted

    def passed(self) -> bool:
        """Return True."""
        return True

    def end(self) -> bool:
        """Return whether the trailer was accepted. The memory is already released."""
        return self._accepted


_DONE, _REFUSED = _Over(accepted=True), _Over(accepted=False)


class CpuCopier:
    """Copies in the submitting thread; see `copier.Copier`. Used by any number of threads."""

    def __init__(self) -> None:
        """Compile the loop. Raises as `rows.prepare`."""
        rows.prepare()

    def prepare(self, pool: KVPool, *, direct: bool) -> None:
        """Do nothing: one compiled loop serves all pools."""

    def admit(self, pool: KVPool, pages: Pages, first_page: int, *, to_write: bool, direct: bool) -> None:
        """Do nothing: page ids are read from the host's memory."""

    def wait(self, limit_s: float) -> None:
        """Return: a copy has ended when `submit` returns."""

    def submit(self, copy: Copy) -> Ticket:
        """Copy; see `copier.Copier.submit`. If `accepts` refuses the trailer of a packed source, nothing is copied."""
        source, target = copy.source, copy.target
        if isinstance(source, Slab):
            if copy.accepts is not None:
                trailer = source.memory.bytes_at(source.offset_bytes + aligned(source.payload_bytes), TRAILER_BYTES)
                if not copy.accepts(trailer):
                    return _REFUSED
            assert isinstance(target, View), "one side is packed at most"
            source = _packed(source, target, copy.tokens, source.payload_bytes)
        if isinstance(target, Slab):
            length_bytes = target.payload_bytes if copy.trailer is None else slab_bytes(target.payload_bytes)
            target = _packed(target, source, copy.tokens, length_bytes)
        copy_rows(source, target, copy.tokens, copy.trailer)
        return _DONE


def _packed(slab: Slab, like: View, tokens: tuple[int, int], length_bytes: int) -> View:
    assert isinstance(slab.memory, StagingBuffer), "a CPU's slab"
    return slab_view(slab.memory.view(slab.offset_bytes, length_bytes), like, tokens)


# A slab of at most this size is still in the L2 cache when the transport reads it. A larger one bypasses the cache.
_CACHED_BYTES_MAX = 2 << 20


def copy_rows(source: View, target: View, tokens: tuple[int, int], trailer: SealedTrailer | None = None) -> int:
    """Copy tokens [first, end) of a sequence. Releases the GIL.

    Page sizes and orders may differ; opaque pages are copied whole, and both sides must have the same ones. Other
    tokens, heads and layers of the target keep their bytes.

    Args:
        source, target: of one model, with equally many layers and heads, and with pages for all tokens. No page of the
            target may repeat.
        tokens: (first, end), unaligned at both ends; with PageOrder.OPAQUE the first is aligned.
        trailer: written behind a slab, at the aligned end of its payload; the gap is zeroed.
    Returns:
        The size of the payload in bytes.
    Raises:
        ShapeError: the arguments do not fit each other; names one; nothing was written.
        LongshoreError: a page is out of range or repeated; names its index; nothing was written.
        PoolError: a pool is unregistered.
        MemoryLostError: an engine has truncated its memory; bytes may be missing.
    """
    with source.in_use(), target.in_use():
        check_fit(source, target, tokens)
        chosen = source.rows(tokens)
        source.check_pages(chosen, unique=False)
        target.check_pages(chosen, unique=True)
        payload = source.payload_bytes(tokens)
        tail = b"" if trailer is None else _tail(trailer, target, payload)
        # Pages need not be in our cache: an engine reads them, in another process and later.
        stream = target.slab is None or payload > _CACHED_BYTES_MAX
        found = segments(source, target, chosen)
        for near in source.planes:
            for far in target.planes:
                _copy_planes(source, target, near, far, found, stream=stream)
        if tail:
            assert target.slab is not None
            target.slab[payload : payload + len(tail)] = np.frombuffer(tail, dtype=np.uint8)
    return payload


def _tail(trailer: SealedTrailer, target: View, payload: int) -> bytes:
    """Return gap and trailer to write behind the payload. A zeroed gap sends no byte of an older slab."""
    if trailer.payload_bytes != payload:
        raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
    if target.slab is None or target.slab.size < slab_bytes(payload):
        raise ShapeError(f"trailer needs a slab of {slab_bytes(payload)} bytes as the target")
    return bytes(aligned(payload) - payload) + trailer.data


def _copy_planes(source: View, target: View, near: PlaneRun, far: PlaneRun, found: Numbers, *, stream: bool) -> None:
    """Copy the planes that both runs have."""
    first = max(near.first, far.first)
    end = min(near.first + len(near.addresses), far.first + len(far.addresses))
    if first >= end:
        return
    source_planes = near.addresses[first - near.first : end - near.first] + source.heads.start * near.head_stride
    target_planes = far.addresses[first - far.first : end - far.first] + target.heads.start * far.head_stride
    heads, row = len(source.heads), source.row_bytes
    if near.head_stride == far.head_stride == row:
        heads, row = 1, row * heads
    source_page, source_slot, target_page, target_slot, counts = found.T
    places = np.empty((len(found), 4), dtype=np.int64)
    places[:, 0] = source_page * near.page_stride + source_slot * near.token_stride
    places[:, 1] = target_page * far.page_stride + target_slot * far.token_stride
    if heads == 1 and near.token_stride == far.token_stride == row:
        places[:, 2], places[:, 3] = 1, counts * row
    else:
        places[:, 2], places[:, 3] = counts, row
    if stream:
        bits = int(np.bitwise_or.reduce(target_planes)) | int(np.bitwise_or.reduce(places[:, 1]))
        bits |= int(np.bitwise_or.reduce(places[:, 3])) | far.token_stride | (far.head_stride if heads > 1 else 0)
        stream = bits % rows.LINE_BYTES == 0
    rows.copy(
        source_planes,
        target_planes,
        places,
        rows.Strides(near.token_stride, near.head_stride),
        rows.Strides(far.token_stride, far.head_stride),
        heads,
        stream=stream,
    )
