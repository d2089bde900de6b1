"""Compares Longshore under a real SGLang on two GPUs with SGLang's own NIXL backend: `make bench-sglang-gpu`.

    python benchmarks/sglang_on_gpus.py --json FILE [--quick] [--mps] [--directions TP2:TP1] [--backends NAME;NAME]

Engines of all backends run at the same time, and get the same prompts in turn, so that no figure of a table is of another
run. SGLang's backend runs with its staging buffer (SGLANG_DISAGG_STAGING_BUFFER) and without. Longshore has an agent for
prefill and one for decode (staged), or one for both (direct).

`alone`: one prompt at a time, by length: the time in which prefill computes it and moves it nowhere, and the time from the
request to decode's first token. `at once`: many prompts of one length together: prompts a second, and the time to each
first token. Prefill and decode get a prompt at the same time, as SGLang's router sends it. Tokens that differ from those of
the last backend are counted: none may of prompts that are moved alone. In batches, rounding depends on time. A backend that
does not answer a prompt has a row with its error.

Needs two GPUs, and an interpreter with SGLang 0.5.16 or 0.5.23 and NIXL: SGLANG_PYTHON, or this one. SGLANG_PATH has folders of
packages that it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from served_engines import about, make_model, mps, spread, tokens_of
from sglang_gpu_scenes import AGENTS, AT_ONCE_MAX, BACKENDS, PATH, PLAIN, PYTHON, STAGED, Pair, Scene

# The folders of tests are in the path now.
from sglang_backends import computed_s, moved  # isort: skip
from sglang_engines import Prompt  # isort: skip

DIRECTIONS = "TP2:TP1,TP1:TP2"
DEFAULT_BACKENDS = (next(iter(AGENTS)), STAGED, PLAIN)
LENGTHS, QUICK_LENGTHS = (64, 512, 2_048, 4_096, 8_192, 16_000), (512, 4_096, 16_000)
REPEATS, QUICK_REPEATS = 7, 5
AT_ONCE, QUICK_AT_ONCE = (4, 16, AT_ONCE_MAX), (16,)
ROUNDS = 3
# Of prompts that are moved at once. The pool of KV holds all of them.
LENGTH_AT_ONCE = 700
KV_TOKENS = 49_152
FIRST_PORT = 19_000
SEED = 11
FAILURE_CHARACTERS = 300
# Nothing is begun after this time, which is counted from the start of the program.
LIMIT_S = 480.0


def prompts_of(seed: int, length: int, count: int) -> list[Prompt]:
    """Return prompts of one length, the same for the same seed."""
    return [Prompt(tokens) for tokens in tokens_of(seed, length, count)]


@dataclass
class Found:
    """What a backend made of some prompts: times (s), tokens, and why it got no more of them.

    Attributes:
        computed_s: times in which prefill computed a prompt and moved it nowhere.
        first_s: times from a request to decode's first token.
        rates: prompts a second.
    """

    computed_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    failed: str = ""

    def take(self, call: Callable[[], None]) -> None:
        """Make a call, unless one has failed. A backend that fails is a result."""
        try:
            if not self.failed:
                call()
        except (httpx.HTTPError, StopIteration, json.JSONDecodeError) as error:
            self.failed = f"{type(error).__name__}: {error}"[:FAILURE_CHARACTERS]

    def others(self, right: Found) -> int | None:
        """Return the number of answers that differ from those of `right`; None: there is nothing to compare with."""
        if self is right or right.failed or not self.tokens:
            return None
        return sum(one != other for one, other in zip(self.tokens, right.tokens, strict=False))

    def row(self, right: Found) -> dict[str, Any]:
        """Return what all tables have."""
        shown: dict[str, Any] = {"first": spread(self.first_s)} if self.first_s else {}
        shown |= {"samples_ms": [round(1e3 * each, 2) for each in self.first_s], "other_tokens": self.others(right)}
        return shown | ({"failed": self.failed} if self.failed else {})


def alone(
    scenes: Sequence[Scene], direction: tuple[int, int], length: int, repeats: int, turn: int
) -> list[dict[str, Any]]:
    """Move prompts of one length, one at a time and by each backend; the first one is not counted."""
    pairs = [scene.pairs[direction] for scene in scenes]
    # It connects peers, and SGLang compiles programs for it.
    first, *prompts = prompts_of(SEED + turn, length, repeats + 1)
    warm, found = [Found() for _ in pairs], [Found() for _ in pairs]

    def move(pair: Pair, prompt: Prompt, mine: Found) -> None:
        computed = computed_s(pair, prompt)
        first_s, tokens = moved(pair, prompt)
        mine.computed_s.append(computed)
        mine.first_s.append(first_s)
        mine.tokens.append(tokens)

    for prompt, rows in [(first, warm), *((prompt, found) for prompt in prompts)]:
        for pair, mine in zip(pairs, rows, strict=True):
            mine.take(partial(move, pair, prompt, mine))
        for mine, before in zip(found, warm, strict=True):
            mine.failed = mine.failed or before.failed
    return [
        {
            "direction": name_of(direction),
            "tokens": length,
            "backend": scene.name,
            "first_prompt_ms": [round(1e3 * each, 1) for each in before.first_s],
            **mine.row(found[-1]),
            **(
                {
                    "computed": spread(mine.computed_s),
                    "moved": spread([one - other for one, other in zip(mine.first_s, mine.computed_s, strict=True)]),
                }
                if mine.first_s
                else {}
            ),
        }
        for scene, mine, before in zip(scenes, found, warm, strict=True)
    ]


def at_once(scenes: Sequence[Scene], direction: tuple[int, int], count: int, turn: int) -> list[dict[str, Any]]:
    """Move many prompts together, the backends in turn."""
    found = [Found() for _ in scenes]

    def move(pair: Pair, prompts: Sequence[Prompt], mine: Found) -> None:
        seconds, answers = together(pair, prompts)
        mine.rates.append(round(count / seconds, 2))
        mine.first_s += [each[0] for each in answers]
        mine.tokens += [each[1] for each in answers]

    for number in range(ROUNDS):
        prompts = prompts_of(SEED + 100 * turn + number, LENGTH_AT_ONCE, count)
        for scene, mine in zip(scenes, found, strict=True):
            mine.take(partial(move, scene.pairs[direction], prompts, mine))
    return [
        {
            "direction": name_of(direction),
            "at_once": count,
            "backend": scene.name,
            "prompts_per_s": statistics.median(mine.rates) if mine.rates else 0.0,
            "rates": mine.rates,
            **mine.row(found[-1]),
        }
        for scene, mine in zip(scenes, found, strict=True)
    ]


def together(pair: Pair, prompts: Sequence[Prompt]) -> tuple[float, list[tuple[float, list[int]]]]:
    """Move all prompts at once; return the time of all, and what `moved` returns of each."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        begin_s = time.monotonic()
        answers = list(threads.map(lambda prompt: moved(pair, prompt), prompts))
        return time.monotonic() - begin_s, answers


