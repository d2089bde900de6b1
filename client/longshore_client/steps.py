"""Keeps what an engine's calls and events of each half took, until the half is over and its agent gets them.

Held by `core.Core`, and kept only while the agent asks for it. Pure: no I/O, no clock. A half is over when it is
RELEASED and the engine has taken its end, in either order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from longshore_client.ledger import HalfKey
from longshore_wire.engine_messages import (
    ENGINE_STEPS_MAX,
    EngineStep,
    EngineSteps,
    RoomEvent,
    RoomEventKind,
)

# Halves whose steps are kept; then the oldest are dropped. Steps are for looking at single rooms.
STEP_HALVES_MAX = 1024
_ENDS = (RoomEventKind.DONE, RoomEventKind.FAILED)


@dataclass(slots=True)
class _Kept:
    """One half: its newest steps, and its events by kind, with the time of their arrival."""

    steps: deque[EngineStep] = field(default_factory=lambda: deque(maxlen=ENGINE_STEPS_MAX))
    arrived_ns: dict[RoomEventKind, int] = field(default_factory=dict)
    end_taken: bool = False


class Steps:
    """The steps of all open halves of one connection. Times are of time.monotonic_ns.

    Attributes:
        wanted: the agent asks for them.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._kept: dict[HalfKey, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def sent(self, key: HalfKey, call: str, begun_ns: int, sent_ns: int) -> None:
        """Record that a `send`, `ask` or `receive` has sent its messages and now waits for its answer."""
        if self.wanted:
            self._of(key).steps.append(EngineStep(call, begun_ns, sent_ns))

    def answered(self, key: HalfKey, call: str, sent_ns: int, ended_ns: int) -> None:
        """Record that the call returns. Another thread may have taken the end of its half before: then it is too late."""
        if (kept := self._kept.get(key)) is not None:
            kept.steps.append(EngineStep(f"{call} waits", sent_ns, ended_ns, waits=True))

    def arrived(self, event: RoomEvent, now_ns: int) -> None:
        """Record that an event was read."""
        if self.wanted:
            self._of(_key(event)).arrived_ns[event.kind] = now_ns

    def taken(self, events: Iterable[RoomEvent], now_ns: int) -> list[EngineSteps]:
        """Record that the engine has taken events; return the steps of halves that are over now, once each."""
        over = []
        for event in events:
            key = _key(event)
            kept = self._kept.get(key)
            arrived_ns = kept.arrived_ns.get(event.kind) if kept is not None else None
            if kept is None or arrived_ns is None:
                continue
            kept.steps.append(EngineStep(event.kind.name, arrived_ns, max(arrived_ns, now_ns), waits=True))
            kept.end_taken = kept.end_taken or event.kind in _ENDS
            over.append(key)
        return [found for key in dict.fromkeys(over) if (found := self.over(key)) is not None]

    def over(self, key: HalfKey) -> EngineSteps | None:
        """Return the steps of a half that is over and forget them; None: it is not over, or was returned before."""
        kept = self._kept.get(key)
        if kept is None or not kept.end_taken or RoomEventKind.RELEASED not in kept.arrived_ns:
            return None
        del self._kept[key]
        return EngineSteps(*key, steps=tuple(kept.steps))

    def forget(self, key: HalfKey) -> None:
        """Forget a half that was not opened."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Forget all: their agent is gone, with the other steps of their rooms."""
        self._kept.clear()

    def _of(self, key: HalfKey) -> _Kept:
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= STEP_HALVES_MAX:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[key] = _Kept()
        return kept


def _key(event: RoomEvent) -> HalfKey:
    return HalfKey(event.half, event.instance, event.room)
