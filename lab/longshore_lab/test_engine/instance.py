"""A test instance: all ranks of one role, with their pages. Called by the test engine's program.

Prefill's ranks have one copy of the content, which all of their rooms offer. Decode's ranks have pages for several rooms at
a time, in places 0, 1 and so on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np

from longshore_client import CacheTokens
from longshore_client.errors import WaitTimeout
from longshore_lab.test_engine.headroom import Allocate
from longshore_lab.test_engine.pages import Pages, page_numbers, planes_of, unit_tokens
from longshore_lab.test_engine.ranks import RELEASED, Engine, Rank, cancelled, insist, left_s, wait_ended
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
        tokens: of the largest room.
        place_count: rooms that have pages at the same time.
        windows: tokens before a room's end that caches of these names keep; they begin there on both sides.
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
        windows: Mapping[str, int] | None = None,
    ) -> None:
        self.instance = instance
        self._windows = windows or {}
        self._stuck: dict[int, int] = {}  # the room whose pages are not released, by place
        # Pages of a place in each cache. Stages with fewer layers need fewer pages of a slot.
        ranks = [layout.at(number).caches for number in range(layout.rank_count)]
        self._page_counts = [
            max(len(page_numbers(one, 0, tokens)) for one in alike) for alike in zip(*ranks, strict=True)
        ]
        first, *others = [count * place_count for count in self._page_counts]
        self._ranks = Engine(socket, instance, layout, (half,), first, limit_s, allocate, others).ranks
        if half is Half.SOURCE:
            for _, cache, pool, plane in self._planes():
                # Also after the last token, so that bytes that move too much are seen.
                pages = pool.sequence(plane, _SEED + cache, self._page_counts[cache] * pool.layout.page_size)
                pool.write(plane, self._page_counts[cache] - pool.numbers(plane, 0, tokens).stop, pages[::-1])

    def endpoint(self, limit_s: float) -> Endpoint:
        """Return prefill's endpoint, once all ranks are registered. Raises LongshoreError."""
        return self._ranks[0].client.endpoint(limit_s)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def offer(self, rooms: Sequence[int], tokens: int, end_s: float, cuts: Sequence[int] = ()) -> None:
        """Offer all tokens of these rooms, in chunks that end at `cuts` and at the end. Raises LongshoreError."""
        if self._ranks[0].layout.order is PageOrder.SLOT:
            cuts = ()  # Each chunk has the first cache, and a slot has one.
        for room in rooms:
            for begin, end in pairwise((0, *cuts, tokens)):
                for rank in self._ranks:
                    head, *others = self._moved(rank, 0, tokens, begin, end)
                    others = [each for each in others if end == tokens or each.pages]
                    moved = head.pages, head.first_token, head.end_token
                    insist(partial(rank.client.send, room, *moved, last=end == tokens, others=others), end_s)

    def flip_byte(self, tokens: int) -> None:
        """Change the first byte of the last plane of a room of this length; a second call changes it back."""
        *_, (_, cache, pool, plane) = self._planes()
        where = pool.geometry.planes[plane]
        place = where.offset + (self._page_counts[cache] - pool.numbers(plane, 0, tokens).stop) * where.page_stride
        pool.memory.write(place, bytes([pool.memory.read(place, 1)[0] ^ 1]))

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
        ended_s, failed = begun_s, None
        events: list[RoomEvent] = []
        try:
            for rank in self._ranks:
                head, *others = self._moved(rank, place, tokens, 0, tokens)
                moved = head.pages, head.first_token, tokens
                insist(partial(rank.client.receive, room, endpoint, *moved, others=others), end_s)
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
        """Return the result with the first wrong byte, if there is any in the pages of the room."""
        for rank, cache, pool, plane in self._planes():
            end, numbers = (place + 1) * self._page_counts[cache], pool.numbers(plane, 0, tokens)
            moved = pool.read(plane, end - numbers.stop, end - numbers.start)[::-1]
            expected = pool.sequence(plane, _SEED + cache, tokens, self._begin(pool, tokens))
            if not np.array_equal(moved, expected):
                page, slot, head, byte = map(int, np.argwhere(moved != expected)[0])
                where = pool.geometry.planes[plane]
                return msgspec.structs.replace(
                    result,
                    reason="WRONG_BYTES",
                    text=f"bytes differ at rank {rank.layout.rank}, {_plane_name(rank.layout, pool.layout, plane)}, "
                    f"page {numbers[page]} of {len(page_numbers(pool.layout, 0, tokens))} of the room, "
                    f"byte {slot * where.token_stride + head * where.head_stride + byte}",
                )
        return result

    def _clear(self, place: int) -> None:
        """Overwrite the pages of a place, so that bytes of an earlier room are not taken for those of the next."""
        if place in self._stuck:
            return
        for _, cache, pool, plane in self._planes():
            where = pool.geometry.planes[plane]
            length = self._page_counts[cache] * where.page_stride
            pool.memory.clear(where.offset + place * length, length)

    # -- both ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the agent, and free the memory."""
        for rank in self._ranks:
            rank.close()

    def _planes(self) -> Iterator[tuple[Rank, int, Pages, int]]:
        """Yield each plane of all ranks: its rank, the index and pages of its cache, and its index there."""
        for rank in self._ranks:
            for cache, pool in enumerate(rank.pools):
                for plane in range(len(pool.geometry.planes)):
                    yield rank, cache, pool, plane

    def _begin(self, pool: Pages, tokens: int) -> int:
        """Return the first token that a cache has of a room."""
        unit = unit_tokens(pool.layout)
        return max(0, tokens - self._windows.get(pool.layout.name, tokens)) // unit * unit

    def _moved(self, rank: Rank, place: int, tokens: int, begin: int, end: int) -> list[CacheTokens]:
        """Return what moves of each cache with tokens [begin, end) of a room in a place. A slot moves with the last token.

        The last page of a place is the first of the sequence.
        """
        found = []
        for cache, pool in enumerate(rank.pools):
            if pool.layout.order is PageOrder.SLOT:
                first, stop = 0, tokens if end == tokens else 0
            else:
                unit = unit_tokens(pool.layout)
                first = max(begin // unit * unit, self._begin(pool, tokens))
                stop = max(first, end if end == tokens else end // unit * unit)
            last = (place + 1) * self._page_counts[cache] - 1
            pages = [last - number for number in page_numbers(pool.layout, first, stop)]
            found.append(CacheTokens(cache, pages, first, stop))
        return found


def _plane_name(whole: KVLayout, cache: KVLayout, index: int) -> str:
    """Return the name of a plane in texts, with its cache if the rank has several."""
    kind, layer = divmod(index, len(cache.layers))
    kinds, name = planes_of(cache), f"layer {cache.layers[layer]}"
    if len(kinds) > 1:
        is_kv = len(kinds) == len("KV") and cache.order is not PageOrder.SLOT
        name = f"{'KV'[kind] if is_kv else f'plane {kind}'} of {name}"
    return f"cache {cache.name!r}, {name}" if whole.others else name
