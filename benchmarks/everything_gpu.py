"""Runs all GPU tests, then all GPU benchmarks, and records their results. Each benchmark compares all bytes it moves.

    make gpu                                        all steps, about 20 minutes
    make gpu GPU_PYTHON=python3                     with an interpreter that has the packages, instead of .venv
    python benchmarks/everything_gpu.py --quick     at most 9 minutes: fewer sizes and repetitions, maybe fewer steps
    python benchmarks/everything_gpu.py --steps tests,demo     only these steps

It first prints the plan: each step with its time limit. A step that exceeds its limit is ended and fails. A step whose
limit exceeds the remaining time (`--budget-s`) is left out and named at the end. The demo and `bench rooms` use four, two
or one GPU, as many as the machine has. Needs the tree, which need not be installed, and the packages of the extras
`agent` and `lab`.

Writes `benchmarks/results/<date>-<device>.json` and a plot beside it. Each step's entry has the commit, the hash of its
sources, its command, and its raw samples or number of passed tests. The entries of steps that did not run are kept. A
failed step, for example one with a wrong byte, writes no entry, and the exit status is 1. Without a GPU the program
prints the reason and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("wire", "spec", "client", "agent", "cli", "lab")


class Step(NamedTuple):
    """One test run or benchmark.

    Attributes:
        key: the key of its entry in the results.
        command: its arguments for the interpreter; `quick` or `full` is appended.
        sources: glob pattern, relative to the root, of the files whose hash is recorded.
        limit_s, quick_limit_s: time limits.
        on_devices: whether it takes `--devices`.
    """

    key: str
    command: tuple[str, ...]
    sources: str
    limit_s: float
    quick_limit_s: float
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    on_devices: bool = False


class Planned(NamedTuple):
    """A step of this run, with its arguments for the interpreter and its time limit."""

    name: str
    step: Step
    words: tuple[str, ...]
    limit_s: float


TESTS = "tests"
# They run in this order, tests first. Each compares bytes itself and fails if one is wrong.
STEPS = {
    # Quick runs leave out the slow tests: the demo, which is a separate step, and GPUs that hang.
    TESTS: Step(
        TESTS, ("-m", "pytest", "-q", "-p", "no:cacheprovider"), "tests/gpu/*.py", 570, 530, ("-m", "not slow")
    ),
    "demo": Step(
        "demo",
        ("-m", "longshore_cli.main", "demo"),
        "lab/longshore_lab/demo/*.py",
        300,
        75,
        ("--quick",),
        ("--pairs", "4:1,1:4,4:2"),
        on_devices=True,
    ),
    "kernels": Step(
        "gather_scatter",
        ("benchmarks/gather_scatter_gpu.py",),
        "benchmarks/gather_scatter_gpu.py",
        120,
        35,
        ("--repetitions", "15"),
    ),
    "counters": Step(
        "kernel_counters",
        ("benchmarks/kernel_counters_gpu.py",),
        "benchmarks/kernel_counters_gpu.py",
        300,
        40,
        ("--sizes", "84,257"),
    ),
    "path": Step(
        "path",
        ("benchmarks/gpu_path.py",),
        "benchmarks/gpu_path.py",
        570,
        100,
        ("--tokens", "256,800,1024,4096,8192", "--repetitions", "9", "--source-tp", "1"),
    ),
    "direct": Step(
        "direct",
        ("benchmarks/direct_gpu.py",),
        "benchmarks/direct_gpu.py",
        570,
        85,
        ("--sizes", "64,256", "--cases", "70B 4->1", "--tokens", "256,800,4096,8192", "--repetitions", "7"),
    ),
    "host": Step(
        "host_target",
        ("benchmarks/host_target_gpu.py",),
        "benchmarks/host_target_gpu.py",
        240,
        120,
        ("--repetitions", "9"),
    ),
    "rooms": Step(
        "rooms",
        ("-m", "longshore_cli.main", "bench", "rooms"),
        "lab/longshore_lab/bench/*.py",
        400,
        100,
        ("--rooms", "1,8,64", "--repeats", "2"),
        on_devices=True,
    ),
    "busy": Step(
        "busy_engine",
        ("benchmarks/busy_engine_gpu.py",),
        "benchmarks/busy_engine_gpu.py",
        570,
        110,
        ("--seconds", "0.7", "--rates", "20", "--engines", "decode"),
    ),
}
# Borrowed machines limit a command to ten minutes. Start and end of the run take about one of them.
QUICK_BUDGET_S = 540.0
# Time that a step gets to end its processes before it is killed. It is part of the step's limit.
GRACE_S = 10.0
# The numbers of GPUs that the demo and rooms use: prefill has the first half.
DEVICE_COUNTS = (4, 2, 1)
# Rooms at the beginning of each series that are dropped, as in `gpu_path`.
WARM_UPS = 2
# Tests that may be skipped on a machine with a GPU: they need Mooncake's wheel for CUDA, which replaces the other wheel, or
# a fake GPU.
MAY_BE_SKIPPED = "tests/gpu/test_mooncake_on_gpu.py"
NEEDS_GPU = "needs a CUDA device"
TOO_LONG = 124


def why_skipped() -> str:
    """Return the reason why no step can run on this machine; empty if steps can run."""
    try:
        import torch
        import triton  # noqa: F401 - only checks that it is installed
    except ImportError as error:
        return f"{error}; install the extra `agent`"
    if not torch.cuda.is_available():
        return "no CUDA device: torch sees none"
    return ""


def plan(chosen: Sequence[str], *, quick: bool, device_count: int, tests: str = "tests/gpu") -> list[Planned]:
    """Return the chosen steps in the order of STEPS."""
    used = next(count for count in DEVICE_COUNTS if count <= device_count)
    devices = ",".join(f"cuda:{index}" for index in range(used))
    planned = []
    for name, step in STEPS.items():
        if name not in chosen:
            continue
        words = [*step.command, *(step.quick if quick else step.full)]
        words += ["--devices", devices] if step.on_devices else []
        words += shlex.split(tests) if name == TESTS else []
        planned.append(Planned(name, step, tuple(words), step.quick_limit_s if quick else step.limit_s))
    return planned


def described(planned: Sequence[Planned], budget_s: float) -> str:
    """Return the plan as text, one line for each step."""
    lines = [f"{len(planned)} steps, at most {sum(each.limit_s for each in planned):.0f} s, of {budget_s:.0f} s:"]
    lines += [f"  {each.name:9}{each.limit_s:5.0f} s  python {shlex.join(each.words)}" for each in planned]
    return "\n".join(lines)


def why_left_out(each: Planned, left_s: float) -> str:
    """Return why a step is left out with `left_s` seconds remaining; empty if it runs."""
    if left_s >= each.limit_s:
        return ""
    left = f"{max(0.0, left_s):.0f} s remain"
    return f"{each.name}: its limit is {each.limit_s:.0f} s and {left}: run it with --steps {each.name}"


def commit() -> str:
    """Return the commit, and " changed" if tracked files differ. A copy without history has a file `commit` instead."""
    given = ROOT / "commit"
    if given.exists():
        return " ".join(given.read_text(encoding="utf-8").split())
    found = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S607
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return f"{found[0] or 'unknown'}{' changed' if found[1] else ''}"


def sources_hash(step: Step) -> str:
    """Return the hash of a step's sources."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ROOT.glob(step.sources)))).hexdigest()


