"""Runs one rank of an engine instance: weights, paged KV, prefill by chunks and greedy decoding.

Used directly for TP 1, and by `rank_main` as one process of several. Prefill computes the prompt and samples the first
token. A decode rank continues from that token with `decode` once its pages are filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from longshore_lab.engine.cache import PagePool
from longshore_lab.engine.config import RankOptions, check_request
from longshore_lab.engine.errors import EngineError, MissingKVError
from longshore_lab.engine.model import Decoder
from longshore_lab.engine.pages import PageAllocator, pages_for
from longshore_lab.engine.tensor_parallel import join_group


class Sampled(NamedTuple):
    """A greedy token, and its logit's margin over the next best one (the logits' standard deviation is about 4)."""

    token: int
    margin: float


class EngineRank:
    """One rank. With tp above 1, every rank must get the same calls in the same order.

    Attributes:
        options: the rank's options.
        pool: its paged KV. An agent needs `pool.memory`, `pool.geometry` and `options.layout`.
        allocator: free pages of the pool, for in-process use. A driver of several ranks has its own.
    Raises:
        EngineError, LayoutError: the options are invalid; names the field.
    """

    def __init__(self, options: RankOptions) -> None:
        options.check()
        self.options = options
        self._group = join_group(options.init_method, options.tp, options.tp_rank)
        self._decoder = Decoder(options, self._group)
        self.pool = PagePool(options.layout, options.page_count, poison=options.poison, device=options.device)
        self.allocator = PageAllocator(options.page_count, options.shuffle_seed)

    def close(self) -> None:
        """Leave the group and free the pool."""
        self._group.close()
        self.pool.close()

    def prefill(self, prompt: Sequence[int], pages: Sequence[int], first: int, end: int) -> Sampled:
        """Compute and store KV of prompt tokens [first, end); pages must hold [0, first).

        Returns:
            the token that follows prompt[:end]; the request's first token when `end` is the prompt's length.
        Raises:
            EngineError: the interval is empty or not in the prompt, or an argument is out of range.
            MissingKVError: KV of [0, first) is missing.
        """
        if not 0 <= first < end <= len(prompt):
            raise EngineError(f"chunk [{first}, {end}) is empty or not within the prompt of {len(prompt)} tokens")
        return self._step(prompt[first:end], first, pages)

    def decode(self, pages: Sequence[int], position: int, token: int) -> Sampled:
        """Store KV of `token` at `position` and return its successor; pages must hold [0, position).

        Raises:
            EngineError: an argument is out of range.
            MissingKVError: KV of [0, position) is missing.
        """
        return self._step([token], position, pages)

    def decode_many(self, pages: Sequence[int], position: int, token: int, count: int) -> list[Sampled]:
        """Call `decode` `count` times, each with the previous token. Raises the errors of `decode`."""
        steps: list[Sampled] = []
        for index in range(count):
            steps.append(self.decode(pages, position + index, steps[-1].token if steps else token))
        return steps

    def generate(self, prompt: Sequence[int], count: int, chunk_tokens: int = 512) -> list[Sampled]:
        """Prefill by chunks and decode `count` tokens on pages of this rank's own allocator; free them at the end.

        Raises:
            EngineError: an argument is out of range.
            PagesExhaustedError: the pool has too few free pages.
        """
        check_request(prompt, count, chunk_tokens)
        pages = self.allocator.allocate(pages_for(len(prompt) + count, self.options.page_size))
        try:
            for first in range(0, len(prompt), chunk_tokens):
                sampled = self.prefill(prompt, pages, first, min(first + chunk_tokens, len(prompt)))
            return [sampled, *self.decode_many(pages, len(prompt), sampled.token, count - 1)]
        finally:
            self.release(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Free pages; poison them if the options say so."""
        self.allocator.free(pages)
        if self.options.poison:
            self.pool.poison(pages)

    def _step(self, tokens: Sequence[int], first: int, pages: Sequence[int]) -> Sampled:
        model, end = self.options.model, first + len(tokens)
        if not 0 <= first < end <= model.positions_max:
            raise EngineError(f"positions [{first}, {end}) are not below positions_max, {model.positions_max}")
        if any(not 0 <= token < model.vocabulary for token in tokens):
            raise EngineError(f"a token is not below the vocabulary of {model.vocabulary}")
        if end > len(pages) * self.options.page_size:
            raise EngineError(f"{len(pages)} pages of {self.options.page_size} tokens do not hold {end} tokens")
        logits = self._decoder.last_logits(tokens, first, self.pool, pages)
        # Logits are bit-identical on all ranks, so either all of them raise or none, and no rank waits for another.
        if not bool(torch.isfinite(logits).all()):
            raise MissingKVError(f"logits at position {end - 1} are not finite: KV of tokens [0, {first}) is missing")
        best = logits.topk(2) if model.vocabulary > 1 else logits.topk(1)
        return Sampled(int(best.indices[0]), float(best.values[0] - best.values[-1]))
