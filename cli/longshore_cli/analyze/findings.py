"""The type of one finding about a manifest. Used by all modules of this package."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad a finding is. The command fails for errors, and with --strict for warnings."""

    ERROR = "Error"
    WARNING = "Warning"


class By(StrEnum):
    """The program that refuses a manifest with this finding, or whose memory or work it is about."""

    API_SERVER = "API server"
    OPERATOR = "operator"
    AGENTS = "agents"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; `path` is that of the field in the document, and `message` has the way out."""

    severity: Severity
    path: str
    message: str
    by: By


def error(by: By, path: str, message: str) -> Finding:
    """Return an error."""
    return Finding(severity=Severity.ERROR, path=path, message=message, by=by)


def warning(by: By, path: str, message: str) -> Finding:
    """Return a warning."""
    return Finding(severity=Severity.WARNING, path=path, message=message, by=by)
