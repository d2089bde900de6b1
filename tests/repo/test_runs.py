"""Tests, in separate runs of pytest with the tree's conftest, what fails a run, and that a run leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_world import wait_for, wait_for_none
from left_behind import marked
from tree_of_files import ROOT

SKIPS = {
    "mark": "import pytest\n@pytest.mark.skip(reason='tired')\ndef test_it(): pass\n",
    "call": "import pytest\ndef test_it(): pytest.skip('tired')\n",
    "module": "import pytest\npytest.importorskip('no_such_module_tired')\ndef test_it(): pass\n",
    "expected failure": "import pytest\n@pytest.mark.xfail(reason='tired')\ndef test_it(): assert False\n",
}


LIMIT_S = 120.0
FURTHER = pytest.mark.rest("storms")
# An agent, a network namespace, a file in shared memory, and a semaphore; they exist when the file of this name does, which
# has the path of the semaphore.
STARTS = """
import multiprocessing, os, subprocess, time
from pathlib import Path
from agent_world import Agent

def test_it(tmp_path):
    held = multiprocessing.get_context("forkserver").Semaphore()
    assert Agent(tmp_path / "agent").http
    inside = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo ready && exec sleep 600"]
    assert subprocess.Popen(inside, stdout=subprocess.PIPE).stdout.readline() == b"ready\\n"
    with open(f"/dev/shm/longshore-{os.getpid()}", "xb"):
        written = Path(os.environ["STARTED"] + ".new")
        written.write_text("/dev/shm/sem." + held._semlock.name.lstrip("/"))
        written.rename(os.environ["STARTED"])
        time.sleep(600)
"""

# Each test takes so long that two processes would share them.
SHARES = """
import os, time
from pathlib import Path
import pytest

MADE = Path(__file__).parent / "made"

@pytest.fixture(scope="module")
def shared():
    with MADE.open("a") as made:
        made.write(f"{os.environ['PYTEST_XDIST_WORKER']}\\n")

@pytest.mark.parametrize("number", range(20))
def test_it(shared, number): time.sleep(0.05)
"""


def write(folder: Path, test: str, allowed: str = "") -> None:
    for name in ("conftest.py", "left_behind.py"):
        shutil.copy(ROOT / "tests" / name, folder / name)
    (folder / "allowed_skips.txt").write_text(allowed, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_one.py").write_text(test, encoding="utf-8")


def run_pytest(folder: Path, test: str, allowed: str, *options: str) -> subprocess.CompletedProcess[str]:
    write(folder, test, allowed)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # No installed plugin is needed here, and loading all of them takes longer than the run.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("kind", SKIPS)
def test_a_skip_that_nobody_allowed_fails_the_run_and_gives_its_reason(kind: str, tmp_path: Path) -> None:
    done = run_pytest(tmp_path, SKIPS[kind], "")
    assert done.returncode != 0
    assert "allowed_skips.txt does not allow it" in done.stdout
    assert "tired" in done.stdout


@pytest.mark.parametrize("kind", ["mark", "call", "expected failure"])
def test_a_skip_that_the_list_allows_passes(kind: str, tmp_path: Path) -> None:
    assert run_pytest(tmp_path, SKIPS[kind], "test_one.py::*  there is a reason\n").returncode == 0


def test_a_line_of_the_list_without_a_reason_is_refused(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_it(): pass\n", "test_one.py::*\n")
    assert done.returncode != 0
    assert "reason" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=FURTHER), signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("processes", [2, pytest.param(0, marks=FURTHER)])
def test_a_run_that_is_ended_leaves_no_process_no_network_and_no_shared_memory(
    processes: int, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run is none of this run's parts.
    for name in ("PYTEST_RUN_MARK", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    write(tmp_path, STARTS)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), "--rootdir", str(tmp_path)]
    with marked([*words, str(tmp_path)]) as run:
        wait_for((tmp_path / "started").exists, LIMIT_S, "the test")
        assert any("longshore_agent" in line for line in run.processes())
        semaphore = Path((tmp_path / "started").read_text(encoding="utf-8"))
        assert semaphore.exists()
        run.process.send_signal(number)
        # pytest keeps the directories of its tests.
        wait_for_none(lambda: [line for line in run.left() if not line.startswith(str(run.directory))], LIMIT_S)
        wait_for_none(lambda: [str(semaphore)] if semaphore.exists() else [], LIMIT_S)


def test_a_semaphore_that_another_process_holds_is_no_leftover() -> None:
    with marked(["-c", ""]) as run:
        held = multiprocessing.get_context("forkserver").Semaphore()
        run.process.wait()
        assert run.left() == []
        del held


@pytest.mark.slow
def test_a_run_fails_if_a_test_leaves_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_RUN_MARK", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    test = "import subprocess\ndef test_it(): subprocess.Popen(['sleep', '600'])\n"
    done = run_pytest(tmp_path, test, "")
    assert done.returncode == 1, done.stdout
    assert "left running by the tests: " in done.stdout
    assert "sleep 600" in done.stdout


def test_tests_that_share_what_a_module_makes_run_in_one_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_RUN_MARK", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    done = run_pytest(tmp_path, SHARES, "", "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    assert len((tmp_path / "made").read_text(encoding="utf-8").split()) == 1


def test_tests_on_gpus_are_left_out_of_a_run_without_the_rest_and_share_a_process_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_RUN_MARK", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    test = SHARES.replace(
        '@pytest.mark.parametrize("number"', '@pytest.mark.gpu\n@pytest.mark.parametrize("number"'
    ).replace("(shared, number)", "(number)")
    done = run_pytest(tmp_path, test, "", "--rest", "none")
    assert "20 deselected" in done.stdout
    done = run_pytest(tmp_path, test, "", "-vv", "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    ran = {
        word for line in done.stdout.splitlines() if "PASSED" in line for word in line.split() if word.startswith("[gw")
    }
    assert len(ran) == 1, done.stdout


def test_a_test_of_two_parts_runs_with_either(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.rest('storms')\n@pytest.mark.rest('soak')\ndef test_it(): pass\n"
    for part, outcome in (
        ("storms", "1 passed"),
        ("soak", "1 passed"),
        ("layouts", "1 deselected"),
        ("none", "1 deselected"),
    ):
        assert outcome in run_pytest(tmp_path, test, "", "--rest", part).stdout
