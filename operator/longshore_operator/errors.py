"""Errors of API calls, one class for each reaction of the caller. Raised by `api`, counted by `metrics`."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError


class ApiError(LongshoreError):
    """The API server refused or did not answer.

    Attributes:
        status: HTTP status; 0 if there was no response.
        cause: the `reason` of its Status object, for example `NotFound`.
        error_class: the label in metrics.
    """

    error_class = "api"

    def __init__(self, message: str, status: int = 0, cause: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


class NotFoundError(ApiError):
    """The object, its namespace or its kind does not exist."""

    error_class = "not_found"


class ConflictError(ApiError):
    """The object exists, has changed meanwhile, or has a field of another field manager."""

    error_class = "conflict"


class RefusedError(ApiError):
    """The request is invalid or forbidden: a retry cannot succeed."""

    error_class = "refused"


class UndeclaredFieldError(RefusedError):
    """The body has a field that the served schema of its kind lacks."""


class UnavailableError(ApiError):
    """No response, too many requests or a server error: a retry may succeed."""

    error_class = "unavailable"
