"""The text of a log line as one JSON object, in one form for all programs. Pure; formats records of the module `logging`.

Called by the log formatters of the agent and the operator. A line that is about a deployment, an engine or a room says so by
`extra={...}` with names of FIELDS. Its message has the same facts for readers of the text form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

# What a line may be about, each a field of its own. Values are text.
FIELDS = (
    "deployment",  # <namespace>/<name>
    "instance",  # of an engine; of a room, its prefill instance
    "worker",  # of this agent: instance, data-parallel rank and rank
    "room",  # in decimal digits, because many JSON parsers lose digits of large numbers
    "peer",  # the workers of the other side, by their names, separated by commas
    "reason",  # the name of an error's reason
)


class LogLevel(StrEnum):
    """The log level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


def json_line(record: Mapping[str, Any], process: str, message: str, exception: str = "") -> str:
    """Return a line without its end.

    Args:
        record: the attributes of a LogRecord, with those of its `extra`.
        process: the name of the program's process, unique within it.
        exception: the traceback, of any number of lines; empty: none.
    """
    line: dict[str, str] = {
        "time": _rfc3339(record["created"]),
        "level": str(record["levelname"]).lower(),
        "logger": str(record["name"]),
        "process": process,
        "message": message,
    }
    line |= {name: str(record[name]) for name in FIELDS if record.get(name)}
    if exception:
        line["exception"] = exception
    # Other characters are escaped: text of peers may hold what is no valid Unicode.
    return json.dumps(line)


def one_line(text: str) -> str:
    """Return a text of the other form on one line: characters that are not printable, such as ends of lines, are escaped.

    Texts come from peers and engines, which could write lines in the name of others, or commands to a terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def plain_line(created_s: float, logger: str, process: str, message: str) -> str:
    """Return the line of an error that ends a program before its log has begun. `created_s`: seconds since 1970."""
    return json_line({"created": created_s, "levelname": "ERROR", "name": logger}, process, message)


def _rfc3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
