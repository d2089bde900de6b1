"""Runs the lives of slabs: `ThreadRunner` in threads that block, `EventRunner` in the control thread, which polls.

Made by `worker.resources`, called by `worker.moving` in the control thread. A CPU's copy occupies a thread, so each lane is
one. A GPU copies by itself, so the control thread runs all lives: no thread and no write waits for another thread. A
runner must not assume that a life ends: if a device hangs, it does not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from longshore_agent.errors import TransportError
from longshore_agent.pipeline.life import InboundTools, LaneCounts, OutboundTools, inbound, outbound
from longshore_agent.pipeline.slabs import (
    End,
    Ends,
    InboundEnd,
    InboundSlab,
    OutboundEnd,
    OutboundSlab,
    ProbeEnd,
    Stage,
    WireProbe,
    still_wanted,
)
from longshore_agent.pipeline.waits import Compiled, Copied, Gate, Now, Wait, Written
from longshore_spec.status import LaneStatus
from longshore_wire.names import UNKNOWN_WIRE, wire_name
from longshore_wire.ways import Way

# Staged copies that a GPU has before the wire is ready for them: the next slab and the one after it. More would delay
# the first write, since the control thread takes as long to queue a copy as the device takes to do it.
COPIES_AHEAD_MAX = 2
# Open staged writes: with three, the wire never waits for this thread to start the next one. Writes land in their
# order.
WRITES_OPEN_MAX = 3
# Submitted direct copies: as many as one pair may have open by default, so that the device never waits for this thread.
# A copy takes 0.7 ms if it runs alone; a cancelled room or an engine that leaves waits for those that are submitted.
DIRECT_COPIES_MAX = 16

# A thread polls a write for this long without a pause: most have ended by then, and a pause costs more than it saves.
_TIGHT_NS = 2_000_000
_PAUSE_MIN_S = 0.00005
_PAUSE_MAX_S = 0.002

SlabEnd = TypeVar("SlabEnd", OutboundEnd, InboundEnd)


class Runner:
    """Runs all lives of one worker. Called by the control thread. A runner overrides only the methods that it needs."""

    @property
    def busy(self) -> bool:
        """Whether `advance` has work."""
        return False

    @property
    def copying(self) -> bool:
        """Whether direct copies run whose end only `advance` notices."""
        return False

    def send(self, slab: OutboundSlab) -> None:
        """Begin the life of a slab at its source, or queue it."""
        raise NotImplementedError

    def receive(self, slab: InboundSlab) -> None:
        """Begin the life of a slab at its target, or queue it."""
        raise NotImplementedError

    def probe(self, probe: WireProbe) -> None:
        """Begin a probe. Its result arrives through `Ends`."""
        raise NotImplementedError

    def end_probe(self, probe: WireProbe) -> None:
        """Finish a probe whose result the caller has taken from `Ends`."""

    def advance(self) -> list[End]:
        """Resume the lives whose waits have passed; return the ends since the last call. Raises DeviceError."""
        return []

    def hurry(self) -> None:
        """Poll the oldest write; if it has ended, start the next. The control thread calls this between other work."""

    def drop_cancelled(self) -> None:
        """End cancelled slabs whose lives have not begun."""

    def writing(self) -> tuple[OutboundSlab, ...]:
        """Return the slabs whose writes are open."""
        raise NotImplementedError

    def lanes(self) -> tuple[LaneStatus, ...]:
        """Return the status of each lane."""
        raise NotImplementedError

    def stop(self) -> None:
        """Let no life begin another copy or write on a device. Open writes continue."""

    def close(self) -> None:
        """Let each thread end after the slabs in its queue."""


def probe_wire(tools: OutboundTools, probe: WireProbe, source_address: int) -> ProbeEnd:
    """Find out over which wire bytes reach a peer. Blocks for at most 5 s."""
    region = probe.region
    try:
        wire = tools.transport.probe_wire(probe.peer_name, source_address, region.address, region.length_bytes)
    except TransportError as error:
        return ProbeEnd(probe, UNKNOWN_WIRE, str(error))
    return ProbeEnd(probe, wire_name(wire))


class ThreadRunner(Runner):
    """Runs each life in a lane thread or a scatter thread. Each lane has its own staging memory; all share one queue.

    All lanes therefore serve one pair if there is only one, and one lane's write overlaps another lane's copy. Grants
    and the window of writes in place limit the queues. Threads put all ends into `Ends`, and a lane drops a cancelled
    slab when it takes it from the queue.
    """

    def __init__(
        self, sources: Sequence[OutboundTools], targets: Sequence[InboundTools], ends: Ends, *, probe_address: int
    ) -> None:
        """Start one thread for each element of `sources` and `targets`.

        Args:
            probe_address: registered memory that probes read.
        """
        self._counts = sources[0].lanes if sources else LaneCounts([], [])
        self._ends = ends
        self._probe_address = probe_address
        self._outbound: queue.SimpleQueue[OutboundSlab | WireProbe | None] = queue.SimpleQueue()
        self._inbound: queue.SimpleQueue[InboundSlab | None] = queue.SimpleQueue()
        self._open: list[OutboundSlab | None] = [None] * len(sources)
        self._thread_counts = len(sources), len(targets)
        self._threads: list[threading.Thread] = []
        for index, source in enumerate(sources):
            self._start(f"lane-{index}", self._run_outbound, index, source)
        for index, target in enumerate(targets):
            self._start(f"scatter-{index}", self._run_inbound, target)

    def send(self, slab: OutboundSlab) -> None:
        """See `Runner`."""
        self._outbound.put(slab)

    def receive(self, slab: InboundSlab) -> None:
        """See `Runner`."""
        self._inbound.put(slab)

    def probe(self, probe: WireProbe) -> None:
        """See `Runner`. A lane runs it."""
        self._outbound.put(probe)

    def writing(self) -> tuple[OutboundSlab, ...]:
        """See `Runner`."""
        return tuple(slab for slab in self._open if slab is not None and slab.stage is Stage.WRITING)

    def lanes(self) -> tuple[LaneStatus, ...]:
        """See `Runner`."""
        return _lane_status(self._counts, {index for index, slab in enumerate(self._open) if slab is not None})

    def close(self) -> None:
        """See `Runner`. A thread that still writes ends with the process."""
        for _ in range(self._thread_counts[0]):
            self._outbound.put(None)
        for _ in range(self._thread_counts[1]):
            self._inbound.put(None)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    def _run_outbound(self, index: int, tools: OutboundTools) -> None:
        while (slab := self._outbound.get()) is not None:
            if isinstance(slab, WireProbe):
                self._ends.put(probe_wire(tools, slab, self._probe_address))
                continue
            slab.lane = index
            self._open[index] = slab
            end = run_to_end(outbound(slab, tools))
            self._open[index] = None
            self._ends.put(end)

    def _run_inbound(self, tools: InboundTools) -> None:
        while (slab := self._inbound.get()) is not None:
            self._ends.put(run_to_end(inbound(slab, tools)))


def run_to_end(life: Generator[Wait, None, SlabEnd]) -> SlabEnd:
    """Run a life to its end in the calling thread."""
    while True:
        try:
            wait = next(life)
        except StopIteration as stop:
            end: SlabEnd = stop.value
            return end
        sleep_until(wait)


def sleep_until(wait: Wait) -> None:
    """Return when the wait has passed. Polls without a pause at first, then with growing pauses."""
    if wait.passed():
        return
    deadline_ns = time.monotonic_ns() + _TIGHT_NS
    pause_s = _PAUSE_MIN_S
    while not wait.passed():
        if time.monotonic_ns() > deadline_ns:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        else:
            # Let other lanes, which may copy, have Python's lock.
            time.sleep(0)


class EventRunner(Runner):
    """Runs all lives in the control thread, in three tracks: direct, staged, inbound. Resumes the oldest slab first."""

    def __init__(
        self,
        direct: OutboundTools | None,
        staged: OutboundTools | None,
        target: InboundTools | None,
        ends: Ends,
        *,
        probe_address: int,
        enter: Callable[[], None],
    ) -> None:
        """Begin with no slab.

        Args:
            direct, staged: of a source; None: this worker is no source.
            target: of a target; None: no slab lands here.
            ends: receives the results of probes. Each probe runs in its own thread.
            probe_address: registered memory that probes read.
            enter: makes the device current in a probe's thread.
        """
        self._staged_tools = staged
        self._done: list[End] = []
        self._direct: _Track[OutboundSlab] = _Track(
            lambda slab: outbound(slab, _known(direct)), self._done, _gate(direct)
        )
        self._staged: _Track[OutboundSlab] = _Track(
            lambda slab: outbound(slab, _known(staged)), self._done, _gate(staged)
        )
        self._inbound: _Track[InboundSlab] = _Track(lambda slab: inbound(slab, _known(target)), self._done, Gate())
        tracks = (self._direct, self._staged, self._inbound)
        self._work = (self._done, *(track.open for track in tracks), *(track.waiting for track in tracks))
        self._counts = staged.lanes if staged is not None else LaneCounts([], [])
        self._ends = ends
        self._probe_address = probe_address
        self._enter = enter
        self._probes_open: set[int] = set()

    @property
    def busy(self) -> bool:
        """See `Runner`."""
        return any(self._work)

    @property
    def copying(self) -> bool:
        """See `Runner`."""
        return any(type(life.wait) is Copied for life in self._direct.open)

    def send(self, slab: OutboundSlab) -> None:
        """See `Runner`. If the gates allow it, the slab's copy begins before this returns."""
        assert slab.effect.way in (Way.DIRECT, Way.STAGED), slab.effect.way
        (self._direct if slab.effect.way is Way.DIRECT else self._staged).put(slab)

    def receive(self, slab: InboundSlab) -> None:
        """See `Runner`."""
        self._inbound.put(slab)

    def probe(self, probe: WireProbe) -> None:
        """See `Runner`. No staged write starts until all probes have ended."""
        tools = _known(self._staged_tools)
        self._probes_open.add(id(probe))
        tools.writes.closed = True

        def run() -> None:
            self._enter()
            self._ends.put(probe_wire(tools, probe, self._probe_address))

        threading.Thread(target=run, name="probe", daemon=True).start()

    def end_probe(self, probe: WireProbe) -> None:
        """See `Runner`. After the last open probe, writes may start again."""
        self._probes_open.discard(id(probe))
        _known(self._staged_tools).writes.closed = bool(self._probes_open)

    def advance(self) -> list[End]:
        """See `Runner`."""
        for track in (self._direct, self._staged, self._inbound):
            if track.open or track.waiting:
                track.advance()
        done = self._done.copy()
        self._done.clear()
        return done

    def hurry(self) -> None:
        """See `Runner`."""
        if self._staged.open:
            self._staged.hurry()

    def drop_cancelled(self) -> None:
        """See `Runner`."""
        for track in (self._direct, self._staged):
            wanted = [*still_wanted(track.waiting, self._done.append)]
            track.waiting.clear()
            track.waiting.extend(wanted)

    def writing(self) -> tuple[OutboundSlab, ...]:
        """See `Runner`."""
        return tuple(life.slab for life in self._staged.open if life.slab.stage is Stage.WRITING)

    def lanes(self) -> tuple[LaneStatus, ...]:
        """See `Runner`. A slab counts for the lane in whose part of the memory it begins, a direct one for lane 0."""
        begun = [life.slab for life in (*self._direct.open, *self._staged.open)]
        return _lane_status(self._counts, {slab.lane for slab in begun if slab.stage is not Stage.WAITING})

    def stop(self) -> None:
        """See `Runner`."""
        for track in (self._direct, self._staged):
            for slab in (*track.waiting, *(life.slab for life in track.open)):
                slab.cancelled = slab.cancelled or slab.stage is not Stage.WRITING
        for life in self._inbound.open:
            # Otherwise a slab whose trailer was wrong would be copied again.
            life.slab.cancelled = True


