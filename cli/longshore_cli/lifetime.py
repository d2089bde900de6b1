"""Cleans up a command's processes. A signal or the end of a needed process unwinds the command; the rest is killed last.

Called by `bench`, `demo` and `up` around all of their work. Handles processes only.
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
# A killed process ends within milliseconds unless it is stuck in the kernel.
_SWEEP_LIMIT_S = 10.0
_LOOK_S = 0.01
# Python loses a signal that arrives between its last look for signals and the system call of a wait. The signal then
# interrupts nothing, so it is sent again until the main thread has handled it.
_REPEAT_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A thread of this process sends this signal to interrupt any wait of the main thread.
_PART_ENDED = signal.SIGUSR1
# Shells use the same base for the exit status after a signal.
SIGNAL_STATUS = 128


class InterruptedBySignal(BaseException):
    """The user ended the command by a signal. Like KeyboardInterrupt not an Exception, so that no error handler catches it.

    Attributes:
        number: the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a command that a signal ended."""
        return SIGNAL_STATUS + self.number


class PartEndedError(LongshoreError):
    """A process that a command needs until its end has ended; names the process."""

    reason = Reason.WORKER_LOST


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Raise InterruptedBySignal at the first SIGINT, SIGTERM or SIGHUP. Later ones are ignored during the cleanup."""

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
    """Ignore further signals during the cleanup."""
    for each in (*_SIGNALS, _PART_ENDED):
        signal.signal(each, signal.SIG_IGN)


@dataclass(frozen=True)
class _Part:
    """A watched process. `name` is for messages; `log` returns the end of its log, `status` its exit status if known."""

    pid: int
    name: str
    log: Callable[[], str]
    status: Callable[[], int | None]


def _unknown() -> int | None:
    return None


class Watch:
    """Watches processes that must not end. Made by `parts_watched`, used by the main thread.

    Attributes:
        lost: the error of the first process that ended; None if none has.
    """

    def __init__(self) -> None:
        self.lost: PartEndedError | None = None
        self._parts: dict[int, _Part] = {}
        self._lock = threading.Lock()
        self._raised = threading.Event()
        self._poller = select.epoll()
        self._end = os.eventfd(0)
        self._poller.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, args=(threading.get_ident(),), name="watch", daemon=True)
        self._thread.start()

    def add(
        self, pid: int, name: str, log: Callable[[], str] = str, status: Callable[[], int | None] = _unknown
    ) -> Callable[[], None]:
        """Watch a process; return a function that ends the watch. Call it before you end the process.

        Args:
            status: returns the exit status of an ended child that other code may reap first.
        Raises:
            PartEndedError: the process has already ended.
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

    def raised(self) -> PartEndedError:
        """Return the error to raise. Called by the handler of the signal."""
        assert self.lost is not None
        self._raised.set()
        return self.lost

    def close(self) -> None:
        """Stop the thread."""
        self._raised.set()
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for pidfd in list(self._parts):
            self._forget(pidfd)
        self._poller.close()
        os.close(self._end)

    def _forget(self, pidfd: int) -> None:
        # It may have just ended, before the thread noticed.
        if select.select([pidfd], [], [], 0)[0]:
            self._note(pidfd)
        self._poller.unregister(pidfd)
        with self._lock:
            del self._parts[pidfd]
            os.close(pidfd)

    def _note(self, pidfd: int) -> bool:
        """Record the first end of a watched process; return whether the process was still watched."""
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
                    while not self._raised.wait(_REPEAT_S):
                        signal.pthread_kill(main_thread, _PART_ENDED)
                    return


@contextlib.contextmanager
def parts_watched() -> Iterator[Watch]:
    """Raise PartEndedError in the main thread, during any wait, when a watched process ends.

    It also replaces an error that such an end has caused. Use it inside `interrupts_raised`; after it raises, that one's
    signals are ignored.
    """
    watch = Watch()

    def raise_once(_number: int, _frame: FrameType | None) -> None:
        _ignore_more()
        raise watch.raised()

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
    """Return a child's exit status, negative for a signal, without reaping it; None if it is no child.

    Its pidfd is already readable, but the kernel may make it waitable slightly later.
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
    """Kill all running descendants at the end of the block; yield a list that then holds their PIDs.

    During the block this process adopts orphaned descendants, so that all of them are found.
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
                # The name in parentheses may contain any character. The parent is the second field after it.
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
