"""How fast do agents move pages from one GPU to another, against a plain copy and against the bare transport?

    python benchmarks/gpu_path.py --json FILE

A model of 80 layers and 8 KV heads of 128 in 2 bytes, pages of 64 tokens: all prefill ranks on the first GPU, TP1 on the
last, each engine rank and each agent real processes, staged by NIXL. With TP2 two workers share the first GPU, which
then serves them by turns; with TP1 each worker has a GPU, as in a deployment, and only the way is that of unequal ranks. A time is from the first `send` to DONE
at the target, the claim having been made before. Every byte of the target's pool is compared after the last repetition of
each size; a wrong one ends the run. `one descriptor` and `slices` are NIXL alone, as a worker uses it, the slices those of
one of the two ranks; `plain copy` is torch's between the two GPUs.

Needs no network and, beside the package, torch, Triton and NIXL; one GPU will do, but then says little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import select
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from gpu_world import EngineProcess, GPUAgent

from longshore_agent.transports import create
from longshore_agent.transports.base import PreparingTransport, WriteState

SHAPE = {"layers": 80, "kv_heads": 8, "page_size": 64}
TOKEN_BYTES = 80 * 2 * 8 * 256
SLICE_BYTES, SLICES_BATCH = 4 * 256, 1000
WARM_UPS = 2


def all_ask(ranks: list[EngineProcess], command: str, **arguments: Any) -> list[Any]:
    """Let all ranks do one thing at once."""
    for rank in ranks:
        rank.begin(command, **arguments)
    return [rank.end() for rank in ranks]


def start(stack: ExitStack, agent: GPUAgent, role: str, tp: int, device: int, page_count: int) -> list[EngineProcess]:
    """Start the ranks of one engine."""
    ranks = [stack.enter_context(EngineProcess()) for _ in range(tp)]
    for number, rank in enumerate(ranks):
        rank.ask("allocate", device=device, tp=tp, rank=number, page_count=page_count, **SHAPE)
    all_ask(ranks, "register", socket=agent.socket, instance=role.lower(), role=role)
    return ranks


def page(agent: GPUAgent, path: str) -> str:
    """Return a page of an agent's status."""
    http = json.loads((agent.directory / "agent.json").read_bytes())["http"]
    with urllib.request.urlopen(http + path, timeout=10) as answer:  # noqa: S310 - the agent's own address
        return str(answer.read().decode())


def wires(agent: GPUAgent) -> list[str]:
    """Return what bytes of an agent's workers travel over."""
    found = [
        peer.get("wire", "") for worker in json.loads(page(agent, "/v1/status"))["workers"] for peer in worker["peers"]
    ]
    return sorted(set(found))


def stage_seconds(agent: GPUAgent) -> dict[str, tuple[float, float]]:
    """Return (seconds, count) of every stage so far."""
    sums: dict[str, list[float]] = {}
    for line in page(agent, "/metrics").splitlines():
        for index, suffix in enumerate(("_sum", "_count")):
            if line.startswith(f"longshore_stage_seconds{suffix}{{"):
                stage = line.split('stage="')[1].split('"')[0]
                sums.setdefault(stage, [0.0, 0.0])[index] += float(line.rsplit(" ", 1)[1])
    return {stage: (total, count) for stage, (total, count) in sums.items()}


