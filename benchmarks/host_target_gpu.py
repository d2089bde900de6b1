"""Compares ways to bring pages from prefill's GPU into decode's host memory.

    python benchmarks/host_target_gpu.py --json FILE

`kernel`: one kernel writes rows of a GPU's pages of 64 tokens, in random order, into pages of one token in a memory file
that the driver has registered; beside a plain copy of as many bytes to pinned memory. Medians of interleaved repetitions
by CUDA events. Every byte is compared.

`registration`: the time to register and unregister a memory file, and the longest time that a launch of another thread
took meanwhile.

`rooms`: real engines of one agent, from the first `send` to DONE at decode. `host` goes into its host memory. `through the
GPU` goes into pages of decode's GPU, whose engine then copies them to pinned memory in one piece a plane. `pinned copy` is
a plain copy of as many bytes by prefill's GPU. Interleaved. Every byte in host memory is compared after each size.

`busy`, with two GPUs: decode's GPU computes without pause (the `decode` load of `busy_engine_gpu.py`) while rooms move
either way. A loss is the drop of its rate of steps beside that without rooms.

Needs torch, Triton and NIXL, and no network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from gather_scatter_gpu import FLUSH_BYTES, WORKER_TUNINGS, TimedStream, milliseconds, random_bytes

from longshore_agent.kernels.copier import pool_view
from longshore_agent.kernels.device_launch import BoundCopy, Paged, PageIds, PlaneTable
from longshore_agent.memory import cuda
from longshore_agent.memory.device_memory import RegisteredMapping
from longshore_agent.memory.pools import KVPool
from longshore_client import KVLayout, ModelShape, Parallel, create_region, pool_geometry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from gpu_world import EngineProcess, GPUAgent

PAGE_SIZE, LAYERS = 64, 40
# Bytes of a token in a plane: from one head of one rank of many to eight heads; 1152 is a latent of DeepSeek.
ROWS = (64, 256, 512, 1152, 2048)
SHAPE = {"layers": 32, "kv_heads": 8, "tp": 1, "rank": 0}
TOKEN_BYTES = 32 * 2 * 8 * 256
WARM_UPS = 1
# Rooms of the busy engine's series.
BUSY_TOKENS, BUSY_S, CALM_S = 4096, 3.0, 1.5


class Row:
    """One kernel that writes one size of rows, checked and ready to be measured."""

    def __init__(self, row_bytes: int, megabytes: float, stream: TimedStream) -> None:
        device = cuda.device_at(0)
        model = ModelShape.kv(LAYERS, 1, row_bytes // 2, 2)
        pages = max(1, round(megabytes * 1e6 / (2 * LAYERS * row_bytes * PAGE_SIZE)))
        self.tokens, self.row_bytes = pages * PAGE_SIZE, row_bytes
        self.payload_bytes = 2 * LAYERS * row_bytes * self.tokens
        layouts = [KVLayout(model, Parallel(), size) for size in (PAGE_SIZE, 1)]
        geometries = [pool_geometry(layouts[0], pages), pool_geometry(layouts[1], self.tokens)]
        self._regions = [create_region(geometry.region_bytes[0]) for geometry in geometries]
        self._pools = [
            KVPool(layout, geometry, [descriptor])
            for layout, geometry, (descriptor, _) in zip(layouts, geometries, self._regions, strict=True)
        ]
        self._near = random_bytes(geometries[0].region_bytes[0], torch.device("cuda", 0))
        self._mapping = RegisteredMapping(device, self._regions[1][0], geometries[1].region_bytes[0])
        order = np.random.default_rng(1)
        self._ids = [order.permutation(count).astype(np.int32) for count in (pages, self.tokens)]
        home = torch.device("cuda", 0)
        sides, lists = [], []
        for pool, ids, address in zip(
            self._pools, self._ids, (self._near.data_ptr(), self._mapping.address), strict=True
        ):
            sides.append(Paged(pool_view(pool, ids, 0, range(LAYERS), range(1)), PlaneTable(pool, [address], home)))
            lists.append((PageIds(pool, ids, home), 0))
        self._lists = lists
        self._copy = BoundCopy(sides[0], sides[1], (0, self.tokens), stream, WORKER_TUNINGS["direct"])
        self._pinned = torch.empty(self.payload_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream

    def kernel(self) -> None:
        """Queue the kernel."""
        self._copy.queue(self._lists[0], self._lists[1], (0, self.tokens))

    def plain(self) -> None:
        """Queue a plain copy to pinned memory."""
        with self._stream.entered():
            self._pinned.copy_(self._near[: self.payload_bytes], non_blocking=True)

    def check(self) -> None:
        """Raise AssertionError unless every row is where indexing puts it."""
        self.kernel()
        self._stream.synchronize()
        found = np.frombuffer(self._regions[1][1], np.uint8).reshape(2 * LAYERS, self.tokens, self.row_bytes)
        near = self._near.cpu().numpy().reshape(2 * LAYERS, -1, PAGE_SIZE, self.row_bytes)
        expected = near[:, self._ids[0]].reshape(2 * LAYERS, self.tokens, self.row_bytes)
        assert np.array_equal(found[:, self._ids[1]], expected), f"rows of {self.row_bytes} bytes are wrong"

    def measure(self, repetitions: int, flush: torch.Tensor) -> dict[str, Any]:
        """Return the medians in GB/s, and the samples in milliseconds."""
        samples: dict[str, list[float]] = {"kernel": [], "plain": []}
        for number in range(repetitions + WARM_UPS):
            for name, job in (("kernel", self.kernel), ("plain", self.plain)):
                with self._stream.entered():
                    flush.zero_()
                begin = self._stream.mark()
                job()
                end = self._stream.mark()
                self._stream.settle()
                if number >= WARM_UPS:
                    samples[name].append(milliseconds(begin, end))
        rates = {name: self.payload_bytes / statistics.median(times) / 1e6 for name, times in samples.items()}
        return {"row_bytes": self.row_bytes, "payload_bytes": self.payload_bytes, "ms": samples, "GB/s": rates}

    def close(self) -> None:
        """Undo the registration and free the memory."""
        self._mapping.unmap()
        for pool in self._pools:
            pool.close()
        for descriptor, _ in self._regions:
            os.close(descriptor)


def run_kernel(megabytes: float, repetitions: int) -> list[dict[str, Any]]:
    """Measure every size of rows."""
    stream = TimedStream(torch.device("cuda", 0))
    flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda:0")
    found = []
    for row_bytes in ROWS:
        row = Row(row_bytes, megabytes, stream)
        row.check()
        found.append(row.measure(repetitions, flush))
        row.close()
        rates = found[-1]["GB/s"]
        share = 100 * rates["kernel"] / rates["plain"]
        print(
            f"kernel, rows of {row_bytes:5} bytes: {rates['kernel']:5.1f} GB/s, plain copy {rates['plain']:5.1f}, "
            f"{share:.0f} %",
            flush=True,
        )
    return found


def run_registration(gigabytes: float) -> dict[str, float]:
    """Register and unregister a memory file, once with new pages and once with existing ones, while another thread works."""
    length = int(gigabytes * (1 << 30))
    descriptor, _ = create_region(length)
    device, small = cuda.device_at(0), torch.zeros(1024, device="cuda:0")
    stop, worst_s = threading.Event(), 0.0

    def launch() -> None:
        nonlocal worst_s
        while not stop.is_set():
            begin_s = time.monotonic()
            small.add_(1)
            torch.cuda.current_stream().synchronize()
            worst_s = max(worst_s, time.monotonic() - begin_s)

    launch_thread = threading.Thread(target=launch)
    launch_thread.start()
    found: dict[str, float] = {"GiB": gigabytes}
    for name in ("new", "existing"):
        begin_s = time.monotonic()
        mapping = RegisteredMapping(device, descriptor, length)
        registered_s = time.monotonic()
        mapping.unmap()
        found |= {f"{name}_s": registered_s - begin_s, f"unregister_{name}_s": time.monotonic() - registered_s}
    stop.set()
    launch_thread.join()
    os.close(descriptor)
    found["worst_launch_s"] = worst_s
    print("registration:", {name: round(value, 4) for name, value in found.items()}, flush=True)
    return found


class Scene:
    """Engines of one agent: prefill on the first GPU, decode with pages in host memory and on the last GPU."""

    def __init__(self, stack: ExitStack, tokens_max: int, last: int) -> None:
        agent = stack.enter_context(GPUAgent(LONGSHORE_RING_BYTES="256Mi"))
        self.prefill, self.host, self.device = (stack.enter_context(EngineProcess()) for _ in range(3))
        page_count = tokens_max // PAGE_SIZE
        self.prefill.ask("allocate", device=0, page_size=PAGE_SIZE, page_count=page_count, **SHAPE)
        self.host.ask("allocate_host", page_size=1, page_count=tokens_max, **SHAPE)
        self.device.ask("allocate", device=last, page_size=PAGE_SIZE, page_count=page_count, **SHAPE)
        self.prefill.ask("register", socket=agent.socket, instance="prefill", role="SOURCE")
        self.host.ask("register_host", socket=agent.socket, instance="host", device="cpu")
        self.device.ask("register", socket=agent.socket, instance="device", role="TARGET")
        self.endpoint = self.prefill.ask("endpoint")
        self.rooms = itertools.count(1)

    def move(self, target: EngineProcess, tokens: int) -> float:
        """Move a room that was claimed before it is sent; return the seconds from its `send` to DONE."""
        room, size = next(self.rooms), 1 if target is self.host else PAGE_SIZE
        pages = list(range(-(-tokens // size)))
        target.ask("receive", room=room, endpoint=self.endpoint, pages=pages, tokens=tokens)
        near = list(range(-(-tokens // PAGE_SIZE)))
        target.begin("wait", room=room, half="TARGET", instance="prefill")
        start_s, _ = self.prefill.ask("send", room=room, pages=near, tokens=tokens, chunk=tokens)
        kind, text, end_s = target.result()
        assert kind == "DONE", text
        self.prefill.ask("wait", room=room, half="SOURCE", instance="prefill")
        return float(end_s - start_s)

    def through_gpu(self, tokens: int) -> float:
        """As `move` into decode's GPU, and its copy from there to pinned memory."""
        return self.move(self.device, tokens) + float(self.device.ask("to_host", page_count=-(-tokens // PAGE_SIZE)))


def run_rooms(sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Measure rooms of each size both ways, and a plain copy."""
    found = []
    with ExitStack() as stack:
        scene = Scene(stack, max(sizes), torch.cuda.device_count() - 1)
        for tokens in sizes:
            scene.prefill.ask("fill", seed=tokens, tokens=tokens, pages=list(range(-(-tokens // PAGE_SIZE))))
            scene.host.ask("poison")
            samples: dict[str, list[float]] = {"host": [], "through the GPU": [], "pinned copy": []}
            for number in range(repetitions + WARM_UPS):
                times = {
                    "host": scene.move(scene.host, tokens),
                    "through the GPU": scene.through_gpu(tokens),
                    "pinned copy": scene.prefill.ask("to_host", page_count=-(-tokens // PAGE_SIZE)),
                }
                for name, taken_s in times.items() if number >= WARM_UPS else ():
                    samples[name].append(taken_s)
            wrong = scene.host.ask("differences", sequences=[(tokens, tokens, list(range(tokens)))])
            assert wrong == 0, f"{wrong} wrong elements of {tokens} tokens"
            medians = {name: statistics.median(times) for name, times in samples.items()}
            found.append({"tokens": tokens, "bytes": tokens * TOKEN_BYTES, "s": samples})
            print(
                f"rooms of {tokens * TOKEN_BYTES / 1e6:6.0f} MB: host {medians['host'] * 1e3:6.2f} ms "
                f"({100 * medians['pinned copy'] / medians['host']:.0f} % of a pinned copy), through the GPU "
                f"{medians['through the GPU'] * 1e3:6.2f} ms, {medians['through the GPU'] / medians['host']:.2f} times as long",
                flush=True,
            )
    return found


@contextmanager
def busy_engine(device: int) -> Iterator[list[float]]:
    """Run the load of `busy_engine_gpu.py` on a GPU; afterwards the list has the ends of its steps, in seconds."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        stop, out = Path(folder) / "stop", Path(folder) / "ends"
        command = [sys.executable, str(Path(__file__).with_name("busy_engine_gpu.py")), "--engine", "decode"]
        engine = subprocess.Popen(
            [*command, "--stop", str(stop), "--out", str(out)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(device)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdout is not None
        if engine.stdout.readline().strip() != "ready":
            raise SystemExit(f"the engine ended with {engine.wait(30)} before its first step")
        try:
            yield ends
        finally:
            stop.touch()
            engine.wait(60)
        ends += json.loads(out.read_text())


def run_busy() -> dict[str, Any]:
    """Measure the loss of a busy engine on decode's GPU, by rooms into host memory and through that GPU."""
    last = torch.cuda.device_count() - 1
    series: list[tuple[str, float, float, int]] = []
    with ExitStack() as stack:
        scene = Scene(stack, BUSY_TOKENS, last)
        # The first rooms map, register and compile.
        scene.move(scene.host, BUSY_TOKENS)
        scene.through_gpu(BUSY_TOKENS)
        with busy_engine(last) as ends:
            for name in ("calm", "host", "calm", "through the GPU", "calm", "host", "calm", "through the GPU", "calm"):
                begin_s, count = time.monotonic(), 0
                while time.monotonic() - begin_s < (CALM_S if name == "calm" else BUSY_S):
                    if name == "calm":
                        time.sleep(CALM_S)
                        continue
                    count += 1
                    if name == "host":
                        scene.move(scene.host, BUSY_TOKENS)
                    else:
                        scene.through_gpu(BUSY_TOKENS)
                series.append((name, begin_s, time.monotonic(), count))
    return {"series": series, "ends": ends}


def shown_busy(found: dict[str, Any]) -> dict[str, Any]:
    """Reduce the ends of steps to rates, and print the losses."""
    ends = found.pop("ends")
    rates: dict[str, list[float]] = {}
    rooms: dict[str, float] = {}
    for name, begin_s, end_s, count in found["series"]:
        steps = sum(begin_s + 0.2 <= end <= end_s - 0.1 for end in ends)
        rates.setdefault(name, []).append(steps / (end_s - begin_s - 0.3))
        rooms[name] = count / (end_s - begin_s)
    calm = statistics.fmean(rates["calm"])
    losses = {name: 1 - statistics.fmean(each) / calm for name, each in rates.items()}
    for name in ("host", "through the GPU"):
        moved = rooms[name] * BUSY_TOKENS * TOKEN_BYTES / 1e9
        print(
            f"busy decode GPU, rooms {name}: {moved:.1f} GB/s, the engine loses {100 * losses[name]:.1f} %", flush=True
        )
    return {"steps_a_second": rates, "rooms_a_second": rooms, "lost": losses}


def main() -> None:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--megabytes", type=float, default=256, help="of the kernel's copies")
    parser.add_argument("--tokens", default="512,2048,8192", help="sizes of rooms, separated by commas")
    parser.add_argument("--gigabytes", type=float, default=8, help="size of the registered memory")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark needs one")
    name = torch.cuda.get_device_name(0)
    print(f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    result: dict[str, Any] = {"device": name, "kernel": run_kernel(options.megabytes, options.repetitions)}
    torch.cuda.empty_cache()
    result["registration"] = run_registration(options.gigabytes)
    result["rooms"] = run_rooms([int(size) for size in options.tokens.split(",")], options.repetitions)
    if torch.cuda.device_count() > 1:
        result["busy"] = shown_busy(run_busy())
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