def measure(
    scenes: Sequence[Scene],
    directions: Sequence[tuple[int, int]],
    note: Callable[[str, list[dict[str, Any]]], None],
    chosen: argparse.Namespace,
    end_s: float,
) -> None:
    """Measure everything that can begin before `end_s`; call `note` with each table's new rows."""
    turn = 0
    lengths, repeats = (QUICK_LENGTHS, QUICK_REPEATS) if chosen.quick else (LENGTHS, REPEATS)
    for direction in directions:
        for length in chosen.lengths or lengths:
            turn += 1
            if time.monotonic() < end_s:
                note("alone", alone(scenes, direction, length, repeats, turn))
        for count in QUICK_AT_ONCE if chosen.quick else AT_ONCE:
            turn += 1
            if time.monotonic() < end_s:
                note("at_once", at_once(scenes, direction, count, turn))
    if time.monotonic() >= end_s:
        print(f"the time of {chosen.limit_s:g} s is over: the tables may lack rows", flush=True)


def name_of(direction: tuple[int, int]) -> str:
    """Return a direction's name."""
    return f"TP{direction[0]}->TP{direction[1]}"


def directions_of(text: str) -> list[tuple[int, int]]:
    """Return tensor parallel sizes of prefill and decode. Raises SystemExit for unknown ones."""
    sizes = {"TP1": 1, "TP2": 2}
    found = [tuple(sizes.get(each, 0) for each in pair.split(":")) for pair in text.split(",")]
    if not all(len(pair) == len(sizes) and all(pair) for pair in found):
        raise SystemExit(f"--directions is {text!r}: give pairs of TP1 and TP2, such as TP2:TP1")
    return [(pair[0], pair[1]) for pair in found]


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    what = f"{row['tokens']:6} tokens" if "tokens" in row else f"{row['at_once']:3} at once "
    text = f"{row['direction']}  {what}  {row['backend']:21}"
    if "computed" in row:
        text += f"  prefill alone {row['computed']['p50_ms']:8.1f}"
    if "first" in row:
        text += f"  first {row['first']['p50_ms']:8.1f} ({row['first']['p99_ms']:8.1f})"
    if "moved" in row:
        text += f"  moved {row['moved']['p50_ms']:8.1f}"
    if "prompts_per_s" in row:
        text += f"  {row['prompts_per_s']:6.1f}/s"
    count = row["other_tokens"]
    text += "  not compared" if count is None else f"  other tokens {count}"
    return text + (f"  FAILED: {row['failed']}" if "failed" in row else "")


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="results; those of other modes are kept"
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, repeats and loads")
    parser.add_argument("--directions", default=DIRECTIONS, help=f"pairs of prefill and decode (default {DIRECTIONS})")
    parser.add_argument("--backends", default=";".join(DEFAULT_BACKENDS), help=f"of {'; '.join(BACKENDS)}")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], help="of prompts alone")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="of each engine's pool")
    parser.add_argument("--mps", action="store_true", help="share the GPUs by CUDA's Multi-Process Service")
    parser.add_argument("--model", type=Path, help="a folder with a model of SGLang, instead of one that is made")
    parser.add_argument("--cpu", action="store_true", help="run the engines on CPUs, to try this program")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="begin nothing after this time")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    return parser.parse_args()