def machine() -> str:
    """Return a description of the machine: GPUs and versions."""
    import torch
    import triton

    name = torch.cuda.get_device_name(0)
    return (
        f"{torch.cuda.device_count()} x {name}, CUDA {torch.version.cuda}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, Python {platform.python_version()}"
    )


def run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Run a command and show its output; return its exit status, TOO_LONG if it exceeded its limit, and its output."""
    print(f"$ {shlex.join(command)}", flush=True)
    paths = [*(str(ROOT / package) for package in PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=show, args=(process.stdout, lines), daemon=True)
    reader.start()
    code = TOO_LONG
    try:
        code = process.wait(max(1.0, limit_s - GRACE_S))
    except subprocess.TimeoutExpired:
        print(f"ended: it took longer than {limit_s - GRACE_S:.0f} s", flush=True)
        end_group(process)
    except BaseException:
        end_group(process)
        raise
    # Children of a killed step may hold the pipe a little longer.
    reader.join(GRACE_S / 2)
    return code, "".join(lines)


def show(output: IO[str], lines: list[str]) -> None:
    """Print each line and append it to `lines`."""
    for line in output:
        sys.stdout.write(line)
        sys.stdout.flush()
        lines.append(line)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process group by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S / 2)


def run_step(each: Planned) -> tuple[int, dict[str, Any], list[str]]:
    """Run one step; return its exit status, its entry (empty if it failed), and its output lines on left out work."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.json"
        extra = [] if each.name == TESTS else ["--json", str(numbers)]
        code, said = run([sys.executable, *each.words, *extra], each.limit_s)
        known = {"commit": commit(), "script": sources_hash(each.step), "command": f"python {shlex.join(each.words)}"}
        found = judged_tests(said) if each.name == TESTS else read_numbers(numbers)
    left_out = [f"{each.name}: {line}" for line in map(str.strip, said.splitlines()) if is_left_out(line)]
    return code, (known | found if found and not code else {}), left_out


