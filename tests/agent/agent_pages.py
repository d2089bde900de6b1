"""Reads the HTTP pages of a real agent. `agent_world.Agent` is one.

An agent waits for its workers only briefly, and then shows a late one as it last was. Here a page is read again until each
worker has answered for it, so that a test may look once at what has happened.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from longshore_agent.supervisor.snapshots import _ANSWER_LIMIT_S
from longshore_wire.engine_messages import Half
from longshore_wire.names import room_name

ANSWER_LIMIT_S = 60.0
# A late worker is waited for this long. One may hang.
LATE_LIMIT_S = 20.0


class AgentPages:
    """The pages of one agent. A subclass tells their address."""

    @property
    def http(self) -> str:
        """Return the address of its HTTP pages."""
        raise NotImplementedError

    def get(self, path: str) -> Any:
        status, body = self.ask(path)
        assert status == 200, (path, status, body)
        return json.loads(body)

    def ask(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=ANSWER_LIMIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def status(self) -> dict[str, Any]:
        """Return the status page, once each worker that runs has answered the agent for it."""
        end_s = time.monotonic() + LATE_LIMIT_S
        while True:
            begun_s = time.monotonic()
            found: dict[str, Any] = self.get("/v1/status")
            now_s = time.monotonic()
            if not any(_is_late(worker, now_s - begun_s) for worker in found["workers"]) or now_s > end_s:
                return found

    def worker(self, instance: str, rank: int = 0) -> dict[str, Any] | None:
        """Return the agent's status of a rank's worker; None while there is none."""
        name = f"{instance}/0/{rank}"
        return next((worker for worker in self.status()["workers"] if worker["worker"] == name), None)

    def room_page(self, room: int) -> dict[str, Any] | None:
        """Return the page of a room, once each worker has answered the agent for it; None if the room is unknown."""
        end_s = time.monotonic() + LATE_LIMIT_S
        while True:
            workers = self.status()["workers"]
            status, body = self.ask(f"/v1/rooms/{room_name(room)}")
            if status == 404:
                return None
            page: dict[str, Any] = json.loads(body)
            # The agent waits for its workers for this long, and then answers without those that are late. It always waits
            # for one that is stopped.
            taken_s = (page["clock"]["answered_ns"] - page["clock"]["received_ns"]) / 1e9
            stopped = any(worker["state"] == "ready" and _is_stopped(worker) for worker in workers)
            if taken_s < _ANSWER_LIMIT_S or stopped or time.monotonic() > end_s:
                return page

    def room(self, room: int, half: Half, instance: str | None = None) -> dict[str, Any] | None:
        """Return one half of a room as its page shows it, also an ended one; None if it is unknown."""
        page = self.room_page(room)
        if page is None:
            return None
        entries = [entry for entry in page["halves"] if entry["room"]["half"] == half.name.lower()]
        entries = [entry for entry in entries if instance in (None, entry["worker"].partition("/")[0])]
        return {**entries[0]["room"], "ended": entries[0]["ended"]} if entries else None

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels, none older than this call."""
        self.status()
        total = 0.0
        for line in self.ask("/metrics")[1].decode().splitlines():
            found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                total += float(found[2])
        return total

    def leftovers(self) -> list[str]:
        """Return open rooms, and granted or held memory; empty once every transfer is over."""
        workers = self.status()["workers"]
        found = [
            f"{worker['worker']}: ring {worker['ring']}"
            for worker in workers
            if worker["ring"] and worker["ring"]["used_bytes"] + worker["ring"]["held_bytes"]
        ]
        if any(worker["rooms_open"] for worker in workers):
            rooms = self.get("/v1/rooms?ended=false")["rooms"]
            # A process may end during the scan.
            found += [self.ask(f"/v1/rooms/{entry['room']['room']}")[1].decode() for entry in rooms]
        return found


def _is_late(worker: dict[str, Any], taken_s: float) -> bool:
    """Whether a status page, which took this long, shows a worker as it last was, although the worker can answer.

    It can answer if it is ready and not stopped. While another one is stopped, each page takes as long as the agent waits.
    """
    return worker["state"] == "ready" and worker["silent_s"] > taken_s and not _is_stopped(worker)


def _is_stopped(worker: dict[str, Any]) -> bool:
    """Whether a worker's process is stopped, or has ended."""
    try:
        return Path(f"/proc/{worker['pid']}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except OSError:
        return True
