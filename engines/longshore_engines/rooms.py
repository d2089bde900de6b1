"""Carries out the scheduler's orders in a rank, through the client, and reports the requests that have ended.

Called by an engine's connector in each rank's process, by the model's thread, which never waits for the agent (see `halves`).
Knows no engine and no tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore_client.arguments import CacheTokens
from longshore_client.client import Client
from longshore_engines.halves import Halves, Key, OpenHalf
from longshore_engines.handover import Ask, Claim, Fail, GroupPages, Offer, Order, ReportSent, TakeBack, Withdraw
from longshore_wire.engine_messages import Half
from longshore_wire.names import room_name

_log = logging.getLogger("vllm.longshore")

# Longest wait for one event while pages are taken back, and interval of the warnings that this takes long.
TAKE_BACK_LOOK_S = 0.05
TAKE_BACK_WARNING_S = 10.0


class Transfer(NamedTuple):
    """One half of a room that has ended, for statistics. `failure` is empty if it succeeded."""

    half: Half
    duration_s: float
    bytes_moved: int
    failure: str


@dataclass(slots=True)
class Ended:
    """The requests that have ended since the last `poll`. Their pages belong to the engine again."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # those of `received` whose pages lack the claimed tokens
    lost: set[int] = field(default_factory=set)  # rooms of offers that have failed here
    answered: set[str] = field(default_factory=set)  # those that have asked, and can claim now or learn why not
    transfers: list[Transfer] = field(default_factory=list)


