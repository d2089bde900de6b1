"""Compares Longshore's connector with vLLM's NixlConnector, in sequence in one run: `make bench-vllm`.

Prefill TP2 and decode TP1 get the same prompts. The clock runs from the end of prefill's answer to decode's first token,
with HTTP and scheduling on both sides. Every token is compared with those of a single engine. A descriptor is a piece of
memory in a transfer: NIXL counts them for NixlConnector, the agents count pieces in writes for Longshore.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tiny_model
from controlplane.waiting import until
from engines import Engine, Nursery, Prompt, tokens_of
from prompts import Oracle
from scene import NixlScene, Scene, Side, prefill

from longshore_cli.lifetime import InterruptedBySignal, interrupts_raised

LENGTHS = (32, 128, 300, 700)
REPEATS = 5
NEW_TOKENS = 4
PREFILL, DECODE = "prefill", "decode"
SIDES = (Side(PREFILL, 2), Side(DECODE, 1))
# The metrics page shows the counts of a transfer some seconds after it.
COUNTED_LIMIT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One connector at one length: median and slowest time, and the transport's counts for one request."""

    first_token_s: float
    slowest_s: float
    descriptors: float
    moved_bytes: float


class Counts:
    """Counts of a scene's transport so far."""

    def __init__(
        self, descriptors: Callable[[], float], moved_bytes: Callable[[], float], requests: Callable[[], float]
    ) -> None:
        self._read = (descriptors, moved_bytes, requests)

    def read(self) -> tuple[float, ...]:
        """Return descriptors, bytes, and finished transfers of ranks."""
        return tuple(read() for read in self._read)


def counts_of(scene: Scene | NixlScene) -> Counts:
    """Return the counters of a scene's transport."""
    decode = scene.engines[DECODE]

    def of_decode(name: str) -> Callable[[], float]:
        def read() -> float:
            decode.complete(Prompt([1, 2]), 1)  # The page gets counts only with the next step.
            return decode.metrics().total(name)

        return read

    if isinstance(scene, NixlScene):
        transfers = of_decode("vllm:nixl_num_descriptors_count")
        return Counts(
            of_decode("vllm:nixl_num_descriptors_sum"), of_decode("vllm:nixl_bytes_transferred_sum"), transfers
        )
    agent = scene.agents[PREFILL]
    return Counts(
        lambda: agent.metrics().total("longshore_write_pieces_total"),
        of_decode("vllm:longshore_load_bytes_sum"),
        lambda: agent.metrics().total("longshore_rooms_total", half="source", outcome="done"),
    )


def measure(scene: Scene | NixlScene, alone: Oracle, prompts: Sequence[Prompt]) -> Row:
    """Move prompts of one length one after another."""
    counts = counts_of(scene)
    before = counts.read()
    seconds = [first_token_s(scene.engines[PREFILL], scene.engines[DECODE], prompt, alone) for prompt in prompts]
    ranks = scene.engines[PREFILL].options.tp
    until(lambda: counts.read()[2] - before[2] >= len(prompts) * ranks, "every transfer is counted", COUNTED_LIMIT_S)
    descriptors, moved_bytes, _ = (after - was for after, was in zip(counts.read(), before, strict=True))
    return Row(statistics.median(seconds), max(seconds), descriptors / len(prompts), moved_bytes / len(prompts))


def first_token_s(source: Engine, target: Engine, prompt: Prompt, alone: Oracle) -> float:
    """Return the time from the end of prefill to the first token of decode."""
    handed = prefill(source, prompt)
    start_s = time.monotonic()
    parts = target.stream(prompt, NEW_TOKENS, handed)
    tokens = tokens_of(next(parts))
    first_s = time.monotonic() - start_s
    for part in parts:
        tokens += tokens_of(part) if part["choices"] else []
    if tokens != alone(prompt):
        raise SystemExit(f"a prompt of {len(prompt)} tokens was answered wrongly: its time is invalid")
    return first_s


def main() -> None:
    """Print the table."""
    generator = Random(7)
    sets = {
        length: [Prompt(generator.randrange(tiny_model.VOCABULARY) for _ in range(length)) for _ in range(REPEATS + 1)]
        for length in LENGTHS
    }
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-")))
        model = tiny_model.make(directory, 4)
        nursery = stack.enter_context(Nursery(Path(os.environ["E2E_VLLM_VENV"]), directory))
        every = [prompt for prompts in sets.values() for prompt in prompts]
        alone = Oracle(nursery, model, every, NEW_TOKENS)
        rows: dict[str, dict[int, Row]] = {}
        for name, kind in (("Longshore", Scene), ("NixlConnector", NixlScene)):
            with kind(nursery, model, SIDES) as scene:
                for prompts in sets.values():  # Warm up: connect the peers, and run the code once for each length.
                    first_token_s(scene.engines[PREFILL], scene.engines[DECODE], prompts[0], alone)
                rows[name] = {length: measure(scene, alone, prompts[1:]) for length, prompts in sets.items()}
    print_table(rows["Longshore"], rows["NixlConnector"])


def print_table(ours: dict[int, Row], theirs: dict[int, Row]) -> None:
    """Print the results of both connectors."""
    print(f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(
        f"vLLM on CPU, prefill TP2 -> decode TP1, {tiny_model.LAYERS} layers, 4 KV heads of {tiny_model.HEAD_DIM}, float32,"
    )
    print(f"blocks of 32 tokens; medians of {REPEATS}; every token equals that of one engine alone\n")
    print("        ms to the first token, median (slowest)             descriptors             KiB moved")
    print("tokens       Longshore   NixlConnector   ratio   Longshore  NixlConnector  Longshore  NixlConnector")
    for length, our in ours.items():
        their = theirs[length]
        print(
            f"{length:6}  {1e3 * our.first_token_s:6.0f} ({1e3 * our.slowest_s:5.0f})"
            f"  {1e3 * their.first_token_s:6.0f} ({1e3 * their.slowest_s:5.0f})"
            f"  {our.first_token_s / their.first_token_s:6.2f}"
            f"  {our.descriptors:10.0f}  {their.descriptors:13.0f}"
            f"  {our.moved_bytes / 1024:9.0f}  {their.moved_bytes / 1024:13.0f}"
        )


if __name__ == "__main__":
    try:
        with interrupts_raised():
            main()
    except InterruptedBySignal as interrupted:
        sys.exit(interrupted.status)
