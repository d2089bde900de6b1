"""Compares Longshore with SGLang's own NIXL backend, in sequence in one run: `make bench-sglang`.

Prefill TP2 and decode TP1 get the same prompts at the same time, as SGLang's router sends them. The first table has the time
from a request to decode's first token, and the part of it that follows prefill's computation, which is measured alone, by
requests that SGLang's prefill computes and moves nowhere. The second has the prompts a second with many at once. Every token
is compared with those of a single engine.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import tiny_model
from sglang_engines import Nursery, Prompt, Server, body
from sglang_prompts import Oracle, random_prompt
from sglang_scene import NIXL_VARIABLE, Scene, Side

from longshore_cli.lifetime import InterruptedBySignal, interrupts_raised

LENGTHS = (32, 128, 300, 700)
REPEATS = 7
AT_ONCE = (1, 4, 16, 64)
ROUNDS = 3
# Tokens of each prompt in the second table.
LENGTH_AT_ONCE = 300
NEW_TOKENS = 4
SIDES = (Side(2), Side(1))
# SGLang's prefill moves nothing for a request of this bootstrap host.
NOWHERE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1}
OURS, THEIRS = "Longshore", "SGLang NIXL"


@dataclass(frozen=True)
class Row:
    """One backend at one length, in seconds: medians, and the slowest request."""

    computed_s: float
    first_token_s: float
    slowest_s: float

    @property
    def moved_s(self) -> float:
        """The part of the time that follows prefill's computation."""
        return self.first_token_s - self.computed_s


def measure(scene: Scene, alone: Oracle, prompts: Sequence[Prompt]) -> Row:
    """Move prompts of one length one after another."""
    computed = [computed_s(scene, prompt) for prompt in prompts]
    seconds = [first_token_s(scene, prompt, alone) for prompt in prompts]
    return Row(statistics.median(computed), statistics.median(seconds), max(seconds))


class Pair(Protocol):
    """A prefill and a decode engine, and what a router adds to a request."""

    @property
    def prefill(self) -> Server:
        """Return the prefill engine."""

    @property
    def decode(self) -> Server:
        """Return the decode engine."""

    def routed(self) -> dict[str, Any]:
        """Return what a router adds to a request."""


def computed_s(scene: Pair, prompt: Prompt) -> float:
    """Return the time in which prefill computes a prompt that it moves nowhere."""
    start_s = time.monotonic()
    scene.prefill.post(body(prompt, 1, **NOWHERE))
    return time.monotonic() - start_s


def first_token_s(scene: Scene, prompt: Prompt, alone: Oracle) -> float:
    """Return the time from the request to the first token of decode."""
    first_s, tokens = moved(scene, prompt)
    check(tokens, prompt, alone)
    return first_s


def moved(scene: Pair, prompt: Prompt) -> tuple[float, list[int]]:
    """Return the time from the request to the first token of decode, and all tokens."""
    content = body(prompt, NEW_TOKENS, **scene.routed())
    with ThreadPoolExecutor(1) as thread:
        start_s = time.monotonic()
        computed = thread.submit(scene.prefill.post, content)
        parts = scene.decode.stream(content)
        found = [next(parts)]
        first_s = time.monotonic() - start_s
        found.extend(parts)
        computed.result()
    return first_s, found[-1]["output_ids"]


def prompts_a_second(scene: Scene, alone: Oracle, prompts: Sequence[Prompt]) -> float:
    """Return the rate of prompts that are all sent at once."""
    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        contents = [body(prompt, NEW_TOKENS, **scene.routed()) for prompt in prompts]
        start_s = time.monotonic()
        computed = [threads.submit(scene.prefill.post, content) for content in contents]
        found = list(threads.map(scene.decode.post, contents))
        seconds = time.monotonic() - start_s
        for each in computed:
            each.result()
    for prompt, answer in zip(prompts, found, strict=True):
        check(answer["output_ids"], prompt, alone)
    return len(prompts) / seconds


