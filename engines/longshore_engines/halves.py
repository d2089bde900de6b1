"""Holds the open halves of rooms of one rank: prompts that are offered chunk by chunk, and claims.

Called by connectors of engines that ask each request for its state, from any of their threads; no call waits for the
agent. `rooms` is for engines that take all ended requests at once. Knows no engine and no tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longshore_client.client import Client
from longshore_client.errors import ArgumentError, ClientClosed
from longshore_engines.calls import CallThread, cancel, insist
from longshore_wire.engine_messages import Endpoint, Half, RoomEvent, RoomEventKind
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import TargetMemory

# A worker's restart takes seconds. A call that waits for longer delays those behind it.
CALL_LIMIT_S = 30.0
# How long the thread that takes events waits for one. It only bounds the time until it notices `close`.
EVENT_WAIT_S = 1.0

_Key = tuple[Half, str, int]


@dataclass(eq=False, slots=True)
class OpenHalf:
    """One half of a room, from its first call until no process uses its pages. Only `Halves` writes it.

    Attributes:
        ended: no process uses its pages. Before that the engine must not reuse them.
        done: all tokens have moved.
        failure: why it failed or was cancelled; empty if it did not.
        touched_s: time of the engine's last call for it, by `time.monotonic`.
    """

    half: Half
    instance: str
    room: int
    touched_s: float
    ended: bool = False
    done: bool = False
    failure: str = ""
    cancelled: bool = False
    bytes_moved: int = 0

    @property
    def key(self) -> _Key:
        """By which events name it."""
        return self.half, self.instance, self.room


@dataclass(slots=True)
class _Table:
    """The open halves. `lock` guards the table and every field of its halves."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    halves: dict[_Key, OpenHalf] = field(default_factory=dict)


class Halves:
    """The open halves of one rank.

    Args:
        client: connected, with its pool registered. Nothing else may call its `poll` and `wait`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._table = _Table()
        self._calls = CallThread("longshore-calls")
        self._events = threading.Thread(target=self._take_all, name="longshore-events", daemon=True)
        self._events.start()

    @property
    def open_count(self) -> int:
        """The number of halves that have not ended."""
        with self._table.lock:
            return len(self._table.halves)

    def offer(
        self,
        room: int,
        pages: Sequence[int],
        first_token: int,
        end_token: int,
        *,
        last: bool,
        fence: Callable[[], None] | None = None,
    ) -> OpenHalf:
        """Offer the next chunk of a room; return its half, which the first chunk opens.

        Args:
            fence: returns after the device has computed the chunk; called in the thread that makes calls.
        """
        key = (Half.SOURCE, self._client.instance, room)
        with self._table.lock:
            found = self._table.halves.get(key)
            if found is None:
                found = self._opened(key)
            found.touched_s = time.monotonic()

        def call() -> None:
            if fence is not None:
                fence()
            self._make(
                found,
                lambda timeout_s: self._client.send(
                    room, pages, first_token, end_token, last=last, timeout_s=timeout_s
                ),
            )

        self._calls.put(call)
        return found

    def claim(self, room: int, endpoint: Endpoint, pages: Sequence[int], first_token: int, end_token: int) -> OpenHalf:
        """Claim tokens [first_token, end_token) of a room into these pages; return its half.

        Raises:
            ArgumentError: this rank has claimed the room already.
        """
        key = (Half.TARGET, endpoint.instance, room)
        with self._table.lock:
            if key in self._table.halves:
                raise ArgumentError(f"room {room} of {endpoint.instance} is open at this rank already")
            found = self._opened(key)
        self._calls.put(
            lambda: self._make(
                found,
                lambda timeout_s: self._client.receive(
                    room, endpoint, pages, first_token, end_token, memory=TargetMemory.DEVICE, timeout_s=timeout_s
                ),
            )
        )
        return found

    def cancel(self, half: OpenHalf, text: str) -> None:
        """Cancel a half. Its pages are in use until it has ended. A second call does nothing."""
        with self._table.lock:
            if half.ended or half.cancelled:
                return
            half.cancelled = True
            half.failure = half.failure or text
        self._calls.put(lambda: self._cancel(half))

    def close(self) -> None:
        """Leave the agent, which then releases all rooms and pages."""
        self._client.close()
        self._calls.close()
        self._events.join()

    def _opened(self, key: _Key) -> OpenHalf:
        found = self._table.halves[key] = OpenHalf(*key, touched_s=time.monotonic())
        return found

    def _end(self, half: OpenHalf) -> None:
        with self._table.lock:
            if not half.done:
                half.failure = half.failure or "it ended without a reason"
            half.ended = True
            self._table.halves.pop(half.key, None)

    # -- the thread that makes calls -------------------------------------------------------------------------------

    def _make(self, half: OpenHalf, call: Callable[[float], None]) -> None:
        with self._table.lock:
            if half.ended or half.cancelled:
                return
        try:
            insist(call, CALL_LIMIT_S)
        except LongshoreError as error:
            with self._table.lock:
                half.failure = half.failure or str(error)
                half.cancelled = True
            self._cancel(half)

    def _cancel(self, half: OpenHalf) -> None:
        cancel(self._client, *half.key)
        # If no call for it was accepted, no event follows.
        if not self._client.is_open(half.room, half.half, half.instance):
            self._end(half)

    # -- the thread that takes events ------------------------------------------------------------------------------

    def _take_all(self) -> None:
        while True:
            try:
                for event in self._client.poll(EVENT_WAIT_S):
                    self._take(event)
            except ClientClosed:
                break
        # When the connection closed, the agent released everything of this rank.
        with self._table.lock:
            left = list(self._table.halves.values())
        for half in left:
            half.failure = half.failure or "the connection to the agent was closed"
            self._end(half)

    def _take(self, event: RoomEvent) -> None:
        with self._table.lock:
            half = self._table.halves.get((event.half, event.instance, event.room))
            if half is None:
                return
            match event.kind:
                case RoomEventKind.DONE:
                    half.done, half.bytes_moved = True, event.bytes_moved
                case RoomEventKind.FAILED:
                    half.failure = half.failure or f"{event.reason.name}: {event.text}"
        if event.kind is RoomEventKind.RELEASED:
            self._end(half)
