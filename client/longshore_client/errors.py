"""Defines the client's errors. Each message states the problem and the remedy.

Raised by `client` and `core`; `from_refusal` makes them from the agent's refusals. Knows no sockets.
"""

# An engine reads these names in `except`, where the suffix Error would add nothing.
# ruff: noqa: N818

from __future__ import annotations

from longshore_wire.engine_messages import Refused
from longshore_wire.errors import LongshoreError, Reason, RoomError


class ClientError(LongshoreError):
    """Base of the client's own errors."""


class ArgumentError(ClientError, ValueError):
    """An argument of a call is invalid; names it and the allowed values. Nothing was sent."""

    reason = Reason.MALFORMED_MESSAGE


class ConnectError(ClientError, ConnectionError):
    """No agent answered at the path in time, or the process there does not speak our protocol."""

    reason = Reason.WORKER_LOST


class NotPermitted(ClientError, PermissionError):
    """This process may not use the agent's socket; names the socket's group and the remedy."""

    reason = Reason.AUTHENTICATION


class HelloRefused(ClientError):
    """The agent refused this engine; `reason` and the text say why."""


class AgentLost(ClientError, ConnectionError):
    """A call got no answer because the agent is away. The client keeps trying to reach it."""

    reason = Reason.WORKER_LOST


class CallTimeout(ClientError, TimeoutError):
    """The agent is connected but did not answer a call in time. It may or may not have accepted the call."""

    reason = Reason.BUSY


class WaitTimeout(ClientError, TimeoutError):
    """The expected event or state did not come in time. The room continues."""

    reason = Reason.BUSY


class ClientClosed(ClientError):
    """The client was closed before or during the call."""

    reason = Reason.SHUTTING_DOWN


class PoolRefused(ClientError):
    """The agent cannot map a pool, or does not know it; `reason` and the text say why."""


class Busy(ClientError):
    """A queue is full. Nothing of this call was lost: make the same call again after the hint.

    Attributes:
        retry_after_s: time to wait before the next attempt, in seconds.
    """

    reason = Reason.BUSY

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# Hint if an agent sends BUSY without one: long enough not to spin, shorter than a transfer.
BUSY_HINT_S = 0.01


def busy_hint_s(refused: Refused) -> float:
    """Return the hint of a BUSY refusal in seconds, never zero."""
    return refused.retry_after_ns / 1e9 if refused.retry_after_ns > 0 else BUSY_HINT_S


def from_refusal(refused: Refused, what: str, kind: type[LongshoreError] = RoomError) -> LongshoreError:
    """Return the error of a refused call: Busy for BUSY, otherwise a `kind` with the agent's reason."""
    text = f"{what}: {refused.text or refused.reason.name}"
    if refused.reason is Reason.BUSY:
        return Busy(text, retry_after_s=busy_hint_s(refused))
    return kind(text, reason=refused.reason)
