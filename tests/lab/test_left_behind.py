"""Tests that shared memory left by a command is found, and that memory of a process beside it is not."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import left_behind
import pytest
from left_behind import marked

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path like those of UCX, in a directory where tests that run beside this one do not look for leftovers."""
    monkeypatch.setattr(left_behind, "SHARED", tmp_path)
    return tmp_path / "ucx_shm_posix_6b068a98"


def test_shared_memory_that_no_process_uses_any_more_is_left(path: Path) -> None:
    with marked(["-c", f"open({str(path)!r}, 'wb').write(bytes(4096))"]) as run:
        run.read_rest()
        assert run.left() == [str(path)]
        path.unlink()
        assert run.left() == []


def opened(path: Path) -> Callable[[], None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    return lambda: os.close(descriptor)


def mapped(path: Path) -> Callable[[], None]:
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096).close


@pytest.mark.parametrize("use", [opened, mapped])
def test_shared_memory_of_a_process_beside_the_command_is_not_left_by_it(
    path: Path, use: Callable[[Path], Callable[[], None]]
) -> None:
    with marked(["-c", "pass"]) as run:
        run.read_rest()
        end = use(path)
        assert run.left() == []
        end()
        assert run.left() == [str(path)]


def test_a_process_that_still_runs_is_left(path: Path) -> None:
    with marked(["-c", SLEEPS]) as run:
        run.read_until("ready")
        (left,) = run.left()
        assert left.startswith(f"{run.process.pid} ")
