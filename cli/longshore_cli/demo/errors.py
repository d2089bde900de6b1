"""Typed errors of the demo."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class DifferenceError(LongshoreError):
    """Something is not as it must be: names the room and what differs."""

    reason = Reason.DIGEST_MISMATCH


class InterruptedBySignal(BaseException):
    """The user asked for the end. As KeyboardInterrupt no error, so that no handler of errors takes it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