def is_left_out(line: str) -> bool:
    """Whether a line of a step's output says that something did not run."""
    return "left out" in line.lower() or line.startswith("SKIPPED")


def judged_tests(said: str) -> dict[str, Any]:
    """Return the number of passed tests; empty if a test was skipped that must run on a machine with a GPU."""
    passed, skipped = re.search(r"(\d+) passed", said), re.search(r"(\d+) skipped", said)
    allowed = re.findall(rf"^SKIPPED \[(\d+)\] {re.escape(MAY_BE_SKIPPED)}:\d+: (?!{NEEDS_GPU})", said, re.MULTILINE)
    if passed is None or (skipped is not None and int(skipped[1]) > sum(map(int, allowed))):
        return {}
    return {"passed": int(passed[1])}


def read_numbers(path: Path) -> dict[str, Any]:
    """Return a benchmark's results; empty if it wrote none. A benchmark writes them only if every byte was right."""
    return {"bytes_checked": True} | json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def row_median_s(row: dict[str, Any]) -> float:
    """Return the median seconds of a size's back-to-back rooms, from the first `send` to DONE at the target's engine."""
    return float(statistics.median(engines_s for _, engines_s in row["in_a_row_seconds"][WARM_UPS:]))


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot the available results: kernels, rates between agents, copies beside a busy engine, concurrent rooms."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(21, 4.5))
    kernels = [("", row) for row in results.get("gather_scatter", {}).get("rows", [])]
    kernels += [("direct", row) for row in results.get("direct", {}).get("kernel", {}).get("rows", [])]
    for name in sorted({row["operation"] for _, row in kernels}):
        mine = sorted(
            (row["bytes"] / 1e6, 100 * row["copy_us"] / row["kernel_us"])
            for _, row in kernels
            if row["operation"] == name
        )
        axes[0].plot(*zip(*mine, strict=True), "o", label=name)
    axes[0].set(title="Kernels", xscale="log", xlabel="MB", ylabel="% of a plain copy", ylim=(50, 102))
    agents = [(f"staged TP{row['source_tp']}→1", row) for row in results.get("path", {}).get("staged", [])]
    agents += [(f"direct TP{row['source_tp']}→1", row) for row in results.get("direct", {}).get("agents", [])]
    for name in dict.fromkeys(name for name, _ in agents):
        mine = sorted(
            (row["bytes"] / 1e6, row["bytes"] / row_median_s(row) / 1e9) for other, row in agents if other == name
        )
        axes[1].plot(*zip(*mine, strict=True), "o-", label=name)
    copies = results.get("path", {}).get("plain_copy_seconds", {})
    mine = sorted((int(length) / 1e6, int(length) / each["in a row"] / 1e9) for length, each in copies.items())
    axes[1].plot([at for at, _ in mine], [rate for _, rate in mine], "k--", label="plain copy")
    axes[1].set(title="Rooms in a row, send to DONE", xscale="log", xlabel="MB", ylabel="GB/s")
    for sharing in ("time-sliced", "MPS"):
        for kind, rows in results.get("busy_engine", {}).get(sharing, {}).items():
            gathers = [row for row in rows if row["name"] == "gather" and not row["cap"]]
            axes[2].plot(
                [row["rate"] for row in gathers], [row["p99_ms"] for row in gathers], "o-", label=f"{sharing}, {kind}"
            )
    axes[2].set(title="Gather of 84 MB beside a busy engine", xlabel="a second", ylabel="p99, ms", ylim=(0, None))
    loads = results.get("rooms", {}).get("loads", [])
    for name in dict.fromkeys(load["way"] for load in loads):
        mine = [(load["rooms"], load["p50_s"] * 1e3) for load in loads if load["way"] == name]
        axes[3].plot(*zip(*mine, strict=True), "o-", label=name)
    axes[3].set(title="Rooms at once, send to DONE", xscale="log", yscale="log", xlabel="rooms", ylabel="p50, ms")
    for each in axes:
        each.grid(alpha=0.3)
        if each.get_legend_handles_labels()[0]:
            each.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the steps; return 0 if all were right or no step can run on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", default=",".join(STEPS), help="of " + ", ".join(STEPS))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions, at most 9 minutes")
    parser.add_argument("--budget-s", type=float, help=f"seconds for all steps ({QUICK_BUDGET_S:.0f} if quick)")
    parser.add_argument("--tests", default="tests/gpu", help="tests to run, as pytest's arguments")
    parser.add_argument("--plan", type=int, metavar="GPUS", help="only print the plan for this number of GPUs")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    chosen = options.steps.split(",")
    if unknown := set(chosen) - set(STEPS):
        parser.error(f"--steps names {min(unknown)!r}: use {', '.join(STEPS)}")
    if options.plan is not None and options.plan < 1:
        parser.error(f"--plan is {options.plan}: give at least 1 GPU")
    reason = "" if options.plan else why_skipped()
    if reason:
        print(f"skipped: {reason}")
        return 0
    device_count = options.plan or count_devices()
    planned = plan(chosen, quick=options.quick, device_count=device_count, tests=options.tests)
    budget_s = options.budget_s or (
        QUICK_BUDGET_S if options.quick else sum(each.limit_s for each in planned) + GRACE_S
    )
    print(described(planned, budget_s), flush=True)
    return 0 if options.plan else run_all(planned, budget_s, device_count, options.out)


