"""A test instance: all ranks of one role, with their pages. Called by the test engine's program.

Prefill's ranks have one copy of the content, which all of their rooms offer. Decode's ranks have pages for several rooms at
a time, in places 0, 1 and so on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from longshore_client.errors import WaitTimeout
from longshore_lab.test_engine.headroom import Allocate
from longshore_lab.test_engine.ranks import RELEASED, Engine, cancelled, insist, left_s, wait_ended
from longshore_spec.verify_messages import RoomResult
from longshore_wire.engine_messages import Endpoint, Half, RoomEvent, RoomEventKind
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, PageOrder

# For the end of a cancelled room. If it takes longer, its place is not used again.
_CANCEL_LIMIT_S = 10.0
# All rooms have the same content.
_SEED = 0


class Instance:
    """A registered instance of one role.

    Args:
        socket: the agent's.
        layout: of any one rank.
        allocate: makes the memory of a rank's pages.
        tokens: of the largest room; whole pages.
        place_count: rooms that have pages at the same time.
    Raises:
        LongshoreError: the agent refuses a rank, or memory is missing.
    """

    def __init__(
        self,
        socket: str,
        instance: str,
        layout: KVLayout,
        half: Half,
        allocate: Allocate,
        tokens: int,
        place_count: int,
        limit_s: float,
    ) -> None:
        self.instance = instance
        self._layout = layout
        self._page_count = tokens // layout.page_size
        self._stuck: dict[int, int] = {}  # the room whose pages are not released, by place
        page_count = self._page_count * place_count
        self._ranks = Engine(socket, instance, layout, (half,), page_count, limit_s, allocate).ranks
        # Of each plane of each rank, for the largest room.
        self._content = [
            [rank.as_bytes(rank.sequence(plane, _SEED, tokens)[::-1]) for plane in range(len(rank.geometry.planes))]
            for rank in self._ranks
        ]
        if half is Half.SOURCE:
            for rank, content in zip(self._ranks, self._content, strict=True):
                for plane, data in zip(rank.geometry.planes, content, strict=True):
                    rank.memory.write(plane.offset, data)

    def endpoint(self, limit_s: float) -> Endpoint:
        """Return prefill's endpoint, once all ranks are registered. Raises LongshoreError."""
        return self._ranks[0].client.endpoint(limit_s)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def offer(self, rooms: Sequence[int], tokens: int, end_s: float) -> None:
        """Offer all tokens of these rooms. Raises LongshoreError."""
        for room in rooms:
            for rank in self._ranks:
                insist(partial(rank.client.send, room, self._pages(0, tokens), 0, tokens, last=True), end_s)

    def flip_byte(self, tokens: int) -> None:
        """Change the first byte of the last plane of a room of this length; a second call changes it back."""
        rank = self._ranks[-1]
        plane = rank.geometry.planes[-1]
        place = plane.offset + (self._page_count - tokens // self._layout.page_size) * plane.page_stride
        rank.memory.write(place, bytes([rank.memory.read(place, 1)[0] ^ 1]))

    def ended(self, rooms: Sequence[int], end_s: float, *, cancel: bool) -> None:
        """Return when these rooms have ended here and their pages are released. Raises LongshoreError."""
        for room in rooms:
            for rank in self._ranks:
                if not cancel or cancelled(rank.client, room, Half.SOURCE, self.instance):
                    wait_ended(rank.client, room, Half.SOURCE, self.instance, end_s)

    # -- decode ----------------------------------------------------------------------------------------------------

    def claim(
        self,
        endpoint: Endpoint,
        rooms: Sequence[int],
        tokens: int,
        concurrency: int,
        end_s: float,
        *,
        compare_each: bool,
    ) -> tuple[list[RoomResult], float]:
        """Receive these rooms, `concurrency` at a time; return how they ended, and the seconds from first to last."""

        def in_place(place: int) -> tuple[list[RoomResult], float]:
            found, ended_s = [], 0.0
            if not compare_each:
                self._clear(place)
            own = rooms[place::concurrency]
            for room in own:
                if compare_each:
                    self._clear(place)
                result, ended_s = self._receive(endpoint, room, place, tokens, end_s)
                if not result.text and (compare_each or room == own[-1]):
                    result = self._compared(result, place, tokens)
                found.append(result)
            return found, ended_s

        begun_s = time.monotonic()
        with ThreadPoolExecutor(concurrency) as threads:
            places = list(threads.map(in_place, range(min(concurrency, len(rooms)))))
        results = [result for found, _ in places for result in found]
        return results, max(ended_s for _, ended_s in places) - begun_s

    def _receive(
        self, endpoint: Endpoint, room: int, place: int, tokens: int, end_s: float
    ) -> tuple[RoomResult, float]:
        """Receive one room; return its result, and when it ended."""
        begun_s = time.monotonic()
        if place in self._stuck:
            text = f"the pages of room {self._stuck[place]} of this run are not released yet"
            return RoomResult(room, 0.0, 0, Reason.BUSY.name, text), begun_s
        pages, ended_s, failed = self._pages(place, tokens), begun_s, None
        events: list[RoomEvent] = []
        try:
            for rank in self._ranks:
                insist(partial(rank.client.receive, room, endpoint, pages, 0, tokens), end_s)
            for rank in self._ranks:
                events.append(rank.client.wait(room, Half.TARGET, endpoint.instance, timeout_s=left_s(end_s)))  # noqa: PERF401 - those so far count
            ended_s = time.monotonic()
        except LongshoreError as error:
            ended_s = time.monotonic()
            text = f"not within {ended_s - begun_s:.0f} s: one of the agents is busy, or the link between them is down"
            text = text if isinstance(error, WaitTimeout) else str(error)
            failed = RoomResult(room, ended_s - begun_s, 0, error.reason.name, text)
        bad = next((event for event in events if event.kind is RoomEventKind.FAILED), None)
        if bad is not None:
            failed = RoomResult(room, ended_s - begun_s, 0, bad.reason.name, bad.text or bad.reason.name)
        self._release(endpoint, room, place, end_s, cancel=failed is not None)
        return failed or RoomResult(room, ended_s - begun_s, sum(event.bytes_moved for event in events)), ended_s

    def _release(self, endpoint: Endpoint, room: int, place: int, end_s: float, *, cancel: bool) -> None:
        """Wait until the pages of a room are released. If they are not, keep their place."""
        limit_s = max(end_s, time.monotonic() + _CANCEL_LIMIT_S)
        for rank in self._ranks:
            try:
                if not cancel or cancelled(rank.client, room, Half.TARGET, endpoint.instance):
                    rank.client.wait(room, Half.TARGET, endpoint.instance, RELEASED, left_s(limit_s))
            except LongshoreError:
                self._stuck[place] = room

    def _compared(self, result: RoomResult, place: int, tokens: int) -> RoomResult:
        """Return the result with the first wrong bytes, if there are any."""
        page_count = tokens // self._layout.page_size
        for rank, content in zip(self._ranks, self._content, strict=True):
            for index, (plane, data) in enumerate(zip(rank.geometry.planes, content, strict=True)):
                end, length = (place + 1) * self._page_count * plane.page_stride, page_count * plane.page_stride
                moved = np.frombuffer(rank.memory.read(plane.offset + end - length, length), np.uint8)
                wrong = np.flatnonzero(moved != np.frombuffer(data, np.uint8)[len(data) - length :])
                if wrong.size:
                    page, byte = divmod(int(wrong[0]), plane.page_stride)
                    return RoomResult(
                        result.room,
                        result.seconds,
                        result.bytes_moved,
                        "WRONG_BYTES",
                        f"bytes differ at rank {rank.layout.rank}, {_plane_name(rank.layout, index)}, "
                        f"page {page_count - 1 - page} of {page_count} of the room, byte {byte}",
                    )
        return result

    def _clear(self, place: int) -> None:
        """Overwrite the pages of a place, so that bytes of an earlier room are not taken for those of the next."""
        if place in self._stuck:
            return
        for rank in self._ranks:
            for plane in rank.geometry.planes:
                length = self._page_count * plane.page_stride
                rank.memory.clear(plane.offset + place * length, length)

    def _pages(self, place: int, tokens: int) -> list[int]:
        """Return the pages of a room in a place, in the order of the sequence: the last page of the place first."""
        last = (place + 1) * self._page_count - 1
        return list(range(last, last - tokens // self._layout.page_size, -1))


def _plane_name(layout: KVLayout, index: int) -> str:
    layers = len(layout.layers)
    layer = layout.layers[index % layers]
    if layout.order is PageOrder.OPAQUE or layout.model.kinds == 1:
        return f"layer {layer}"
    return f"{'KV'[index // layers]} of layer {layer}"
