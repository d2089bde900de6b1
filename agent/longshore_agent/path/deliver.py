"""Stage two: one write of a slab from a lane's buffer into granted ring memory, or of runs of pages in place; between
ranks of one node, one copy from pages to pages.

Called by lanes; blocks its lane until the write is settled, driving the transport's progress: tightly at first,
then with short pauses.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import TransportError, WriteFailedError
from longshore_agent.kernels.cpu_copy import copy
from longshore_agent.kernels.view import View, remote_view
from longshore_agent.memory.staging import StagingPieces
from longshore_agent.path.jobs import WriteJob, page_ids
from longshore_agent.path.runs import runs
from longshore_agent.status.metrics import Metrics
from longshore_agent.transports.base import PreparingTransport, Write, WriteState
from longshore_wire.codec import PEER
from longshore_wire.peer_messages import RegionInfo, SlabReady

# A write that completes within this is waited for without a pause: most do, and a pause costs more than it saves.
_TIGHT_NS = 2_000_000
_PAUSE_MIN_S = 0.00005
_PAUSE_MAX_S = 0.002
# Batches of slices in flight: enough to keep the transport busy, few enough to stay fair to other lanes.
_OPEN_BATCHES_MAX = 4


class Deliverer:
    """Writes for all lanes of one worker."""

    def __init__(self, transport: PreparingTransport, metrics: Metrics, *, slices_batch: int) -> None:
        self._transport = transport
        self._metrics = metrics
        self._slices_batch = slices_batch

    def staged(self, job: WriteJob, buffer: StagingPieces, length_bytes: int) -> None:
        """Write the first `length_bytes` of `buffer` to the granted region; the bytes have landed on return.

        Raises:
            TransportError: nothing was begun.
            WriteFailedError: the write failed.
        """
        assert job.ring is not None
        sources, targets, lengths = cut(buffer, 0, job.ring, job.effect.offset_bytes, length_bytes)
        notice = PEER.encode(ready_message(job)) if job.noticed else b""
        write = self._transport.post(job.peer_name, sources, targets, lengths, notice)
        self._metrics.add("longshore_writes_total", 1, way="staged")
        self._metrics.add("longshore_write_pieces_total", len(sources), way="staged")
        finish(self._transport, write)

    def direct(self, job: WriteJob) -> None:
        """Copy the slab from our engine's pages into the target's, which are mapped here.

        Raises:
            PoolError: an engine has let its pages go.
        """
        copy(*job.neighbour_sides(page_ids(job.effect.target_pages)), job.effect.tokens)
        self._metrics.add("longshore_writes_total", 1, way="direct")

    def in_place(self, job: WriteJob) -> bool:
        """Write the slab's runs straight into the target's pages, in batches; all have landed on return.

        Those of a room that is given up meanwhile stop after a batch. Returns whether anything was written.

        Raises:
            TransportError: nothing was begun.
            WriteFailedError: a write failed; none is open any more.
            PoolError: the engine has let its pages go.
            MemoryLostError: it has cut its memory short.
        """
        way = job.effect.way.name.lower()
        with job.pool.in_use():
            sources, targets, lengths = runs(job.source(), _remote_target(job), job.effect.tokens)
            count = len(sources)
            self._metrics.add("longshore_write_pieces_total", count, way=way)
            prepared = self._transport.prepare(job.peer_name, sources, targets, lengths)
            open_writes: deque[Write] = deque()
            posted_count = 0
            try:
                for first in range(0, count, self._slices_batch):
                    if job.cancelled:
                        break
                    if len(open_writes) >= _OPEN_BATCHES_MAX:
                        finish(self._transport, open_writes.popleft())
                    indices: npt.NDArray[np.int32] = np.arange(
                        first, min(first + self._slices_batch, count), dtype=np.int32
                    )
                    open_writes.append(self._transport.post_prepared(job.peer_name, prepared, indices, b""))
                    posted_count += 1
                    self._metrics.add("longshore_writes_total", 1, way=way)
                while open_writes:
                    finish(self._transport, open_writes.popleft())
            finally:
                self._settle(open_writes)
                self._transport.release_prepared(prepared)
            return posted_count > 0 or count == 0

    def _settle(self, writes: deque[Write]) -> None:
        """Wait for what a failure has left open: the engine's pages stay mapped until then."""
        for write in writes:
            try:
                finish(self._transport, write)
            except TransportError:
                continue


def finish(transport: PreparingTransport, write: Write) -> None:
    """Wait until a write is settled, tightly at first, then with pauses.

    Raises:
        WriteFailedError: it failed.
    """
    deadline_ns = time.monotonic_ns() + _TIGHT_NS
    pause_s = _PAUSE_MIN_S
    while (state := transport.state(write)) is WriteState.OPEN:
        if time.monotonic_ns() > deadline_ns:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        else:
            # Other lanes gather meanwhile, and want Python's lock.
            time.sleep(0)
    settled = transport.release(write)
    if state is WriteState.FAILED:
        error = write.error or "the write failed and the transport does not say why"
        raise WriteFailedError(error, settled=settled)


def ready_message(job: WriteJob) -> SlabReady:
    """Return the notice that a job's slab has landed."""
    effect = job.effect
    return SlabReady(effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens)


def cut(
    buffer: StagingPieces, begin_bytes: int, ring: RegionInfo, offset_bytes: int, length_bytes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Cut a write where registrations of either side end: mostly one piece.

    Args:
        begin_bytes: of the slab in `buffer`.
        offset_bytes: of the slab in the target's ring.
    """
    pieces = buffer.pieces(begin_bytes, length_bytes)
    if len(pieces) == 1 and not ring.extent_bytes:
        whole = ((buffer.address + begin_bytes,), (ring.address + offset_bytes,), (length_bytes,))
        sources, targets, lengths = (np.array(each, dtype=np.uint64) for each in whole)
        return sources, targets, lengths
    extent = ring.extent_bytes or ring.length_bytes
    cuts = {0, length_bytes}
    cuts.update(range(extent - offset_bytes % extent, length_bytes, extent))
    near = 0
    for _, piece_bytes in pieces:
        near += piece_bytes
        cuts.add(near)
    edges = np.array(sorted(cuts), dtype=np.uint64)
    starts, lengths = edges[:-1], np.diff(edges)
    return starts + np.uint64(buffer.address + begin_bytes), starts + np.uint64(ring.address + offset_bytes), lengths


def _remote_target(job: WriteJob) -> View:
    assert job.target_pool is not None
    route, layout = job.effect.route, job.target_layout
    table = job.target_pages(page_ids(job.effect.target_pages))
    return remote_view(
        layout,
        job.target_pool.geometry,
        job.target_pool.region_addresses,
        table.pages,
        table.first_page,
        route.local_layers(layout),
        route.local_heads(layout),
    )
