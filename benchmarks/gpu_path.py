"""Measures how fast agents move pages from one GPU to another, compared with a plain copy and the bare transport.

    python benchmarks/gpu_path.py --json FILE

The model has 80 layers, 8 KV heads of 128 elements of 2 bytes, and pages of 64 tokens. All prefill ranks are on the first
GPU, decode's TP1 is on the last. Engine ranks and agents are real processes; transfers are staged. With TP2 two workers
share the first GPU, which alternates between them. With TP1 each worker has a GPU, as in a deployment, and stages
although the layouts are equal. Rooms move alone, after 0.1 s of idleness, in which GPUs and NVLink enter power saving,
and back to back: each is claimed before its predecessor is sent. So does the plain copy, torch's between the two GPUs.

Two clocks start after the claim. The workers' clock runs from the first gather, or the acceptance of the first `send` if
that was earlier, to the event of the last scatter. The engines' clock runs from the first `send` to DONE at the target's
engine. `one descriptor` and the pieces below it measure the transport alone; pieces are prepared first and written in
reverse order. Every byte of the target's pool is compared after the first room and after the last room of each size,
before which the pool is poisoned. A wrong byte ends the run.

Needs torch, Triton, and NIXL or (`--backend Mooncake`) Mooncake's wheel for CUDA 13. With one GPU the result says little.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from gpu_world import EngineProcess, GPUAgent, agent_page, agent_status

from longshore_agent.transports import create
from longshore_agent.transports.base import Pieces, Selection, Transport, Write, WriteState
from longshore_cli.metrics_page import MetricsPage
from longshore_wire.names import room_name

SHAPE = {"layers": 80, "kv_heads": 8, "page_size": 64}
TOKEN_BYTES = 80 * 2 * 8 * 256
SLICES_BATCH = 1000
# Sizes of pieces for the transport alone: a token's heads for a rank of TP4 and of TP2, then a page's tokens of one head
# and of four heads, as in engines whose pages are stored head by head (HND).
PIECES = {"TP4's slices": 512, "TP2's slices": 1024, "page and head": 64 * 256, "page, 4 heads": 4 * 64 * 256}
WARM_UPS = 2
# The agents' settings for each backend.
BACKENDS = {"NIXL": {}, "Mooncake": {"LONGSHORE_BACKEND": "Mooncake"}}


def all_ask(ranks: list[EngineProcess], command: str, **arguments: Any) -> list[Any]:
    """Run a command on all ranks concurrently."""
    for rank in ranks:
        rank.begin(command, **arguments)
    return [rank.result() for rank in ranks]


def start(stack: ExitStack, agent: GPUAgent, role: str, tp: int, device: int, page_count: int) -> list[EngineProcess]:
    """Start the ranks of one engine."""
    ranks = [stack.enter_context(EngineProcess()) for _ in range(tp)]
    for number, rank in enumerate(ranks):
        rank.ask("allocate", device=device, tp=tp, rank=number, page_count=page_count, **SHAPE)
    all_ask(ranks, "register", socket=agent.socket, instance=role.lower(), role=role)
    return ranks


def wires(agent: GPUAgent) -> list[str]:
    """Return the wires that an agent's workers use."""
    return sorted({peer.get("wire", "") for worker in agent_status(agent)["workers"] for peer in worker["peers"]})


def stage_seconds(agent: GPUAgent) -> dict[str, tuple[float, float]]:
    """Return (seconds, count) of every stage so far."""
    page = MetricsPage(agent_page(agent, "/metrics"))
    sums, counts = (page.by("stage", f"longshore_stage_seconds_{part}") for part in ("sum", "count"))
    return {stage: (total, counts[stage]) for stage, total in sums.items()}


def spans(agent: GPUAgent, room: int) -> list[dict[str, Any]]:
    """Return the spans of a room's slabs at one agent, without those of its messages."""
    found = json.loads(agent_page(agent, f"/v1/rooms/{room_name(room)}"))["spans"]
    return [span for span in found if span["kind"] == "stage"]


