"""Compares Longshore under a real vLLM on two GPUs with vLLM's NixlConnector, and with vLLM's own time: `make bench-vllm-gpu`.

    python benchmarks/vllm_on_gpus.py --json FILE [--quick] [--mps] [--directions TP2:TP2] [--connectors NAME;NAME]

Engines of all connectors run at the same time, and get the same prompts in turn, so that no figure of a table is of another
run. Longshore has an agent for each engine (staged) or one for both (direct). "in turn": decode gets a prompt after
prefill's answer. "at once": both get it together, as examples/vllm/proxy.py does it. "floor": decode computes the prompt's
last token over blocks that nobody wrote. "MooncakeConnector" is vLLM's, over CUDA IPC or over TCP; it is left out unless it is
named. Its router names each prompt, and so can give it to both engines at once.

`alone`: one prompt at a time, by length: from the request to decode's first token, and from prefill's answer to it. The
tokens of all connectors are compared. `loads`: fixed traces of prompts and answers of mixed length, with some number at
once: tokens that differ are counted, since vLLM's batches, and with them its rounding, depend on time. A connector that does not
answer a prompt is left out from then on, and `failed` says why. `memory`: of each
worker of an agent, by nvidia-smi, before the first prompt.

"Longshore, two agents, other tree" and "Longshore, one agent, other tree" have the agents and the connector of the checkout
OTHER_TREE, and are left out unless they are named.

With --mps all engines and agents share the GPUs by a daemon of CUDA's Multi-Process Service, which this starts and ends. Its
server takes clients before the first of them starts, and agents refuse engines where they are no clients of it.

Needs two GPUs, one for TP1:TP1, whose engines then share it, and an interpreter with vLLM and NIXL as
e2e/vllm/requirements-gpu.lock pins them: VLLM_PYTHON, or this one.
VLLM_PATH has folders of packages that it lacks, such as Mooncake's (mooncake-transfer-engine-cuda13).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from served_engines import DENSE, VOCABULARY, about, make_model, mps, program, spread, tokens_of
from vllm_gpu_scenes import CONNECTORS, FLOOR, NIXL, OTHER, OTHER_TREE, OURS, PATH, PYTHON, SIDES, Scene, devices_of

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "vllm"))
from engines import Prompt
from scene import TO_PREFILL

DEFAULT_CONNECTORS = (*OURS, NIXL, FLOOR)
DIRECTIONS = "TP2:TP1,TP1:TP2"
LENGTHS, QUICK_LENGTHS = (64, 512, 2_048, 4_096, 8_192, 16_000), (512, 4_096, 16_000)
REPEATS, QUICK_REPEATS = 9, 5
AT_ONCE, QUICK_AT_ONCE = (4, 16, 64), (16,)
REQUESTS, TRACES = 64, 3
NEW_TOKENS = 8
# Of the trace: medians of prompts and answers, and the spread of their logarithms.
PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_MAX = 900, 1.0, 8_000
ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_MAX = 24, 0.7, 96
FIRST_PORT = 18_000
# Graphs for steps of decode, and no compiler, which would take minutes at each start.
# A dense model; K and V and the states of gated delta rules; latents.
KINDS = {
    DENSE: (),
    # vLLM's other backend for their prompts compiles a package at its first use.
    "gdn": ("--gdn-prefill-backend", "triton"),
    # vLLM's other backends for latents need more of its compiled modules.
    "mla": ("--attention-backend", "TRITON_MLA"),
}
ENGINE_ARGUMENTS = '--compilation-config \'{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 16, 64]}\''
SEED = 11
FAILURE_CHARACTERS = 2_000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Moved(NamedTuple):
    """One request: its times (s, from its beginning; negative if decode was earlier than prefill's answer) and tokens."""

    prefill_s: float
    first_s: float
    steps_s: list[float]
    tokens: list[int]

    def milliseconds(self) -> list[float]:
        """Return the times of prefill's answer and of decode's first token."""
        return [round(1e3 * self.prefill_s, 2), round(1e3 * self.first_s, 2)]


class Ask(NamedTuple):
    """One request of a trace."""

    prompt: Prompt
    new_tokens: int


def prompts_of(seed: int, length: int, count: int) -> list[Ask]:
    """Return prompts of one length, the same for the same seed."""
    return [Ask(Prompt(tokens), NEW_TOKENS) for tokens in tokens_of(seed, length, count)]


def trace(seed: int, count: int) -> list[Ask]:
    """Return requests of mixed length, the same for the same seed."""
    draw = random.Random(seed)

    def size(median: float, spread: float, most: int) -> int:
        return min(most, max(2, round(median * draw.lognormvariate(0, spread))))

    sizes = [
        (size(PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_MAX), size(ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_MAX))
        for _ in range(count)
    ]
    return [Ask(Prompt(draw.randrange(10, VOCABULARY) for _ in range(prompt)), answer) for prompt, answer in sizes]


class SceneError(Exception):
    """The engines of a scene did not answer a prompt; the scene's `failed` says why."""


class Router:
    """Gives prompts to two engines of a scene in one of its ways."""

    def __init__(self, scene: Scene, kind: str, source: str, target: str) -> None:
        self._scene, self._kind = scene, kind
        self._source, self._target = scene.engines[source], scene.engines[target]
        self._known = self._source.known

    def move(self, ask: Ask) -> Moved:
        """Move one request. Raises SceneError if the scene's engines do not answer it."""
        try:
            return self._move(ask)
        except (SystemExit, httpx.HTTPError) as error:
            self._scene.failed = f"{type(error).__name__}: {error}"[:FAILURE_CHARACTERS]
            raise SceneError(self._scene.name) from error

    def _move(self, ask: Ask) -> Moved:
        begin_s = time.monotonic()
        answered: list[float] = []

        def computed(more: Mapping[str, Any]) -> Mapping[str, Any]:
            wanted = None if self._kind == FLOOR else {**TO_PREFILL, **more}
            told: Mapping[str, Any] = self._source.complete(ask.prompt, 1, wanted).get("kv_transfer_params") or {}
            answered.append(time.monotonic())
            return told

        if self._kind == "at once" and self._known:
            room = self._scene.room()
            with ThreadPoolExecutor(1) as thread:
                coming = thread.submit(computed, room)
                first_s, steps, tokens = self._decode(ask, {**self._known, **room})
                coming.result()
        else:
            room = self._scene.room() if self._source.known else {}
            told = {**self._source.known, **computed(room)}
            self._known = told
            first_s, steps, tokens = self._decode(ask, {"floor": True} if self._kind == FLOOR else {**told, **room})
        return Moved(answered[0] - begin_s, first_s - begin_s, steps, tokens)

    def _decode(self, ask: Ask, transfer: Mapping[str, Any]) -> tuple[float, list[float], list[int]]:
        times, tokens = list[float](), list[int]()
        for came_s, found in self._target.stream(ask.prompt, ask.new_tokens, transfer):
            times += [came_s] * len(found)
            tokens += found
        if len(tokens) != ask.new_tokens:
            raise SystemExit(f"{self._target.name} answered {len(tokens)} tokens instead of {ask.new_tokens}")
        return times[0], [after - before for before, after in itertools.pairwise(times)], tokens


class Burnt:
    """Counts the processor seconds of process trees."""

    def __init__(self, roots: Mapping[str, list[int]]) -> None:
        self._roots, self._before = roots, self._read(roots)

    def seconds(self) -> dict[str, float]:
        """Return those since the beginning, by kind."""
        return {kind: round(found - self._before[kind], 3) for kind, found in self._read(self._roots).items()}

    @staticmethod
    def _read(roots: Mapping[str, list[int]]) -> dict[str, float]:
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.parent.name)] = int(words[1])
            ticks[int(path.parent.name)] = int(words[11]) + int(words[12])
        found = {}
        for kind, tops in roots.items():
            mine = set(tops)
            while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
                mine |= more
            found[kind] = sum(ticks.get(pid, 0) for pid in mine) / CLOCK_TICKS
        return found


