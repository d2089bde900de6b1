"""Moves thousands of rooms between two processes and aborts some while their writes are open.

Freed memory is reused at once. The test's process is the decode half. It decides which side aborts which room, and when.
Run as a script, this file is the prefill half, which reports the start of each room's write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from half_worker import PEERS, HalfWorker, stamped

from longshore_agent.pipeline import runners
from longshore_agent.pipeline.life import OutboundLife, OutboundTools
from longshore_agent.pipeline.slabs import OutboundSlab
from longshore_agent.pipeline.waits import Gate
from longshore_agent.settings import Settings
from longshore_client import Half, KVLayout, ModelShape, PageOrder, Parallel
from longshore_spec.agent_config import Backend
from longshore_wire.effects import RoomEnded, RoomReleased, StartScatter
from longshore_wire.engine_messages import Accepted, CachePages, Cancel, Endpoint, Offer, RankAddress, Receive
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import Abort, PeerMessage
from longshore_wire.ways import Way

PAGE_SIZE = 16
TOKENS = 128
# A token is 4 KiB; pages of the two sides differ in order, so that slice by slice a room is 2,048 pieces.
MODEL = ModelShape.kv(layers=2, kv_heads=4, head_dim=64, element_bytes=4)
SOURCE = KVLayout(MODEL, Parallel(), PAGE_SIZE)
TARGET = KVLayout(MODEL, Parallel(), PAGE_SIZE, PageOrder.HND)
ROOM_PAGES = TOKENS // PAGE_SIZE
# Rooms of one round, and the number of aborted ones. Prefill and decode abort alternately.
ROUND_ROOMS = 9
GIVEN_UP = 6
SETTINGS = Settings(
    deployment="tests/storm",
    # Three slabs of half a room, so that some room always waits for memory that another room used.
    ring_bytes=3 << 18,
    ring_extent_bytes=1 << 20,
    ring_share_divisor=1,
    grant_window=2,
    lane_count=2,
    lane_bytes=1 << 20,
    slab_bytes_min=(1 << 18) - 4096,
    slices_batch=500,
    scatter_threads=1,
    retry_ms=200,
    lease_s=600.0,
    peer_timeout_s=300.0,
    heartbeat_s=1.0,
)
# Duration of a write over the loopback. The other transports have no such setting.
LOOPBACK_DELAY_NS = 800_000
SWITCH_S = 0.0002
# Time limit for a round on a machine with other load.
ROUND_LIMIT_S = 240.0


def base_content() -> np.ndarray:
    """Return the random tile from which all rooms' contents are made."""
    shape = (2, MODEL.layers, TOKENS, MODEL.kv_heads, MODEL.head_dim)
    return np.random.default_rng(4).integers(0, 1 << 32, shape, dtype=np.uint32)


