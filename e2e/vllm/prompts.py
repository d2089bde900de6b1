"""Makes the tests' prompts from fixed seeds, and the answers of a single vLLM to them. Called by `conftest`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engines import Engine, EngineOptions, Nursery, Prompt, tokens_of
from tiny_model import VOCABULARY, TinyModel

# Around the ends of blocks of 32 and 64 tokens and of chunks of 128, and far beyond them.
LENGTHS = (2, 31, 32, 33, 65, 150, 300, 700)
# A prompt with the same beginning as the second longest one: all of its blocks except the last are equal up to here.
SHARED_TOKENS = 200
NEW_TOKENS = 16
# The shortest prompt whose tokens change if its KV is zeroed. Decode always computes the last token itself.
TELLING_TOKENS_MIN = 32
# The number of requests that an engine runs concurrently.
AT_ONCE = 8


def random_prompt(seed: int, length: int) -> Prompt:
    """Return a prompt of `length` tokens, the same for the same seed."""
    generator = random.Random(seed)
    return Prompt(generator.randrange(VOCABULARY) for _ in range(length))


PROMPTS = tuple(random_prompt(seed, length) for seed, length in enumerate(LENGTHS))
SHARES_A_PREFIX = Prompt([*PROMPTS[-2][:SHARED_TOKENS], *random_prompt(100, 100)])
EVERY_PROMPT = (*PROMPTS, SHARES_A_PREFIX)


class Oracle:
    """The answers of a single engine, by prompt."""

    def __init__(
        self,
        nursery: Nursery,
        model: TinyModel,
        prompts: Sequence[Prompt] = EVERY_PROMPT,
        max_tokens: int = NEW_TOKENS,
    ) -> None:
        extra = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "2048")
        options = EngineOptions(f"alone-{model.kv_heads}", model, 1, extra=extra)
        with Engine(nursery, options) as engine:
            engine.wait_ready()
            answers = [tokens_of(engine.complete(prompt, max_tokens)) for prompt in prompts]
        self._answers = dict(zip(map(tuple, prompts), answers, strict=True))

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return its tokens."""
        return self._answers[tuple(prompt)]


class Family(NamedTuple):
    """A model, the answers of a single engine, and what engines need for it.

    Attributes:
        held_back: the last tokens of a prompt, which do not move.
    """

    model: TinyModel
    alone: Oracle
    extra: Sequence[str] = ()
    held_back: int = 0


def at_once(work: Callable[..., list[int]], prompts: Sequence[Prompt], *more: Sequence[object]) -> list[list[int]]:
    """Call `work` concurrently for each prompt, with its item of each of `more`; return the results."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(work, prompts, *more))
