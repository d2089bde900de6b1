"""Typed errors of the reference engine."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class EngineError(LongshoreError):
    """A request to the engine is invalid; names the argument and the valid values."""

    reason = Reason.UNSUPPORTED


class PagesExhaustedError(EngineError):
    """The page pool has fewer free pages than requested; names both numbers."""

    reason = Reason.BUSY


class MissingKVError(EngineError):
    """Attention read unwritten KV: the logits are not finite. Names the token interval that was read."""

    reason = Reason.TOKENS_MISSING


class RankLostError(EngineError):
    """A rank's process ended or does not answer; names the rank and its exit status."""

    reason = Reason.ENGINE_LOST
