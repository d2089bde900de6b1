"""Shows where the time of one small room goes: its timeline in all of its processes, of the median of several rooms.

    python benchmarks/small_room.py                          2 MiB, TP2 to TP1, staged, in host memory
    python benchmarks/small_room.py --way Direct --devices cuda:0,cuda:1
    python benchmarks/small_room.py --trace room.json        also write the file for Perfetto

Real agents and clients, every byte compared, the claim before the offer. `longshore trace room` makes the timeline.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from longshore_cli.main import main as longshore
from longshore_client import Half, RoomEventKind
from longshore_lab import devices
from longshore_lab.bench.report import machine
from longshore_lab.bench.scene import Course, Scene, open_scenes
from longshore_lab.bench.transfer import MODEL

_PAGE_SIZE = 16
_RELEASED_S = 10.0


def main() -> None:
    """Move rooms, and print the timeline of the one with the median time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16, help="of a room, 128 KiB each (16)")
    parser.add_argument("--rooms", type=int, default=15, help="rooms, one after another (15)")
    parser.add_argument("--way", default="Staged", help="Staged, Direct, Contiguous or Slices (Staged)")
    parser.add_argument("--backend", default="NIXL", help="NIXL, Mooncake or Loopback (NIXL)")
    parser.add_argument("--tp", default="2:1", help="TP of prefill and decode (2:1)")
    parser.add_argument("--trace", type=Path, help="write the timeline to this file")
    devices.add_argument(parser)
    arguments = parser.parse_args()
    source_tp, target_tp = map(int, arguments.tp.split(":"))
    course = Course(f"{arguments.way} {arguments.tp}", arguments.way, source_tp, target_tp)
    settings = {
        "backend": arguments.backend,
        "deployment": "bench/room",
        "log_level": "warning",
        "client_spans": "true",
    }
    placement = devices.check(arguments.devices, [arguments.backend])
    with (
        tempfile.TemporaryDirectory() as directory,
        open_scenes([course], MODEL, _PAGE_SIZE, arguments.tokens, settings, Path(directory), placement) as scenes,
    ):
        (scene,) = scenes
        times = {}
        for _ in range(arguments.rooms):
            seconds = scene.move(arguments.tokens).seconds
            wait_released(scene)
            times[seconds] = scene.last_room
        middle = sorted(times)[len(times) // 2]
        print(f"{machine()}\n{course.name}, {len(times)} rooms of {arguments.tokens} tokens, every byte compared")
        print(
            f"by the engines' clock {min(times) * 1e3:.2f} to {max(times) * 1e3:.2f} ms; here {middle * 1e3:.2f} ms\n"
        )
        agents = dict.fromkeys([scene.source.agent.http, scene.target.agent.http])
        words = [word for url in agents for word in ("--agent", url)]
        if arguments.trace:
            words += ["-o", str(arguments.trace)]
        raise SystemExit(longshore(["trace", "room", str(times[middle]), *words]))


def wait_released(scene: Scene) -> None:
    """Wait until the last room is over at every rank, so that no room runs beside the next."""
    for engine, half in ((scene.source, Half.SOURCE), (scene.target, Half.TARGET)):
        for client in engine.clients:
            client.wait(scene.last_room, half, kinds=[RoomEventKind.RELEASED], timeout_s=_RELEASED_S)


if __name__ == "__main__":
    main()
