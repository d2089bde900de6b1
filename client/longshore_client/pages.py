"""Packs lists of pages for messages, and cuts them so that each part fits one message. Pure.

Called by `client.Client` only. A page id is an int32, little endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence, Sized

import msgspec

from longshore_client.errors import ArgumentError
from longshore_wire.engine_messages import ENGINE_MESSAGE_BYTES_MAX, PAGES_PER_MESSAGE_MAX, TO_AGENT, Offer, Receive
from longshore_wire.errors import Reason

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


def pages_for(pages: Sequence[int] | bytes, first_token: int, end_token: int, page_size: int) -> bytes:
    """Return the packed ids of the pages that hold tokens [first, end). Raises ArgumentError if their count is another."""
    packed = packed_pages(pages)
    count, wanted = len(packed) // PAGE_BYTES, page_count(first_token, end_token, page_size)
    if count != wanted:
        raise ArgumentError(
            f"{count} pages for tokens [{first_token}, {end_token}): pages of {page_size} tokens that "
            f"hold them are {wanted}; begin with the page of the first token"
        )
    return packed


def page_count(first_token: int, end_token: int, page_size: int) -> int:
    """Return the number of pages that hold tokens [first_token, end_token)."""
    return -(-end_token // page_size) - first_token // page_size if end_token > first_token else 0


def split_offer(
    room: int, pool: int, packed: bytes, first_token: int, end_token: int, *, last: bool, page_size: int
) -> Iterator[Offer]:
    """Yield offers of at most PAGES_PER_MESSAGE_MAX pages each, cut between pages. Only the final one may be `last`."""
    begin_token = first_token
    while True:
        stop_token = min(end_token, (begin_token // page_size + PAGES_PER_MESSAGE_MAX) * page_size)
        offset = (begin_token // page_size - first_token // page_size) * PAGE_BYTES
        pages = packed[offset : offset + PAGE_BYTES * page_count(begin_token, stop_token, page_size)]
        yield Offer(0, room, pool, begin_token, stop_token, last and stop_token == end_token, pages)
        begin_token = stop_token
        if begin_token >= end_token:
            return


def split_claim(whole: Receive, packed: bytes) -> Iterator[Receive]:
    """Yield the parts of claim `whole`, which has no pages, each with as many of `packed` as fit one message."""
    # An endpoint of a thousand ranks leaves less space. 32 bytes cover the growth of lengths and offsets.
    free_bytes = ENGINE_MESSAGE_BYTES_MAX - len(TO_AGENT.encode(whole)) - 32
    step = max(1, min(PAGES_PER_MESSAGE_MAX, free_bytes // PAGE_BYTES))
    for offset in range(0, max(1, whole.page_count), step):
        pages = packed[PAGE_BYTES * offset : PAGE_BYTES * (offset + step)]
        yield msgspec.structs.replace(whole, page_offset=offset, pages=pages)
