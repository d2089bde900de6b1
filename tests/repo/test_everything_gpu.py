"""Tests `make gpu` without a GPU: the reason for skipping, the plan, and the time limits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from tree_of_files import ROOT

SCRIPT = ROOT / "benchmarks" / "everything_gpu.py"
STEPS = ["tests", "demo", "kernels", "path", "direct", "rooms", "busy"]
# A step that starts a child, prints both process ids, and does not end by itself.
STUBBORN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Hide the GPUs that this machine may have.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--out", str(folder / "out.json"), *words]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=200)


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def everything() -> ModuleType:
    spec = importlib.util.spec_from_file_location("everything_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.rest("releases")
@pytest.mark.slow
def test_without_a_gpu_the_reason_is_printed_and_nothing_is_written(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no CUDA device")
    assert not list(tmp_path.iterdir())


def test_an_unknown_step_is_refused_by_its_name(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "tests,teleport")
    assert done.returncode == 2
    assert "teleport" in done.stderr


def test_the_plan_is_printed_with_a_limit_a_step_and_checks_first(tmp_path: Path) -> None:
    done = run(tmp_path, "--plan", "2", "--quick", "--steps", ",".join(reversed(STEPS)))
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == STEPS
    assert all(line.split()[2:4] == ["s", "python"] for line in lines)
    assert "of 540 s" in first
    assert not list(tmp_path.iterdir())


def test_a_quick_run_has_time_for_the_checks_and_every_step_fits_into_one_command_of_ten_minutes(
    everything: ModuleType,
) -> None:
    quick = {each.name: each.limit_s for each in everything.plan(STEPS, quick=True, device_count=2)}
    assert quick["tests"] <= everything.QUICK_BUDGET_S == 540
    assert sum(quick[name] for name in quick if name != "tests") <= everything.QUICK_BUDGET_S
    assert all(each.limit_s <= 580 for each in everything.plan(STEPS, quick=False, device_count=2))


@pytest.mark.parametrize(
    ("there", "used"),
    [(1, "cuda:0"), (2, "cuda:0,cuda:1"), (3, "cuda:0,cuda:1"), (8, "cuda:0,cuda:1,cuda:2,cuda:3")],
)
def test_the_demo_and_rooms_run_on_as_many_gpus_as_there_are(there: int, used: str, everything: ModuleType) -> None:
    planned = everything.plan(["demo", "rooms", "kernels"], quick=True, device_count=there)
    words = {each.name: each.words for each in planned}
    assert words["demo"][-2:] == words["rooms"][-2:] == ("--devices", used)
    assert "--devices" not in words["kernels"]


def test_every_word_of_the_demo_and_of_rooms_is_one_that_they_know(
    everything: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longshore_cli.main import main
    from longshore_lab import bench, demo

    seen = []
    monkeypatch.setattr(demo, "run", lambda arguments: seen.append(arguments) or 0)
    monkeypatch.setattr(bench, "run", lambda arguments: seen.append(arguments) or 0)
    for quick in (True, False):
        for each in everything.plan(["demo", "rooms"], quick=quick, device_count=2):
            assert main([*each.words[2:], "--json", "numbers.json"]) == 0
    assert [arguments.devices for arguments in seen] == [("cuda:0", "cuda:1")] * 4
    assert seen[2].pairs == [(4, 1), (1, 4), (4, 2)]


def test_a_step_that_the_time_left_does_not_cover_is_left_out_by_name(everything: ModuleType) -> None:
    (busy,) = everything.plan(["busy"], quick=True, device_count=1)
    assert not everything.why_left_out(busy, busy.limit_s)
    assert everything.why_left_out(busy, 31.0) == (
        f"busy: its limit is {busy.limit_s:.0f} s and 31 s remain: run it with --steps busy"
    )


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_ended_with_what_it_started(everything: ModuleType) -> None:
    code, said = everything.run([sys.executable, "-c", STUBBORN], everything.GRACE_S + 10.0)
    assert code == 124
    for pid in map(int, said.split()):
        end_s = time.monotonic() + 30
        while runs(pid):
            assert time.monotonic() < end_s, f"{pid} runs on"
            os.sched_yield()


def test_a_steps_output_and_its_own_leavings_are_kept_and_a_failure_has_no_results(everything: ModuleType) -> None:
    def step(code: str) -> object:
        words = ("-c", code)
        return everything.Planned("rooms", everything.STEPS["rooms"], words, 100.0)

    write = "import sys; open(sys.argv[-1], 'w').write('{\"loads\": []}'); print('MPS: none here, left out')"
    code, found, left_out = everything.run_step(step(write))
    assert code == 0
    assert found["loads"] == []
    assert found["bytes_checked"] is True
    assert len(found["script"]) == 64
    assert left_out == ["rooms: MPS: none here, left out"]
    assert everything.run_step(step(f"{write}; sys.exit(1)"))[:2] == (1, {})
    assert everything.run_step(step("pass"))[:2] == (0, {})


def a_run(
    everything: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, ends: dict[str, int], budget_s: float = 1000.0
) -> tuple[int, list[str]]:
    """Run all steps as if each ended at once, with status 0 where none is given; return the status and which ones ran."""
    ran: list[str] = []

    def run_step(each: object) -> tuple[int, dict[str, object], list[str]]:
        ran.append(each.name)
        code = ends.get(each.name, 0)
        return code, {} if code else {"bytes_checked": True}, []

    monkeypatch.setattr(everything, "run_step", run_step)
    monkeypatch.setattr(everything, "machine", lambda: "2 x NVIDIA H200, CUDA 13")
    monkeypatch.setattr(everything, "plot", lambda results, path: None)
    planned = everything.plan(STEPS, quick=True, device_count=2)
    return everything.run_all(planned, budget_s, 2, out), ran


def test_after_failed_tests_nothing_is_measured_and_after_slow_ones_all_is(
    everything: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert a_run(everything, monkeypatch, out, {"tests": 1}) == (1, ["tests"])
    assert not out.exists()
    assert a_run(everything, monkeypatch, out, {"tests": everything.TOO_LONG, "path": 1}) == (1, STEPS)
    assert set(json.loads(out.read_text())) >= {"demo", "rooms", "busy_engine"}
    assert not {"tests", "path"} & set(json.loads(out.read_text()))


def test_results_of_steps_that_did_not_run_now_are_kept_and_what_was_left_out_is_named(
    everything: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"busy_engine": "of yesterday"}))
    status, ran = a_run(everything, monkeypatch, out, {}, budget_s=58.0)
    assert (status, ran) == (0, ["kernels"])
    found = json.loads(out.read_text())
    assert found["busy_engine"] == "of yesterday"
    assert [line.partition(":")[0] for line in found["left_out"]] == [
        "tests",
        "demo",
        "path",
        "direct",
        "rooms",
        "busy",
    ]
    assert "left out: busy: its limit is 110 s" in capsys.readouterr().out


def test_a_skipped_test_is_a_failure_where_there_is_a_gpu(everything: ModuleType) -> None:
    assert everything.judged_tests("25 passed, 1 deselected in 99 s") == {"passed": 25}
    assert everything.judged_tests("24 passed, 1 skipped in 99 s") == {}
    mooncake = "SKIPPED [2] tests/gpu/test_mooncake_on_gpu.py:62: needs mooncake-transfer-engine-cuda13"
    assert everything.judged_tests(f"{mooncake}\n24 passed, 2 skipped in 99 s") == {"passed": 24}
    assert everything.judged_tests(f"{mooncake}\n24 passed, 3 skipped in 99 s") == {}
    for place in ("test_mooncake_on_gpu.py:62", "test_worker_on_gpu.py:60"):
        absent = f"SKIPPED [2] tests/gpu/{place}: needs a CUDA device; or a stand-in"
        assert everything.judged_tests(f"{absent}\n24 passed, 2 skipped in 99 s") == {}
    assert everything.judged_tests("no tests ran") == {}


@pytest.mark.rest("releases")
def test_the_picture_is_drawn_of_whatever_results_there_are(everything: ModuleType, tmp_path: Path) -> None:
    loads = [{"way": "staged 2→1", "rooms": count, "p50_s": count / 1e3} for count in (1, 8)]
    everything.plot({"rooms": {"loads": loads}}, tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 1000
    kept = max((ROOT / "benchmarks" / "results").glob("*-h200.json"))
    everything.plot(json.loads(kept.read_text()), tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 1000


def test_children_find_the_tree_wherever_they_are_run_from(
    everything: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code, said = everything.run([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], 60.0)
    assert code == 0
    folders = said.strip().split(os.pathsep)
    assert folders[-1] == "/somewhere"
    assert all((Path(folder) / f"longshore_{Path(folder).name}").is_dir() for folder in folders[:-1])