def main() -> None:
    """Run everything, and write the results after each row."""
    begin_s, chosen = time.monotonic(), options()
    directions, names = directions_of(chosen.directions), chosen.backends.split(";")
    if not set(names) <= set(BACKENDS):
        raise SystemExit(f"--backends has {chosen.backends!r}: give some of {'; '.join(BACKENDS)}")
    mode = "MPS" if chosen.mps else "time-sliced"
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-gpu-")))
        logs = chosen.logs or directory
        logs.mkdir(parents=True, exist_ok=True)
        model = chosen.model or make_model(directory, os.environ.get(PYTHON, sys.executable), os.environ.get(PATH, ""))
        variables = stack.enter_context(mps(directory / "mps", logs, wanted=chosen.mps))
        print(f"{mode}: the model is there after {time.monotonic() - begin_s:.0f} s", flush=True)
        scenes = [
            stack.enter_context(
                Scene(name, directions, model, logs, FIRST_PORT + 100 * index, chosen.kv_tokens, variables, chosen.cpu)
            )
            for index, name in enumerate(names)
        ]
        for scene in scenes:
            scene.wait_ready()
            print(f"{scene.name}: all engines serve after {time.monotonic() - begin_s:.0f} s", flush=True)
        kept = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
        results: dict[str, Any] = {"alone": [], "at_once": []} | ({} if chosen.cpu else about([]))

        def note(table: str, rows: list[dict[str, Any]]) -> None:
            results[table] += rows
            chosen.json.write_text(json.dumps(kept | {mode: results}, indent=1) + "\n")
            for row in rows:
                print(line_of(row), flush=True)

        measure(scenes, directions, note, chosen, begin_s + chosen.limit_s)
        print(f"done after {time.monotonic() - begin_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
