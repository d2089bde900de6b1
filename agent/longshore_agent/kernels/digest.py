"""Defines the digests that show whether pages of two layouts hold the same bytes. `cpu_digest` and `device_digest` compute them.

A digest is 64 bits for one plane (K or V of a layer) and one head, over rows of a sequence; see `copier` for rows. It
does not depend on page sizes, page orders or the numbers of ranks. All sums are modulo 2**64:

    digest = sum over rows r and blocks b of a row: mix(nh(block) + SEED + (r * blocks of a row + b) * STEP)
    nh     = sum over words w of a block: (low(w) + low(k)) mod 2**32 * (high(w) + high(k)) mod 2**32
    mix(x) = three times x ^= x >> 32, with x *= MIX between two of them

A block is BLOCK_BYTES of a row, the last one of a row is shorter and padded with zeros to a multiple of LINE_BYTES. A
word is 8 bytes, little-endian; k is the word of the key with the same index in the block. `nh` is the hash of UMAC
(RFC 4418): two blocks that differ have equal values with a probability of at most 2**-32, for anyone without the key.

A source's digests are those of its pages, found by the room's page list and not by the addresses that the copy uses. On a
GPU, and for pages that were written in place, a target's are those of its pages, after the copy. On a CPU they are those
of the bytes that the copy reads and, for one in READ_BACK_EVERY planes of equal strides, of the pages after the copy. Each
copy reads other planes again. A wrong page id changes all planes, so each copy shows it. A fault of one plane shows in one
copy of READ_BACK_EVERY.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

BLOCK_BYTES = 512
LINE_BYTES = 64
BLOCK_WORDS = BLOCK_BYTES // 8
# A copy on a CPU reads this part of the target's planes again; see the module.
READ_BACK_EVERY = 8
MIX = 0xD6E8FEB86659FD93
# Separates this use of a key from others.
_PURPOSE = b"longshore digest 1"
_KEYS_MAX = 4096


@functools.lru_cache(_KEYS_MAX)
def expanded(key: bytes) -> Words:
    """Return the words of a key, [BLOCK_WORDS + 2] uint64: those of a block, then SEED and STEP, which is odd."""
    words = np.frombuffer(hashlib.shake_256(_PURPOSE + key).digest((BLOCK_WORDS + 2) * 8), dtype="<u8").copy()
    words[-1] |= np.uint64(1)
    words.flags.writeable = False
    return words


def blocks_of(row_bytes: int) -> int:
    """Return the blocks of a row."""
    return -(-row_bytes // BLOCK_BYTES)


class Digests(NamedTuple):
    """The digests of a slab's rows.

    Attributes:
        source, target: of either side, [planes * heads] uint64, little-endian: the heads of a plane are adjacent. Empty: that
            side is a slab, or no digest was wanted.
    """

    source: bytes = b""
    target: bytes = b""


NO_DIGESTS = Digests()


def joined(parts: Sequence[Digests]) -> Digests:
    """Return the digests of a copy from those of its parts."""
    return Digests(b"".join(part.source for part in parts), b"".join(part.target for part in parts))


def first_difference(wanted: bytes, found: bytes) -> int | None:
    """Return the index of the first digest that differs; None: all are equal. A missing one differs."""
    if wanted == found:
        return None
    count = min(len(wanted), len(found)) // 8
    differs = np.flatnonzero(np.frombuffer(wanted[: 8 * count], "<u8") != np.frombuffer(found[: 8 * count], "<u8"))
    return int(differs[0]) if differs.size else count
