"""Memory of the simulated world, word by word, with the present owner of each piece.

A word is one token of one head in one layer, K and V; of a slot, one row of one head. Its content names its room, so that no
two are equal by accident.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
from sim_world import ViolationError

from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.layout import KVLayout
from longshore_wire.plan import Pair
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
        self.cache = cache
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

    def of(self, pages: list[int], first_page: int) -> Pages:
        """Return other pages of the same half of a room."""
        return Pages(self.pool, self.serial, pages, first_page)

    def _own(self, first: int, end: int, doing: str) -> npt.NDArray[np.int64]:
        places = self.places[first - self.base : end - self.base]
        if len(places) != end - first:
            raise ViolationError(f"{doing} tokens [{first}, {end}) beyond the pages of the room")
        numbers = places // self.pool.layout.page_size
        if (numbers >= len(self.pool.owners)).any() or (self.pool.owners[numbers] != self.serial).any():
            raise ViolationError(f"{doing} pages that are not this room's any more")
        return places

    def read(self, route: Pair, units: tuple[int, int]) -> Words:
        """Return a copy of the words that a pair of ranks moves, [layers, tokens, heads]."""
        places = self._own(*units, "reads")
        layers, heads = self._part(route)
        return self.pool.words[layers.start : layers.stop, places, heads.start : heads.stop]

    def write(self, route: Pair, units: tuple[int, int], words: Words) -> None:
        """Write words into the pages."""
        places = self._own(*units, "writes")
        layers, heads = self._part(route)
        shape = (len(layers), units[1] - units[0], len(heads))
        self.pool.words[layers.start : layers.stop, places, heads.start : heads.stop] = words.reshape(shape)

    def digests(self, route: Pair, units: tuple[int, int], words: Words) -> bytes:
        """Return the digests of words that `read` returned."""
        return digests(words, units[0])

    def _part(self, route: Pair) -> tuple[range, range]:
        return route.local_layers(self.pool.layout), route.local_heads(self.pool.layout)

    def fill(self, room: int, first: int, end: int) -> None:
        """Write tokens [first, end) as if the engine had computed them."""
        places = self._own(first, end, "computes")
        self.pool.words[:, places] = self.pool.content(room, first, end)

    def holds(self, room: int, end: int) -> bool:
        """Whether the pages hold the room's tokens up to `end`, all of them."""
        places = self._own(self.base, end, "keeps")
        return bool((self.pool.words[:, places] == self.pool.content(room, self.base, end)).all())


class SlotPool(Pool):
    """Slots of one cache of one engine rank. A word is one row of one head in one layer."""

    def __init__(self, layout: KVLayout, page_count: int, cache: int = 0) -> None:
        super().__init__(msgspec.structs.replace(layout, page_size=1), page_count, cache)
        self.layout = layout
        # By section: [layers, slots, rows, heads].
        self.sections = [
            np.full((len(layout.layers), page_count, each.rows, len(layout.heads_of(each.heads))), POISON, np.uint64)
            for each in layout.sections
        ]

    def give_back(self, pages: list[int]) -> None:
        self.owners[pages] = 0
        for words in self.sections:
            words[:, pages] = POISON
        self._free.extend(pages)

    def state(self, room: int, section: int) -> Words:
        """Return the words of a room in this rank, [layers, rows, heads]."""
        layout, held = self.layout, self.layout.sections[section]
        layers = (np.array(layout.layers, np.uint64)[:, None, None] + np.uint64(16 * self.cache)) << np.uint64(8)
        rows = np.arange(held.rows, dtype=np.uint64)[None, :, None] << np.uint64(16)
        heads = np.array(layout.heads_of(held.heads), np.uint64)[None, None, :] + np.uint64(64 * section)
        return layers + rows + heads + np.uint64((room & 0xFFFFFFFF) << 32)


class SlotPages(Pages):
    """The slots of one half of a room, by layers."""

    pool: SlotPool

    def __init__(self, pool: SlotPool, serial: int, pages: list[int]) -> None:
        super().__init__(pool, serial, pages, 0)

    def of(self, pages: list[int], _first_page: int) -> SlotPages:
        return SlotPages(self.pool, self.serial, pages)

    def _at(self, layer: int, doing: str) -> tuple[int, int]:
        """Return a global layer's place: its local number and its slot."""
        local = layer - self.pool.layout.layers.start
        number = local // self.pool.layout.page_size
        if not 0 <= number < len(self.pages):
            raise ViolationError(f"{doing} layer {layer} beyond the slots of the room")
        slot = self.pages[number]
        if self.pool.owners[slot] != self.serial:
            raise ViolationError(f"{doing} a slot that is not this room's any more")
        return local, slot

    def _pieces(self, route: Pair, units: tuple[int, int], doing: str) -> Iterator[Words]:
        for section, (first, end) in enumerate(route.sections):
            heads = route.local_heads(self.pool.layout, section)
            for layer in range(*units) if first < end else ():
                local, slot = self._at(layer, doing)
                yield self.pool.sections[section][local, slot, :, heads.start : heads.stop]

    def read(self, route: Pair, units: tuple[int, int]) -> Words:
        """Return a copy of the words that a pair of ranks moves, section by section, [1, words, 1]."""
        return np.concatenate([piece.reshape(-1) for piece in self._pieces(route, units, "reads")])[None, :, None]

    def write(self, route: Pair, units: tuple[int, int], words: Words) -> None:
        """Write words into the slots."""
        flat = words.reshape(-1)
        for piece in self._pieces(route, units, "writes"):
            piece[:] = flat[: piece.size].reshape(piece.shape)
            flat = flat[piece.size :]

    def digests(self, route: Pair, units: tuple[int, int], words: Words) -> bytes:
        """Return the digests of words that `read` returned."""
        found, at = [], 0
        for section, (first, end) in zip(self.pool.layout.sections, route.sections, strict=True):
            shape = (units[1] - units[0], section.rows, end - first)
            size = shape[0] * shape[1] * shape[2]
            if size:
                # Of one plane.
                found.append(digests(words.reshape(-1)[at : at + size].reshape(shape), 0)[: 8 * shape[0] * shape[2]])
            at += size
        return b"".join(found)

    def fill(self, room: int, _first: int, _end: int) -> None:
        """Write the state as if the engine had computed it."""
        for section, words in enumerate(self.pool.sections):
            state = self.pool.state(room, section)
            for local, layer in enumerate(self.pool.layout.layers):
                words[local, self._at(layer, "computes")[1]] = state[local]

    def holds(self, room: int, _end: int) -> bool:
        """Whether the slots hold the room's state, all of it."""
        return all(
            bool((words[local, self._at(layer, "keeps")[1]] == self.pool.state(room, section)[local]).all())
            for section, words in enumerate(self.pool.sections)
            for local, layer in enumerate(self.pool.layout.layers)
        )


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

    def take(self, effect: StartScatter) -> Words | None:
        """Return the words of a landed slab, [words]; None: the memory holds something else."""
        payload = aligned(effect.payload_bytes)
        if not self.ring.is_of(effect.generation, effect.offset_bytes, payload + TRAILER_BYTES):
            raise ViolationError(
                f"slab {effect.slab} of room {effect.pair.key.room} is scattered from memory of another"
            )
        first = effect.offset_bytes // WORD_BYTES
        end = first + payload // WORD_BYTES
        if self._words[end : end + TRAILER_BYTES // WORD_BYTES].tobytes() != trailer(effect):
            return None
        return self._words[first : first + effect.payload_bytes // WORD_BYTES].copy()


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
