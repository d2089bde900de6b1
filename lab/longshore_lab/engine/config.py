"""Options of the reference engine's ranks: the model's sizes and the rank's place in the instance.

Read by every module of the engine and sent to rank processes. Pure values; loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from longshore_lab.devices import device_of
from longshore_lab.engine.errors import EngineError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel

FLOAT32_BYTES = 4


class ModelConfig(msgspec.Struct, frozen=True):
    """Sizes of the decoder. The defaults give 36,864 bytes of KV a token over all ranks.

    Attributes:
        layers, hidden, query_heads, kv_heads, head_dim, mlp, vocabulary: counts of elements.
        positions_max: the longest sequence, in tokens.
        rope_base: base of the rotary frequencies (Su et al., RoFormer, arXiv 2104.09864).
    """

    layers: int = 6
    hidden: int = 384
    query_heads: int = 24
    kv_heads: int = 12
    head_dim: int = 64
    mlp: int = 768
    vocabulary: int = 512
    positions_max: int = 8192
    rope_base: float = 10_000.0

    @property
    def shape(self) -> ModelShape:
        """The cache's shape, which both sides of a transfer declare."""
        return ModelShape.kv(self.layers, self.kv_heads, self.head_dim, FLOAT32_BYTES)

    @property
    def query_group(self) -> int:
        """Number of query heads that read each KV head."""
        return self.query_heads // self.kv_heads

    def check(self, tp: int) -> None:
        """Raise EngineError, naming the field, if this model cannot be split over `tp` ranks."""
        for name in ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "mlp", "vocabulary", "positions_max"):
            if getattr(self, name) < 1:
                raise EngineError(f"model.{name} is {getattr(self, name)}: give at least 1")
        if self.head_dim % 2:
            raise EngineError(f"model.head_dim is {self.head_dim}: rotary positions need an even number")
        if self.query_heads % self.kv_heads:
            raise EngineError(f"model.query_heads is {self.query_heads}: give a multiple of kv_heads, {self.kv_heads}")
        for name in ("kv_heads", "mlp"):
            if tp < 1 or getattr(self, name) % tp:
                raise EngineError(f"tp is {tp} and model.{name} is {getattr(self, name)}: tp must divide it")


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine instance.

    Attributes:
        seed: the weights' seed, equal for all ranks of an instance and for instances that are compared.
        page_size: tokens in a page.
        page_count: pages in this rank's pool.
        poison: fill unwritten pages with NaN, so that attention over missing KV is detected.
        shuffle_seed: allocate pages in an order shuffled by this seed; None means ascending.
        devices: GPUs for the pages, assigned to the ranks round-robin; empty means shared memory. All ranks compute on the CPU.
        init_method: `file://` or `tcp://` rendezvous of the ranks, unused with tp 1.
        extension: `module:factory` that a rank process loads (see `rank_main`), or empty.
        extension_options: bytes for that factory.
    """

    model: ModelConfig = ModelConfig()
    tp: int = 1
    tp_rank: int = 0
    seed: int = 0
    page_size: int = 16
    order: PageOrder = PageOrder.NHD
    page_count: int = 256
    poison: bool = True
    shuffle_seed: int | None = None
    devices: tuple[str, ...] = ()
    init_method: str = ""
    extension: str = ""
    extension_options: bytes = b""

    @property
    def layout(self) -> KVLayout:
        """This rank's share of the cache, as a transfer's layout."""
        return KVLayout(self.model.shape, Parallel(tp=self.tp, tp_rank=self.tp_rank), self.page_size, self.order)

    @property
    def device(self) -> str:
        """The device of this rank's pages: "cpu", or torch's name of a GPU."""
        return device_of(self.devices, self.tp_rank)

    def check(self) -> None:
        """Raise EngineError or LayoutError, naming the field, if the options are invalid."""
        self.model.check(self.tp)
        self.layout.check()
        if self.order is PageOrder.OPAQUE:
            raise EngineError("order is OPAQUE: attention reads tokens, use NHD or HND")
        if self.page_count < 1:
            raise EngineError(f"page_count is {self.page_count}: give at least 1")
        if self.tp > 1 and not self.init_method:
            raise EngineError(f"init_method is empty and tp is {self.tp}: give a file:// or tcp:// rendezvous")


def check_request(prompt: Sequence[int], count: int, chunk_tokens: int) -> None:
    """Raise EngineError if the prompt is empty, or `count` or `chunk_tokens` is below 1."""
    if not prompt or count < 1 or chunk_tokens < 1:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens, count is {count}, chunk_tokens is {chunk_tokens}: give at least 1"
        )
