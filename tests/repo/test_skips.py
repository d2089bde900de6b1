"""Tests, in a separate run of pytest with the tree's conftest, that a skipped required test fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tree_of_files import ROOT

SKIPS = {
    "mark": "import pytest\n@pytest.mark.skip(reason='tired')\ndef test_it(): pass\n",
    "call": "import pytest\ndef test_it(): pytest.skip('tired')\n",
    "module": "import pytest\npytest.importorskip('no_such_module_tired')\ndef test_it(): pass\n",
    "expected failure": "import pytest\n@pytest.mark.xfail(reason='tired')\ndef test_it(): assert False\n",
}


def run_pytest(folder: Path, test: str, allowed: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "conftest.py")
    (folder / "allowed_skips.txt").write_text(allowed, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_one.py").write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
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
