"""Moves one slab: `outbound` at its source, `inbound` at its target. Read from top to bottom.

A life is a generator: it yields each `Wait` and returns how it ended. `runners` resumes a life after its wait has
passed: a lane thread on a CPU, the control thread on a GPU. A life must not block and must not know which runner
resumes it. Do not assume that an abandoned life cleans up: a staged or direct one keeps its memory, which a device or a
peer may still use.

The steps of a staged slab, from `send` to DONE:

1. `send` of prefill's client gives its worker an Offer, `receive` of decode's a Receive. `worker.engine_requests` checks
   the pages and passes both to the cores, `source` and `target`.
2. Decode's core sends a Claim, prefill's answers with a Demand, and decode's grants ring memory (`granting`).
3. Once the slab has its tokens, a grant and a wire, prefill's core emits StartWrite. `worker.moving` makes a slab of it,
   and `outbound` runs.
4. `moving` calls `write_done` of the core. The transport has announced the slab to the target with its notice, or the
   core does so by a SlabReady message. The slab has landed in the ring.
5. Decode's core emits StartScatter, and `inbound` runs.
6. `moving` calls `scatter_done` of the core, which acknowledges the slab and frees its region.
7. After the last slab of a room, both cores emit RoomEnded, and `worker.loop` sends DONE to the engines.

A slab that was copied directly or written in place has arrived at step 4. It has no grant and, without digests, no inbound
life.

If the claim has a digest key, the source's copy also computes digests of its pages, and the SlabReady message of step 4
has them. The inbound life computes the target's, and fails the room if they differ. A slab in place gets an inbound life
for that alone. A direct copy compares both sides itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import TransportError
from longshore_agent.kernels.copier import Copier, Copy, Slab
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.pipeline.slabs import (
    InboundEnd,
    InboundSlab,
    OutboundEnd,
    OutboundSlab,
    Stage,
    digest_fault,
    dropped,
    pieces_in_place,
    staged_pieces,
    trailer_of,
)
from longshore_agent.pipeline.waits import Compiled, Copied, Gate, Now, StagingMemory, Until, Wait, Written
from longshore_agent.status.spans import StageLog
from longshore_agent.transports.base import Selection, Transport, Write
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import room_name
from longshore_wire.slabs import Trailer, unseal
from longshore_wire.ways import Way

# Open writes of one slab in place: enough to keep the transport busy, few enough to stay fair to other lanes.
_OPEN_BATCHES_MAX = 4
# Pause before a slab with a wrong trailer is copied again. Only a broken transport announces a slab before its trailer.
_TRAILER_PAUSE_NS = 1_000_000

OutboundLife = Generator[Wait, None, OutboundEnd]
InboundLife = Generator[Wait, None, InboundEnd]


@dataclass(slots=True)
class LaneCounts:
    """Slabs and payload bytes that have reached their targets, by lane."""

    slabs: list[int]
    payload_bytes: list[int]


@dataclass(slots=True)
class OutboundTools:
    """The tools of lives at a source. A CPU's worker has one set for each lane, a GPU's one for each way.

    Attributes:
        memory: staging memory; None: these lives stage no slab.
        batch_count: most pieces in one write in place.
        copies: limits copies. A staged slab holds a place until its write starts, a direct one until its copy has
            ended.
        writes: limits open writes of staged slabs.
        passed_ns: time.monotonic_ns when the last direct copy had ended.
    """

    copier: Copier
    transport: Transport
    memory: StagingMemory | None
    lanes: LaneCounts
    log: StageLog
    batch_count: int
    copies: Gate = field(default_factory=Gate)
    writes: Gate = field(default_factory=Gate)
    passed_ns: int = 0


@dataclass(slots=True)
class InboundTools:
    """The tools of lives at a target. A CPU's worker has one set for each scatter thread, a GPU's has one.

    Attributes:
        ring: staging memory that sources write to; None: these lives only compare digests.
        trailer_key: authenticates the trailers of this ring's slabs.
        trailer_deadline_ns: how long a life waits for a correct trailer.
        thread: index of the thread that runs these lives, for spans.
    """

    copier: Copier
    ring: StagingRange | None
    log: StageLog
    trailer_key: bytes
    trailer_deadline_ns: int
    thread: int = 0


def outbound(slab: OutboundSlab, tools: OutboundTools) -> OutboundLife:
    """Bring a slab to its target by its way: staged, by a direct copy, or by writes in place."""
    if slab.cancelled:
        return dropped(slab)
    try:
        if slab.effect.way is Way.STAGED:
            return (yield from _staged(slab, tools))
        if slab.effect.way is Way.DIRECT:
            return (yield from _direct(slab, tools))
        return (yield from _in_place(slab, tools))
    except LongshoreError as error:
        return OutboundEnd(slab, str(error))


def _staged(slab: OutboundSlab, tools: OutboundTools) -> OutboundLife:
    """Copy pages into staging memory, write that to the target's ring, and free it."""
    effect, memory, transport, ring = slab.effect, tools.memory, tools.transport, slab.attach.ring
    assert memory is not None
    assert ring is not None
    space = memory.take(slab)
    # The runner begins a life only while this gate is free, so the life does not wait for its turn.
    tools.copies.enter()
    yield space
    region = space.region
    if region is None:
        tools.copies.leave()
        return dropped(slab)
    slab.lane, slab.stage = memory.lane(region), Stage.COPYING
    start_ns = time.monotonic_ns()
    try:
        staged = Slab(memory.buffer, region.offset_bytes, effect.payload_bytes)
        copy = Copy(slab.source(), staged, slab.sealed_trailer(), digest_key=effect.digest_key)
        ticket = tools.copier.submit(copy)
    except LongshoreError:
        memory.free(region)
        tools.copies.leave()
        raise
    assert ticket is not None, "only direct copies wait for their kernel"
    # Older slabs go first. The transport then looks this write up while the GPU copies.
    yield Now()
    write: Write | None = None
    error = ""
    try:
        pieces = staged_pieces(memory.buffer, region.offset_bytes, ring, effect.offset_bytes, space.length_bytes)
        write = transport.draft(slab.peer_name, pieces, slab.notice())
    except TransportError as refused:
        error = str(refused)
    yield Copied(ticket)
    copied_ns = time.monotonic_ns()
    try:
        ticket.end()
    except LongshoreError as failed:
        error = error or str(failed)
    if not error:
        yield tools.writes.turn(slab)
    tools.copies.leave()
    if write is None or error or slab.cancelled:
        if write is not None:
            transport.release(write)
        memory.free(region)
        return dropped(slab) if slab.cancelled else OutboundEnd(slab, error)
    tools.writes.enter()
    slab.stage = Stage.WRITING
    begun_ns = time.monotonic_ns()
    transport.start(write)
    tools.log.gathered(effect, slab.lane, start_ns, copied_ns, len(pieces.lengths))
    written = Written(transport, write)
    yield written
    error, settled = written.release()
    tools.writes.leave()
    memory.free(region)
    return _ended(slab, tools, begun_ns, error, settled=settled, digests=ticket.digests.source)


