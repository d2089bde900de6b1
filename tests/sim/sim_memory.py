"""Memory of the simulated world, word by word, with the present owner of each piece.

A word is one token of one head in one layer, K and V. Its content names its room, so that no two are equal by accident.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sim_world import ViolationError

from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.layout import KVLayout
from longshore_wire.ring import Region, Ring
from longshore_wire.slabs import TRAILER_BYTES, Trailer, aligned

WORD_BYTES = 8
POISON = 0xDEAD_DEAD_DEAD_DEAD
Words = npt.NDArray[np.uint64]


def digests(words: Words, first_token: int) -> bytes:
    """Return the digests of words [layers, tokens, heads], of which the first token is `first_token`, as agents send them."""
    places = (np.arange(words.shape[1], dtype=np.uint64) + np.uint64(first_token)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = words * np.uint64(0xBF58476D1CE4E5B9) + places[None, :, None]
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0x94D049BB133111EB)
    # A word is K and V, which are two planes.
    return 2 * np.ascontiguousarray((mixed ^ mixed >> np.uint64(29)).sum(axis=1)).tobytes()


def damaged(words: Words, damage: int) -> Words:
    """Return other words: with a changed bit, tokens or heads at each other's places, or those of nobody."""
    kind, place = damage % 4, damage // 4 % words.size
    found = words.copy()
    if kind == 1 and words.shape[1] > 1:
        return np.roll(found, 1, axis=1)
    if kind == 2 and words.shape[2] > 1:
        return np.roll(found, 1, axis=2)
    if kind == 3:
        found[...] = POISON
        return found
    found.reshape(-1)[place] ^= np.uint64(1 << damage % 64)
    return found


class Pool:
    """Pages of one cache of one engine rank. Freed pages are allocated next."""

    def __init__(self, layout: KVLayout, page_count: int, cache: int = 0) -> None:
        self.layout = layout
        self.words: Words = np.full(
            (len(layout.layers), page_count * layout.page_size, len(layout.heads)), POISON, np.uint64
        )
        self.owners = np.zeros(page_count, np.int64)  # the serial number of a half of a room; 0: nobody's
        self._free = list(range(page_count))
        layers = (np.array(layout.layers, np.uint64)[:, None, None] + np.uint64(16 * cache)) << np.uint64(8)
        self._names = layers + np.array(layout.heads, np.uint64)[None, None, :]

    def take(self, count: int, serial: int) -> list[int] | None:
        """Allocate pages for `serial`; return None if too few are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self.owners[pages] = serial
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free these pages and poison them."""
        self.owners[pages] = 0
        size = self.layout.page_size
        self.words.reshape(self.words.shape[0], -1, size, self.words.shape[2])[:, pages] = POISON
        self._free.extend(pages)

    def content(self, room: int, first: int, end: int) -> Words:
        """Return the words of tokens [first, end) of a room in this rank."""
        tokens = np.arange(first, end, dtype=np.uint64) << np.uint64(16)
        return self._names + tokens[None, :, None] + np.uint64((room & 0xFFFFFFFF) << 32)