def show_spans(found: list[dict[str, Any]], accepted_ns: int) -> None:
    """Print each slab's stages, in microseconds from the acceptance of the offer."""
    for span in sorted(found, key=lambda span: (span["slab"], span["start_ns"])):
        begin, end = ((span[name] - accepted_ns) / 1e3 for name in ("start_ns", "end_ns"))
        print(
            f"    slab {span['slab']:3} of rank {span['source_rank']} {span['stage']:8} {begin:9.0f} to {end:9.0f} us",
            flush=True,
        )


@dataclass
class Scene:
    """Two agents, a prefill engine at one and a decode engine at the other."""

    near: GPUAgent
    far: GPUAgent
    prefill: list[EngineProcess]
    decode: EngineProcess
    endpoint: str
    page_count: int  # that prefill has; decode has twice as many
    room: int = 0  # the newest that was claimed

    def claim(self, tokens: int, pages: list[int]) -> int:
        """Claim the next room; return its number."""
        self.room += 1
        there = self.pages_at_decode(self.room, pages)
        self.decode.ask("receive", room=self.room, endpoint=self.endpoint, pages=there, tokens=tokens)
        return self.room

    def pages_at_decode(self, room: int, pages: list[int]) -> list[int]:
        """Return decode's page ids for a room. Two rooms that are claimed at once do not share a page."""
        return [page + room % 2 * self.page_count for page in pages]

    def move(self, room: int, tokens: int, pages: list[int]) -> tuple[float, float, float]:
        """Move a claimed room; return the times of the first `send`, of its acceptance, and of DONE at decode."""
        self.decode.begin("wait", room=room, half="TARGET", instance="source")
        sends = all_ask(self.prefill, "send", room=room, pages=pages, tokens=tokens, chunk=8192)
        kind, text, end_s = self.decode.result()
        if kind != "DONE":
            raise SystemExit(f"room of {tokens} tokens: {text}\n{self.near.log()}\n{self.far.log()}")
        all_ask(self.prefill, "wait", room=room, half="SOURCE", instance="source")
        return min(begin_s for begin_s, _ in sends), min(accepted_s for _, accepted_s in sends), end_s

    def spans(self, room: int) -> list[dict[str, Any]]:
        """Return a room's spans from both agents, or from the one agent of both engines."""
        return [span for agent in dict.fromkeys((self.near, self.far)) for span in spans(agent, room)]

    def clocks(self, room: int, times: tuple[float, float, float]) -> tuple[float, float]:
        """Return the seconds of both clocks; see the module's docstring."""
        found = self.spans(room)
        ended_ns = max(span["end_ns"] for span in found)
        # The worker may begin before the engine receives the acceptance.
        begun_ns = min(span["start_ns"] for span in found)
        return ended_ns / 1e9 - min(times[1], begun_ns / 1e9), times[2] - times[0]

    def alone(self, tokens: int, pages: list[int], count: int, *, shown: bool) -> list[tuple[float, float]]:
        """Move rooms one at a time, each after 0.1 s of idleness; print the last one's slabs if requested."""
        found = []
        for index in range(count):
            room = self.claim(tokens, pages)
            time.sleep(0.1)
            times = self.move(room, tokens, pages)
            found.append(self.clocks(room, times))
            if shown and index == count - 1:
                show_spans(self.spans(room), round(times[1] * 1e9))
        return found

    def in_a_row(self, tokens: int, pages: list[int], count: int) -> list[tuple[float, float]]:
        """Move rooms back to back, each claimed before its predecessor is sent."""
        claimed = self.claim(tokens, pages)
        moved = []
        for _ in range(count):
            room, claimed = claimed, self.claim(tokens, pages)
            moved.append((room, self.move(room, tokens, pages)))
        found = [self.clocks(room, times) for room, times in moved]
        # Poison the pool before the last room, so that no byte of an earlier room can pass for one of its own.
        self.decode.ask("poison")
        self.move(claimed, tokens, pages)
        return found

    def differences(self, seed: int, tokens: int, pages: list[int]) -> int:
        """Return the number of wrong elements at decode after the newest room."""
        there = self.pages_at_decode(self.room, pages)
        return int(self.decode.ask("differences", sequences=[(seed, tokens, there)]))

    def stages(self) -> list[dict[str, tuple[float, float]]]:
        """Return the stages' times so far, for each agent."""
        return [stage_seconds(agent) for agent in dict.fromkeys((self.near, self.far))]


