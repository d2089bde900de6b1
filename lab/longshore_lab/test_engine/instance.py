"""A test instance: all ranks of one role, with their pages. Called by the test engine's program.

Prefill's ranks have one copy of the content, which all of their rooms offer. Decode's ranks have pages for several rooms at
a time, in places 0, 1 and so on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from longshore_client.client import Client
from longshore_client.connection import open_links
from longshore_client.errors import AgentLost, Busy, WaitTimeout
from longshore_client.memory import pool_geometry
from longshore_lab.test_engine import pattern
from longshore_lab.test_engine.memory import Allocate, Memory
from longshore_spec.verify_messages import RoomResult
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Endpoint, Half, Hello, RoomEvent, RoomEventKind
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, PageOrder, PlaneGeometry, TargetMemory

_AGAIN_S = 0.1
# For the end of a cancelled room. If it takes longer, its place is not used again.
_CANCEL_LIMIT_S = 10.0
_RELEASED = frozenset({RoomEventKind.RELEASED})


class _Rank(NamedTuple):
    client: Client
    layout: KVLayout
    planes: tuple[PlaneGeometry, ...]
    memory: Memory
    content: list[bytes]  # of each plane, for the largest room


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
        stack = ExitStack()

        def rank(number: int) -> _Rank:
            own = layout.at(number)
            geometry = pool_geometry(own, self._page_count * place_count)
            memory = allocate(number, geometry.region_bytes[0])
            stack.callback(memory.close)
            client = _connect(socket, instance, own, memory.device_name, half, limit_s)
            stack.callback(client.close)
            client.register_pool(0, geometry, memory.regions)
            return _Rank(client, own, geometry.planes, memory, pattern.planes(own, self._page_count))

        with stack:
            with ThreadPoolExecutor(layout.rank_count) as threads:
                self._ranks = list(threads.map(rank, range(layout.rank_count)))
            if half is Half.SOURCE:
                for each in self._ranks:
                    for plane, content in zip(each.planes, each.content, strict=True):
                        each.memory.write(plane.offset, content)
            # From now on the end of the process makes the agent release everything.
            stack.pop_all()

    def endpoint(self, limit_s: float) -> Endpoint:
        """Return prefill's endpoint, once all ranks are registered. Raises LongshoreError."""
        return self._ranks[0].client.endpoint(limit_s)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def offer(self, rooms: Sequence[int], tokens: int, end_s: float) -> None:
        """Offer all tokens of these rooms. Raises LongshoreError."""
        for room in rooms:
            for rank in self._ranks:
                _insist(partial(rank.client.send, room, self._pages(0, tokens), 0, tokens, last=True), end_s)

    def flip_byte(self, tokens: int) -> None:
        """Change the first byte of the last plane of a room of this length; a second call changes it back."""
        rank = self._ranks[-1]
        place = rank.planes[-1].offset + (self._page_count - tokens // self._layout.page_size) * _page_bytes(rank, -1)
        rank.memory.write(place, bytes([rank.memory.read(place, 1)[0] ^ 1]))

    def ended(self, rooms: Sequence[int], end_s: float, *, cancel: bool) -> None:
        """Return when these rooms have ended here and their pages are released. Raises LongshoreError."""
        for room in rooms:
            for rank in self._ranks:
                if cancel:
                    rank.client.cancel(room, Half.SOURCE)
                if not cancel or rank.client.is_open(room, Half.SOURCE, self.instance):
                    rank.client.wait(room, Half.SOURCE, self.instance, timeout_s=_left_s(end_s))
                    rank.client.wait(room, Half.SOURCE, self.instance, _RELEASED, _left_s(end_s))

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
                _insist(partial(rank.client.receive, room, endpoint, pages, 0, tokens), end_s)
            for rank in self._ranks:
                events.append(rank.client.wait(room, Half.TARGET, endpoint.instance, timeout_s=_left_s(end_s)))  # noqa: PERF401 - those so far count
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
                if cancel:
                    rank.client.cancel(room, Half.TARGET, instance=endpoint.instance)
                if rank.client.is_open(room, Half.TARGET, endpoint.instance) or not cancel:
                    rank.client.wait(room, Half.TARGET, endpoint.instance, _RELEASED, _left_s(limit_s))
            except LongshoreError:
                self._stuck[place] = room

    def _compared(self, result: RoomResult, place: int, tokens: int) -> RoomResult:
        """Return the result with the first wrong bytes, if there are any."""
        page_count = tokens // self._layout.page_size
        for rank in self._ranks:
            for index, (plane, content) in enumerate(zip(rank.planes, rank.content, strict=True)):
                page_bytes = _page_bytes(rank, index)
                end = plane.offset + (place + 1) * self._page_count * page_bytes
                length = page_count * page_bytes
                moved, wanted = rank.memory.read(end - length, length), content[len(content) - length :]
                if moved != wanted:
                    first = next(at for at in range(length) if moved[at] != wanted[at])
                    return RoomResult(
                        result.room,
                        result.seconds,
                        result.bytes_moved,
                        "WRONG_BYTES",
                        f"bytes differ at rank {rank.layout.rank}, {_plane_name(rank.layout, index)}, "
                        f"page {page_count - 1 - first // page_bytes} of {page_count} of the room, byte {first % page_bytes}",
                    )
        return result

    def _clear(self, place: int) -> None:
        """Overwrite the pages of a place, so that bytes of an earlier room are not taken for those of the next."""
        if place in self._stuck:
            return
        for rank in self._ranks:
            for index, plane in enumerate(rank.planes):
                length = self._page_count * _page_bytes(rank, index)
                rank.memory.clear(plane.offset + place * length, length)

    def _pages(self, place: int, tokens: int) -> list[int]:
        """Return the pages of a room in a place, in the order of the sequence: the last page of the place first."""
        last = (place + 1) * self._page_count - 1
        return list(range(last, last - tokens // self._layout.page_size, -1))


def _connect(path: str, instance: str, layout: KVLayout, device: str, half: Half, limit_s: float) -> Client:
    """Register a rank as `longshore_client.connect` does, which refuses the names of test instances to engines."""
    number = 1 + int.from_bytes(os.urandom(7), "little")
    hello = Hello(ENGINE_PROTOCOL_VERSION, instance, layout, device, (half,), engine=number, pid=os.getpid())
    return Client(hello, open_links(path, {TargetMemory.DEVICE: hello}, limit_s))


def _page_bytes(rank: _Rank, plane: int) -> int:
    return rank.planes[plane].page_stride


def _plane_name(layout: KVLayout, index: int) -> str:
    layers = len(layout.layers)
    layer = layout.layers[index % layers]
    if layout.order is PageOrder.OPAQUE or layout.model.kinds == 1:
        return f"layer {layer}"
    return f"{'KV'[index // layers]} of layer {layer}"


def _left_s(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())


def _insist(call: Callable[[], None], end_s: float) -> None:
    """Repeat a call while the agent's queues are full or it restarts."""
    while True:
        try:
            return call()
        except (Busy, AgentLost) as error:
            if time.monotonic() > end_s:
                raise
            time.sleep(error.retry_after_s if isinstance(error, Busy) else _AGAIN_S)