class Pages:
    """The pages of one half of a room, by tokens of its sequence."""

    def __init__(self, pool: Pool, serial: int, pages: list[int], first_page: int) -> None:
        self.pool, self.serial, self.pages = pool, serial, pages
        size = pool.layout.page_size
        self.base = first_page * size
        numbers = np.array(pages, np.int64)
        self._numbers = numbers
        self.places = (numbers[:, None] * size + np.arange(size)).reshape(-1)

    def _own(self, first: int, end: int, doing: str) -> npt.NDArray[np.int64]:
        places = self.places[first - self.base : end - self.base]
        if len(places) != end - first:
            raise ViolationError(f"{doing} tokens [{first}, {end}) beyond the pages of the room")
        if (self.pool.owners[places // self.pool.layout.page_size] != self.serial).any():
            raise ViolationError(f"{doing} pages that are not this room's any more")
        return places

    def read(self, layers: range, first: int, end: int, heads: range) -> Words:
        """Return a copy of the pages' words."""
        places = self._own(first, end, "reads")
        return self.pool.words[layers.start : layers.stop, places, heads.start : heads.stop]

    def write(self, layers: range, first: int, end: int, heads: range, words: Words) -> None:
        """Write words into the pages."""
        places = self._own(first, end, "writes")
        self.pool.words[layers.start : layers.stop, places, heads.start : heads.stop] = words

    def fill(self, room: int, first: int, end: int) -> None:
        """Write tokens [first, end) as if the engine had computed them."""
        places = self._own(first, end, "computes")
        self.pool.words[:, places] = self.pool.content(room, first, end)

    def holds(self, room: int, end: int) -> bool:
        """Whether the pages hold the room's tokens up to `end`, all of them."""
        places = self._own(self.base, end, "keeps")
        return bool((self.pool.words[:, places] == self.pool.content(room, self.base, end)).all())


class ShadowRing(Ring):
    """The real ring, and a map of the owner of each of its pieces."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._owners = np.zeros(capacity_bytes // self.alignment_bytes, np.int64)

    def _span(self, region: Region) -> slice:
        return slice(region.offset_bytes // 64, (region.offset_bytes + region.length_bytes) // 64)

    def allocate(self, length_bytes: int) -> Region | None:
        region = super().allocate(length_bytes)
        if region is not None:
            span = self._span(region)
            if self._owners[span].any():
                raise ViolationError(f"the ring gives {region} out, of which a part is another's")
            self._owners[span] = region.generation
        return region

    def free(self, region: Region) -> None:
        super().free(region)
        self._owners[self._span(region)] = 0

    def release_held(self, region: Region) -> None:
        super().release_held(region)
        self._owners[self._span(region)] = 0

    def is_of(self, generation: int, offset_bytes: int, length_bytes: int) -> bool:
        """Whether this piece was granted as `generation` and was not freed since."""
        span = slice(offset_bytes // 64, -(-(offset_bytes + length_bytes) // 64))
        return bool((self._owners[span] == generation).all())


class Staging:
    """The ring's memory at a decode worker."""

    def __init__(self, ring: ShadowRing) -> None:
        self.ring = ring
        self._words: Words = np.zeros(ring.capacity_bytes // WORD_BYTES, np.uint64)

    def land(self, effect: StartWrite, words: Words) -> None:
        """Store arriving bytes of a write, also if the memory has another owner by now."""
        payload = aligned(effect.payload_bytes)
        if not self.ring.is_of(effect.generation, effect.offset_bytes, payload + TRAILER_BYTES):
            raise ViolationError(
                f"slab {effect.slab} of room {effect.pair.key.room} lands at {effect.offset_bytes} "
                f"(generation {effect.generation}) in memory that is not its own any more"
            )
        first = effect.offset_bytes // WORD_BYTES
        self._words[first : first + words.size] = words.reshape(-1)
        end = first + payload // WORD_BYTES
        self._words[end : end + TRAILER_BYTES // WORD_BYTES] = np.frombuffer(trailer(effect), np.uint64)

    def take(self, effect: StartScatter, shape: tuple[int, int, int]) -> Words | None:
        """Return the words of a landed slab; None: the memory holds something else."""
        payload = aligned(effect.payload_bytes)
        if not self.ring.is_of(effect.generation, effect.offset_bytes, payload + TRAILER_BYTES):
            raise ViolationError(
                f"slab {effect.slab} of room {effect.pair.key.room} is scattered from memory of another"
            )
        first = effect.offset_bytes // WORD_BYTES
        end = first + payload // WORD_BYTES
        if self._words[end : end + TRAILER_BYTES // WORD_BYTES].tobytes() != trailer(effect):
            return None
        return self._words[first : first + effect.payload_bytes // WORD_BYTES].reshape(shape)


def trailer(effect: StartWrite | StartScatter) -> bytes:
    """Return the trailer of a slab, as the agent's gather writes it and its scatter checks it."""
    pair = effect.pair
    return (
        Trailer(
            pair.key.room,
            pair.cache,
            effect.slab,
            pair.source_rank,
            pair.target_rank,
            pair.source_epoch,
            pair.target_epoch,
            effect.generation,
            effect.payload_bytes,
        )
        .seal(b"")
        .data
    )
