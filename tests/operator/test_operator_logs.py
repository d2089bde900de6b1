"""Tests the operator's log: texts of the cluster stay on one line, and so does the end of a thread."""

from __future__ import annotations

import json
import subprocess
import sys

BEGIN = (
    "import logging, threading; from longshore_operator import logs; from longshore_operator.settings import Settings; "
    "logs.begin(Settings.from_environment(dict(LONGSHORE_LOG_FORMAT='{form}'))); "
)


def written(form: str, code: str) -> list[str]:
    """Return what a program writes to its standard error, which has begun the operator's log."""
    command = [sys.executable, "-c", BEGIN.format(form=form) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr.splitlines()


def test_text_of_an_agent_ends_no_line_and_commands_no_terminal() -> None:
    (line,) = written("text", r"logging.getLogger('x').warning('%s', 'no\n2026-01-01 operator ERROR forged \x1b[2J')")
    assert line.endswith(r"operator WARNING no\n2026-01-01 operator ERROR forged \x1b[2J")


def test_an_error_that_ends_a_thread_is_one_object() -> None:
    (line,) = written("json", "threading.Thread(target=lambda: 1 / 0, name='reader').start()")
    found = json.loads(line)
    assert (found["level"], found["process"]) == ("critical", "operator")
    assert "reader" in found["message"]
    assert "ZeroDivisionError" in found["exception"]