def mean_stages(
    before: list[dict[str, tuple[float, float]]], after: list[dict[str, tuple[float, float]]]
) -> dict[str, dict[str, float]]:
    """Return the mean microseconds and the count of each stage between two readings."""
    found = {}
    for old, new in zip(before, after, strict=True):
        for stage, (total, count) in new.items():
            was = old.get(stage, (0.0, 0.0))
            if count > was[1]:
                found[stage] = {"mean_us": (total - was[0]) / (count - was[1]) * 1e6, "count": count - was[1]}
    return found


def show_row(row: dict[str, Any], name: str) -> None:
    """Print one size."""
    length = row["bytes"]
    print(f"{name} {row['tokens']:6} tokens {length / 1e6:8.1f} MB", flush=True)
    for kind in ("alone", "in_a_row"):
        samples = row[f"{kind}_seconds"][WARM_UPS:]
        moved_s, engines_s = (statistics.median(column) for column in zip(*samples, strict=True))
        print(
            f"    {kind:8} {moved_s * 1e3:7.3f} ms {length / moved_s / 1e9:6.1f} GB/s (best {length / min(samples)[0] / 1e9:.1f}); "
            f"engines {engines_s * 1e3:7.3f} ms {length / engines_s / 1e9:6.1f} GB/s",
            flush=True,
        )
    means = (f"{stage} {each['mean_us']:.0f} us x {each['count']:.0f}" for stage, each in row["stages"].items())
    print("    " + ", ".join(means), flush=True)


