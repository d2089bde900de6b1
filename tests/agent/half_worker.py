"""Runs one half of a worker, with the real core, ring, pipeline and transport, and one socket to its peer.

Tests with thousands of rooms use it to avoid the cost of a supervisor, ZeroMQ and an engine's client. `abort_storm` runs
one half in each of two processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from agent_world import poisoned

from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.engine_requests import EngineRequests
from longshore_agent.worker.moving import Mover
from longshore_client import ModelShape, Parallel
from longshore_client.pages import packed_pages
from longshore_spec.agent_config import Backend
from longshore_wire.effects import (
    PeerAttached,
    PeerGone,
    PeerId,
    RoomEnded,
    RoomReleased,
    Send,
    StartScatter,
    StartWrite,
)
from longshore_wire.engine_messages import (
    Accepted,
    CachePages,
    Endpoint,
    Half,
    Offer,
    RankAddress,
    Receive,
    RegisterPool,
    ToAgent,
)
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PEER, PeerMessage
from longshore_wire.session import Session
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

PAGE_SIZE = 8
TOKENS = 64
ROOM_PAGES = TOKENS // PAGE_SIZE
LAYOUT = KVLayout(ModelShape.kv(layers=2, kv_heads=2, head_dim=16, element_bytes=4), Parallel(), PAGE_SIZE)
SETTINGS = Settings(
    deployment="tests/storm",
    backend=Backend.LOOPBACK,
    ring_bytes=1 << 20,
    ring_extent_bytes=1 << 20,
    lane_count=1,
    lane_bytes=1 << 20,
    slab_bytes_min=1 << 20,
    force_way=Way.STAGED,
    retry_ms=100,
    peer_timeout_s=300.0,
)
LIMIT_S = 30.0
PEERS = {Half.SOURCE: PeerId("prefill", 0, 0), Half.TARGET: PeerId("decode", 0, 0)}
_DATAGRAM_BYTES_MAX = 1 << 20
# At least the size of a transport's metadata, which is one datagram.
_SOCKET_BUFFER_BYTES = 4 << 20
_FROM_PEER, _NOTE = b"p"[0], b"n"[0]


class HalfWorker:
    """One half. `turn` does one turn of a worker's control thread; `heard` are the notes of the other half."""

    def __init__(self, half: Half, layout: KVLayout, page_count: int, settings: Settings, link: socket.socket) -> None:
        self.half, self.other = half, PEERS[Half(1 - half)]
        self.link = link
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            link.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        name = PEERS[half].instance
        config = WorkerConfig(name, name, time.time_ns(), layout, (half,), settings, port=0)
        now_ns = time.monotonic_ns()
        made = config.session_config()
        self.session: Session = (
            SourceSession(made, now_ns=now_ns) if half is Half.SOURCE else TargetSession(made, now_ns=now_ns)
        )
        self.metrics = Metrics()
        self.mover = Mover(config, self.metrics, SpanRecorder(1), lambda *_: None)
        # No peer attaches over ZeroMQ here.
        self.mover.resources.ports.admit([settings.bind_host])
        self.requests = EngineRequests(layout.caches, self.mover.resources.transport, self._source, self._target)
        self.pages = poisoned(layout, page_count, f"storm-{name}")
        self.ask(RegisterPool(1, 0, self.pages.geometry), [os.dup(self.pages.memory.descriptor)])
        self.session.describe(
            self.mover.resources.transport.metadata(),
            self.mover.resources.ring_region,
            {number: pool.info(number) for number, pool in self.requests.pools.items()},
            self.mover.resources.probe_region,
            "127.0.0.9:1",
        )
        self.heard: list[dict[str, Any]] = []
        self.effects: list[RoomEnded | RoomReleased | StartScatter] = []
        self.watched = [link.fileno(), self.mover.ends.wake]

    def ask(self, message: ToAgent, descriptors: list[int] | None = None) -> None:
        """Make an engine's request, which must be accepted."""
        answer = self.requests.handle(message, descriptors or [], time.monotonic_ns())
        assert isinstance(answer, Accepted), answer

    def note(self, **note: Any) -> None:
        """Send a note to the test in the other process."""
        self.link.send(bytes([_NOTE]) + json.dumps(note).encode())

    def turn(self, wait_s: float) -> None:
        """Wait at most this long for work, and do it."""
        select.select(self.watched, [], [], wait_s)
        now_ns = time.monotonic_ns()
        self._hear(now_ns)
        self.mover.collect()
        self.mover.take_results({self.half: self.session}, now_ns)
        if self._target is not None and self.mover.resources.transport.notifies:
            for peer, message in self.mover.notices():
                self.session.receive(peer, message, now_ns)
        self.session.renew(now_ns)
        self.session.tick(now_ns)
        self.flush(now_ns)

    def flush(self, now_ns: int) -> None:
        """Carry out the core's effects; keep the events for its engine."""
        while effects := self.session.take_effects():
            for effect in effects:
                self._apply(effect, now_ns)

    def close(self) -> None:
        """Close the transport."""
        self.mover.resources.close()
        self.pages.close()
        self.link.close()

    @property
    def _source(self) -> SourceSession | None:
        return self.session if isinstance(self.session, SourceSession) else None

    @property
    def _target(self) -> TargetSession | None:
        return self.session if isinstance(self.session, TargetSession) else None

    def hear_peer(self, message: PeerMessage, now_ns: int) -> None:
        """Handle one message of the other half."""
        self.session.receive(self.other, message, now_ns)

    def _hear(self, now_ns: int) -> None:
        while True:
            try:
                data = self.link.recv(_DATAGRAM_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise EOFError("the other half has ended")
            if data[0] == _FROM_PEER:
                self.hear_peer(PEER.decode(data[1:]), now_ns)
            else:
                self.heard.append(json.loads(data[1:]))

    def _say(self, peer: PeerId, message: PeerMessage) -> None:
        assert peer == self.other, peer
        with contextlib.suppress(BrokenPipeError):
            self.link.send(bytes([_FROM_PEER]) + PEER.encode(message))

    def _apply(self, effect: object, now_ns: int) -> None:
        if isinstance(effect, Send):
            self._say(effect.peer, effect.message)
        elif isinstance(effect, StartWrite):
            assert self._source is not None
            self.mover.start_write(effect, self.requests, self._source, now_ns)
        elif isinstance(effect, StartScatter):
            self.effects.append(effect)
            self.mover.start_scatter(effect, self.requests, now_ns)
        elif isinstance(effect, RoomEnded):
            self.effects.append(effect)
            if effect.reason:
                self.mover.cancel(self.half, effect.key)
        elif isinstance(effect, RoomReleased):
            self.requests.release(self.half, effect.key)
            self.mover.forget(self.half, effect.key)
            self.effects.append(effect)
        elif isinstance(effect, PeerAttached):
            self.mover.connect(self.half, effect)
        else:
            assert not isinstance(effect, PeerGone), "the other half was lost"


def stamped(base: np.ndarray, room: int) -> np.ndarray:
    """Return a room's content, [K and V, layer, token, head, byte]. Two rooms differ in every word."""
    stamp = (room * 2654435761) & 0xFFFFFFFF
    words: np.ndarray = base ^ np.uint32(stamp)
    return words.view(np.uint8)


class Halves:
    """Both halves in this process, connected by the loopback transport."""

    def __init__(self, faults: list[dict[str, object]], **settings: object) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = dataclasses.replace(SETTINGS, **settings)
        self.prefill = HalfWorker(
            Half.SOURCE, LAYOUT, 64, dataclasses.replace(made, loopback_faults=json.dumps(faults)), ours
        )
        self.decode = HalfWorker(Half.TARGET, LAYOUT, 64, made, theirs)
        self.data = np.random.default_rng(2).integers(0, 256, (2, 2, TOKENS, 2, 64), dtype=np.uint8)

    def begin(self, room: int, *, digest: bool = False) -> list[int]:
        """Claim and offer a room; return decode's pages."""
        pages = list(range(room * ROOM_PAGES, (room + 1) * ROOM_PAGES))
        self.prefill.pages.put(self.prefill.pages.planes, pages, self.data, 0, TOKENS)
        packed = packed_pages(pages)
        endpoint = Endpoint("prefill", LAYOUT, (RankAddress(0, "127.0.0.9:1", self.prefill.session.config.epoch),))
        self.decode.ask(Receive(1, room, endpoint, (CachePages(0, 0, TOKENS, len(pages), packed, 0),), digest=digest))
        self.decode.flush(time.monotonic_ns())
        self.prefill.ask(Offer(1, room, (CachePages(0, 0, TOKENS, len(packed) // 4, packed),), True))
        return pages

    def run(self, until: Callable[[], object]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not until():
            assert time.monotonic() < end_s, "not in time"
            for half in (self.prefill, self.decode):
                half.turn(0.001)

    def end(self, room: int, half: Half = Half.TARGET) -> RoomEnded:
        """Wait for the end of a room in one half."""
        worker = self.decode if half is Half.TARGET else self.prefill
        found: list[RoomEnded] = []

        def is_over() -> bool:
            found[:] = [end for end in worker.effects if isinstance(end, RoomEnded) and end.key.room == room]
            return bool(found)

        self.run(is_over)
        return found[0]

    def arrived(self, pages: list[int]) -> bool:
        self.decode.pages.put(self.decode.pages.expected, pages, self.data, 0, TOKENS)
        return self.decode.pages.intact()

    def close(self) -> None:
        for half in (self.prefill, self.decode):
            half.close()