def _direct(slab: OutboundSlab, tools: OutboundTools) -> OutboundLife:
    """Copy pages into the target's pages, which are mapped into this process."""
    effect = slab.effect
    copy = Copy(slab.source(), slab.neighbour_target(), digest_key=effect.digest_key)
    while True:
        yield tools.copies.turn(slab)
        if slab.cancelled:
            return dropped(slab)
        start_ns = time.monotonic_ns()
        ticket = tools.copier.submit(copy)
        if ticket is not None:
            break
        yield Compiled()
    tools.copies.enter()
    slab.stage = Stage.COPYING
    yield Copied(ticket)
    tools.copies.leave()
    ticket.end()
    fault = _compare(slab, *ticket.digests, tools.log) if effect.digest_key else ""
    if fault:
        return OutboundEnd(slab, fault, Reason.DIGEST_MISMATCH)
    tools.log.count("longshore_writes_total", 1, way="direct")
    # A device begins a copy after the previous one has ended.
    start_ns = max(start_ns, tools.passed_ns)
    end = _ended(slab, tools, start_ns)
    tools.passed_ns = time.monotonic_ns()
    return end


def _in_place(slab: OutboundSlab, tools: OutboundTools) -> OutboundLife:
    """Write runs of pages into the target's pages, in batches. A cancelled slab starts no further batch."""
    transport, way = tools.transport, slab.effect.way.label
    slab.stage = Stage.WRITING
    start_ns = time.monotonic_ns()
    posted_count = count = 0
    error, settled, digests = "", True, b""
    try:
        with slab.pool.in_use():
            if slab.effect.digest_key:
                ticket = tools.copier.digest(slab.source(), slab.effect.digest_key)
                yield Copied(ticket)
                ticket.end()
                digests = ticket.digests.source
                start_ns = time.monotonic_ns()
            pieces = pieces_in_place(slab.source(), slab.remote_target())
            count = len(pieces.lengths)
            tools.log.count("longshore_write_pieces_total", count, way=way)
            prepared = transport.prepare(slab.peer_name, pieces)
            open_writes: deque[Written] = deque()
            while True:
                if posted_count < count and len(open_writes) < _OPEN_BATCHES_MAX and not slab.cancelled and not error:
                    end = min(posted_count + tools.batch_count, count)
                    indices: npt.NDArray[np.int32] = np.arange(posted_count, end, dtype=np.int32)
                    try:
                        write = transport.draft(slab.peer_name, Selection(prepared, indices), b"")
                    except TransportError as refused:
                        error = str(refused)
                        continue
                    transport.start(write)
                    open_writes.append(Written(transport, write))
                    posted_count = end
                    tools.log.count("longshore_writes_total", 1, way=way)
                elif open_writes:
                    # After a failure, too, the pages stay in use until every write has ended.
                    written = open_writes.popleft()
                    yield written
                    failure, is_settled = written.release()
                    error, settled = error or failure, settled and is_settled
                else:
                    break
            transport.release_prepared(prepared)
    except LongshoreError as failed:
        # No write is open here, so `settled` is final.
        error = error or str(failed)
    if not posted_count:
        return OutboundEnd(slab, error) if error else dropped(slab)
    return _ended(slab, tools, start_ns, error, settled=settled, digests=digests, whole=posted_count == count)


