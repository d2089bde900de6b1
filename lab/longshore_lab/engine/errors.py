"""Typed errors of the reference engine."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class EngineError(LongshoreError):
    """The engine cannot do what it was asked; names the argument and what would be allowed."""

    reason = Reason.UNSUPPORTED


class PagesExhaustedError(EngineError):
    """The page pool has fewer free pages than were asked for; names both numbers."""

    reason = Reason.BUSY


class MissingKVError(EngineError):
    """Attention met KV that nobody wrote: the logits are not finite. Names the token interval that was read."""

    reason = Reason.TOKENS_MISSING


class RankLostError(EngineError):
    """A rank's process ended or went silent; names the rank and its exit status."""

    reason = Reason.ENGINE_LOST
