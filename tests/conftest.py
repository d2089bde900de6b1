"""Applies to every test run: reproducible property tests, one thread a library, and only skips that are allowed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

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