def check(tokens: list[int], prompt: Prompt, alone: Oracle) -> None:
    """Raise unless the tokens are those of one engine."""
    if tokens != alone(prompt):
        raise SystemExit(f"a prompt of {len(prompt)} tokens was answered wrongly: its time is invalid")


def nixl_packages(directory: Path) -> Path:
    """Return a folder with the tree's NIXL and nothing else: SGLang's environment has none."""
    folder = directory / "nixl"
    folder.mkdir()
    spec = find_spec("nixl")
    assert spec is not None
    assert spec.origin is not None
    for path in Path(spec.origin).parents[1].glob("nixl*"):
        (folder / path.name).symlink_to(path)
    return folder


def main() -> None:
    """Print the tables."""
    numbers = iter(range(1000, 2000))
    sets = {length: [random_prompt(next(numbers), length) for _ in range(REPEATS + 1)] for length in LENGTHS}
    many = [random_prompt(next(numbers), LENGTH_AT_ONCE) for _ in range(max(AT_ONCE))]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-")))
        model = tiny_model.make(directory, 4)
        nursery = stack.enter_context(Nursery(Path(os.environ["E2E_SGLANG_VENV"]), directory))
        nursery.wait_ready()
        alone = Oracle(
            nursery, model, [*(prompt for prompts in sets.values() for prompt in prompts), *many], NEW_TOKENS
        )
        rows: dict[str, dict[int, Row]] = {}
        rates: dict[str, dict[int, float]] = {}
        scenes = {
            OURS: Scene(nursery, model, *SIDES),
            THEIRS: Scene(
                nursery,
                model,
                *SIDES,
                backend="nixl",
                environment={NIXL_VARIABLE: "1"},
                paths=(nixl_packages(directory),),
            ),
        }
        for name, scene in scenes.items():
            with scene:
                for prompts in sets.values():  # Warm up: connect the peers, and run the code once for each length.
                    computed_s(scene, prompts[0])
                    first_token_s(scene, prompts[0], alone)
                rows[name] = {length: measure(scene, alone, prompts[1:]) for length, prompts in sets.items()}
                rates[name] = {
                    count: statistics.median(prompts_a_second(scene, alone, many[:count]) for _ in range(ROUNDS))
                    for count in AT_ONCE
                }
    print_tables(rows, rates)


def print_tables(rows: dict[str, dict[int, Row]], rates: dict[str, dict[int, float]]) -> None:
    """Print the results of both backends."""
    print(f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(
        f"SGLang on CPU, prefill TP2 -> decode TP1, {tiny_model.LAYERS} layers, 4 KV heads of {tiny_model.HEAD_DIM}, float32,"
    )
    print(f"pages of 16 tokens; medians of {REPEATS}; every token equals that of one engine alone\n")
    print("        ms to the first token, median (slowest)       ms of it after prefill's computation")
    print(f"tokens  {OURS:>15}  {THEIRS:>15}  ratio  {OURS:>11}  {THEIRS:>11}  ratio")
    for length in LENGTHS:
        our, their = rows[OURS][length], rows[THEIRS][length]
        print(
            f"{length:6}  {1e3 * our.first_token_s:7.0f} ({1e3 * our.slowest_s:5.0f})"
            f"  {1e3 * their.first_token_s:7.0f} ({1e3 * their.slowest_s:5.0f})"
            f"  {our.first_token_s / their.first_token_s:5.2f}"
            f"  {1e3 * our.moved_s:11.0f}  {1e3 * their.moved_s:11.0f}  {our.moved_s / their.moved_s:5.2f}"
        )
    print(f"\nprompts of {LENGTH_AT_ONCE} tokens a second, medians of {ROUNDS}")
    print(f"at once  {OURS:>11}  {THEIRS:>11}  ratio")
    for count in AT_ONCE:
        ours, theirs = rates[OURS][count], rates[THEIRS][count]
        print(f"{count:7}  {ours:11.2f}  {theirs:11.2f}  {ours / theirs:5.2f}")


if __name__ == "__main__":
    try:
        with interrupts_raised():
            main()
    except InterruptedBySignal as interrupted:
        sys.exit(interrupted.status)
