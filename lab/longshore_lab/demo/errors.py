"""Typed errors of the demo."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class DifferenceError(LongshoreError):
    """A check failed; names the room and the difference."""

    reason = Reason.DIGEST_MISMATCH
