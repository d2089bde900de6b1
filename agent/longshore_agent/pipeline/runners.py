"""Run the lives of slabs: `ThreadRunner` by threads that wait, `EventRunner` by the control thread, which polls.

Made by the worker. A CPU copies in a thread, so threads run its lives. A GPU copies by itself, so the control thread runs its
lives: no thread waits for another, and the wire never waits for a thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

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
    dropped,
)
from longshore_agent.pipeline.stage_log import StageLog
from longshore_agent.pipeline.waits import Compiled, Copied, Gate, Now, Wait, Written
from longshore_agent.status.snapshot import LaneStatus
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.plan import Way

# Copies that a GPU is given before the wire is ready for them: the next slab and the one after it. More would only put off
# the first write, since each takes the control thread as long to queue as it takes the device to do.
COPIES_AHEAD_MAX = 2
# Staged writes in flight: the wire never waits for this thread to begin the next, and the first to begin is the first to land.
WRITES_OPEN_MAX = 3
# Direct copies that a GPU is given: all that one pair may have under way by default, so that the device never waits for this
# thread. Alone each takes 0.7 ms, after which a room that was given up, or an engine that left, waits no longer.
DIRECT_COPIES_MAX = 16

# A thread waits so long for a write without a pause: most are over by then, and a pause costs more than it saves.
_TIGHT_NS = 2_000_000
_PAUSE_MIN_S = 0.00005
_PAUSE_MAX_S = 0.002

SlabEnd = TypeVar("SlabEnd", OutboundEnd, InboundEnd)


class Runner(Protocol):
    """Runs all lives of one worker. Called by the control thread."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do."""

    @property
    def copying(self) -> bool:
        """Whether direct copies are under way whose end only `turn` notices."""

    def send(self, slab: OutboundSlab) -> None:
        """Begin the life of a slab at its source, or queue it."""

    def receive(self, slab: InboundSlab) -> None:
        """Begin the life of a slab at its target, or queue it."""

    def probe(self, probe: WireProbe) -> None:
        """Begin to find out a wire; the end comes through `Ends`."""

    def probed(self, probe: WireProbe) -> None:
        """A probe's end has been taken."""

    def turn(self) -> list[End]:
        """Resume what can go on; return the lives that have ended since the last turn. Raises DeviceError."""

    def hurry(self) -> None:
        """Between two other things that the thread does: end the oldest write if it is over, and begin the next."""

    def drop_cancelled(self) -> None:
        """Slabs have been cancelled: end those that wait for others before them."""

    def writing(self) -> tuple[OutboundSlab, ...]:
        """Return the slabs whose writes are open."""

    def lanes(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done."""

    def stop(self) -> None:
        """Begin no copy and no write on a device any more."""

    def close(self) -> None:
        """Let threads end once they have nothing to do."""


def probe_wire(tools: OutboundTools, probe: WireProbe, source_address: int) -> ProbeEnd:
    """Find out what bytes to a peer travel over. Blocks for some seconds at most."""
    region = probe.region
    try:
        wire = tools.transport.probe_wire(probe.peer_name, source_address, region.address, region.length_bytes)
    except TransportError as error:
        return ProbeEnd(probe, UNKNOWN_WIRE, str(error))
    return ProbeEnd(probe, wire.value)


class ThreadRunner:
    """Lanes and scatter threads. Each lane has staging memory of its own and takes slabs from one queue.

    So all lanes work for a single pair when there is only one, and one lane's write overlaps another's copy. Grants and
    the window of writes in place bound the queues.
    """

    busy = False
    copying = False

    def __init__(
        self, sources: Sequence[OutboundTools], targets: Sequence[InboundTools], ends: Ends, *, probe_address: int
    ) -> None:
        """Start a thread for each tools.

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
        """See `Runner`. A lane does it."""
        self._outbound.put(probe)

    def probed(self, probe: WireProbe) -> None:
        """See `Runner`."""

    def turn(self) -> list[End]:
        """See `Runner`. Threads need nothing."""
        return []

    def hurry(self) -> None:
        """See `Runner`."""

    def drop_cancelled(self) -> None:
        """See `Runner`. Lanes look by themselves."""

    def writing(self) -> tuple[OutboundSlab, ...]:
        """See `Runner`."""
        return tuple(slab for slab in self._open if slab is not None and slab.stage is Stage.WRITING)

    def lanes(self) -> tuple[LaneStatus, ...]:
        """See `Runner`."""
        return _lane_status(self._counts, {index for index, slab in enumerate(self._open) if slab is not None})

    def stop(self) -> None:
        """See `Runner`. No device copies here."""

    def close(self) -> None:
        """See `Runner`. Threads that still write end with the process."""
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
            end = lived(outbound(slab, tools))
            self._open[index] = None
            self._ends.put(end)

    def _run_inbound(self, tools: InboundTools) -> None:
        while (slab := self._inbound.get()) is not None:
            self._ends.put(lived(inbound(slab, tools)))


def lived(life: Generator[Wait, None, SlabEnd]) -> SlabEnd:
    """Run a life to its end in the calling thread."""
    while True:
        try:
            wait = next(life)
        except StopIteration as stop:
            end: SlabEnd = stop.value
            return end
        sleep_until(wait)


def sleep_until(wait: Wait) -> None:
    """Return when the wait has passed: ask tightly at first, then with pauses."""
    if wait.passed():
        return
    deadline_ns = time.monotonic_ns() + _TIGHT_NS
    pause_s = _PAUSE_MIN_S
    while not wait.passed():
        if time.monotonic_ns() > deadline_ns:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        else:
            # Other lanes copy meanwhile, and want Python's lock.
            time.sleep(0)


class EventRunner:
    """Lives that the control thread resumes: in each track the oldest slab first, so that the wire never stands still."""

    def __init__(
        self,
        direct: OutboundTools | None,
        staged: OutboundTools | None,
        target: InboundTools | None,
        ends: Ends,
        log: StageLog,
        *,
        probe_address: int,
        enter: Callable[[], None],
    ) -> None:
        """Begin with no slab.

        Args:
            direct, staged: of a source.
            target: None: no slab lands here.
            ends: where the ends of probes go, each of which has a thread of its own.
            log: of all tools.
            enter: makes the device current for such a thread.
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
        self._counts = staged.lanes if staged is not None else LaneCounts([], [])
        self._ends = ends
        self._log = log
        self._probe_address = probe_address
        self._enter = enter
        self._probes_open: set[int] = set()

    @property
    def busy(self) -> bool:
        """See `Runner`."""
        return bool(self._direct.busy or self._staged.busy or self._inbound.busy or self._done or self._log)

    @property
    def copying(self) -> bool:
        """See `Runner`."""
        return any(isinstance(life.wait, Copied) for life in self._direct.open)

    def send(self, slab: OutboundSlab) -> None:
        """See `Runner`. The device and the wire begin at once what they can."""
        assert slab.effect.way in (Way.DIRECT, Way.STAGED), slab.effect.way
        (self._direct if slab.effect.way is Way.DIRECT else self._staged).put(slab)

    def receive(self, slab: InboundSlab) -> None:
        """See `Runner`."""
        self._inbound.put(slab)

    def probe(self, probe: WireProbe) -> None:
        """See `Runner`. No write begins meanwhile."""
        tools = _known(self._staged_tools)
        self._probes_open.add(id(probe))
        tools.writes.closed = True

        def run() -> None:
            self._enter()
            self._ends.put(probe_wire(tools, probe, self._probe_address))

        threading.Thread(target=run, name="probe", daemon=True).start()

    def probed(self, probe: WireProbe) -> None:
        """See `Runner`. Writes may begin again."""
        self._probes_open.discard(id(probe))
        _known(self._staged_tools).writes.closed = bool(self._probes_open)

    def turn(self) -> list[End]:
        """See `Runner`."""
        for track in (self._direct, self._staged, self._inbound):
            if track.busy:
                track.advance()
        if not self._done and not self._staged.busy and not self._inbound.busy:
            # The device needs nothing of this thread meanwhile.
            self._log.write_one()
        done = list(self._done)
        self._done.clear()
        return done

    def hurry(self) -> None:
        """See `Runner`."""
        if self._staged.open:
            self._staged.hurry()

    def drop_cancelled(self) -> None:
        """See `Runner`."""
        for track in (self._direct, self._staged):
            track.drop_cancelled()

    def writing(self) -> tuple[OutboundSlab, ...]:
        """See `Runner`."""
        return tuple(life.slab for life in self._staged.open if life.slab.stage is Stage.WRITING)

    def lanes(self) -> tuple[LaneStatus, ...]:
        """See `Runner`. A slab counts for the lane in whose part of the memory it began; direct copies for the first."""
        begun = [life.slab for life in (*self._direct.open, *self._staged.open)]
        return _lane_status(self._counts, {slab.lane for slab in begun if slab.stage is not Stage.WAITING})

    def stop(self) -> None:
        """See `Runner`."""
        for track in (self._direct, self._staged):
            for slab in (*track.waiting, *(life.slab for life in track.open)):
                slab.cancelled = slab.cancelled or slab.stage is not Stage.WRITING
        for life in self._inbound.open:
            # A slab whose trailer was refused would be copied again.
            life.slab.cancelled = True

    def close(self) -> None:
        """See `Runner`."""


AnySlab = TypeVar("AnySlab", bound=OutboundSlab | InboundSlab)


class _Life(Generic[AnySlab]):
    """One life and what it waits for."""

    __slots__ = ("over", "run", "slab", "wait")

    def __init__(self, slab: AnySlab, run: Generator[Wait, None, End]) -> None:
        self.slab = slab
        self.run = run
        self.wait: Wait = Now()
        self.over = False


class _Track(Generic[AnySlab]):
    """Slabs that go one after the other.

    Attributes:
        waiting: slabs whose lives have not begun.
        open: lives that have begun, the oldest first.
    """

    def __init__(self, begin: Callable[[AnySlab], Generator[Wait, None, End]], done: list[End], gate: Gate) -> None:
        self.waiting: deque[AnySlab] = deque()
        self.open: list[_Life[AnySlab]] = []
        self._begin = begin
        self._done = done
        self._gate = gate

    @property
    def busy(self) -> bool:
        """Whether a slab is here."""
        return bool(self.waiting or self.open)

    def put(self, slab: AnySlab) -> None:
        """Queue a slab, and begin what can begin: an offer brings many slabs at once."""
        self.waiting.append(slab)
        self.advance()

    def advance(self) -> None:
        """Resume all lives that can go on, the oldest first: its write leaves before younger copies begin."""
        copying = compiling = False
        for life in list(self.open):
            # One stream does copies in their order, and kernels come in the order in which they were asked for.
            waits_for_older = compiling and isinstance(life.wait, Compiled) and not life.slab.cancelled
            if waits_for_older or (copying and isinstance(life.wait, Copied)):
                continue
            self._resume(life)
            if not life.over:
                copying = copying or isinstance(life.wait, Copied)
                compiling = compiling or isinstance(life.wait, Compiled)
        self._begin_next()

    def hurry(self) -> None:
        """Look at the oldest write alone; where it is over, begin what can begin."""
        if self._hurry(None):
            self._begin_next()

    def drop_cancelled(self) -> None:
        """End cancelled slabs that have not begun, whatever waits before them."""
        for slab in [slab for slab in self.waiting if slab.cancelled]:
            self.waiting.remove(slab)
            assert isinstance(slab, OutboundSlab)
            self._done.append(dropped(slab))

    def _begin_next(self) -> None:
        while self.waiting and (self._gate.is_free or self.waiting[0].cancelled):
            slab = self.waiting.popleft()
            life = _Life(slab, self._begin(slab))
            self.open.append(life)
            self._resume(life)

    def _hurry(self, youngest: _Life[AnySlab] | None) -> bool:
        """Resume the oldest write, and older lives than `youngest` that may begin theirs; return whether a write ended."""
        ended = looked = False
        for life in list(self.open):
            if life is youngest:
                break
            if life.over or (looked and isinstance(life.wait, Written)) or self._follows_copy(life):
                continue
            if isinstance(life.wait, Written):
                self._resume(life)
                ended = ended or life.over
                looked = not life.over
            else:
                self._resume(life)
        return ended

    def _follows_copy(self, life: _Life[AnySlab]) -> bool:
        """Whether a life waits for a copy that its stream does after an older life's."""
        if not isinstance(life.wait, Copied):
            return False
        older = itertools.takewhile(lambda each: each is not life, self.open)
        return any(isinstance(each.wait, Copied) for each in older)

    def _resume(self, life: _Life[AnySlab]) -> None:
        """Let a life go on until it waits."""
        while not life.over and life.wait.passed():
            try:
                life.wait = next(life.run)
            except StopIteration as stop:
                life.over = True
                self.open.remove(life)
                self._done.append(stop.value)
                return
            if isinstance(life.wait, Compiled) or self._follows_copy(life):
                return
            if isinstance(life.wait, Now):
                # The wire stands still meanwhile.
                self._hurry(life)


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
