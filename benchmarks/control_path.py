"""How many slabs a second does one worker's control work allow on one core, apart from the bytes?

Two agents on the loopback transport move rooms of many slabs that are almost empty: one token of a small model each.
What is left is what every slab costs besides its bytes: protocol cores, messages, hand-over between threads, one small
write. The processor time of each worker, all its threads together, is the kernel's; slabs / core-seconds is what one
core can do. Beside it runs the floor in the same process: the same number of messages through bare ZeroMQ sockets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import zmq

from longshore_agent.path.jobs import Results  # noqa: F401  (loads what a worker loads, before any clock runs)
from longshore_cli.bench.pages import Content
from longshore_cli.bench.scene import Course, Engine, Scene, open_stage
from longshore_client import Half
from longshore_wire.layout import ModelShape

# One slab is one token: 2 planes of 2 heads of 512 bytes; two do not fit a lane.
MODEL = ModelShape(layers=1, kv_heads=2, head_dim=256, element_bytes=2)
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="Loopback")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = arguments.slabs // arguments.rooms // _PAGE_SIZE * _PAGE_SIZE
    slabs = tokens * arguments.rooms
    rows: dict[str, list[float]] = {"prefill": [], "decode": [], "together, by the clock": [], "messages": []}
    with tempfile.TemporaryDirectory() as directory, open_stage(
        {**_SETTINGS, "backend": arguments.backend}, Path(directory)
    ) as stage:
        content = Content(MODEL.kv_heads * MODEL.head_bytes, slabs)
        sides = {}
        for name, half, seed in (("prefill", Half.SOURCE, 1), ("decode", Half.TARGET, 2)):
            agent = stage.agent(name)
            agent.wait_ready()
            pages = stage.pages(MODEL, 1, _PAGE_SIZE, slabs, seed)
            if half is Half.SOURCE:
                pages[0].fill(content, slabs)
            sides[half] = stage.engine(f"{name}-engine", agent, pages, half)
        scene = Scene(Course("control", "Staged", 1, 1), sides[Half.SOURCE], sides[Half.TARGET], content)
        clocks = scene.clocks()
        for repetition in range(arguments.repeats + 1):
            before = [time.clock_gettime(clock) for clock in clocks]
            begin_s = time.perf_counter()
            scene.move_many(arguments.rooms, tokens)
            wall_s = time.perf_counter() - begin_s
            used = [time.clock_gettime(clock) - start for clock, start in zip(clocks, before, strict=True)]
            if repetition:
                rows["prefill"].append(slabs / used[0])
                rows["decode"].append(slabs / used[1])
                rows["together, by the clock"].append(slabs / wall_s)
                rows["messages"].append(slabs / messages_s(slabs))
        print(stage_counts(sides[Half.SOURCE]), stage_counts(sides[Half.TARGET]))
    for name, values in rows.items():
        print(f"{name:24} {statistics.median(values):8.0f} slabs/s   {min(values):8.0f} … {max(values):8.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


def stage_counts(engine: Engine) -> dict[str, int]:
    return {}


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
