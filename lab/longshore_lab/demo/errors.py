"""Typed errors of the demo."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class DifferenceError(LongshoreError):
    """Something is not as it must be: names the room and what differs."""

    reason = Reason.DIGEST_MISMATCH
