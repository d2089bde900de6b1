"""Leaves nothing behind: an interrupt, or the death of a part, unwinds a command in order; a last sweep ends what is left.

Called by `bench`, `demo` and `up` around everything else. Knows processes only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from longshore_wire.errors import LongshoreError, Reason

_PR_SET_CHILD_SUBREAPER = 36
# A killed process is gone within milliseconds, unless the kernel holds it.
_SWEEP_LIMIT_S = 10.0
_LOOK_S = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A thread of this process sends it to the main thread, whatever that waits for.
_PART_ENDED = signal.SIGUSR1
# As shells do.
_SIGNAL_STATUS = 128


class InterruptedBySignal(BaseException):
    """The user asked for the end. As KeyboardInterrupt no error, so that no handler of errors takes it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a command that a signal ended."""
        return _SIGNAL_STATUS + self.number


class PartEndedError(LongshoreError):
    """A process that a command needs to its end has ended; names it."""

    reason = Reason.WORKER_LOST


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into InterruptedBySignal; later ones do not disturb the cleaning up."""

    def raise_once(number: int, _frame: FrameType | None) -> None:
        _ignore_more()
        raise InterruptedBySignal(number)

    before = {number: signal.signal(number, raise_once) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_more() -> None:
    """Let nothing disturb the cleaning up."""
    for each in (*_SIGNALS, _PART_ENDED):
        signal.signal(each, signal.SIG_IGN)


@dataclass(frozen=True)
class _Part:
    """A process under watch: `name` is what messages call it, `log` returns its last words, `status` how it ended, if that is known."""

    pid: int
    name: str
    log: Callable[[], str]
    status: Callable[[], int | None]


def _unknown() -> int | None:
    return None


class Watch:
    """Processes that must not end; made by `parts_watched`, and used by the main thread.

    Attributes:
        lost: that the first of them has ended; None: none has.
    """

    def __init__(self) -> None:
        self.lost: PartEndedError | None = None
        self._parts: dict[int, _Part] = {}
        self._lock = threading.Lock()
        self._poller = select.epoll()
        self._end = os.eventfd(0)
        self._poller.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, args=(threading.get_ident(),), name="watch", daemon=True)
        self._thread.start()

    def add(
        self, pid: int, name: str, log: Callable[[], str] = str, status: Callable[[], int | None] = _unknown
    ) -> Callable[[], None]:
        """Watch a process; return what ends that, to be called before the process is asked to end.

        Args:
            status: of a child that somebody else may wait for first.
        Raises:
            PartEndedError: it is gone already.
        """
        part = _Part(pid, name, log, status)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise PartEndedError(_said(part, None)) from error
        with self._lock:
            self._parts[pidfd] = part
        self._poller.register(pidfd, select.EPOLLIN)
        return lambda: self._forget(pidfd)

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for pidfd in list(self._parts):
            self._forget(pidfd)
        self._poller.close()
        os.close(self._end)

    def _forget(self, pidfd: int) -> None:
        # Its end may have come a moment ago, and the thread may not have run since.
        if select.select([pidfd], [], [], 0)[0]:
            self._note(pidfd)
        self._poller.unregister(pidfd)
        with self._lock:
            del self._parts[pidfd]
            os.close(pidfd)

    def _note(self, pidfd: int) -> bool:
        """Keep the first end; return whether this was one of a part under watch."""
        with self._lock:
            part = self._parts.get(pidfd)
            if part is not None and self.lost is None:
                status = _status(pidfd)
                self.lost = PartEndedError(_said(part, part.status() if status is None else status))
            return part is not None

    def _run(self, main_thread: int) -> None:
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._end:
                    return
                if self._note(descriptor):
                    signal.pthread_kill(main_thread, _PART_ENDED)
                    return


@contextlib.contextmanager
def parts_watched() -> Iterator[Watch]:
    """Raise PartEndedError in the main thread, in whatever it waits, when a process under watch ends.

    It also takes the place of an error that such an end has caused. Used inside `interrupts_raised`, whose signals it
    makes harmless when it raises.
    """
    watch = Watch()

    def raise_once(_number: int, _frame: FrameType | None) -> None:
        _ignore_more()
        assert watch.lost is not None
        raise watch.lost

    before = signal.signal(_PART_ENDED, raise_once)
    try:
        yield watch
    except Exception as error:
        if watch.lost is not None and watch.lost is not error:
            raise watch.lost from error
        raise
    finally:
        signal.signal(_PART_ENDED, signal.SIG_IGN)
        watch.close()
        signal.signal(_PART_ENDED, before)
    if watch.lost is not None:
        raise watch.lost


def _status(pidfd: int) -> int | None:
    """Return how a child ended, negative for a signal, and leave it to be waited for; None: it is no child.

    Its descriptor has said that it ended. The kernel may let it be waited for a moment later.
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    assert found is not None, "waiting without WNOHANG returns an end"
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _said(part: _Part, status: int | None) -> str:
    how, log = "" if status is None else f" with {status}", part.log()
    return f"{part.name} ended{how}:\n{log}" if log else f"{part.name} ended{how}"


@contextlib.contextmanager
def descendants_ended() -> Iterator[list[int]]:
    """End what still runs of this process's descendants when the block is left; yields a list that then holds their PIDs.

    Children whose parents died come to this process meanwhile, so that none of them can hide.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, ended = _descendants(), list[int]()
    try:
        yield ended
    finally:
        deadline_s = time.monotonic() + _SWEEP_LIMIT_S
        while (left := _descendants() - before) and time.monotonic() < deadline_s:
            for pid in left:
                _end(pid, ended)
            time.sleep(_LOOK_S)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end(pid: int, ended: list[int]) -> None:
    """Reap a child that is dead; kill any other process."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        if pid not in ended:
            ended.append(pid)


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything; the parent is the second field after it.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    open_pids = [os.getpid()]
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            if child not in found:
                found.add(child)
                open_pids.append(child)
    return found
