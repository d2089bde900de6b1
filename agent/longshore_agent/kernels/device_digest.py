"""Computes digests of pages on a device; see `digest` for their definition.

Called by `device_copier`, on the stream of the copy whose pages it reads. The kernel reads each row once and writes no
page. It adds to sums on the device, which the stream has zeroed before and copies to the host afterwards.

A program adds the digests of one tile, [rows, columns] words of 8 bytes: one block of each of its rows, of one head of
one plane. The grid is (tiles, heads, planes), blocks of one tile of rows side by side. The arguments:

    planes: address of a table of planes, as `copy_kernel` reads it, from the first chosen layer on.
    pages: address of int32 page ids, the first one for the first row.
    key: address of the words of `digest.expanded`.
    found: address of the sums, [planes, heads] uint64.
    token: of the first row, counted from the beginning of the first page.
    gap: the pool's layers that are not chosen, between the planes of K and V.
    head: the first chosen head.
    layer_count: chosen layers.
    row_count: rows of each head.
    row_units: units of a row.
    blocks: of a row.
    row_first: number of the first row in the sequence.
    unit_bytes: of a unit, 16, 8, 4, 2 or 1: all addresses and strides are multiples of it.
    part: integer type of a unit's size, at most 8 bytes. A word is made of as many parts as it needs.
    rows, columns: of a tile.
    page_tokens: tokens of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from longshore_agent.errors import DeviceError, ShapeError
from longshore_agent.kernels.copier import check_fit
from longshore_agent.kernels.copy_kernel import locate
from longshore_agent.kernels.device_grid import (
    TOKEN_BYTES_MAX,
    Grid,
    Tile,
    Tuning,
    choose_grid,
    unit_of,
)
from longshore_agent.kernels.device_kernel import CopyStream, DeviceKernel, Launch
from longshore_agent.kernels.device_launch import Listed, Paged
from longshore_agent.kernels.digest import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    LINE_BYTES,
    MIX,
    Digests,
    Words,
    blocks_of,
    expanded,
)
from longshore_agent.memory import cuda

# Number of the kernel's addresses, 32-bit numbers and 64-bit words, in this order, before its constants.
ARGUMENTS = (4, 7, 1)
# Not measured. The compiled code has fewer instructions for each byte than with tiles of 8192 bytes.
TUNING = Tuning(tile_bytes=16384)
_WORD_BYTES = 8
_KEY_WORDS = BLOCK_WORDS + 2
_PARTS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
_BLOCK_WORDS = tl.constexpr(BLOCK_WORDS)
_LINE_BYTES = tl.constexpr(LINE_BYTES)
_MIX = tl.constexpr(MIX)


def constants(tile: Tile, _: Tuning) -> dict[str, object]:
    """Return the compile-time arguments of the kernel."""
    return {
        "unit_bytes": tile.unit_bytes,
        "part": _PARTS[min(tile.unit_bytes, _WORD_BYTES)],
        "rows": tile.rows,
        "columns": tile.columns,
        "page_tokens": tile.source_page_tokens,
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _read_words(
    start: tl.tensor,
    offset: tl.tensor,
    meant: tl.tensor,
    word: tl.tensor,
    row_parts: tl.tensor,
    part: tl.constexpr,
) -> tl.tensor:
    """Return words of rows, [rows, columns] uint64. A byte behind a row's end is zero, and is not read.

    Args:
        start: pointer to parts, to which the offsets are added.
        offset: of each row, in parts.
        meant: mask of the rows that are read.
        word: index of each column in a row.
        row_parts: parts of a row.
        part: see the module.
    """
    bits: tl.constexpr = part.primitive_bitwidth
    parts: tl.constexpr = 64 // bits
    for index in tl.static_range(parts):
        at = word * parts + index
        mask = meant[:, None] & (at < row_parts)[None, :]
        read = tl.load(start + (offset[:, None] + at[None, :]), mask=mask, other=0).to(tl.uint64)
        if index == 0:
            words = read
        else:
            words |= read << (index * bits)
    return words


# No value that differs from call to call may specialize the kernel: compiling one takes a second.
@triton.jit(do_not_specialize=tuple(range(sum(ARGUMENTS))))  # type: ignore[untyped-decorator]  # Triton has no types
def digest_kernel(
    planes: tl.int64,
    pages: tl.int64,
    key: tl.int64,
    found: tl.int64,
    token: tl.int32,
    gap: tl.int32,
    head: tl.int32,
    layer_count: tl.int32,
    row_count: tl.int32,
    row_units: tl.int32,
    blocks: tl.int32,
    row_first: tl.int64,
    unit_bytes: tl.constexpr,
    part: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
) -> None:
    """Add the digests of this program's tile to `found`. Args: see the module."""
    part_bytes: tl.constexpr = part.primitive_bitwidth // 8
    units: tl.constexpr = unit_bytes // part_bytes
    block, own_head, plane = tl.program_id(0) % blocks, tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) // blocks * rows
    row = at + tl.arange(0, rows)
    meant = row < row_count
    side = (planes, pages, token, gap, head)
    chosen = (plane, own_head, tl.num_programs(1), layer_count, row_count, row_units * units)
    start, offset = locate(side, chosen, at, meant, unit_bytes, part, rows, page_tokens, False, tl.int64)
    column = tl.arange(0, columns)
    word = block * _BLOCK_WORDS + column
    words = _read_words(start, offset, meant, word, row_units * units, part)

    secrets = key.to(tl.int64).to(tl.pointer_type(tl.uint64))
    secret = tl.load(secrets + column)[None, :]
    # These sums are meant to wrap.
    low = tl.add(words.to(tl.uint32), secret.to(tl.uint32), sanitize_overflow=False)
    high = tl.add((words >> 32).to(tl.uint32), (secret >> 32).to(tl.uint32), sanitize_overflow=False)
    lines = (row_units * unit_bytes + _LINE_BYTES - 1) // _LINE_BYTES
    counted = (word < lines * (_LINE_BYTES // 8))[None, :]
    value = tl.sum(tl.where(counted, low.to(tl.uint64) * high.to(tl.uint64), 0), axis=1)
    place = (row_first.to(tl.int64) + row) * blocks + block
    value += tl.load(secrets + _BLOCK_WORDS) + place.to(tl.uint64) * tl.load(secrets + _BLOCK_WORDS + 1)
    value = (value ^ (value >> 32)) * _MIX
    value = (value ^ (value >> 32)) * _MIX
    value ^= value >> 32
    total = tl.sum(tl.where(meant, value, 0), axis=0)
    sums = found.to(tl.int64).to(tl.pointer_type(tl.uint64))
    tl.atomic_add(sums + plane * tl.num_programs(1) + own_head, total, sem="relaxed")


_KERNEL = DeviceKernel(digest_kernel, ARGUMENTS, constants)


def choose_digest_grid(paged: Paged, tokens: tuple[int, int], tuning: Tuning) -> Grid:
    """Return the launch for the digests of these tokens. Raises ShapeError if one launch cannot read so much."""
    view, table = paged
    first, end = view.rows(tokens)
    row_words = -(-view.row_bytes // LINE_BYTES) * (LINE_BYTES // _WORD_BYTES)
    columns = min(1 << (row_words - 1).bit_length(), BLOCK_WORDS)
    tile = Tile(
        unit_bytes=unit_of(table.bits),
        word_bytes=_WORD_BYTES,
        rows=max(tuning.tile_bytes // (columns * _WORD_BYTES), 1),
        columns=columns,
        source_page_tokens=view.page_rows,
        target_page_tokens=0,
        one_page=False,
        whole_rows=view.row_bytes <= BLOCK_BYTES,
        narrow=False,
    )
    return choose_grid(tile, view.row_bytes, len(view.heads), view.plane_count, first % view.page_rows, end - first, 0)


class BoundDigest:
    """All digests of one shape: equally many tokens, at the same place in a page, of the same layers and heads.

    Attributes:
        count: of the digests, one for each plane and head.
    """

    def __init__(self, paged: Paged, tokens: tuple[int, int], stream: CopyStream, tuning: Tuning = TUNING) -> None:
        """Check the first of them and choose their grid; queue and compile nothing.

        Args:
            tokens: see `cpu_copy.digest_rows`.
            stream: of the device that holds the table; it can read all addresses.
        Raises:
            ShapeError: the pages do not hold these tokens, or one launch cannot read so much; names the argument.
        """
        view, table = paged
        check_fit(view, view, tokens)
        if table.device != stream.device:
            raise ShapeError(f"stream is of {stream.device}: the pages are on {table.device}")
        if view.row_bytes > TOKEN_BYTES_MAX:
            raise ShapeError(f"rows of {view.row_bytes} bytes: above {TOKEN_BYTES_MAX}")
        self._stream, self._tuning, self._pool = stream, tuning, table.pool
        self._row_tokens, self._page_tokens = view.row_tokens, view.page_tokens
        self._planes = table.line(view.layers.start)
        self._grid = choose_digest_grid(paged, tokens, tuning)
        first, end = view.rows(tokens)
        self._same = (
            first % view.page_rows,
            table.pool.layer_count - len(view.layers),
            view.heads.start,
            len(view.layers),
            end - first,
            view.row_bytes // self._grid.tile.unit_bytes,
            blocks_of(view.row_bytes),
        )
        self.count = view.plane_count * len(view.heads)
        self._launch: Launch | None = None

    def prepare(self) -> None:
        """Begin to compile the kernel in another thread. Raises DeviceError: the last attempt failed."""
        _KERNEL.ready(self._stream, self._grid.tile, self._tuning)

    def checked(self, listed: Listed, tokens: tuple[int, int]) -> Callable[[int, int], None]:
        """Return the call that queues the digests of tokens [first, end); it raises only DeviceError.

        Its arguments are device addresses: of the key's words, and of zeroed sums, [planes, heads] uint64. Until the
        stream has passed the launch, pages, list, key and sums are in use.

        Args:
            listed: pages of the same pool.
            tokens: equally many as at first, and at the same distance from the beginning of their page.
        Raises:
            ShapeError: a token lies in no page of them.
            DeviceError: the kernel cannot be compiled.
        """
        ids, first_page = listed
        assert ids.pool is self._pool, "page ids of another pool"
        address = ids.address_of(first_page, tokens, self._page_tokens, unique=False)
        if self._launch is None:
            self._launch = _KERNEL.bind(self._stream, self._grid, self._tuning)
        launch, row_first = self._launch, tokens[0] // self._row_tokens
        return lambda key, found: launch(self._planes, address, key, found, *self._same, row_first)


class DigestMemory:
    """Memory for the digests of one copy at a time: the key and the sums on the device, and the sums on the host.

    Reuse it only for work on the same stream, whose order keeps that behind all earlier work.

    Attributes:
        stream: of the work that uses it.
        capacity: sums.
    """

    def __init__(self, device: cuda.Device, stream: CopyStream, capacity: int) -> None:
        """Allocate it. Raises DeviceError."""
        self.stream, self.capacity = stream, capacity
        self._words: Words = np.zeros(_KEY_WORDS + capacity, dtype=np.uint64)
        try:
            self._memory = torch.empty(self._words.size, dtype=torch.int64, device=stream.device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the GPU has no memory left for {capacity} digests: leave the agent some of what its engine takes"
            ) from error
        self._host = cuda.HostBytes(device, capacity * _WORD_BYTES)
        self.key_address = self._memory.data_ptr()
        self.found_address = self.key_address + _KEY_WORDS * _WORD_BYTES

    def begin(self, key: bytes) -> None:
        """Queue a copy of the key and of zeros to the device, in one call of the driver. Raises DeviceError."""
        self._words[:_KEY_WORDS] = expanded(key)
        context = self.stream.context
        if context is None:
            self._memory.copy_(torch.from_numpy(self._words.view(np.int64)))
        else:
            cuda.copy_to_device(context, self.key_address, self._words.tobytes(), self.stream.handle)

    def finish(self) -> None:
        """Queue a copy of the sums to the host. Raises DeviceError."""
        self._host.fill(self.found_address, self.stream.handle)

    def read(self) -> bytes:
        """Return the sums, little-endian, after the stream has passed `finish`."""
        return self._host.read()


class Digested(NamedTuple):
    """A part of a side whose digests are wanted, with a list of page ids that only digests read."""

    bound: BoundDigest
    listed: Listed
    tokens: tuple[int, int]


class DigestMemories:
    """Keeps memory for digests until it is used again: as much as copies have used at the same time."""

    def __init__(self, device: cuda.Device) -> None:
        """Allocate nothing."""
        self._device = device
        self._free: dict[tuple[CopyStream, int], list[DigestMemory]] = {}

    def take(self, stream: CopyStream, count: int) -> DigestMemory:
        """Return memory for this many digests; its capacity is a power of two. Raises DeviceError."""
        capacity = 1 << (count - 1).bit_length()
        free = self._free.get((stream, capacity))
        return free.pop() if free else DigestMemory(self._device, stream, capacity)

    def give_back(self, memory: DigestMemory) -> None:
        """Keep memory that no copy will read again."""
        self._free.setdefault((memory.stream, memory.capacity), []).append(memory)


class CopyDigests:
    """The digests of one copy, of one side or of both. Keep it until its stream has passed the copy.

    Attributes:
        memory: of these digests.
    """

    def __init__(
        self,
        memories: DigestMemories,
        stream: CopyStream,
        sides: tuple[Sequence[Digested], Sequence[Digested]],
        key: bytes,
    ) -> None:
        """Check the sides and compile their kernels; queue nothing.

        Args:
            sides: the parts of source and target; empty: no digests of this side are wanted.
        Raises:
            ShapeError, DeviceError: as `BoundDigest.checked`, and if there is no memory.
        """
        # The lists of page ids, too, are in use until the end.
        self._sides, self._key = sides, key
        self._launches = [[part.bound.checked(part.listed, part.tokens) for part in side] for side in sides]
        self._counts = [[part.bound.count for part in side] for side in sides]
        self.memory = memories.take(stream, sum(map(sum, self._counts)))

    def calls(self, copies: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return the calls that queue the source's digests, the copies, the target's digests, and their way to the host.

        Each raises only DeviceError.

        Args:
            copies: queue the parts of the copy; each raises only DeviceError. Empty: there is no copy.
        """
        address = self.memory.found_address
        digests: list[list[Callable[[], None]]] = []
        for launches, counts in zip(self._launches, self._counts, strict=True):
            queued: list[Callable[[], None]] = []
            for launch, count in zip(launches, counts, strict=True):
                queued.append(functools.partial(launch, self.memory.key_address, address))
                address += count * _WORD_BYTES
            digests.append(queued)
        return [*digests[0], *copies, *digests[1], self.memory.finish]

    def begin(self) -> None:
        """Queue the key and zeroed sums, before the calls. Raises DeviceError."""
        self.memory.begin(self._key)

    def read(self) -> Digests:
        """Return the digests, after the stream has passed the copy."""
        found, (source_count, target_count) = self.memory.read(), map(sum, self._counts)
        source_end = source_count * _WORD_BYTES
        return Digests(found[:source_end], found[source_end : source_end + target_count * _WORD_BYTES])
