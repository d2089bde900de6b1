"""Makes the demo's requests: prompts, their chunks, and the prefixes that decode already has.

Each request has the expected tokens, which a single engine computes once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from longshore_lab.engine.config import ModelConfig
from longshore_lab.engine.processes import EngineProcesses

# Different orders of computation change a logit by up to 5e-5. A margin twenty times larger gives the same token in all.
MARGIN_MIN = 1e-3
# Random prompts rarely have a token with a smaller margin.
DRAWS_MAX = 20
TOKENS_GENERATED = 8

# (tokens, prefix that decode holds). The first one is long, of odd length, in three chunks, and its prefix ends in
# the middle of a page; the others have no prefix, one that fills pages, and one that does not.
_FULL = ((1861, 37), (640, 128), (411, 50), (333, 7), (257, 0), (97, 33))
_QUICK = ((911, 37), (128, 16), (65, 0))
_LONG_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes:
        tokens: the prompt.
        prefix: how many leading tokens decode computes itself.
        chunk_tokens: prefill's chunk; the last one may be shorter.
        expected: greedy tokens of one engine that did both prefill and decode; empty before they are known.
    """

    tokens: tuple[int, ...]
    prefix: int
    chunk_tokens: int
    expected: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """[first, end) of each chunk."""
        ends = range(self.chunk_tokens, self.total + self.chunk_tokens, self.chunk_tokens)
        return [(end - self.chunk_tokens, min(end, self.total)) for end in ends]


def total_tokens(*, quick: bool) -> int:
    """Tokens of all prompts."""
    return sum(tokens for tokens, _ in (_QUICK if quick else _FULL))


def answered_requests(engine: EngineProcesses, seed: int, *, quick: bool) -> list[Request]:
    """Draw prompts and compute their tokens with one engine; draw a prompt again if a margin is too small.

    If two logits differ by less than float32's rounding error, the token depends on the order of computation.
    """
    draw = random.Random(seed)
    found = []
    for number, (tokens, prefix) in enumerate(_QUICK if quick else _FULL):
        chunk_tokens = -(-tokens // _LONG_CHUNKS) if number == 0 else tokens
        found.append(_answered(engine, draw, Request(tuple([0] * tokens), prefix, chunk_tokens)))
    return found


def _answered(engine: EngineProcesses, draw: random.Random, shape: Request) -> Request:
    vocabulary = ModelConfig().vocabulary
    for _ in range(DRAWS_MAX):
        request = replace(shape, tokens=tuple(draw.randrange(vocabulary) for _ in shape.tokens))
        answer = engine.generate(request.tokens, TOKENS_GENERATED)
        if min(answer.margins) > MARGIN_MIN:
            return replace(request, expected=tuple(answer.tokens))
    raise AssertionError(f"{DRAWS_MAX} prompts of {shape.total} tokens have unclear answers")
