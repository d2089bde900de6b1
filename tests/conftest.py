"""Applies to every test run: its parts, reproducible property tests, one thread a library, and only skips that are allowed.

A run leaves no process: it fails if one is left at its end, and a process beside it ends all others if it is killed.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import left_behind
import pytest
from hypothesis import settings

# Tests start many processes on few cores, where thread pools would only compete. Children inherit these variables. They
# must be set before a library reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a failure depends only on the code. No deadline, since it would depend on the
# machine.
settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("explore" if os.environ.get("HYPOTHESIS_EXPLORE") else "reproducible")

# A shell without job control starts programs in the background with SIGINT ignored, which children inherit. Tests interrupt
# commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The parts of the tests that `make test` leaves out. `make test-all` runs them, `.ci/run` one of them.
PARTS = {
    "benches": "runs of the benchmarks with real agents",
    "kernels": "further shapes of the kernels in Triton's interpreter and of the reference engine",
    "layouts": "further pairs of layouts",
    "releases": "wheels, releases and the results of benchmarks",
    "simulator": "many seeds of the simulator, and a hundred thousand rooms",
    "soak": "the soak with real agents",
    "storms": "thousands of aborts, messages of a gibibyte, further faults at decode, and runs of pytest that are ended",
    "transports": "behaviours of agents that `make test` shows over one transport, over the others",
}
_PART_MARK = "rest"
# A benchmark takes up to 8 GB of memory, so that one runs at a time.
_LARGE_PART = "benches"
# Tests on GPUs would disturb each other. `make gpu` runs them, and `make test` does not.
_GPU_MARK = "gpu"
# Processes inherit it. A pytest that a test starts belongs to the run of that test.
_RUN_MARK = "PYTEST_RUN_MARK"
_WORKER = "PYTEST_XDIST_WORKER"

ALLOWED_SKIPS_PATH = Path(__file__).parent / "allowed_skips.txt"


def read_allowed_skips(text: str) -> list[str]:
    """Return the patterns of `allowed_skips.txt`; a line without a reason is an error."""
    patterns = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = line.partition("  ")
        if not separator or not reason.strip():
            message = f"{ALLOWED_SKIPS_PATH.name}:{number}: give two spaces and a reason after the pattern"
            raise pytest.UsageError(message)
        patterns.append(pattern.strip())
    return patterns


ALLOWED_SKIPS = read_allowed_skips(ALLOWED_SKIPS_PATH.read_text(encoding="utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses parts of the tests."""
    parser.addoption(
        "--rest",
        choices=["all", "none", *PARTS],
        default="all",
        help="of the tests marked `rest` or `gpu`, run all, none, or those of one part: "
        + "; ".join(f"{name}: {text}" for name, text in PARTS.items()),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the parts that were not chosen, put long tests first, and keep tests with a common fixture in one process."""
    chosen, shares = config.getoption("--rest"), config.pluginmanager.hasplugin("xdist")
    left_out = []
    for item in items:
        parts = [mark.args for mark in item.iter_markers(_PART_MARK)]
        if unknown := [part for part in parts if part not in {(name,) for name in PARTS}]:
            raise pytest.UsageError(f"{item.nodeid}: rest{unknown[0]} is none of {', '.join(PARTS)}")
        is_of_part = not parts or (chosen,) in parts
        if chosen != "all" and (_needs_gpu(item) or not is_of_part):
            left_out.append(item)
        if shares and (group := _group_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    kept = [item for item in items if item not in dropped]
    # Several processes share the tests. One long test at the end would keep all others waiting.
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("slow") is None)


def _needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker(_GPU_MARK) is not None


def _group_of(item: pytest.Item) -> str | None:
    """Return the name that this test shares with all others that must run in its process; None: there are none.

    They use the same instance of a fixture, or GPUs, or each takes gigabytes of memory.
    """
    if any(mark.args == (_LARGE_PART,) for mark in item.iter_markers(_PART_MARK)):
        return _LARGE_PART
    if _needs_gpu(item):
        return _GPU_MARK
    found = getattr(item, "_fixtureinfo", None)
    shared = {
        definitions[-1].scope: definitions[-1].argname
        for definitions in (found.name2fixturedefs.values() if found is not None else ())
        if definitions[-1].scope in {"session", "module"} and definitions[-1].baseid
    }
    return shared["session"] if "session" in shared else str(item.path) if shared else None


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that cleans up after this run, unless it is a part of another one."""
    if _RUN_MARK in os.environ or _WORKER in os.environ:
        return
    os.environ[_RUN_MARK] = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != _RUN_MARK}
    config.stash[_CLEANER] = subprocess.Popen(
        [sys.executable, left_behind.__file__, _run_mark()],
        stdin=subprocess.PIPE,
        env=environment,
        # Signals for a run's processes must not reach this one.
        start_new_session=True,
    )


def _run_mark() -> str:
    return f"{_RUN_MARK}={os.environ[_RUN_MARK]}"


_CLEANER = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Fail a run that has left a process behind. After an interrupt, the cleaner ends them without a wait."""
    yield
    _end_helpers()
    if _CLEANER not in session.config.stash or session.exitstatus is pytest.ExitCode.INTERRUPTED:
        return
    left = left_behind.wait_for_end(_run_mark())
    if left:
        for pid, line in left.items():
            session.config.get_terminal_writer().line(f"left running by the tests: {pid} {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _end_helpers() -> None:
    """End the processes that multiprocessing, and tests of agents, keep for this one until its end."""
    for name, helper in (("forkserver", "_forkserver"), ("resource_tracker", "_resource_tracker")):
        module = sys.modules.get(f"multiprocessing.{name}")
        if module is not None:
            getattr(module, helper)._stop()
    agents = sys.modules.get("agent_world")
    if agents is not None:
        agents.template.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until what this run has left is ended."""
    if _CLEANER in config.stash:
        config.stash[_CLEANER].communicate()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude all imported modules and collected tests from later garbage collections, which would visit them every time."""
    gc.collect()
    gc.freeze()


def _refuse_a_skip_that_is_not_allowed(report: pytest.TestReport | pytest.CollectReport) -> None:
    # pytest reports an expected failure as a skip. So do we: it is a required test that fails.
    if not report.skipped or any(fnmatchcase(report.nodeid, pattern) for pattern in ALLOWED_SKIPS):
        return
    if isinstance(report.longrepr, tuple):
        why = report.longrepr[2]
    else:
        why = getattr(report, "wasxfail", str(report.longrepr))
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} was skipped, and tests/{ALLOWED_SKIPS_PATH.name} does not allow it: {why}"
    if hasattr(report, "wasxfail"):
        del report.wasxfail


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that is not allowed into a failure, so that the exit status and the closing line say so."""
    report = yield
    _refuse_a_skip_that_is_not_allowed(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself while it is collected."""
    report = yield
    _refuse_a_skip_that_is_not_allowed(report)
    return report
