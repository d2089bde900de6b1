"""How many slabs a second does one worker's control work allow on one core, apart from the bytes?

Two agents on the loopback transport move rooms of many slabs that are almost empty: one token of a small model each.
What is left is what every slab costs besides its bytes: protocol cores, messages, hand-over between threads, one small
write. The processor time of each worker, all its threads together, is the kernel's; slabs / core-seconds is what one
core can do: each worker is held to one, where its threads wake each other without waking a core that sleeps. Beside it runs the floor in the same process: the same number of messages through bare ZeroMQ sockets.
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
from longshore_lab.bench.pages import Content
from longshore_lab.bench.report import machine
from longshore_lab.bench.scene import Course, Engine, Scene, Stage, open_stage
from longshore_wire.layout import ModelShape

# One slab is one token: 2 planes of 2 heads of 512 bytes; two do not fit a lane.
MODEL = ModelShape(layers=1, kv_heads=2, head_dim=256, element_bytes=2)
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
    parser.add_argument("--repeats", type=int, default=5, help="repetitions that count (5)")
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
    """Give each worker, with all its threads, one core of its own, as far as there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[index % len(cores)]})


def open_scene(stage: Stage, slabs: int) -> Scene:
    """Start two agents and an engine of one rank at each, with `slabs` tokens of KV at prefill's."""
    content = Content(MODEL.kv_heads * MODEL.head_bytes, slabs)
    sides: dict[Half, Engine] = {}
    for name, half, seed in (("prefill", Half.SOURCE, 1), ("decode", Half.TARGET, 2)):
        agent = stage.agent(name)
        agent.wait_ready()
        pages = stage.pages(MODEL, 1, _PAGE_SIZE, slabs, seed)
        if half is Half.SOURCE:
            pages[0].fill(content, slabs)
        sides[half] = stage.engine(f"{name}-engine", agent, pages, half)
    return stage.scene(Course("control", "Staged", 1, 1), sides[Half.SOURCE], sides[Half.TARGET], content)


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