def alone(scenes: list[Scene], source: str, target: str, length: int, repeats: int, turn: int) -> list[dict[str, Any]]:
    """Move prompts of one length, one at a time and each in every way; count those whose tokens are not the reference's."""
    ways = [(scene.name, kind, Router(scene, kind, source, target)) for scene in scenes for kind in scene.kinds]
    asks = prompts_of(SEED + turn, length, repeats + 1)
    # The first prompt connects peers, and vLLM compiles kernels for it.
    first, *moved = [[router.move(ask) for _, _, router in ways] for ask in asks]
    right = reference([name for name, _, _ in ways])
    return [
        {
            "direction": f"{source}->{target}",
            "tokens": length,
            "connector": name,
            "way": kind,
            "first": spread([each[index].first_s for each in moved]),
            "after_prefill": spread([each[index].first_s - each[index].prefill_s for each in moved]),
            "first_prompt_ms": first[index].milliseconds(),
            "samples_ms": [each[index].milliseconds() for each in moved],
            "other_tokens": sum(each[index].tokens != each[right].tokens for each in moved),
        }
        for index, (name, kind, _) in enumerate(ways)
    ]


def reference(names: Sequence[str]) -> int:
    """Return the index of the way whose tokens are right: NixlConnector's, else the first that moves KV."""
    return names.index(NIXL) if NIXL in names else next((i for i, name in enumerate(names) if name != FLOOR), 0)