class Prefill(HalfWorker):
    """The prefill half: offers rooms as ordered, and aborts rooms as ordered once a write of them has begun."""

    def __init__(self, settings: Settings, link: socket.socket) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.begun: deque[int] = deque()
        self.writing: Counter[int] = Counter()
        self.armed: dict[int, dict[str, Any]] = {}
        self.met: Counter[str] = Counter()
        self._watch_writes()
        super().__init__(Half.SOURCE, SOURCE, 2 * ROUND_ROOMS * ROOM_PAGES, settings, link)
        self.watched.append(self.wake)
        self.base = base_content()
        self.free = list(range(2 * ROUND_ROOMS * ROOM_PAGES))
        self.held: dict[int, list[int]] = {}
        self.note(epoch=self.session.config.epoch)

    def serve(self) -> None:
        """Carry out orders until the order to close."""
        while True:
            self.turn(0.05)
            self._look_at_writes()
            for effect in self.effects:
                # A claim may open and abort a room before the offer.
                if isinstance(effect, RoomReleased) and effect.key.room in self.held:
                    self._give_back(effect.key.room)
            self.effects.clear()
            heard, self.heard = self.heard, []
            for note in heard:
                if "close" in note:
                    return
                if "count" in note:
                    found = self.metrics.snapshot()
                    counts = {
                        way: found.value("longshore_overtaken_writes_total", way=way) for way in ("staged", "slices")
                    }
                    self.note(count=counts, met=self.met)
                else:
                    self._offer(note)

    def hear_peer(self, message: PeerMessage, now_ns: int) -> None:
        """Count an abort that arrives while a lane has the room."""
        if isinstance(message, Abort):
            self.met["decode"] += self.writing[message.pair.key.room] > 0
            self.armed.pop(message.pair.key.room, None)
        super().hear_peer(message, now_ns)

    def _offer(self, note: dict[str, Any]) -> None:
        room = note["room"]
        pages, self.free = self.free[:ROOM_PAGES], self.free[ROOM_PAGES:]
        self.pages.put(self.pages.planes, pages, stamped(self.base, room), 0, TOKENS)
        self.held[room] = pages
        if note["who"]:
            self.armed[room] = note
        offer = Offer(
            1,
            room,
            (
                CachePages(
                    0,
                    0,
                    TOKENS,
                    len(np.array(pages, dtype="<i4").tobytes()) // 4,
                    np.array(pages, dtype="<i4").tobytes(),
                ),
            ),
            True,
        )
        if not isinstance(self.requests.handle(offer, [], time.monotonic_ns()), Accepted):
            # Decode has already aborted it.
            self._give_back(room)
        self.flush(time.monotonic_ns())

    def _give_back(self, room: int) -> None:
        self.armed.pop(room, None)
        self.free = self.held.pop(room) + self.free
        self.note(released=room)

    def _look_at_writes(self) -> None:
        """Abort the rooms whose writes have begun, or let decode abort them."""
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return
        while self.begun:
            room = self.begun.popleft()
            note = self.armed.pop(room, None)
            if note is None:
                continue
            if note["who"] == "decode":
                self.note(writing=room, delay_s=note["delay_s"])
                continue
            select.select([], [], [], note["delay_s"])
            self.met["prefill"] += self.writing[room] > 0
            self.ask(Cancel(1, Half.SOURCE, PEERS[Half.SOURCE].instance, room))
            self.flush(time.monotonic_ns())

    def _watch_writes(self) -> None:
        """Make the lanes report the start of each write."""
        whole, storm = runners.outbound, self

        class Watched(Gate):
            """A gate that passes every write and reports it."""

            def __init__(self, slab: OutboundSlab) -> None:
                super().__init__()
                self.slab, self.begun = slab, False

            def enter(self) -> None:
                self.begun = True
                storm.begin(self.slab)
                super().enter()

        def watched(slab: OutboundSlab, tools: OutboundTools) -> OutboundLife:
            gate = Watched(slab)
            if slab.effect.way is not Way.STAGED:
                gate.enter()
            end = yield from whole(slab, dataclasses.replace(tools, writes=gate))
            storm.writing[slab.effect.pair.key.room] -= gate.begun
            return end

        runners.outbound = watched

    def begin(self, slab: OutboundSlab) -> None:
        """A lane is about to write."""
        self.writing[slab.effect.pair.key.room] += 1
        self.begun.append(slab.effect.pair.key.room)
        os.eventfd_write(self.wake, 1)


@dataclass
class Room:
    """Decode's state of a room of the round. `who` aborts it at `stage`; empty if no side does."""

    pages: list[int]
    who: str
    stage: str
    ended: Reason | None = None
    released: bool = False
    returned: bool = False

    @property
    def over(self) -> bool:
        return self.ended is not None and self.released and self.returned


