"""Records what a worker's control thread does for each room: messages that it handles and sends, slabs that it starts.

Called by the worker's loop, in its thread only. Steps follow each other, so that each begins where the last one ended
or where `begin` was called, and costs one clock call and one record. Messages that belong to no room are not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from longshore_agent.status.spans import Kind, SpanRecorder
from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.engine_messages import (
    Accepted,
    Ask,
    Cancel,
    EngineSteps,
    Half,
    Offer,
    Receive,
    Refused,
    RoomEvent,
    RoomEventKind,
    ToAgent,
    ToEngine,
)
from longshore_wire.peer_messages import PairKey, PeerMessage, RoomKey

# Keys of rooms that steps share, so that the recorder does not keep those of each message alive. Then begin anew.
_KEYS_MAX = 4096
# Longest name of an instance or a step that is kept. An engine may send any, and spans are bounded by their number alone.
_NAME_CHARACTERS_MAX = 256
_NO_LANE = -1
_ANSWERS = (Accepted, Refused)
_EVENTS = {kind: f"send {kind.name}" for kind in RoomEventKind}


class StepLog:
    """The steps of one control thread.

    Args:
        instance: of the worker's engine, whose offers do not name it.
        of_engines: the agent asks engines for their steps.
    Attributes:
        woken_ns: when the thread woke for its current turn.
    """

    def __init__(self, spans: SpanRecorder, instance: str, *, of_engines: bool) -> None:
        self.woken_ns = 0
        self._spans, self._append = spans, spans.append
        self._instance = instance
        self._of_engines = of_engines
        self._begun_ns = 0
        self._asked: RoomKey | None = None  # the room of the engine's request that is being handled
        self._keys: dict[PairKey | RoomKey, PairKey | RoomKey] = {}
        # Steps of one key often follow each other. It is looked up once: the newest key, and the one that its steps share.
        self._newest: PairKey | RoomKey | None = None
        self._newest_shared: PairKey | RoomKey | None = None

    def begin(self) -> None:
        """Begin a step now."""
        self._begun_ns = time.monotonic_ns()

    def handled(self, message: PeerMessage) -> None:
        """Record that a peer's message was read and handled."""
        pair = getattr(message, "pair", None)
        if pair is None:
            self.begin()
        else:
            self._record(type(message).__name__, pair, getattr(message, "slab", -1), Kind.HANDLE)

    def sent(self, message: PeerMessage) -> None:
        """Record that a message was sent to a peer."""
        pair = getattr(message, "pair", None)
        if pair is not None:
            self._record(f"send {type(message).__name__}", pair, getattr(message, "slab", -1), Kind.SEND)

    def started(self, stage: str, effect: StartWrite | StartScatter) -> None:
        """Record that the thread started a stage of a slab."""
        self._record(f"start {stage}", effect.pair, effect.slab, Kind.START)

    def asked(self, message: ToAgent) -> None:
        """Record that a request of the engine was read and handled. `told` records its answer."""
        self._asked = self._room(message)
        if self._asked is None:
            self.begin()
        else:
            self._record(type(message).__name__, self._asked, -1, Kind.HANDLE)

    def answered(self) -> None:
        """End the handling of a request. Later answers are to others."""
        self._asked = None

    def prepared(self, rooms: Iterable[RoomKey]) -> None:
        """Record the preparation of pages, room by room as `rooms` goes on. Called at the end of each turn."""
        self.begin()
        for key in rooms:
            self._record("prepare pages", key, -1, Kind.START)
        self._spans.trim()

    def told(self, message: ToEngine) -> None:
        """Record that an event or an answer was sent to the engine."""
        if isinstance(message, RoomEvent):
            key = RoomKey(message.instance, message.room)
            self._record(_EVENTS[message.kind], key, -1, Kind.SEND)
        elif isinstance(message, _ANSWERS) and self._asked is not None:
            self._record(f"send {type(message).__name__}", self._asked, -1, Kind.SEND)

    def of_engine(self, message: EngineSteps) -> None:
        """Record the steps of the engine's client, if the agent asks for them. Impossible ones are dropped."""
        key = self._of_room(RoomKey(message.instance, message.room)) if self._of_engines else None
        now_ns = time.monotonic_ns()
        for step in message.steps:
            # OpenTelemetry drops all spans of a request if one of them has a time that needs more than 64 bits.
            if (
                key is not None
                and 0 <= step.start_ns <= step.end_ns <= now_ns
                and len(step.name) <= _NAME_CHARACTERS_MAX
            ):
                kind = Kind.WAIT if step.waits else Kind.CALL
                self._spans.record(step.name, key, -1, _NO_LANE, step.start_ns, step.end_ns, kind)
        self.begin()

    def _of_room(self, key: RoomKey) -> PairKey | RoomKey | None:
        return self._keys.get(key) or self._shared(key)

    def _room(self, message: ToAgent) -> RoomKey | None:
        if isinstance(message, Offer):
            return RoomKey(self._instance, message.room)
        if isinstance(message, Receive | Ask):
            return RoomKey(message.endpoint.instance, message.room)
        if isinstance(message, Cancel):
            instance = message.instance if message.half is Half.TARGET else self._instance
            return RoomKey(instance, message.room)
        return None

    def _record(self, name: str, key: PairKey | RoomKey, slab: int, kind: Kind) -> None:
        end_ns = time.monotonic_ns()
        if key is not self._newest:
            self._newest, self._newest_shared = key, self._keys.get(key) or self._shared(key)
        if (shared := self._newest_shared) is not None:
            self._append((name, shared, slab, _NO_LANE, self._begun_ns, end_ns, kind, self.woken_ns))
        self._begun_ns = end_ns

    def _shared(self, key: PairKey | RoomKey) -> PairKey | RoomKey | None:
        """Return the key that all steps of it will share; None: its instance's name is too long to keep."""
        instance = key.key.instance if isinstance(key, PairKey) else key.instance
        if len(instance) > _NAME_CHARACTERS_MAX:
            return None
        if len(self._keys) >= _KEYS_MAX:
            self._keys.clear()
        self._keys[key] = key
        return key