class Load(NamedTuple):
    """What some traces took in one way: the time of each (s), all requests, and processor seconds by kind of process."""

    all_s: list[float]
    moves: list[Moved]
    processor_s: list[dict[str, float]]


def loads(scenes: list[Scene], source: str, target: str, at_once: int, turn: int) -> list[dict[str, Any]]:
    """Move traces in each way, the ways in turn; count the requests whose tokens are not the reference's."""
    ways = [(scene, kind, Router(scene, kind, source, target)) for scene in scenes for kind in scene.kinds]
    found = [Load([], [], []) for _ in ways]
    for number in range(TRACES):
        asks = trace(SEED + 100 * turn + number, REQUESTS)
        for (scene, _, router), mine in zip(ways, found, strict=True):
            router.move(prompts_of(SEED + number, 65 + turn, 1)[0])
            burnt, begin_s = Burnt(scene.processes()), time.monotonic()
            with ThreadPoolExecutor(at_once) as threads:
                mine.moves.extend(threads.map(router.move, asks))
            mine.all_s.append(round(time.monotonic() - begin_s, 3))
            mine.processor_s.append(burnt.seconds())
    right = found[reference([scene.name for scene, _, _ in ways])].moves
    return [
        {
            "direction": f"{source}->{target}",
            "at_once": at_once,
            "connector": scene.name,
            "way": kind,
            "requests": len(mine.moves),
            "all_s": mine.all_s,
            "requests_per_s": round(len(mine.moves) / sum(mine.all_s), 2),
            "first": spread([each.first_s for each in mine.moves]),
            "after_prefill": spread([each.first_s - each.prefill_s for each in mine.moves]),
            "step": spread([step for each in mine.moves for step in each.steps_s]),
            "processor_s": {
                name: round(sum(each[name] for each in mine.processor_s), 2) for name in mine.processor_s[0]
            },
            "other_tokens": sum(one.tokens != other.tokens for one, other in zip(mine.moves, right, strict=True)),
        }
        for (scene, kind, _), mine in zip(ways, found, strict=True)
    ]


