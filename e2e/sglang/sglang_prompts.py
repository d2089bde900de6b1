"""Makes the tests' prompts from fixed seeds, and the answers of a single SGLang to them. Called by `conftest`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_engines import Engine, EngineOptions, Nursery, Prompt, body
from tiny_model import TinyModel

# Around the ends of pages of 8 and 16 tokens and of chunks of 128, and far beyond them.
LENGTHS = (2, 8, 15, 16, 17, 127, 128, 129, 300, 700)
NEW_TOKENS = 8
AT_ONCE = 24
# The shortest prompt whose tokens change if its KV is zeroed. Decode computes only what follows the prompt.
TELLING_TOKENS_MIN = 8
# Of the tiny model that has the fewest tokens.
_VOCABULARY = 960
# A prompt with the same beginning as the second longest one.
SHARED_TOKENS = 200
# Logprobs of one engine and of another layout differ by rounding alone.
LOGPROB_ERROR_MAX = 1e-3


def random_prompt(seed: int, length: int) -> Prompt:
    """Return a prompt of `length` tokens, the same for the same seed."""
    generator = random.Random(seed)
    return Prompt(generator.randrange(1, _VOCABULARY) for _ in range(length))


PROMPTS = tuple(random_prompt(seed, length) for seed, length in enumerate(LENGTHS))
# The requests that a router sends at once.
MANY_PROMPTS = tuple(PROMPTS[index % len(PROMPTS)] for index in range(AT_ONCE))
SHARES_A_PREFIX = Prompt([*PROMPTS[-2][:SHARED_TOKENS], *random_prompt(100, 100)])
# Computed in 16 chunks.
LONG_PROMPT = random_prompt(101, 1990)
EVERY_PROMPT = (*PROMPTS, SHARES_A_PREFIX, LONG_PROMPT)


class Answer(NamedTuple):
    """Tokens, and the logprob of the first."""

    tokens: list[int]
    first_logprob: float


def answer_of(found: Any) -> Answer:
    """Return the answer in a response that was asked for logprobs."""
    return Answer(found["output_ids"], found["meta_info"]["output_token_logprobs"][0][0])


class Oracle:
    """The answers of a single engine, by prompt.

    Args:
        options: further ones of `EngineOptions`.
    """

    def __init__(
        self,
        nursery: Nursery,
        model: TinyModel,
        prompts: Sequence[Prompt] = EVERY_PROMPT,
        max_tokens: int = NEW_TOKENS,
        **options: Any,
    ) -> None:
        alone = EngineOptions(f"alone-{model.kv_heads}-{max_tokens}", model, 1, chunk_tokens=2048, **options)
        with Engine(nursery, alone) as engine:
            engine.wait_ready()
            self._answers = {
                tuple(prompt): answer_of(engine.post(body(prompt, max_tokens, return_logprob=True)))
                for prompt in prompts
            }

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return its tokens."""
        return self._answers[tuple(prompt)].tokens

    def first_logprob(self, prompt: Prompt) -> float:
        """Return the logprob of its first token."""
        return self._answers[tuple(prompt)].first_logprob

    def first_logprob_error(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> float:
        """Return the largest difference between the first logprob of an answer and that of a single engine."""
        return max(abs(found.first_logprob - self.first_logprob(p)) for p, found in zip(prompts, answers, strict=True))
