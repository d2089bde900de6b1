"""Errors that an engine sees from the client; each message says what happened and the way out.

Raised by `client` and `core`; made from the agent's refusals by `from_refusal`. Knows no sockets.
"""

# These names say what happened, as an engine reads them in `except`; the suffix would add nothing.
# ruff: noqa: N818

from __future__ import annotations

from longshore_wire.engine_messages import Refused
from longshore_wire.errors import LongshoreError, Reason, RoomError


class ClientError(LongshoreError):
    """Base of the client's own errors."""


class ArgumentError(ClientError, ValueError):
    """An argument of a call cannot be right; names it and what to give. Nothing was sent."""

    reason = Reason.MALFORMED_MESSAGE


class ConnectError(ClientError, ConnectionError):
    """No agent answered at the path in time, or what answered does not speak our protocol."""

    reason = Reason.WORKER_LOST


class HelloRefused(ClientError):
    """The agent answered, and refused this engine; `reason` and the text say why."""


class AgentLost(ClientError, ConnectionError):
    """A call could not be answered because the agent is away; the client goes on trying to reach it."""

    reason = Reason.WORKER_LOST


class CallTimeout(ClientError, TimeoutError):
    """The agent is there and did not answer a call in time: whether it took the call is not known."""

    reason = Reason.BUSY


class WaitTimeout(ClientError, TimeoutError):
    """The event that was waited for has not come; the room goes on."""

    reason = Reason.BUSY


class ClientClosed(ClientError):
    """The client was closed, before the call or while it waited."""

    reason = Reason.SHUTTING_DOWN


class PoolRefused(ClientError):
    """The agent cannot map a pool, or does not know it; `reason` and the text say why."""


class Busy(ClientError):
    """A queue is full. Nothing of this call was lost: make the same call again after the hint.

    Attributes:
        retry_after_s: when it is worth trying again, in seconds from now.
    """

    reason = Reason.BUSY

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# Used where an agent says BUSY without a hint: long enough not to spin, short against a transfer.
BUSY_HINT_S = 0.01


def busy_hint_s(refused: Refused) -> float:
    """Return the hint of a BUSY refusal in seconds, never zero."""
    return refused.retry_after_ns / 1e9 if refused.retry_after_ns > 0 else BUSY_HINT_S


def from_refusal(refused: Refused, what: str, kind: type[LongshoreError] = RoomError) -> LongshoreError:
    """Return the error of a refused call: Busy for BUSY, else a `kind` with the agent's reason."""
    text = f"{what}: {refused.text or refused.reason.name}"
    if refused.reason is Reason.BUSY:
        return Busy(text, retry_after_s=busy_hint_s(refused))
    return kind(text, reason=refused.reason)