def run_agents(
    sizes: list[int], repetitions: int, target_device: int, source_tp: int, lanes: tuple[str, str]
) -> list[dict[str, Any]]:
    """Move rooms of each size; return a row for each."""
    page_count = -(-max(sizes) // 64)
    rows = []
    settings = {"LONGSHORE_LANE_COUNT": lanes[0], "LONGSHORE_LANE_BYTES": lanes[1], "LONGSHORE_STAGING": "Always"}
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(**settings)) for _ in range(2))
        prefill = start(stack, near, "SOURCE", source_tp, 0, page_count)
        decode = start(stack, far, "TARGET", 1, target_device, page_count)[0]
        endpoint = prefill[0].ask("endpoint")
        room = 0
        for tokens in sizes:
            pages = np.random.default_rng(tokens).permutation(page_count)[: -(-tokens // 64)].tolist()
            all_ask(prefill, "fill", seed=tokens, tokens=tokens, pages=pages)
            samples = []
            before: list[dict[str, tuple[float, float]]] = []
            for repetition in range(WARM_UPS + repetitions):
                if repetition == WARM_UPS:
                    before = [stage_seconds(near), stage_seconds(far)]
                room += 1
                decode.ask("poison")
                decode.ask("receive", room=room, endpoint=endpoint, pages=pages, tokens=tokens)
                time.sleep(0.1)
                decode.begin("wait", room=room, half="TARGET", instance="source")
                starts = all_ask(prefill, "send", room=room, pages=pages, tokens=tokens, chunk=8192)
                kind, text, end_s = decode.end()
                if kind != "DONE":
                    raise SystemExit(f"room of {tokens} tokens: {text}\n{near.log()}\n{far.log()}")
                all_ask(prefill, "wait", room=room, half="SOURCE", instance="source")
                samples.append(end_s - min(starts))
            wrong = decode.ask("differences", sequences=[(tokens, tokens, pages)])
            if wrong:
                raise SystemExit(f"{wrong} elements differ after {tokens} tokens")
            stages = {}
            for old, agent in zip(before, (near, far), strict=True):
                for stage, (total, count) in stage_seconds(agent).items():
                    was = old.get(stage, (0.0, 0.0))
                    if count > was[1]:
                        stages[stage] = {"mean_us": (total - was[0]) / (count - was[1]) * 1e6, "count": count - was[1]}
            length, median_s = tokens * TOKEN_BYTES, statistics.median(samples[WARM_UPS:])
            print(
                f"staged TP{source_tp}->TP1 {'x'.join(lanes):>8} {tokens:6} tokens {length / 1e6:8.1f} MB {median_s * 1e3:8.2f} ms "
                f"{length / median_s / 1e9:7.2f} GB/s  {json.dumps(stages)}",
                flush=True,
            )
            rows.append(
                {
                    "source_tp": source_tp,
                    "lanes": lanes,
                    "tokens": tokens,
                    "bytes": length,
                    "seconds": samples,
                    "stages": stages,
                    "wires": wires(near),
                }
            )
        print(f"wires: {wires(near)}, {wires(far)}", flush=True)
    return rows


def run_copy(sizes: list[int], target_device: int) -> dict[int, float]:
    """Return the median seconds of a plain copy of each length."""
    found = {}
    for length in sizes:
        near = torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda:0")
        far = torch.empty(length, dtype=torch.uint8, device=f"cuda:{target_device}")
        samples = []
        for _ in range(12):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(target_device)
            begin_s = time.perf_counter()
            far.copy_(near, non_blocking=True)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(target_device)
            samples.append(time.perf_counter() - begin_s)
        assert torch.equal(far.cpu(), near.cpu())
        found[length] = statistics.median(samples[2:])
        print(
            f"plain copy {length / 1e6:8.1f} MB {found[length] * 1e3:8.3f} ms {length / found[length] / 1e9:7.1f} GB/s",
            flush=True,
        )
    return found


def receive_bare(device: int, length: int) -> None:
    """The receiving half of `run_bare`: register, tell how to reach the memory, and drive the transport until told to stop."""
    torch.cuda.set_device(device)
    memory = torch.zeros(length, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize()
    transport = create("NIXL", "bare-target", device_index=device)
    transport.register(memory.data_ptr(), length)
    print(json.dumps([transport.metadata().hex(), memory.data_ptr()]), flush=True)
    transport.connect(bytes.fromhex(sys.stdin.readline()))
    print("connected", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        transport.notices()
    torch.cuda.synchronize()
    host = memory.cpu().numpy()
    print(json.dumps(int(np.frombuffer(host.tobytes(), np.uint64).sum(dtype=np.uint64))), flush=True)


def finish(transport: PreparingTransport, writes: list[Any]) -> None:
    """Wait for writes."""
    for write in writes:
        while (state := transport.state(write)) is WriteState.OPEN:
            pass
        transport.release(write)
        if state is not WriteState.DONE:
            raise SystemExit(f"a bare write failed: {write.error}")


def run_bare(length: int, target_device: int) -> dict[str, list[float]]:
    """Return the seconds of one descriptor of `length`, and of as many bytes slice by slice."""
    torch.cuda.set_device(0)
    memory = torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    child = subprocess.Popen(
        [sys.executable, __file__, "--bare-target", str(target_device), "--bare-bytes", str(length)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: PT018 - one fact
    transport = create("NIXL", "bare-source", device_index=0)
    transport.register(memory.data_ptr(), length)
    metadata, target = json.loads(child.stdout.readline())
    peer = transport.connect(bytes.fromhex(metadata))
    child.stdin.write(transport.metadata().hex() + "\n")
    child.stdin.flush()
    child.stdout.readline()
    found: dict[str, list[float]] = {"one descriptor": [], "slices": []}
    one = np.array([memory.data_ptr()], np.uint64), np.array([target], np.uint64), np.array([length], np.uint64)
    for _ in range(7):
        begin_s = time.perf_counter()
        finish(transport, [transport.post(peer, *one, b"")])
        found["one descriptor"].append(time.perf_counter() - begin_s)
    count = length // SLICE_BYTES
    # As pages lie: slices of one rank are every second kilobyte of the target's rows, those of the source side by side.
    steps = np.arange(count, dtype=np.uint64) * np.uint64(SLICE_BYTES)
    sizes = np.full(count, SLICE_BYTES, np.uint64)
    for _ in range(2):
        begin_s = time.perf_counter()
        prepared = transport.prepare(peer, steps + one[0], steps[::-1] + one[1], sizes)
        for first in range(0, count, 4 * SLICES_BATCH):
            batches = range(first, min(first + 4 * SLICES_BATCH, count), SLICES_BATCH)
            finish(
                transport,
                [
                    transport.post_prepared(
                        peer, prepared, np.arange(each, min(each + SLICES_BATCH, count), dtype=np.int32), b""
                    )
                    for each in batches
                ],
            )
        found["slices"].append(time.perf_counter() - begin_s)
        transport.release_prepared(prepared)
    child.stdin.write("stop\n")
    child.stdin.flush()
    assert json.loads(child.stdout.readline()) == int(memory.cpu().numpy().view(np.uint64).sum(dtype=np.uint64))
    child.wait(30)
    for name, samples in found.items():
        print(
            f"NIXL, {name:15} {length / 1e6:8.1f} MB {statistics.median(samples) * 1e3:9.3f} ms "
            f"{length / statistics.median(samples) / 1e9:8.2f} GB/s",
            flush=True,
        )
    return found


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--tokens", default="256,1024,4096,8192", help="sizes of rooms, separated by commas")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bare-bytes", type=int, default=83_886_080, help="of the bare transport's writes")
    parser.add_argument("--bare-target", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_target >= 0:
        receive_bare(options.bare_target, options.bare_bytes)
        return
    target = torch.cuda.device_count() - 1
    name = torch.cuda.get_device_name(0)
    print(f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}, Python {platform.python_version()}")
    sizes = [int(size) for size in options.tokens.split(",")]
    result = {
        "device": name,
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "plain_copy_seconds": run_copy([options.bare_bytes, *(size * TOKEN_BYTES for size in sizes)], target),
        "bare": {"bytes": options.bare_bytes, "seconds": run_bare(options.bare_bytes, target)},
        "staged": [
            row
            for source_tp, lanes in itertools.product((1, 2), (("4", "64Mi"), ("2", "256Mi")))
            for row in run_agents(sizes, options.repetitions, target, source_tp, lanes)
        ],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