def count_devices() -> int:
    """Return the number of GPUs that torch finds."""
    import torch

    return int(torch.cuda.device_count())


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results."""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def run_all(planned: Sequence[Planned], budget_s: float, device_count: int, out: Path | None) -> int:
    """Run the planned steps; write the results after each one; return the exit status."""
    end_s = time.monotonic() + budget_s
    name = machine()
    device = re.sub(r"[^a-z0-9]+", "-", name.split(" x ")[1].split(",")[0].lower()).removeprefix("nvidia-")
    path = out or RESULTS / f"{time.strftime('%Y-%m-%d')}-{device}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results |= {"date": time.strftime("%Y-%m-%d"), "machine": name}
    failed, left_out = [], list[str]()
    if device_count not in DEVICE_COUNTS:
        left_out.append(f"the demo and rooms use {', '.join(map(str, DEVICE_COUNTS))} GPUs, of {device_count} here")
    for each in planned:
        if reason := why_left_out(each, end_s - time.monotonic()):
            left_out.append(reason)
            continue
        begin_s = time.monotonic()
        code, found, missing = run_step(each)
        left_out += missing
        print(f"{each.name}: {time.monotonic() - begin_s:.0f} s of {each.limit_s:.0f} s", flush=True)
        if found:
            results[each.step.key] = found
            write(path, results)
            continue
        failed.append(each.name)
        # After tests that only took too long, the benchmarks run: each compares its own bytes.
        if each.name == TESTS and code != TOO_LONG:
            print("the tests failed: no benchmark runs before they pass")
            break
    if path.exists():
        write(path, results | {"left_out": left_out})
        plot(results, path.with_suffix(".png"))
        print(f"results: {path}, {path.with_suffix('.png')}")
    for line in left_out:
        print(f"left out: {line}")
    print(f"failed: {', '.join(failed)}" if failed else "all steps that ran are right")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
