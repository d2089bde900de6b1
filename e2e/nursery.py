"""Starts engines by fork and ends all of their processes. Run by the engine's interpreter; reads one command a line from stdin.

Importing an engine takes ten seconds of a core in every process of it. This process imports it once; an engine is a fork
of it, runs its usual command line, and forks its own processes where it would spawn them. Nothing else is changed. The
first argument is a file with `import_engine()` and `run(arguments)` for one kind of engine.

Each engine has a keeper, a process that adopts the engine's orphans. So no process of an engine outlives the command to
end it, or the death of the process that sends commands. Called by `nurseries`.

    {"start": {"arguments": ["serve", ...], "environment": {...}, "log": path}}   answered by {"pid": of the keeper};
                       with "program": path, that is run instead of a fork
    {"kill": pid}      SIGKILL to every process of the engine at once; answered when they are gone
    {"look": pid}      answered by {"processes": ids of the engine's processes}; empty when it has ended
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.02
# Killed processes end at once, unless the kernel must first write their memory out.
_END_LIMIT_S = 30.0
# Niceness of engines relative to other processes: the maximum.
_STAND_BACK = 19
_SESSION_NICENESS = Path("/proc/self/autogroup")


def main() -> None:
    """Import the engine, report that, and execute commands until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Output of the engine must not be read as an answer.
    _tie_to_parent(signal.SIGTERM)
    program = Path(sys.argv[1])
    sys.path.insert(0, str(program.parent))
    importlib.import_module(program.stem).import_engine()
    multiprocessing.get_context = _fork_instead_of_spawn  # type: ignore[assignment]
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_start_method
    keepers: set[int] = set()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C and then closes our input.
    try:
        _answer(answers, {"ready": True})
        for line in sys.stdin:
            _answer(answers, _obey(json.loads(line), keepers))
    finally:
        _end_keepers(keepers)


def _obey(command: dict[str, Any], keepers: set[int]) -> dict[str, Any]:
    match command:
        case {"start": order}:
            pid = os.fork()
            if pid == 0:
                try:
                    _keep(order)
                finally:
                    os._exit(1)  # Nothing of a fork may unwind into the loop that serves commands.
            keepers.add(pid)
            return {"pid": pid}
        case {"kill": int(pid)}:
            _end_keepers(keepers & {pid})
            keepers.discard(pid)
            return {}
        case {"look": int(pid)}:
            if pid in keepers and os.waitpid(pid, os.WNOHANG)[0] == pid:
                keepers.discard(pid)
            return {"processes": sorted(_descendants(pid)) if pid in keepers else []}
    raise ValueError(f"unknown command {command}")


def _keep(order: dict[str, Any]) -> NoReturn:
    """Run one engine as its keeper: adopt its orphans, and kill the rest when it ends or SIGTERM arrives."""
    _tie_to_parent(signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()
    _stand_back()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, _leave)
    engine = os.fork()
    if engine == 0:
        _be_engine(order)
    shared: set[int] = set()
    try:
        while os.waitpid(engine, os.WNOHANG)[0] == 0:
            time.sleep(_LOOK_S)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline_s = time.monotonic() + _END_LIMIT_S
        while (left := _descendants(os.getpid())) and time.monotonic() < deadline_s:
            for pid in left:
                shared |= _shared_memory(pid)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(_LOOK_S)
        _remove(shared)
        os._exit(0)


def _stand_back() -> None:
    """Lower this session's priority, so that its engine cannot starve agents and tests.

    Ranks of one engine wait for each other by yielding the processor again and again. On two processors Linux 6.18 then
    let other sessions wait for up to 37 s, agents among them.
    """
    os.nice(_STAND_BACK)
    # If the scheduler first divides the processors between sessions, each session has its own niceness.
    if _SESSION_NICENESS.exists():
        _SESSION_NICENESS.write_text(str(_STAND_BACK))


def _be_engine(order: dict[str, Any]) -> NoReturn:
    _tie_to_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["environment"])
    if "program" in order:
        os.execv(order["program"], [order["program"], *order["arguments"]])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    status = 1
    try:
        importlib.import_module(Path(sys.argv[1]).stem).run(order["arguments"])
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 -- the end of a process: its traceback goes to the log
        import traceback

        traceback.print_exc()
    os._exit(status)


_get_context = multiprocessing.get_context


def _fork_instead_of_spawn(method: str | None = None) -> Any:
    return _get_context("fork" if method == "spawn" else method)


def _keep_start_method(method: str | None, *, force: bool = False) -> None:
    """Do nothing: engines choose to spawn."""


def _tie_to_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _leave(*_ignored: object) -> NoReturn:
    # An exception unwinds the running code, whose `finally` blocks end all processes.
    raise SystemExit(0)


def _end_keepers(pids: set[int]) -> None:
    """End all keepers with their engines concurrently, since freeing memory takes seconds on a busy machine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _answer(descriptor: int, value: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(value).encode() + b"\n")


def _shared_memory(pid: int) -> set[int]:
    """Return the inodes in shared memory that a process maps; an engine's are left behind by a kill.

    Paths would not work, because a semaphore is created under a temporary name.
    """
    found = set()
    with contextlib.suppress(OSError):
        for line in (Path("/proc") / str(pid) / "maps").read_text(encoding="utf-8").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) > 5 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                found.add(int(fields[4]))
    return found


def _remove(inodes: set[int]) -> None:
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_ino in inodes:
                path.unlink()


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may contain any character. State and parent are the next fields.
                state, parent = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


if __name__ == "__main__":
    main()
