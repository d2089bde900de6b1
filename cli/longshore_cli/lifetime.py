"""Leaves nothing behind: an interrupt unwinds a command in order, and what its parts forgot is ended here, by its PID.

Called by `demo` and `up` around everything else. Knows processes only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
# A killed process is gone within milliseconds, unless the kernel holds it.
_SWEEP_LIMIT_S = 10.0
_LOOK_S = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedBySignal(BaseException):
    """The user asked for the end. As KeyboardInterrupt no error, so that no handler of errors takes it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into InterruptedBySignal; later ones do not disturb the cleaning up."""

    def raise_once(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise InterruptedBySignal(number)

    before = {number: signal.signal(number, raise_once) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
