"""Begins the log of one of the agent's processes, on standard error: as text, or with one JSON object a line.

Called once by each program of the agent. Libraries in C, such as NIXL and UCX, write their own lines past it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType

from longshore_agent.settings import Settings
from longshore_spec.environment import variable
from longshore_spec.log_lines import LogFormat, json_line, one_line, plain_line

# The process that accepts engines and starts workers.
SUPERVISOR = "supervisor"


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str, deployment: str) -> None:
        super().__init__()
        self._process, self._deployment = process, deployment

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        fields = {"deployment": self._deployment} | vars(record)
        return json_line(fields, self._process, record.getMessage(), exception)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return one_line(super().formatMessage(record))


def begin(settings: Settings, process: str) -> None:
    """Begin the log of a process with this name; errors that nothing handles and warnings go to it, too."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter(process, settings.deployment))
    else:
        name = "agent" if process == SUPERVISOR else process
        handler.setFormatter(_TextFormatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=settings.log_level.value.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_ended_thread


def complain(faults: Iterable[str]) -> None:
    """Write why the agent cannot start, in the form that its environment asks for. Its settings may be invalid."""
    is_json = os.environ.get(variable("log_format"), "").strip().lower() == LogFormat.JSON.value
    for fault in faults:
        line = plain_line(time.time(), "longshore_agent.main", SUPERVISOR, fault) if is_json else ""
        sys.stderr.write(f"{line or f'longshore-agent: {fault}'}\n")


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the process ends by an error of its own", exc_info=(kind, error, traceback))


def _log_ended_thread(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "unknown"
    error = failure.exc_value or failure.exc_type()
    about = (failure.exc_type, error, failure.exc_traceback)
    logging.getLogger(__name__).critical("the thread %s has ended by an error of its own", name, exc_info=about)
