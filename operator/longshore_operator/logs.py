"""Begins the operator's log, on standard error: as text, or with one JSON object a line. Called once by `main`.

kopf, aiohttp and the Kubernetes client log to it, too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from longshore_operator.settings import Settings
from longshore_spec.environment import variable
from longshore_spec.log_lines import LogFormat, json_line, one_line, plain_line
from longshore_spec.names import KIND

_PROCESS = "operator"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        return json_line(_of_kopf(record) | vars(record), _PROCESS, record.getMessage(), exception)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return one_line(super().formatMessage(record))


def begin(settings: Settings) -> None:
    """Begin the log; errors that nothing handles and warnings go to it, too."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = settings.log_format is LogFormat.JSON
    handler.setFormatter(
        _JsonFormatter() if is_json else _TextFormatter(f"%(asctime)s {_PROCESS} %(levelname)s %(message)s")
    )
    logging.basicConfig(level=settings.log_level.value.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_ended_thread
    # At INFO kopf logs every event.
    logging.getLogger("kopf").setLevel(logging.WARNING)


def complain(faults: Iterable[str]) -> None:
    """Write why the operator cannot start, in the form that its environment asks for. Its settings may be invalid."""
    is_json = os.environ.get(variable("log_format"), "").strip().lower() == LogFormat.JSON.value
    for fault in faults:
        line = plain_line(time.time(), "longshore_operator.main", _PROCESS, fault) if is_json else ""
        sys.stderr.write(f"{line or f'longshore-operator: {fault}'}\n")


def _of_kopf(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line of kopf, which names its object in its own way."""
    found = getattr(record, "k8s_ref", None) or {}
    return {"deployment": f"{found.get('namespace')}/{found.get('name')}"} if found.get("kind") == KIND else {}


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the process ends by an error of its own", exc_info=(kind, error, traceback))


def _log_ended_thread(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "unknown"
    error = failure.exc_value or failure.exc_type()
    about = (failure.exc_type, error, failure.exc_traceback)
    logging.getLogger(__name__).critical("the thread %s has ended by an error of its own", name, exc_info=about)
