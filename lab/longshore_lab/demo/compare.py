"""Checks decode's pages after a transfer, and the tokens that decode generates from them. Raises at any difference."""

from __future__ import annotations

from collections.abc import Sequence

from longshore_lab.demo.errors import DifferenceError
from longshore_lab.engine.commands import Dumped, HeadDigest
from longshore_lab.engine.processes import EngineProcesses


class Fingerprint:
    """The content of decode's pages around the tokens that are to arrive. It must not change."""

    def __init__(self, decode: EngineProcesses, pages: Sequence[int], first: int, end: int) -> None:
        self._decode, self._pages = decode, pages
        # The last page is written only up to `end`, so its rest is checked, too.
        page_size = decode.options.page_size
        self._ranges = [(0, first), (end, -(-end // page_size) * page_size)]
        self._before = self._digests()

    def check(self, room: int) -> None:
        """Raise DifferenceError if tokens outside of the claim were written."""
        for (first, end), before, now in zip(self._ranges, self._before, self._digests(), strict=True):
            if before != now:
                raise DifferenceError(f"room {room}: tokens [{first}, {end}) were written, and nobody claimed them")

    def _digests(self) -> list[list[HeadDigest]]:
        return [self._decode.digest(self._pages, first, end) for first, end in self._ranges]


def check_digests(
    room: int,
    prefill: EngineProcesses,
    prefill_pages: Sequence[int],
    decode: EngineProcesses,
    decode_pages: Sequence[int],
    interval: tuple[int, int],
) -> None:
    """Raise DifferenceError unless each layer's K and V of each head have the same bytes on both sides."""
    near = prefill.digest(prefill_pages, *interval)
    far = decode.digest(decode_pages, *interval)
    if near == far:
        return
    wrong = [one for one, other in zip(near, far, strict=False) if one != other]
    if wrong:
        place = f"layer {wrong[0].layer}, {'V' if wrong[0].values else 'K'} of head {wrong[0].head}"
    else:
        place = f"{len(near)} and {len(far)} heads"
    raise DifferenceError(
        f"room {room}: pages of tokens [{interval[0]}, {interval[1]}) differ in {len(wrong)} of {len(near)} places; "
        f"the first is {place}"
    )


def check_bytes(
    room: int,
    prefill: EngineProcesses,
    prefill_pages: Sequence[int],
    decode: EngineProcesses,
    decode_pages: Sequence[int],
    interval: tuple[int, int],
) -> int:
    """Compare every byte itself, without a digest; return how many there are, or raise DifferenceError."""
    near = whole_rows(prefill.dump(prefill_pages, *interval))
    far = whole_rows(decode.dump(decode_pages, *interval))
    if near != far:
        raise DifferenceError(f"room {room}: bytes of tokens [{interval[0]}, {interval[1]}) differ")
    return len(near)


def whole_rows(dumps: Sequence[Dumped]) -> bytes:
    """Combine the ranks' dumps into [2 * layers, tokens, all heads, head_dim], the same for every TP."""
    planes, tokens = dumps[0].shape[:2]
    contents = [memoryview(dump.content) for dump in dumps]
    rows_bytes = [len(content) // (planes * tokens) for content in contents]
    return b"".join(
        content[row * row_bytes : (row + 1) * row_bytes]
        for row in range(planes * tokens)
        for content, row_bytes in zip(contents, rows_bytes, strict=True)
    )


def check_tokens(room: int, generated: Sequence[int], expected: Sequence[int]) -> None:
    """Raise DifferenceError unless the tokens are those of one engine that did both prefill and decode."""
    if list(generated) != list(expected):
        raise DifferenceError(
            f"room {room}: decode generated {list(generated)}, and one engine alone generates {list(expected)}"
        )


def check_control(room: int, generated: Sequence[int], expected: Sequence[int]) -> None:
    """Raise DifferenceError if the tokens stay the same when the transferred KV is set to zero."""
    if list(generated) == list(expected):
        raise DifferenceError(
            f"room {room}: tokens are the same with the transferred KV set to zero: the comparison proves nothing"
        )
