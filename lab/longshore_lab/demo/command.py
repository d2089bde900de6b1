"""The command `longshore demo`: its arguments, the order of its steps, and its exit status.

Exit status 0: everything is equal. 1: something differs or failed, as the message says. 2: invalid arguments. 130 or 143:
interrupted. In every case no process, socket, shared memory or file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from longshore_cli.arguments import new_file, tp_pair
from longshore_cli.lifetime import InterruptedBySignal, Watch, descendants_ended, interrupts_raised, parts_watched
from longshore_lab import devices
from longshore_lab.demo.caches import move_requests
from longshore_lab.demo.cluster import PAGE_SIZE, Agents, Engines
from longshore_lab.demo.counts import PairResult, Result
from longshore_lab.demo.pair import PairRun
from longshore_lab.demo.progress import Progress
from longshore_lab.demo.prompts import TOKENS_GENERATED, Request, answered_requests, total_tokens
from longshore_lab.demo.table import encoded, rendered
from longshore_lab.devices import DevicesError, Placement
from longshore_lab.engine.config import ModelConfig, RankOptions
from longshore_lab.engine.pages import pages_for
from longshore_lab.engine.processes import EngineProcesses
from longshore_lab.engine.starter import RankStarter
from longshore_spec.agent_config import Backend
from longshore_wire.errors import LongshoreError

_PAIRS = "4:1,1:4,2:3"
_PAIRS_QUICK = "2:1"
_BACKENDS = "NIXL,Mooncake"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's arguments."""
    parser.add_argument(
        "--pairs",
        type=_pairs,
        help=f"prefill and decode TP of each pair (default: {_PAIRS}); TPs that divide 12 KV heads",
    )
    parser.add_argument(
        "--backend",
        type=_backends,
        help=f"transports, separated by commas; the first moves every room, a further one the longest (default: {_BACKENDS}; "
        f"on GPUs {','.join(devices.BACKENDS_DEFAULT)})",
    )
    devices.add_argument(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and page ids (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help=f"fewer prompts, and {_PAIRS_QUICK} where no pairs are given"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the results to this file")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return its exit status."""
    if arguments.backend is None:
        arguments.backend = list(devices.BACKENDS_DEFAULT) if arguments.devices else _backends(_BACKENDS)
    try:
        placement = devices.check(arguments.devices, arguments.backend)
    except DevicesError as error:
        print(f"longshore demo: {error}", file=sys.stderr)
        return 2
    try:
        with interrupts_raised(), _directory() as directory, descendants_ended() as ended:
            status = _judged(arguments, placement, directory)
    except InterruptedBySignal as error:
        print("longshore demo: interrupted; everything that it started has ended", file=sys.stderr)
        return error.status
    except LongshoreError as error:
        print(f"longshore demo: FAILED: {error}", file=sys.stderr)
        return 1
    if ended:
        print(f"longshore demo: processes {ended} were still running and were killed: that is a bug", file=sys.stderr)
        return 1
    return status


def _judged(arguments: argparse.Namespace, placement: Placement, directory: Path) -> int:
    transports = [Agents(backend, directory / backend.lower(), placement) for backend in arguments.backend]
    with contextlib.ExitStack() as stack:
        for agents in transports:
            stack.enter_context(agents)
        starter = stack.enter_context(RankStarter())
        try:
            with parts_watched() as watch:
                for agent in (agent for agents in transports for agent in agents.all):
                    agent.watched_by(watch)
                progress = Progress()
                pairs = _all_pairs(arguments, placement, transports, starter, watch, progress)
                requests = move_requests(transports, placement, progress, watch, quick=arguments.quick)
        except LongshoreError:
            for agent in (agent for agents in transports for agent in agents.all):
                place = agent.directory.relative_to(directory)
                print(f"--- {agent.log_path.name} of {place}\n{agent.log_tail()}", file=sys.stderr)
            raise
        # Signalled first, so that all of them end concurrently.
        for agent in (agent for agents in transports for agent in agents.all):
            agent.terminate()
    results: list[Result] = [*pairs, *requests]
    print(f"\n{rendered(results)}\n")
    print("Everything is equal: pages byte for byte, and tokens with those of one engine that did both.")
    print("GB/s: all rooms at once, from the first accepted send to the last DONE, the middle one of several times;")
    print("pieces: the separate pieces of memory in all writes; vs slices: against the same rooms slice by slice;")
    print("host: into pages of one token in decode's host memory, compared after decode had copied them into its own.")
    print("hybrid, MLA: a room of several caches, from its claim to DONE, without a model; every byte was compared.")
    if placement.on_gpus:
        print(f"KV was in GPU memory throughout: {placement}. The one engine has its own in host memory.")
        print(f"Left out on GPUs: {devices.WAYS_LEFT_OUT}.")
    if arguments.json is not None:
        options = {"backends": arguments.backend, "seed": arguments.seed, "quick": arguments.quick}
        if placement.on_gpus:
            options["devices"] = arguments.devices
        arguments.json.write_bytes(encoded(pairs, requests, options))
    return 0


def _all_pairs(
    arguments: argparse.Namespace,
    placement: Placement,
    transports: Sequence[Agents],
    starter: RankStarter,
    watch: Watch,
    progress: Progress,
) -> list[PairResult]:
    if placement.on_gpus:
        progress.say(devices.describe(placement))
    pairs = arguments.pairs or _pairs(_PAIRS_QUICK if arguments.quick else _PAIRS)
    names = " and ".join(arguments.backend)
    count = sum(len(agents.all) for agents in transports)
    progress.say(f"starting {count} agents ({names}, CURVE keys on), the first engines, and one engine to compare with")
    page_count = 2 * pages_for(total_tokens(quick=arguments.quick), PAGE_SIZE)
    results: list[PairResult] = []
    requests: list[Request] = []
    for number, (prefill_tp, decode_tp) in enumerate(pairs, 1):
        if results:
            progress.say(f"starting the engines of TP{prefill_tp} -> TP{decode_tp}")
        # One pair is enough to show decode's host memory, which takes two more workers for each of its ranks.
        shape = (prefill_tp, decode_tp, page_count, arguments.seed)
        with Engines(transports, *shape, placement, starter, has_host=number == len(pairs)) as engines:
            if not requests:
                requests = _reference(arguments, progress, starter)
                for agents in transports:
                    agents.wait_ready()
                progress.say(
                    f"agents are ready: each has moved 1 MiB by {names.replace(' and ', ' or ')} in its self-test"
                )
            engines.wait_ready()
            progress.say(f"{engines.name}: {prefill_tp} prefill and {decode_tp} decode processes are registered")
            first: PairRun | None = None
            with engines.watched_by(watch):
                for agents in transports:
                    pair = PairRun(agents, engines, requests, progress, first)
                    results.append(pair.run())
                    first = first or pair
    return results


def _reference(arguments: argparse.Namespace, progress: Progress, starter: RankStarter) -> list[Request]:
    """Compute the expected tokens of every prompt with one engine, without agents."""
    options = RankOptions(page_count=pages_for(total_tokens(quick=arguments.quick), PAGE_SIZE))
    with EngineProcesses(options, wait=False, starter=starter) as engine:
        engine.wait_ready()
        progress.say("the engine to compare with is loaded")
        requests = answered_requests(engine, arguments.seed, quick=arguments.quick)
    tokens = sum(request.total for request in requests)
    kv_bytes = tokens * ModelConfig().shape.kinds * ModelConfig().layers * ModelConfig().kv_heads
    kv_bytes *= ModelConfig().shape.head_bytes
    progress.say(
        f"one engine alone answered {len(requests)} prompts of {tokens:,} tokens ({kv_bytes / 1e6:.0f} MB of KV) "
        f"with {TOKENS_GENERATED} tokens each"
    )
    return requests


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Yield a temporary directory for all files of the demo and its processes."""
    with tempfile.TemporaryDirectory(prefix="longshore-", ignore_cleanup_errors=True) as name:
        before = os.environ.get("TMPDIR"), tempfile.tempdir
        os.environ["TMPDIR"], tempfile.tempdir = name, name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before[1]
            if before[0] is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before[0]


def _backends(text: str) -> list[str]:
    known = [backend.value for backend in Backend]
    found = text.split(",")
    wrong = [name for name in found if name not in known]
    if wrong or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: give different ones of {', '.join(known)}")
    return found


def _pairs(text: str) -> list[tuple[int, int]]:
    """Parse pairs of TPs such as `4:1,1:4`."""
    heads = ModelConfig().kv_heads
    found = []
    for pair in text.split(","):
        tps = tp_pair(pair, heads)
        if tps[0] == tps[1]:
            raise argparse.ArgumentTypeError(f"{pair}: equal layouts need no staging; give unequal ones, such as 4:1")
        found.append(tps)
    return found