def memory_taken(scenes: list[Scene]) -> dict[str, list[float]]:
    """Return the GPU memory of each worker of each scene's agents, in MiB, by `nvidia-smi`."""
    query = [program("nvidia-smi"), "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, check=False, capture_output=True, text=True, timeout=60).stdout
    used = [line.split(",") for line in listed.splitlines() if line.strip()]
    found = {}
    for scene in scenes:
        workers = {child for agent in scene.agents for child in children_of(agent.process.pid)}
        found[scene.name] = [float(size) for pid, size in used if int(pid) in workers and size.strip().isdigit()]
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def measure(
    scenes: list[Scene],
    directions: list[tuple[str, str]],
    note: Callable[[str, list[dict[str, Any]]], None],
    chosen: argparse.Namespace,
) -> None:
    """Measure everything; call `note` with each table's new rows."""
    turns = itertools.count(1)
    lengths, repeats = (QUICK_LENGTHS, QUICK_REPEATS) if chosen.quick else (LENGTHS, REPEATS)
    for source, target in directions:
        for length in chosen.lengths or lengths:
            note("alone", without_failed(scenes, alone, source, target, length, repeats, next(turns)))
            if chosen.timelines:
                without_failed(scenes, timelines, source, target, length, next(turns), chosen.timelines)
        for at_once in () if chosen.no_loads else QUICK_AT_ONCE if chosen.quick else AT_ONCE:
            note("loads", without_failed(scenes, loads, source, target, at_once, next(turns)))


def without_failed(
    scenes: Sequence[Scene], table: Callable[..., list[dict[str, Any]]], *arguments: Any
) -> list[dict[str, Any]]:
    """Return the rows of a table; if a scene fails, those of a new attempt without it."""
    while not all(scene.failed for scene in scenes):
        try:
            return table([scene for scene in scenes if not scene.failed], *arguments)
        except SceneError as error:
            print(
                f"{error} is left out from here on: {next(s.failed for s in scenes if s.name == str(error))}",
                flush=True,
            )
    raise SystemExit("no connector is left")


def timelines(
    scenes: Sequence[Scene], source: str, target: str, length: int, turn: int, folder: Path
) -> list[dict[str, Any]]:
    """Move one more prompt in each way of Longshore, and write the timeline of its room."""
    for scene in scenes:
        for kind in scene.kinds if scene.agents else ():
            router = Router(scene, kind, source, target)
            first, second = prompts_of(SEED + turn, length, 2)
            router.move(first)
            # Its halves end at both agents soon after decode's first token.
            time.sleep(0.5)
            before = scene.ended_rooms()
            router.move(second)
            scene.write_timeline(
                before, folder / f"{source}-{target}-{length}-{scene.name}-{kind}".replace(", ", "-").replace(" ", "-")
            )
    return []


def directions_of(text: str) -> list[tuple[str, str]]:
    """Return pairs of engines' names. Raises SystemExit for an unknown one."""
    found = []
    for pair in text.split(","):
        source, _, target = pair.partition(":")
        target += " second" if source == target else ""
        if not {source, target} <= set(SIDES):
            raise SystemExit(f"--directions has {pair!r}: give pairs of TP1 and TP2, such as TP2:TP1")
        found.append((source, target))
    return found


def connectors_of(text: str) -> list[str]:
    """Return names of connectors. Raises SystemExit for an unknown one, and if one lacks its checkout."""
    names = text.split(";")
    if not set(names) <= set(CONNECTORS) or set(names) == {FLOOR}:
        raise SystemExit(f"--connectors has {text!r}: give some of {'; '.join(CONNECTORS)}")
    if any(name.endswith(OTHER) for name in names) and OTHER_TREE not in os.environ:
        raise SystemExit(f"{OTHER_TREE} must name a checkout for the connectors of another tree")
    return names


def main() -> None:
    """Run everything, and write the results after each table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="results; those of other modes are kept"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="PNG", help="only draw the results, one row of plots for each mode"
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, repeats and loads")
    parser.add_argument("--directions", default=DIRECTIONS, help=f"pairs of prefill and decode (default {DIRECTIONS})")
    parser.add_argument("--model", choices=KINDS, default=DENSE, help=f"kind of model (default {DENSE})")
    parser.add_argument("--no-loads", action="store_true", help="only prompts alone")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], help="of prompts alone")
    parser.add_argument("--connectors", default=";".join(DEFAULT_CONNECTORS), help=f"of {'; '.join(CONNECTORS)}")
    parser.add_argument("--mps", action="store_true", help="share the GPUs by CUDA's Multi-Process Service")
    parser.add_argument("--engine-arguments", default=ENGINE_ARGUMENTS, help="further arguments of vLLM, as one text")
    parser.add_argument("--timelines", type=Path, help="write the timeline of a room of each row into this folder")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    chosen = parser.parse_args()
    if chosen.draw:
        draw(json.loads(chosen.json.read_text()), chosen.draw)
        return
    directions, names = directions_of(chosen.directions), connectors_of(chosen.connectors)
    arguments = [*shlex.split(chosen.engine_arguments), *KINDS[chosen.model]]
    machine = about(arguments)
    devices = devices_of([side for side in SIDES if any(side in pair for pair in directions)], len(machine["gpus"]))
    mode = f"{chosen.directions} {'mps' if chosen.mps else 'time-sliced'}"
    mode += "" if chosen.model == DENSE else f" {chosen.model}"
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-vllm-")))
        logs = chosen.logs or directory
        logs.mkdir(parents=True, exist_ok=True)
        model = make_model(directory, os.environ.get(PYTHON, sys.executable), os.environ.get(PATH, ""), chosen.model)
        variables = stack.enter_context(mps(directory / "mps", logs, wanted=chosen.mps))
        begin_s = time.monotonic()
        scenes = [
            stack.enter_context(
                Scene(
                    name,
                    devices,
                    model,
                    logs,
                    FIRST_PORT + 100 * index,
                    variables,
                    arguments,
                    steps=bool(chosen.timelines),
                )
            )
            for index, name in enumerate(names)
        ]
        for scene in scenes:
            try:
                scene.wait_ready()
            except SystemExit as error:
                scene.failed = f"its engines do not serve: {error}"[:FAILURE_CHARACTERS]
                print(f"{scene.name} is left out: {error}", flush=True)
        print(f"{mode}: all engines serve after {time.monotonic() - begin_s:.0f} s", flush=True)
        kept = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
        results: dict[str, Any] = {"memory_mib": memory_taken(scenes), "alone": [], "loads": []} | machine

        def note(table: str, rows: list[dict[str, Any]]) -> None:
            results[table] += rows
            results["failed"] = {scene.name: scene.failed for scene in scenes if scene.failed}
            chosen.json.write_text(json.dumps(kept | {mode: results}, indent=1) + "\n")
            for row in rows:
                print(line_of(row), flush=True)

        measure(scenes, directions, note, chosen)


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot first tokens after prefill by length and requests a second by load, for each mode and direction."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plots = [
        (mode, table, direction)
        for mode, found in results.items()
        for direction in dict.fromkeys(row["direction"] for row in found["alone"])
        for table in ("alone", "loads")
    ]
    figure, axes = plt.subplots(-(-len(plots) // 4), 4, figsize=(21, 4.5 * -(-len(plots) // 4)), squeeze=False)
    for place, (mode, table, direction) in zip(axes.flat, plots, strict=False):
        rows = [row for row in results[mode][table] if row["direction"] == direction]
        for connector, way in dict.fromkeys((row["connector"], row["way"]) for row in rows):
            mine = [row for row in rows if (row["connector"], row["way"]) == (connector, way)]
            label = connector if way in {connector, "in turn"} else f"{connector}, {way}"
            if table == "alone":
                place.plot(
                    [row["tokens"] for row in mine], [row["after_prefill"]["p50_ms"] for row in mine], "o-", label=label
                )
            else:
                place.plot([row["at_once"] for row in mine], [row["requests_per_s"] for row in mine], "o-", label=label)
        if table == "alone":
            place.set(
                xscale="log",
                yscale="log",
                xlabel="tokens",
                ylabel="ms",
                title=f"{direction}: first token after prefill",
            )
        else:
            place.set_xscale("log", base=2)
            place.set(
                xlabel="requests at once",
                ylabel="requests/s",
                ylim=(0, None),
                title=f"{direction}: mixed load",
            )
        place.grid(alpha=0.3)
        place.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text."""
    what = f"{row['tokens']:6} tokens" if "tokens" in row else f"{row['at_once']:3} at once "
    text = f"{row['direction']}  {what}  {row['connector']:21} {row['way']:7}"
    text += f"  first {row['first']['p50_ms']:8.1f} ({row['first']['p99_ms']:8.1f})"
    text += f"  after prefill {row['after_prefill']['p50_ms']:8.1f} ({row['after_prefill']['p99_ms']:8.1f})"
    if "all_s" in row:
        text += f"  {row['requests_per_s']:6.1f}/s  step {row['step']['p50_ms']:6.1f}  {row['processor_s']}"
    return text + f"  other tokens {row['other_tokens']}"


if __name__ == "__main__":
    main()