AnySlab = TypeVar("AnySlab", bound=OutboundSlab | InboundSlab)


class _Life(Generic[AnySlab]):
    """A life that has begun, and its current wait."""

    __slots__ = ("over", "slab", "steps", "wait")

    def __init__(self, slab: AnySlab, steps: Generator[Wait, None, End]) -> None:
        self.slab = slab
        self.steps = steps
        self.wait: Wait = Now()
        self.over = False


class _Track(Generic[AnySlab]):
    """Runs the lives of one kind of slab, in the order in which they arrive.

    Attributes:
        waiting: slabs whose lives have not begun.
        open: lives that have begun and not ended, the oldest first.
    """

    def __init__(self, begin: Callable[[AnySlab], Generator[Wait, None, End]], done: list[End], gate: Gate) -> None:
        self.waiting: deque[AnySlab] = deque()
        self.open: list[_Life[AnySlab]] = []
        self._begin = begin
        self._done = done
        self._gate = gate

    def put(self, slab: AnySlab) -> None:
        """Queue a slab and advance the track: the first of an offer's many slabs need not wait for the last."""
        self.waiting.append(slab)
        self.advance()

    def advance(self) -> None:
        """Resume the lives whose waits have passed, oldest first: its write starts before younger copies begin."""
        copying = compiling = False
        for life in self.open.copy():
            # Copies of one stream end in their order. Compiled kernels arrive in the order of their requests.
            kind = type(life.wait)
            if (copying and kind is Copied) or (compiling and kind is Compiled and not life.slab.cancelled):
                continue
            if life.wait.passed():
                self._resume(life)
                kind = type(life.wait)
            if not life.over:
                copying = copying or kind is Copied
                compiling = compiling or kind is Compiled
        self._begin_next()

    def hurry(self) -> None:
        """Poll the oldest write. If it has ended, start the next write and begin the lives that now may."""
        if self._hurry(None):
            self._begin_next()

    def _begin_next(self) -> None:
        while self.waiting and (self._gate.is_free or self.waiting[0].cancelled):
            slab = self.waiting.popleft()
            life = _Life(slab, self._begin(slab))
            self.open.append(life)
            self._resume(life)

    def _hurry(self, youngest: _Life[AnySlab] | None) -> bool:
        """Resume the oldest write and each life that can start one, up to `youngest`; return whether a write ended."""
        ended = looked = False
        for life in self.open.copy():
            if life is youngest:
                break
            is_write = type(life.wait) is Written
            if life.over or (looked and is_write) or self._follows_copy(life):
                continue
            if life.wait.passed():
                self._resume(life)
            if is_write:
                ended = ended or life.over
                looked = not life.over
        return ended

    def _follows_copy(self, life: _Life[AnySlab]) -> bool:
        """Whether a life waits for a copy that follows an older life's copy in the stream."""
        if type(life.wait) is not Copied:
            return False
        for older in self.open:
            if older is life:
                break
            if type(older.wait) is Copied:
                return True
        return False

    def _resume(self, life: _Life[AnySlab]) -> None:
        """Run a life whose wait has passed until it waits for something that has not."""
        while True:
            try:
                life.wait = next(life.steps)
            except StopIteration as stop:
                life.over = True
                self.open.remove(life)
                self._done.append(stop.value)
                return
            kind = type(life.wait)
            if kind is Compiled or self._follows_copy(life):
                return
            if kind is Now:
                # The submit just now took time in which a write may have ended.
                self._hurry(life)
            if not life.wait.passed():
                return


def _lane_status(counts: LaneCounts, busy: set[int]) -> tuple[LaneStatus, ...]:
    return tuple(
        LaneStatus(index, index in busy, counts.slabs[index], counts.payload_bytes[index])
        for index in range(len(counts.slabs))
    )


Known = TypeVar("Known")


def _known(tools: Known | None) -> Known:
    assert tools is not None, "a slab of a half that this worker does not serve"
    return tools


def _gate(tools: OutboundTools | None) -> Gate:
    return Gate() if tools is None else tools.copies
