"""Measures how many slabs a second one worker's control work allows on one core, without the cost of the bytes.

Two agents on the loopback transport move rooms of many almost empty slabs: one token of a small model each. The remaining
cost of a slab is its control work: protocol cores, messages, hand-over between threads, one small write. The rate of one
core is slabs / core-seconds; the kernel measures the processor time of all threads of a worker. Each worker is pinned to
one core, so that its threads wake each other without waking an idle core. For comparison, the same process sends as many
messages through bare ZeroMQ sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import zmq

from longshore_client import Half
from longshore_lab.bench.report import machine
from longshore_lab.bench.scene import Course, Engine, Scene, Stage, open_stage
from longshore_wire.layout import ModelShape

# One slab is one token: 2 planes of 2 heads of 512 bytes. Two tokens do not fit a lane.
MODEL = ModelShape.kv(layers=1, kv_heads=2, head_dim=256, element_bytes=2)
_SLAB_BYTES = 2 * 2 * 512
_PAGE_SIZE = 16
_SETTINGS = {
    "backend": "Loopback",
    "deployment": "bench/control",
    "log_level": "warning",
    "force_way": "Staged",
    "direct": "false",
    "lane_bytes": "4Ki",
    "slab_bytes_min": "1Ki",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slabs", type=int, default=4000, help="slabs of one repetition, over all rooms (4000)")
    parser.add_argument("--rooms", type=int, default=8, help="rooms at once (8)")
    parser.add_argument("--repeats", type=int, default=5, help="measured repetitions (5)")
    parser.add_argument("--backend", default="Loopback", help="Loopback, NIXL or Mooncake")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    arguments = parser.parse_args()
    tokens = arguments.slabs // arguments.rooms // _PAGE_SIZE * _PAGE_SIZE
    slabs = tokens * arguments.rooms
    rates: dict[str, list[float]] = {name: [] for name in ("prefill worker", "decode worker", "both", "bare messages")}
    with (
        tempfile.TemporaryDirectory() as directory,
        open_stage({**_SETTINGS, "backend": arguments.backend}, Path(directory)) as stage,
    ):
        scene = open_scene(stage, slabs)
        pin(scene.worker_pids())
        for repetition in range(arguments.repeats + 1):
            before = [time.clock_gettime(clock) for clock in scene.clocks]
            begin_s = time.perf_counter()
            scene.move_many(arguments.rooms, tokens)
            wall_s = time.perf_counter() - begin_s
            prefill_s, decode_s = (
                time.clock_gettime(clock) - at for clock, at in zip(scene.clocks, before, strict=True)
            )
            if repetition:
                for name, seconds in zip(rates, (prefill_s, decode_s, wall_s, messages_s(slabs)), strict=True):
                    rates[name].append(slabs / seconds)
    print(f"{machine()}\n{arguments.backend}; {slabs} slabs of {_SLAB_BYTES} B in {arguments.rooms} rooms at once\n")
    print(f"{'slabs a second':24} {'median':>8}   {'min':>8}   {'max':>8}")
    for name, values in rates.items():
        unit = "by the clock" if name == "both" else "of one core"
        print(f"{name:24} {statistics.median(values):8.0f}   {min(values):8.0f}   {max(values):8.0f}   {unit}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rates": rates}, indent=2) + "\n")


def pin(pids: list[int]) -> None:
    """Pin each worker, with all its threads, to a core of its own if there are enough cores."""
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[index % len(cores)]})


def open_scene(stage: Stage, slabs: int) -> Scene:
    """Start two agents with one single-rank engine each; prefill's has `slabs` tokens of KV."""
    sides: dict[Half, Engine] = {}
    for name, half, seed in (("prefill", Half.SOURCE, 1), ("decode", Half.TARGET, 2)):
        agent = stage.agent(name)
        agent.wait_ready()
        pages = stage.pages(MODEL, 1, _PAGE_SIZE, slabs, seed)
        if half is Half.SOURCE:
            pages[0].fill(slabs)
        sides[half] = stage.engine(f"{name}-engine", agent, pages, half)
    return stage.scene(Course("control", "Staged", 1, 1), sides[Half.SOURCE], sides[Half.TARGET])


def messages_s(count: int) -> float:
    """Return the processor seconds of one side of `count` exchanges over TCP on loopback: two messages out, two in."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        begin_s = time.process_time()
        for _ in range(count):
            client.send(b"x" * 100)
            route, data = server.recv_multipart()
            server.send_multipart([route, data])
            client.recv()
        used_s = time.process_time() - begin_s
    context.term()
    return used_s


if __name__ == "__main__":
    main()
