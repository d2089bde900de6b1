"""A worker's report on one half of a room that has ended, for OpenTelemetry: types, their bytes, and the trace's id. Pure.

`worker.reporting` makes reports, `supervisor.telemetry` reads them. Times are of the host's monotonic clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

# Steps in one message, whose names have at most 256 characters: such a message fits a datagram of 64 KiB.
STEPS_PER_MESSAGE = 100
# Longest text of a reason, and pairs of ranks, in a report.
_TEXT_CHARACTERS_MAX = 1000
_PAIRS_MAX = 64


def trace_id(deployment: str, instance: str, room: str) -> int:
    """Return the id of a room's trace, which is the same at all agents of its deployment."""
    return hashed(16, deployment, instance, room)


def hashed(length_bytes: int, *parts: object) -> int:
    """Return a number of this length that is not 0, which OpenTelemetry reserves."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode(errors="replace")).digest()
    return int.from_bytes(digest[:length_bytes], "big") or 1


class PairReport(msgspec.Struct, array_like=True, frozen=True):
    """A cache of one pair of ranks. `way` and `wire` are empty if it had nothing to move; the wire of direct copies is `None`."""

    peer: str
    way: str
    wire: str
    slabs: int
    cache: int


class StepReport(msgspec.Struct, array_like=True, frozen=True):
    """One step, as `spans.Span`. `kind` is the value of a `spans.Kind`."""

    name: str
    kind: str
    source_rank: int
    target_rank: int
    cache: int
    slab: int
    lane: int
    start_ns: int
    end_ns: int


class RoomReport(msgspec.Struct, array_like=True, frozen=True):
    """One half of a room, or a part of its steps. Each part has the facts of the half.

    Attributes:
        half: `source` or `target`.
        instance, room: the room's key.
        outcome: one of `metric_table.OUTCOMES`.
        reason, text: why it failed or was cancelled; empty if it is done.
        is_first: whether this part stands for the half, too.
    """

    worker: str
    half: str
    instance: str
    room: str
    opened_ns: int
    ended_ns: int
    outcome: str
    reason: str
    text: str
    bytes_moved: int
    pairs: tuple[PairReport, ...]
    is_first: bool = True
    steps: tuple[StepReport, ...] = ()

    def parts(self, steps: Sequence[StepReport]) -> list[RoomReport]:
        """Return the parts of the report with these steps."""
        base = msgspec.structs.replace(self, text=self.text[:_TEXT_CHARACTERS_MAX], pairs=self.pairs[:_PAIRS_MAX])
        return [
            msgspec.structs.replace(base, is_first=first == 0, steps=tuple(steps[first : first + STEPS_PER_MESSAGE]))
            for first in range(0, max(1, len(steps)), STEPS_PER_MESSAGE)
        ]

    @property
    def span_count(self) -> int:
        """The spans that this part becomes."""
        return len(self.steps) + self.is_first

    def to_bytes(self) -> bytes:
        """Encode this part."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RoomReport:
        """Decode the result of `to_bytes`."""
        return msgspec.msgpack.decode(data, type=cls)