class Storm:
    """The decode half, and the process of the prefill half."""

    def __init__(self, backend: Backend, environment: dict[str, str], seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = dataclasses.replace(SETTINGS, backend=backend)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, __file__, backend.value, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        theirs.close()
        self.random = random.Random(seed)
        # The next room gets the pages of an ended one.
        page_count = (ROUND_ROOMS + 1) * ROOM_PAGES
        self.decode = HalfWorker(Half.TARGET, TARGET, page_count, settings, ours)
        self.base = base_content()
        # Mooncake uses 20 us of processor time for each of two thousand slices.
        self.ways = [Way.SLICES, *[Way.STAGED] * (4 if backend is Backend.MOONCAKE else 1)]
        self.free = list(range(page_count))
        self.rooms: dict[int, Room] = {}
        self.next_room = 2**63
        epoch = self._wait_note("epoch")["epoch"]
        self.endpoint = Endpoint("prefill", SOURCE, (RankAddress(0, "127.0.0.9:1", epoch),))

    def round(self) -> None:
        """Open a round's rooms at once, abort most of them, and wait until no thread touches any of them."""
        plans = ["prefill" if number % 2 else "decode" for number in range(GIVEN_UP)]
        for who in self.random.sample([*plans, *[""] * (ROUND_ROOMS - GIVEN_UP)], ROUND_ROOMS):
            self._open(who)
        end_s = time.monotonic() + ROUND_LIMIT_S
        while not all(room.over for room in self.rooms.values()):
            assert time.monotonic() < end_s, self.rooms
            self._turn()
        self.rooms.clear()

    def count(self) -> dict[str, Any]:
        """Return the prefill half's counts: writes by mode, and aborts during writes by side."""
        self.decode.note(count=True)
        return self._wait_note("count")

    def close(self) -> int:
        self.decode.note(close=True)
        try:
            return self.process.wait(ROUND_LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.decode.close()

    def _open(self, who: str) -> None:
        room = self.next_room
        self.next_room += 1
        stage = "writing" if not who or self.random.random() < 0.85 else self.random.choice(["claimed", "landed"])
        pages, self.free = self.free[:ROOM_PAGES], self.free[ROOM_PAGES:]
        self.random.shuffle(pages)
        self.rooms[room] = Room(pages, who, stage)
        way = self.random.choice(self.ways)
        core = self.decode.session
        core.config = dataclasses.replace(core.config, force_way=way)
        packed = np.array(pages, dtype="<i4").tobytes()
        self.decode.ask(Receive(1, room, self.endpoint, (CachePages(0, 0, TOKENS, len(pages), packed, 0),)))
        watched = who if stage == "writing" else ""
        self.decode.note(room=room, who=watched, delay_s=self.random.choice([0.0, 0.0, 0.0, 0.0001, 0.0005]))
        if stage == "claimed":
            self._give_up(room)
        self.decode.flush(time.monotonic_ns())

    def _give_up(self, room: int) -> None:
        self.decode.ask(Cancel(1, Half.TARGET, "prefill", room))
        self.decode.flush(time.monotonic_ns())

    def _turn(self) -> None:
        self.decode.turn(0.02)
        heard, self.decode.heard = self.decode.heard, []
        for note in heard:
            if "writing" in note:
                select.select([], [], [], note["delay_s"])
                self._give_up(note["writing"])
            else:
                self.rooms[note["released"]].returned = True
        while self.decode.effects:
            effects, self.decode.effects = self.decode.effects, []
            for effect in effects:
                self._see(effect)

    def _see(self, effect: RoomEnded | RoomReleased | StartScatter) -> None:
        if isinstance(effect, StartScatter):
            room = self.rooms[effect.pair.key.room]
            if room.stage == "landed" and room.who and room.ended is None:
                self._give_up(effect.pair.key.room)
            return
        room = self.rooms[effect.key.room]
        pages = self.decode.pages
        if isinstance(effect, RoomReleased):
            room.released = True
            if room.ended is not Reason.NONE:
                # These pages hold unspecified bytes now. From here on only their next owner may change them.
                pages.expected[:, :, room.pages] = pages.planes[:, :, room.pages]
            self.free = room.pages + self.free
            return
        room.ended = effect.reason
        if effect.reason is Reason.NONE:
            pages.put(pages.expected, room.pages, stamped(self.base, effect.key.room), 0, TOKENS)
            got, want = pages.planes[:, :, room.pages], pages.expected[:, :, room.pages]
            assert np.array_equal(got, want), f"room {effect.key.room} was delivered with bytes that are not its own"
        else:
            assert room.who and effect.reason is Reason.CANCELLED, (room, effect)

    def _wait_note(self, name: str) -> dict[str, Any]:
        end_s = time.monotonic() + ROUND_LIMIT_S
        while True:
            for note in self.decode.heard:
                if name in note:
                    self.decode.heard.remove(note)
                    return note
            assert time.monotonic() < end_s and self.process.poll() is None, f"no {name} from the prefill half"
            self.decode.turn(0.02)


def main() -> None:
    """Run the prefill half."""
    # Lanes poll short writes without a pause; the thread that aborts rooms must run in between.
    sys.setswitchinterval(SWITCH_S)
    backend, link = Backend(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    settings = dataclasses.replace(SETTINGS, backend=backend)
    if backend is Backend.LOOPBACK:
        rule = {"kind": "delay", "delay_ns": LOOPBACK_DELAY_NS, "count": None}
        settings = dataclasses.replace(settings, loopback_faults=json.dumps([rule]))
    half = Prefill(settings, link)
    half.serve()
    half.close()


if __name__ == "__main__":
    main()
