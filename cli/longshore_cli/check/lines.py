"""The lines of a check, and how they are printed. Pure. All other modules of the folder make lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from longshore_cli import words
from longshore_cli.words import count, plain

# Names in one message. A cluster may have 1,000 nodes.
_NAMED_MAX = 5


class State(Enum):
    """The result of one check. SKIPPED: it cannot be known at this time, and is neither a warning nor an ok."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    ERROR = "error"


_MARKS = {State.OK: "√", State.SKIPPED: "-", State.WARNING: "‼", State.ERROR: "×"}  # noqa: RUF001 - the mark of kubectl's plugins
_PLAIN_MARKS = {State.OK: "ok", State.SKIPPED: "--", State.WARNING: "!!", State.ERROR: "XX"}


class Line(NamedTuple):
    """The result of one check.

    Attributes:
        section: what was checked: a part of the cluster, or `namespace/deployment`.
        check: a short name that stays the same, for programs.
        message: one sentence on the observation, with the cause if it is not ok.
        way_out, link: what to do, and the documentation's path in the repository; empty if there is nothing to do.
    """

    section: str
    check: str
    state: State
    message: str
    way_out: str = ""
    link: str = ""


def ok(section: str, check: str, message: str) -> Line:
    """Return a line on a check that passed."""
    return Line(section, check, State.OK, message)


def skipped(section: str, check: str, message: str, way_out: str, link: str) -> Line:
    """Return a line on a check that nobody can make at this time."""
    return Line(section, check, State.SKIPPED, message, way_out, link)


def warning(section: str, check: str, message: str, way_out: str, link: str) -> Line:
    """Return a line on something that may be wrong, or could not be checked."""
    return Line(section, check, State.WARNING, message, way_out, link)


def error(section: str, check: str, message: str, way_out: str, link: str) -> Line:
    """Return a line on something that is wrong."""
    return Line(section, check, State.ERROR, message, way_out, link)


def unread(section: str, check: str, failure: Exception) -> Line:
    """Return a line on a check that could not be made, with the reason."""
    way_out = "get the right, or what the message names, and run the check again"
    return warning(section, check, f"not checked: {failure}", way_out, "docs/how-to/check.md#rights")


def some(names: Iterable[str]) -> str:
    """Return the first names in order, and the number of further ones."""
    found = sorted(set(names))
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return ", ".join(found[:_NAMED_MAX]) + more


def failed(lines: Iterable[Line], *, strict: bool) -> bool:
    """Whether the checks found an error.

    Args:
        strict: a warning counts as an error.
    """
    bad = {State.ERROR, State.WARNING} if strict else {State.ERROR}
    return any(line.state in bad for line in lines)


def table(lines: Sequence[Line], encoding: str) -> str:
    """Return the lines by section, each with its mark.

    Args:
        encoding: of the output. One that lacks the marks gets plain ones.
    """
    marks = _MARKS
    try:
        "".join(marks.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        marks = _PLAIN_MARKS
    indent = " " * (len(marks[State.OK]) + 1)
    parts = []
    for section in dict.fromkeys(line.section for line in lines):
        parts += [plain(section), "-" * len(section)]
        for line in lines:
            if line.section != section:
                continue
            parts.append(f"{marks[line.state]} {plain(line.message)}")
            parts += [f"{indent}way out: {plain(line.way_out)}"] if line.way_out else []
            parts += [f"{indent}see {plain(line.link)}"] if line.link else []
        parts.append("")
    errors, warnings = (sum(line.state is state for line in lines) for state in (State.ERROR, State.WARNING))
    return "\n".join([*parts, f"{count(errors, 'error')}, {count(warnings, 'warning')}"])


def as_json(lines: Sequence[Line]) -> str:
    """Return the lines as a list of objects with the fields of `Line`."""
    found = [{**line._asdict(), "state": line.state.value} for line in lines]
    return words.as_json(found)