class CacheGroups(NamedTuple):
    """The groups of layers in which an engine allots a cache's pages.

    Attributes:
        groups: their indexes: one, or for recurrent states several, the layers of each after those of the one before.
        repeats: of recurrent states, how often each group's page is named; empty: the cache has tokens.
        page_size: tokens of a page of the cache.
        parts: pages of the cache in one page of its group.
    """

    groups: tuple[int, ...] = (0,)
    repeats: tuple[int, ...] = ()
    page_size: int = 0
    parts: int = 1

    def tokens(self, cache: int, groups: Sequence[GroupPages]) -> CacheTokens:
        """Return what the cache has of these tokens of all groups."""
        pages, first, end = groups[self.groups[0]]
        if self.repeats:
            named = zip(self.groups, self.repeats, strict=True)
            return CacheTokens(cache, sum((groups[group].pages * count for group, count in named), ()), first, end)
        if self.parts > 1:
            begin = first // self.page_size % self.parts
            count = -(-end // self.page_size) - first // self.page_size
            split = (page * self.parts + part for page in pages for part in range(self.parts))
            pages = tuple(split)[begin : begin + count]
        return CacheTokens(cache, pages, first, end)


ONE_CACHE = (CacheGroups(),)


@dataclass(slots=True)
class _Request:
    """A request's half of a room, from its order until no process uses its pages.

    Attributes:
        order: the ask, the claim, or the last offer so far.
        since_s: time of that order.
        reported: of a prefill half: the engine keeps its pages until it hears that the half has ended.
        unwanted: cancelled because the engine no longer needs it, which is no failure.
    """

    order: Offer | Ask | Claim
    half: OpenHalf
    since_s: float
    reported: bool = False
    unwanted: bool = False


class RankRooms:
    """The open rooms of one rank. Only the model's thread may call its public methods.

    Args:
        client: connected, with its pool registered.
        limit_s: a room that is not done after this time is cancelled. Its pages return when no process uses them.
        asks: this rank asks for rooms, on behalf of all ranks of its engine.
        caches: of the layout, in its order.
    """

    def __init__(
        self,
        client: Client,
        limit_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        asks: bool = True,
        caches: Sequence[CacheGroups] = ONE_CACHE,
    ) -> None:
        self._asks = asks
        self._caches = caches
        self._client = client
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._halves = Halves(client, _log)
        # In the order of `since_s`.
        self._open: dict[Key, _Request] = {}
        self._by_request: dict[str, Key] = {}
        self._ended = Ended()

    @property
    def open_count(self) -> int:
        """The number of halves of rooms that have not ended."""
        return len(self._open)

    def carry_out(self, orders: Sequence[Order], fence: Callable[[], None] | None = None) -> None:
        """Begin the scheduler's orders; return at once.

        Args:
            fence: returns after the device has done all earlier work; called in the thread that makes calls.
        """
        for order in orders:
            match order:
                case Offer() | Claim():
                    self._begin(order, fence)
                case Ask():
                    self._ask(order)
                case Withdraw():
                    self._give_up(order.request_id)
                case ReportSent():
                    found = self._open.get(self._source_key(order.room))
                    if found is not None and found.order.request_id == order.request_id:
                        found.reported = True
                    else:
                        self._ended.sent.add(order.request_id)
                case Fail():
                    _log.error("request %s: %s", order.request_id, order.text)
                    self._ended.received.add(order.request_id)
                    self._ended.failed.add(order.request_id)
                    self._ended.transfers.append(Transfer(Half.TARGET, 0.0, 0, order.text))

    def take_back(self, orders: Sequence[Order]) -> None:
        """Cancel the rooms of all `TakeBack` orders, and wait until no process uses their pages.

        If the agent is away, this waits for the next one. A room that could still be done would be read from pages that
        the engine has given to another request.
        """
        wanted = [order.request_id for order in orders if isinstance(order, TakeBack)]
        keys = [key for request_id in wanted if (key := self._give_up(request_id)) is not None]
        begin_s = warned_s = time.monotonic()
        while any(key in self._open for key in keys):
            self._hear(TAKE_BACK_LOOK_S)
            now_s = time.monotonic()
            if now_s - warned_s >= TAKE_BACK_WARNING_S:
                warned_s = now_s
                _log.warning("a preempted prompt waits for the agent for %.0f s to release its pages", now_s - begin_s)

    def poll(self, pause_s: float = 0.0) -> Ended:
        """Return the requests that have ended since the last call.

        Args:
            pause_s: how long to wait for an end if rooms are open; 0: do not wait.
        """
        self._hear(pause_s)
        ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """Leave the agent, which then releases all rooms and pages."""
        self._halves.close()

    def _hear(self, pause_s: float) -> None:
        now_s = self._clock_s()
        for half in self._halves.take(pause_s if self._open else 0.0):
            self._end(half, now_s)
        for half in self._halves.take_offered():
            if (request := self._open.get(half.key)) is not None:
                self._ended.answered.add(request.order.request_id)
        for request in self._open.values():
            if now_s - request.since_s < self._limit_s:
                break
            if not request.half.done:
                self._halves.cancel(request.half, f"it was not done within {self._limit_s:g} s")

    def _ask(self, order: Ask) -> None:
        key = (Half.TARGET, order.endpoint.instance, order.room)
        if not self._asks:
            return
        if key in self._open:
            # Its claim will fail, since a router has used one room for two prompts.
            self._ended.answered.add(order.request_id)
            return
        half = self._halves.ask(order.room, order.endpoint, order.binding)
        self._open[key] = _Request(order, half, self._clock_s())
        self._by_request[order.request_id] = key

    def _begin(self, order: Offer | Claim, fence: Callable[[], None] | None) -> None:
        if isinstance(order, Offer):
            key = self._source_key(order.room)
        else:
            key = (Half.TARGET, order.endpoint.instance, order.room)
        known, now_s = self._open.get(key), self._clock_s()
        is_next = isinstance(order, Offer) and order.is_next
        if is_next and (known is None or known.half.cancelled):
            # It has ended, such as by decode's cancellation, while the engine computes the rest.
            return
        is_asked = known is not None and isinstance(known.order, Ask) and isinstance(order, Claim)
        if known is not None and (known.order.request_id != order.request_id or not (is_next or is_asked)):
            # A router has used one room for two prompts. The second request cannot have it.
            self._fail_twin(order)
            return
        groups = order.groups
        caches = [cache.tokens(index, groups) for index, cache in enumerate(self._caches)]
        (_, pages, first, end), others = caches[0], caches[1:]
        if isinstance(order, Claim):
            half = self._halves.claim(order.room, order.endpoint, pages, first, end, fence, order.binding, others)
            self._open.pop(key, None)
            self._open[key] = _Request(order, half, now_s)
        else:
            half = self._halves.offer(
                order.room,
                pages,
                first,
                end,
                last=order.last,
                others=[each for each in others if each.first_token < each.end_token],
                binding=order.binding,
                fence=fence,
                half=known.half if known else None,
            )
            request = self._open.pop(key, None) or _Request(order, half, now_s)
            request.order, request.since_s = order, now_s
            self._open[key] = request
        if _has_pages(order):
            self._by_request[order.request_id] = key
        elif is_asked:
            del self._by_request[order.request_id]

    def _fail_twin(self, order: Offer | Claim) -> None:
        if not _has_pages(order):
            return
        _log.error(
            "request %s: room %s is open at this rank already: a router must use each room for one prompt",
            order.request_id,
            room_name(order.room),
        )
        if isinstance(order, Claim):
            self._ended.received.add(order.request_id)
            self._ended.failed.add(order.request_id)

    def _source_key(self, room: int) -> Key:
        return Half.SOURCE, self._client.instance, room

    def _give_up(self, request_id: str) -> Key | None:
        """Cancel the open room of a request, which the engine no longer needs; return the room's key."""
        key = self._by_request.get(request_id)
        if key is not None:
            request = self._open[key]
            request.unwanted = True
            self._halves.cancel(request.half, "the engine no longer needs it")
        return key

    def _end(self, half: OpenHalf, now_s: float) -> None:
        request = self._open.pop(half.key)
        order, failure = request.order, "" if half.done else half.failure
        # An empty claim only tells prefill not to wait. vLLM requests one even for rooms that were claimed.
        is_ask = isinstance(order, Ask)
        has_pages = not isinstance(order, Ask) and _has_pages(order)
        unwanted = request.unwanted or not (is_ask or has_pages)
        if has_pages and not (failure and unwanted):
            self._ended.transfers.append(Transfer(half.half, now_s - request.since_s, half.bytes_moved, failure))
        if failure:
            _log.log(
                logging.DEBUG if unwanted else logging.WARNING,
                "request %s, room %s of %s: %s",
                order.request_id,
                room_name(order.room),
                half.instance,
                failure,
            )
        if is_ask or has_pages:
            self._by_request.pop(order.request_id, None)
        if is_ask:
            # Its claim will fail with the same reason.
            self._ended.answered.add(order.request_id)
        if request.reported:
            self._ended.sent.add(order.request_id)
        elif isinstance(order, Offer) and failure:
            self._ended.lost.add(order.room)
        if isinstance(order, Claim) and has_pages:
            self._ended.received.add(order.request_id)
            if failure:
                self._ended.failed.add(order.request_id)


def _has_pages(order: Offer | Claim) -> bool:
    return any(group.pages for group in order.groups)