def prove(scene: Scene, tokens: int) -> None:
    """Move one room and compare every byte of the target's pool. Called before any measurement."""
    pages = list(range(-(-tokens // 64)))
    all_ask(scene.prefill, "fill", seed=1, tokens=tokens, pages=pages)
    scene.decode.ask("poison")
    scene.move(scene.claim(tokens, pages), tokens, pages)
    wrong = scene.differences(1, tokens, pages)
    if wrong:
        raise SystemExit(f"{wrong} elements differ in the first room, of {tokens} tokens")
    print(f"every byte of a first room of {tokens} tokens is right; wires: {wires(scene.near)}", flush=True)


def measure_room_sizes(
    scene: Scene, sizes: list[int], repetitions: int, name: str, shown: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Move rooms of each size alone and back to back; compare the last one's bytes; print and return a row for each."""
    rows = []
    for tokens in sizes:
        pages = np.random.default_rng(tokens).permutation(scene.page_count)[: -(-tokens // 64)].tolist()
        all_ask(scene.prefill, "fill", seed=tokens, tokens=tokens, pages=pages)
        before = scene.stages()
        row: dict[str, Any] = {
            "source_tp": len(scene.prefill),
            "tokens": tokens,
            "bytes": tokens * TOKEN_BYTES,
            "alone_seconds": scene.alone(tokens, pages, WARM_UPS + repetitions, shown=tokens in shown),
            "in_a_row_seconds": scene.in_a_row(tokens, pages, WARM_UPS + repetitions),
        }
        wrong = scene.differences(tokens, tokens, pages)
        if wrong:
            raise SystemExit(f"{wrong} elements differ after {tokens} tokens")
        row |= {"stages": mean_stages(before, scene.stages()), "wires": wires(scene.near)}
        show_row(row, name)
        rows.append(row)
    return rows


def bare_transport(backend: str, name: str, device: int) -> Transport:
    """Return a transport for a device's memory, made as a worker makes it."""
    options = {"enter": lambda: torch.cuda.set_device(device)} if backend == "Mooncake" else {}
    return create(backend, name, device_index=device, **options)


def run_agents(
    backend: str,
    sizes: list[int],
    repetitions: int,
    target_device: int,
    source_tp: int,
    settings: dict[str, str],
    shown: list[int],
) -> list[dict[str, Any]]:
    """Move rooms of each size between agents with these settings; return a row for each."""
    page_count = -(-max(sizes) // 64)
    name = " ".join(f"{setting}={value}" for setting, value in settings.items()) or "defaults"
    environment = BACKENDS[backend] | {f"LONGSHORE_{setting.upper()}": value for setting, value in settings.items()}
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(**environment)) for _ in range(2))
        prefill = start(stack, near, "SOURCE", source_tp, 0, page_count)
        decode = start(stack, far, "TARGET", 1, target_device, 2 * page_count)[0]
        scene = Scene(near, far, prefill, decode, prefill[0].ask("endpoint"), page_count)
        prove(scene, sizes[0])
        rows = measure_room_sizes(scene, sizes, repetitions, f"staged TP{source_tp}->TP1 {name}", shown)
        for row in rows:
            row |= {"settings": settings}
        print(f"wires: {wires(near)}, {wires(far)}", flush=True)
    return rows


def copied_s(near: torch.Tensor, far: torch.Tensor) -> float:
    """Copy once; return the seconds until the event behind the copy is complete."""
    begin_s = time.perf_counter()
    far.copy_(near, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(near.device))
    while not event.query():  # type: ignore[no-untyped-call]
        pass
    return time.perf_counter() - begin_s


def run_copy(sizes: list[int], target_device: int) -> dict[int, dict[str, float]]:
    """Return the median seconds of a plain copy of each length: back to back, and after 0.1 s of idleness."""
    found: dict[int, dict[str, float]] = {}
    torch.cuda.set_device(0)
    for length in sizes:
        near = torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda:0")
        far = torch.empty(length, dtype=torch.uint8, device=f"cuda:{target_device}")
        torch.cuda.synchronize(target_device)
        row = [copied_s(near, far) for _ in range(12)]
        alone = []
        for _ in range(7):
            time.sleep(0.1)
            alone.append(copied_s(near, far))
        torch.cuda.synchronize(target_device)
        assert torch.equal(far.cpu(), near.cpu())
        found[length] = {"in a row": statistics.median(row[2:]), "alone": statistics.median(alone)}
        rates = ", ".join(
            f"{kind} {each * 1e3:.3f} ms {length / each / 1e9:.1f} GB/s" for kind, each in found[length].items()
        )
        print(f"plain copy {length / 1e6:8.1f} MB {rates}", flush=True)
    return found


def receive_bare(backend: str, device: int, length: int) -> None:
    """The receiving process of `run_bare`: register memory, print its address, drive the transport until told to stop."""
    torch.cuda.set_device(device)
    memory = torch.zeros(length, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize()
    transport = bare_transport(backend, "bare-target", device)
    transport.register(memory.data_ptr(), length)
    print(json.dumps([transport.metadata().hex(), memory.data_ptr()]), flush=True)
    transport.connect(bytes.fromhex(sys.stdin.readline()))
    print("connected", flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 0)[0]:
            transport.notices()
        if sys.stdin.readline() != "check\n":
            return
        torch.cuda.synchronize()
        print(hashlib.blake2b(memory.cpu().numpy().data).hexdigest(), flush=True)
        memory.zero_()
        torch.cuda.synchronize()


def finish(transport: Transport, writes: list[Any]) -> None:
    """Wait for writes."""
    for write in writes:
        while (state := transport.state(write)) is WriteState.OPEN:
            pass
        transport.release(write)
        if state is not WriteState.DONE:
            raise SystemExit(f"a bare write failed: {write.error}")


class Bare:
    """The transport alone: this process writes into the memory of a second one. Use as a context manager."""

    def __init__(self, backend: str, length: int, target_device: int) -> None:
        torch.cuda.set_device(0)
        self.length = length
        self._memory = torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self._host = self._memory.cpu().numpy()
        words = ("--backend", backend, "--bare-target", str(target_device), "--bare-bytes", str(length))
        self._child = subprocess.Popen(
            [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._transport = bare_transport(backend, "bare-source", 0)
        self._transport.register(self._memory.data_ptr(), length)
        metadata, self._target = json.loads(self._heard())
        self._peer = self._transport.connect(bytes.fromhex(metadata))
        self._say(self._transport.metadata().hex())
        self._heard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._say("stop")
        self._child.wait(30)

    def whole(self) -> float:
        """Write all bytes as one descriptor; return the seconds."""
        piece = Pieces.one(self._memory.data_ptr(), self._target, self.length)
        begin_s = time.perf_counter()
        finish(self._transport, [self._begun(piece)])
        return time.perf_counter() - begin_s

    def pieces(self, piece_bytes: int) -> tuple[float, float]:
        """Write all bytes in pieces, in reverse order; return the seconds to prepare the pieces and to write them."""
        count = self.length // piece_bytes
        steps = np.arange(count, dtype=np.uint64) * np.uint64(piece_bytes)
        begin_s = time.perf_counter()
        places = (steps + np.uint64(self._memory.data_ptr()), steps[::-1] + np.uint64(self._target))
        prepared = self._transport.prepare(self._peer, Pieces(*places, np.full(count, piece_bytes, np.uint64)))
        looked_up_s = time.perf_counter()
        for first in range(0, count, 4 * SLICES_BATCH):
            batches = range(first, min(first + 4 * SLICES_BATCH, count), SLICES_BATCH)
            chosen = [np.arange(each, min(each + SLICES_BATCH, count), dtype=np.int32) for each in batches]
            finish(self._transport, [self._begun(Selection(prepared, each)) for each in chosen])
        end_s = time.perf_counter()
        self._transport.release_prepared(prepared)
        return looked_up_s - begin_s, end_s - looked_up_s

    def _begun(self, pieces: Pieces | Selection) -> Write:
        write = self._transport.draft(self._peer, pieces, b"")
        self._transport.start(write)
        return write

    def check(self, piece_bytes: int) -> None:
        """End the program unless the target has every byte at the place to which `pieces` (or `whole`) writes it."""
        expected = np.ascontiguousarray(self._host.reshape(-1, piece_bytes)[::-1])
        self._say("check")
        if self._heard() != hashlib.blake2b(expected.data).hexdigest():
            raise SystemExit(f"the bare transport left wrong bytes with pieces of {piece_bytes}")

    def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _heard(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def run_bare(backend: str, length: int, target_device: int) -> dict[str, list[float]]:
    """Return the seconds of one descriptor of `length`, and of as many bytes in prepared pieces of each size."""
    with Bare(backend, length, target_device) as bare:
        found = {"one descriptor": [bare.whole() for _ in range(7)]}
        bare.check(length)
        for name, piece_bytes in PIECES.items():
            looked_up, found[name] = map(list, zip(*(bare.pieces(piece_bytes) for _ in range(3)), strict=True))
            bare.check(piece_bytes)
            print(f"{backend}, {name}: prepared in {statistics.median(looked_up) * 1e3:.0f} ms", flush=True)
    for name, samples in found.items():
        print(
            f"{backend}, {name:15} {length / 1e6:8.1f} MB {statistics.median(samples) * 1e3:9.3f} ms "
            f"{length / statistics.median(samples) / 1e9:8.2f} GB/s",
            flush=True,
        )
    return found


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="NIXL", help="the transport")
    parser.add_argument("--tokens", default="256,1024,4096,8192", help="sizes of rooms, separated by commas")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bare-bytes", type=int, default=83_886_080, help="of the bare transport's writes")
    parser.add_argument(
        "--variants", default=";", help="settings of the agents, as name=value,...; separated by semicolons"
    )
    parser.add_argument("--source-tp", default="1,2", help="TPs of prefill, separated by commas")
    parser.add_argument("--show", default="", help="sizes whose last room is printed slab by slab, separated by commas")
    parser.add_argument("--no-bare", action="store_true", help="leave out the bare transport")
    parser.add_argument("--bare-target", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_target >= 0:
        receive_bare(options.backend, options.bare_target, options.bare_bytes)
        return
    target = torch.cuda.device_count() - 1
    name = torch.cuda.get_device_name(0)
    print(f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}, Python {platform.python_version()}")
    sizes = [int(size) for size in options.tokens.split(",")]
    shown = [int(size) for size in options.show.split(",") if size]
    variants = [
        dict(pair.split("=") for pair in variant.split(",") if pair)
        for variant in dict.fromkeys(options.variants.split(";"))
    ]
    result = {
        "device": name,
        "backend": options.backend,
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "plain_copy_seconds": run_copy([options.bare_bytes, *(size * TOKEN_BYTES for size in sizes)], target),
        "bare": {}
        if options.no_bare
        else {"bytes": options.bare_bytes, "seconds": run_bare(options.backend, options.bare_bytes, target)},
        "staged": [
            row
            for source_tp, variant in itertools.product(map(int, options.source_tp.split(",")), variants)
            for row in run_agents(options.backend, sizes, options.repetitions, target, source_tp, variant, shown)
        ],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # NIXL's library crashes if it is unloaded in a process that has used CUDA.
