"""Errors of the operator, by what the caller does about them. Raised by `api`, counted by `metrics`."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError


class ApiError(LongshoreError):
    """The API server refused or did not answer.

    Attributes:
        status: HTTP status; 0: no answer.
        cause: the `reason` of its Status object, for example `NotFound`.
        error_class: one word for metrics.
    """

    error_class = "api"

    def __init__(self, message: str, status: int = 0, cause: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


class NotFoundError(ApiError):
    """The object, its namespace or its kind is not there."""

    error_class = "not_found"


class ConflictError(ApiError):
    """The object is there already, was changed meanwhile, or another field manager owns a field."""

    error_class = "conflict"


class RefusedError(ApiError):
    """The request is wrong or not allowed: repeating it unchanged cannot help."""

    error_class = "refused"


class UnavailableError(ApiError):
    """No answer, too many requests or a fault of the server: repeating it may help."""

    error_class = "unavailable"
