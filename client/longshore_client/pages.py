"""Packs lists of pages for messages, and cuts them so that each part fits one message. Pure.

Called by `client.Client` only. A page id is an int32, little endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence, Sized

import msgspec

from longshore_client.errors import ArgumentError
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    PAGES_PER_MESSAGE_MAX,
    TO_AGENT,
    CachePages,
    Offer,
    Receive,
)
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PageOrder

PAGE_BYTES = 4  # of an id in a message
_SIGN_BIT = 0x80  # of an id's highest byte
_PACKED = (bytes, bytearray, memoryview)


def packed_pages(pages: Sequence[int] | bytes) -> bytes:
    """Return page ids as packed int32, little endian. Bytes must be packed already. Raises ArgumentError."""
    if isinstance(pages, _PACKED):
        packed = bytes(pages)
        if len(packed) % PAGE_BYTES:
            raise ArgumentError(f"pages are {len(packed)} bytes: give int32 ids of {PAGE_BYTES} bytes each")
    else:
        if isinstance(pages, str) or not isinstance(pages, Sized):
            raise ArgumentError(f"pages is a {type(pages).__name__}: give a sequence of int32 ids, or them packed")
        try:
            numbers = array("i", pages)
        except (TypeError, OverflowError) as error:
            raise ArgumentError(f"pages must be int32 numbers: {error}") from error
        # A look at each would cost more than all else of a long list.
        if isinstance(next(iter(pages), None), bool):
            raise ArgumentError("pages are bools: give int32 ids")
        assert numbers.itemsize == PAGE_BYTES
        if sys.byteorder == "big":
            numbers.byteswap()
        packed = numbers.tobytes()
    high_bytes = packed[PAGE_BYTES - 1 :: PAGE_BYTES]
    if not high_bytes.isascii():
        index = next(at for at, byte in enumerate(high_bytes) if byte & _SIGN_BIT)
        page = int.from_bytes(packed[PAGE_BYTES * index : PAGE_BYTES * (index + 1)], "little", signed=True)
        raise ArgumentError(f"pages[{index}] is {page}: give ids from 0 on", reason=Reason.PAGE_OUT_OF_RANGE)
    return packed


def listed(pages: Sequence[int] | bytes, cache: int, first_token: int, end_token: int, layout: KVLayout) -> CachePages:
    """Return the pages of a cache that hold tokens [first, end), as messages name them.

    Args:
        layout: of the cache.
    Raises:
        ArgumentError: they are no page ids, or more or fewer.
    """
    packed = packed_pages(pages)
    count, (_, wanted) = len(packed) // PAGE_BYTES, layout.pages_of(first_token, end_token)
    if count != wanted:
        raise ArgumentError(
            f"{count} pages for tokens [{first_token}, {end_token}): {layout.pages_text} that "
            f"hold them are {wanted}; begin with the page of the first token"
        )
    return CachePages(cache, first_token, end_token, count, packed)


def split_offer(room: int, caches: Sequence[CachePages], layouts: Sequence[KVLayout], *, last: bool) -> Iterator[Offer]:
    """Yield offers of at most PAGES_PER_MESSAGE_MAX pages each, cut between pages. Only the final one may be `last`.

    Args:
        layouts: of each cache.
    """
    if sum([each.page_count for each in caches]) <= PAGES_PER_MESSAGE_MAX:
        yield Offer(0, room, tuple(caches), last)
        return
    # Slots come with `last`. Those of all caches fit one message: each has at most SLOT_PARTS_MAX pages.
    slots = tuple(each for each in caches if layouts[each.cache].order is PageOrder.SLOT)
    offers: list[tuple[CachePages, ...]] = [
        (part,) for each in caches if each not in slots for part in _cut(each, layouts[each.cache])
    ]
    if slots:
        offers.append(slots)
    for index, offered in enumerate(offers):
        yield Offer(0, room, offered, last and index == len(offers) - 1)


def _cut(whole: CachePages, layout: KVLayout) -> Iterator[CachePages]:
    page_size, begin_token = layout.page_size, whole.first_token
    first_page, _ = layout.pages_of(begin_token, whole.end_token)
    while True:
        stop_token = min(whole.end_token, (begin_token // page_size + PAGES_PER_MESSAGE_MAX) * page_size)
        offset = (begin_token // page_size - first_page) * PAGE_BYTES
        _, count = layout.pages_of(begin_token, stop_token)
        pages = whole.pages[offset : offset + PAGE_BYTES * count]
        yield CachePages(whole.cache, begin_token, stop_token, count, pages)
        begin_token = stop_token
        if begin_token >= whole.end_token:
            return


def split_claim(whole: Receive, caches: Sequence[CachePages]) -> Iterator[Receive]:
    """Yield the parts of claim `whole`, which names no cache, each with as many pages of `caches` as fit one message."""
    # An endpoint of a thousand ranks leaves less space. 64 bytes of each cache cover its numbers.
    free_bytes = ENGINE_MESSAGE_BYTES_MAX - len(TO_AGENT.encode(whole)) - 64 * len(caches)
    step = free = max(1, min(PAGES_PER_MESSAGE_MAX, free_bytes // PAGE_BYTES))
    parts: list[CachePages] = []
    for each in caches:
        rest = each
        while rest.page_count - rest.page_offset > free:
            if free:
                parts.append(msgspec.structs.replace(rest, pages=rest.pages[: PAGE_BYTES * free]))
            yield msgspec.structs.replace(whole, caches=tuple(parts))
            left = rest.pages[PAGE_BYTES * free :]
            rest = msgspec.structs.replace(rest, pages=left, page_offset=rest.page_offset + free)
            parts, free = [], step
        parts.append(rest)
        free -= rest.page_count - rest.page_offset
    yield msgspec.structs.replace(whole, caches=tuple(parts))
