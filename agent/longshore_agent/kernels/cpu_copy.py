"""Copies rows from one view to another on a CPU: gather, scatter and pages to pages are this one operation.

Called by the pipeline's threads. `rows` is the compiled loop; here its arguments are checked and what lies side by side on
both sides is joined.
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
    """The ticket of a copy that was over when it was submitted."""

    def __init__(self, *, accepted: bool) -> None:
        self._accepted = accepted

    def passed(self) -> bool:
        """Return True."""
        return True

    def end(self) -> bool:
        """Return whether the trailer was accepted. The memory was let go already."""
        return self._accepted


_DONE, _REFUSED = _Over(accepted=True), _Over(accepted=False)


class CpuCopier:
    """Copies in the thread that submits; see `copier.Copier`. Used by any number of threads."""

    def __init__(self) -> None:
        """Compile the loop. Raises as `rows.prepare`."""
        rows.prepare()

    def prepare(self, pool: KVPool, *, direct: bool) -> None:
        """Do nothing: one compiled loop serves all pools."""

    def admit(self, pool: KVPool, pages: Pages, first_page: int, *, to_write: bool, direct: bool) -> None:
        """Do nothing: page ids are read where they are."""

    def wait(self, limit_s: float) -> None:
        """Return: a copy is over when `submit` returns."""

    def submit(self, copy: Copy) -> Ticket:
        """Copy; see `copier.Copier.submit`. A packed source with a trailer that is refused is not copied."""
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


# A slab of at most this size is still in the second-level cache when the transport reads it. A larger one is written past it.
_CACHED_BYTES_MAX = 2 << 20


def copy_rows(source: View, target: View, tokens: tuple[int, int], trailer: SealedTrailer | None = None) -> int:
    """Copy tokens [first, end) of a sequence. Releases the GIL.

    Page sizes and orders may differ; opaque pages are copied whole, and both sides must have them alike. Other tokens, heads
    and layers of the target keep their bytes.

    Args:
        source, target: as many layers and heads on both, of one model; pages of all the tokens. The target's may not repeat.
        tokens: (first, end), unaligned at both ends; with PageOrder.OPAQUE the first is aligned.
        trailer: written behind a slab, at the aligned end of its payload; the gap is zeroed.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: the arguments do not fit each other; names one; nothing was written.
        LongshoreError: a page is out of range or repeated; names its index; nothing was written.
        PoolError: a pool is unregistered.
        MemoryLostError: an engine has cut its memory short; bytes may be missing.
    """
    with source.in_use(), target.in_use():
        check_fit(source, target, tokens)
        chosen = source.rows(tokens)
        source.check_pages(chosen, unique=False)
        target.check_pages(chosen, unique=True)
        payload = source.payload_bytes(tokens)
        tail = b"" if trailer is None else _tail(trailer, target, payload)
        # Nothing is gained by having pages in our cache: an engine reads them, in another process and later.
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
    """Return what stands behind the payload. The gap is zeros, so that no byte of an older slab travels with this one."""
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
