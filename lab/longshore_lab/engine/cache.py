"""Holds one rank's paged KV as tensors in a pool of the test engine: in shared memory or GPU memory.

Called by the decoder (write, read), which always computes on the CPU, and by checks of a transfer (dump, digest, zero).
Knows pages and bytes, but neither models nor the processes that map the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from longshore_lab.devices import CPU
from longshore_lab.engine.commands import HeadDigest
from longshore_lab.engine.device_memory import DeviceMemory
from longshore_lab.engine.errors import EngineError
from longshore_lab.engine.pages import pages_for
from longshore_lab.test_engine.memory import HostMemory, Memory
from longshore_lab.test_engine.pages import Pool
from longshore_wire.layout import KVLayout, PageOrder

# A quiet NaN that arithmetic does not produce, so that a dump shows which bytes were never written.
POISON_PATTERN = 0x7FC0DEAD
DIGEST_BYTES = 16


class PagePool(Pool):
    """K and V pages of a rank's layers and heads, float32, in one memfd or one tensor on a GPU.

    Methods that write pages return when the write is complete, so that an agent's process may access them.

    Attributes:
        layout: the rank's share of the cache.
        page_count: pages in the pool.
        planes: [2 * layers, page_count, page_size, heads, head_dim], a view with the page order's strides.
    """

    def __init__(self, layout: KVLayout, page_count: int, *, poison: bool = True, device: str = CPU) -> None:
        layout.check()
        if layout.order is PageOrder.OPAQUE or layout.model.element_bytes != torch.float32.itemsize:
            raise EngineError(f"layout is {layout}: the reference pool holds float32 pages in NHD or HND order")

        self._on_gpu: DeviceMemory | None = None

        def allocate(length_bytes: int) -> Memory:
            if device == CPU:
                return HostMemory(length_bytes)
            self._on_gpu = DeviceMemory(length_bytes, device)
            return self._on_gpu

        super().__init__(layout, page_count, allocate)
        self.page_count = page_count
        if self._on_gpu is None:
            # The mapping lives as long as a tensor refers to it, so that no access after `close` reads unmapped memory.
            flat = torch.frombuffer(self.memory.read(0, self.geometry.region_bytes[0]), dtype=torch.float32)
        else:
            flat = self._on_gpu.tensor.view(torch.float32)
        planes, heads, head_dim = 2 * len(layout.layers), len(layout.heads), layout.model.head_dim
        if layout.order is PageOrder.NHD:
            self.planes = flat.view(planes, page_count, layout.page_size, heads, head_dim)
        else:
            self.planes = flat.view(planes, page_count, heads, layout.page_size, head_dim).transpose(2, 3)
        self._words = flat.view(torch.int32).view(planes, page_count, -1)
        if poison:
            self._words.fill_(POISON_PATTERN)
        self._settle()

    def poison(self, pages: Sequence[int]) -> None:
        """Fill whole pages of every plane with a NaN pattern.

        Raises:
            EngineError: a page is out of range.
        """
        self._words[:, self._checked(pages)] = POISON_PATTERN
        self._settle()

    def zero(self, pages: Sequence[int], first: int, end: int) -> None:
        """Set K and V of tokens [first, end) of the sequence in `pages` to zero, on every plane.

        Raises:
            EngineError: the pages do not hold these tokens, or a page is out of range.
        """
        page, slot = self._locate(pages, first, end)
        self.planes[:, page, slot] = 0.0
        self._settle()

    def write(self, layer: int, pages: Sequence[int], first: int, keys: Tensor, values: Tensor) -> None:
        """Store K and V, each [tokens, heads, head_dim], of the tokens from `first` on; `layer` is local.

        Raises:
            EngineError: the pages do not hold these tokens, or a page is out of range.
        """
        page, slot = self._locate(pages, first, first + keys.shape[0])
        self.planes[layer, page, slot] = keys.to(self.planes.device)
        self.planes[len(self.layout.layers) + layer, page, slot] = values.to(self.planes.device)
        self._settle()

    def read(self, layer: int, pages: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Gather K and V of tokens [0, end) through the page table, each [heads, end, head_dim], contiguous, on the CPU."""
        values_layer = len(self.layout.layers) + layer
        return self._gather(layer, pages, end), self._gather(values_layer, pages, end)

    def dump_tokens(self, pages: Sequence[int], first: int, end: int) -> Tensor:
        """Copy tokens [first, end) out: [2 * layers, end - first, heads, head_dim], K planes first, on the CPU.

        Raises:
            EngineError: the pages do not hold these tokens, or a page is out of range.
        """
        page, slot = self._locate(pages, first, end)
        return self.planes[:, page, slot].contiguous().cpu()

    def put_tokens(self, pages: Sequence[int], first: int, end: int, rows: Tensor) -> None:
        """Store the result of `dump_tokens` of another pool as tokens [first, end).

        Args:
            pages: those from the page of `first` on.
        Raises:
            EngineError: a page is out of range.
        """
        size = self.layout.page_size
        page, slot = self._locate([pages[0]] * (first // size) + list(pages), first, end)
        self.planes[:, page, slot] = rows.to(self.planes.device)
        self._settle()

    def digest_tokens(self, pages: Sequence[int], first: int, end: int) -> list[HeadDigest]:
        """Digest the bytes of tokens [first, end), one entry for each global layer, K or V, and global head.

        Independent of TP, page size, page order and page ids: two layouts hold the same bytes exactly when the
        entries of all their ranks, sorted, are equal. The bytes are those of [tokens, head_dim].
        """
        page, slot = self._locate(pages, first, end)
        entries = []
        for plane in range(self.planes.shape[0]):
            by_head = self.planes[plane, page, slot].transpose(0, 1).contiguous().cpu().numpy()
            values, layer = divmod(plane, len(self.layout.layers))
            for local, head in enumerate(self.layout.heads):
                digest = hashlib.blake2b(by_head[local].data, digest_size=DIGEST_BYTES).digest()
                entries.append(HeadDigest(self.layout.layers[layer], bool(values), head, digest))
        return entries

    def _gather(self, plane: int, pages: Sequence[int], end: int) -> Tensor:
        """Copy whole pages and cut the tail off, which is faster than an index for each token."""
        needed = pages_for(end, self.layout.page_size)
        if needed > len(pages):
            raise EngineError(f"{len(pages)} pages of {self.layout.page_size} tokens do not hold {end} tokens")
        taken = self.planes[plane].index_select(0, self._checked(pages[:needed]))
        return taken.flatten(0, 1)[:end].transpose(0, 1).contiguous().cpu()

    def _locate(self, pages: Sequence[int], first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return page id and slot of each token in [first, end)."""
        page_size = self.layout.page_size
        if not 0 <= first <= end <= len(pages) * page_size:
            raise EngineError(f"tokens [{first}, {end}) are not held by {len(pages)} pages of {page_size} tokens")
        positions = torch.arange(first, end, device=self.planes.device)
        return self._checked(pages)[positions // page_size], positions % page_size

    def _checked(self, pages: Sequence[int]) -> Tensor:
        if any(not 0 <= page < self.page_count for page in pages):
            raise EngineError(
                f"pages {[p for p in pages if not 0 <= p < self.page_count]} are not in the pool: "
                f"it has pages 0 to {self.page_count - 1}"
            )
        return torch.tensor(pages, dtype=torch.int64, device=self.planes.device)

    def _settle(self) -> None:
        """Wait for queued work if the pages are on a GPU."""
        if self._on_gpu is not None:
            self._on_gpu.settle()