def _compare(slab: OutboundSlab | InboundSlab, source: bytes, target: bytes, log: StageLog) -> str:
    """Compare digests and count the slab; see `digest_fault`."""
    fault = digest_fault(slab.effect, slab.pool.layout, source, target)
    log.count("longshore_digests_total", 1, result="different" if fault else "equal")
    return fault


def _ended(
    slab: OutboundSlab,
    tools: OutboundTools,
    start_ns: int,
    error: str = "",
    *,
    settled: bool = True,
    digests: bytes = b"",
    whole: bool = True,
) -> OutboundEnd:
    """Return the end of a slab after its last write or its direct copy, and record it. `whole`: all of it was written."""
    effect, lane, log = slab.effect, slab.lane, tools.log
    if slab.cancelled:
        log.count("longshore_overtaken_writes_total", 1, way=effect.way.label)
    if error:
        return OutboundEnd(slab, error, settled=settled)
    end_ns = time.monotonic_ns()
    if whole:
        log.written(effect, lane, start_ns, end_ns, slab.wire)
    else:
        log.stage("write", effect, lane, start_ns, end_ns)
    if slab.cancelled:
        return dropped(slab)
    tools.lanes.slabs[lane] += 1
    tools.lanes.payload_bytes[lane] += effect.payload_bytes
    must_announce = effect.way is not Way.STAGED or not slab.transport_announces
    return OutboundEnd(slab, must_announce=must_announce, digests=digests)


def inbound(slab: InboundSlab, tools: InboundTools) -> InboundLife:
    """Copy a landed slab into pages, and compare digests. The slab counts only if its trailer was correct before the copy.

    A GPU copies a slab even if its trailer is wrong. That is safe: until its room ends, nothing else uses the room's
    pages.
    """
    effect, wanted = slab.effect, trailer_of(slab.effect)
    found: Trailer | None = None
    staged = effect.way is Way.STAGED

    def accepts(data: bytes) -> bool:
        nonlocal found
        found = unseal(data, tools.trailer_key)
        return found == wanted

    deadline_ns = time.monotonic_ns() + tools.trailer_deadline_ns
    while not slab.cancelled:
        start_ns = time.monotonic_ns()
        try:
            if staged:
                assert tools.ring is not None
                landed = Slab(tools.ring, effect.offset_bytes, effect.payload_bytes)
                copy = Copy(landed, slab.target(), accepts=accepts, digest_key=effect.digest_key)
                ticket = tools.copier.submit(copy)
            else:
                ticket = tools.copier.digest(slab.target(), effect.digest_key)
        except LongshoreError as error:
            # The pages of a slab that was cancelled meanwhile may be unmapped.
            return InboundEnd(slab, dropped=True) if slab.cancelled else InboundEnd(slab, error.reason, str(error))
        assert ticket is not None, "only direct copies wait for their kernel"
        yield Copied(ticket)
        end_ns = time.monotonic_ns()
        try:
            is_copied = ticket.end()
        except LongshoreError as error:
            return InboundEnd(slab, error.reason, str(error))
        if is_copied:
            if staged:
                tools.log.stage("scatter", effect, tools.thread, start_ns, end_ns)
            if effect.digest_key and not slab.cancelled:
                target = ticket.digests.target if staged else ticket.digests.source
                if fault := _compare(slab, effect.digests, target, tools.log):
                    return InboundEnd(slab, Reason.DIGEST_MISMATCH, fault)
            return InboundEnd(slab)
        if slab.cancelled:
            return InboundEnd(slab, Reason.TRAILER_MISMATCH, "the room was given up")
        if end_ns >= deadline_ns:
            text = f"slab {effect.slab} of room {room_name(wanted.room)} ends with {found}, not with {wanted}"
            return InboundEnd(slab, Reason.TRAILER_MISMATCH, text)
        yield Until(end_ns + _TRAILER_PAUSE_NS)
    return InboundEnd(slab, dropped=True)
