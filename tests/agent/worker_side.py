"""Runs one half of a worker in the test's process without sockets: the real core, engine requests, pipeline and transport.

Tests pass messages between both halves, and an engine's requests to `Side.say`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.engine_requests import EngineRequests
from longshore_agent.worker.moving import Mover
from longshore_client.memory import create_region, pool_geometry
from longshore_wire.effects import PeerAttached, PeerId, RoomEnded, RoomReleased, Send, StartScatter, StartWrite
from longshore_wire.engine_messages import (
    Accepted,
    CachePages,
    Endpoint,
    Half,
    Hello,
    Offer,
    RankAddress,
    Receive,
    Refused,
    RegisterPool,
)
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

MODEL = ModelShape.kv(layers=2, kv_heads=2, head_dim=8, element_bytes=2)
PAGE_COUNT = 32


class Side:
    """A worker without sockets: a core, `EngineRequests`, and the parts that move bytes."""

    def __init__(self, instance: str, half: Half, page_size: int, **settings: str) -> None:
        variables = {
            "LONGSHORE_BACKEND": "Loopback",
            "LONGSHORE_RING_BYTES": "1Mi",
            "LONGSHORE_LANE_BYTES": "64Ki",
            "LONGSHORE_LANE_COUNT": "2",
            "LONGSHORE_SLAB_BYTES_MIN": "1Ki",
        } | settings
        layout = KVLayout(MODEL, Parallel(), page_size)
        self.half, self.now_ns = half, 1
        found = Settings.from_environment(variables)
        self.config = WorkerConfig(f"{instance}/0/0", instance, 7, layout, (half,), found, 0)
        session = self.config.session_config()
        self.peer = PeerId(instance, 0, 0)
        self.source = SourceSession(session, now_ns=1) if half is Half.SOURCE else None
        self.target = TargetSession(session, now_ns=1) if half is Half.TARGET else None
        self.core = self.source or self.target
        assert self.core is not None
        self.metrics = Metrics()
        self.mover = Mover(self.config, self.metrics, SpanRecorder(100), lambda *_: None)
        self.requests = EngineRequests(layout.caches, self.mover.resources.transport, self.source, self.target)
        self.geometry = pool_geometry(layout, PAGE_COUNT)
        self.descriptor, memory = create_region(self.geometry.region_bytes[0])
        self.bytes = np.frombuffer(memory, np.uint8)
        self.ended: dict[int, RoomEnded] = {}
        self.released: set[int] = set()
        self._request = 0
        self.describe()

    def say(self, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> Accepted | Refused | None:
        """Send one engine request with a new number; return its answer."""
        self._request += 1
        request = message if isinstance(message, Hello) else msgspec.structs.replace(message, request=self._request)
        answer = self.requests.handle(request, [os.dup(descriptor) for descriptor in descriptors], self.now_ns)
        assert answer is None or answer.request in (self._request, 0)
        return answer

    def register(self, cache: int = 0) -> Accepted | Refused | None:
        answer = self.say(RegisterPool(0, cache, self.geometry), (self.descriptor,))
        self.describe()
        return answer

    def describe(self) -> None:
        pools = {number: pool.info(number) for number, pool in self.requests.pools.items()}
        self.core.describe(
            self.mover.resources.transport.metadata(),
            self.mover.resources.ring_region,
            pools,
            self.mover.resources.probe_region,
            "127.0.0.9:1",
        )

    def turn(self, other: Side) -> None:
        """Run one turn of a worker's loop; messages go directly to the other side."""
        self.now_ns += 1_000_000
        self.mover.collect()
        self.mover.take_results({self.half: self.core}, self.now_ns)
        if self.target is not None:
            for peer, message in self.mover.notices():
                self.target.receive(peer, message, self.now_ns)
        self.core.tick(self.now_ns)
        for effect in self.core.take_effects():
            if isinstance(effect, Send):
                other.core.receive(self.peer, effect.message, other.now_ns)
            elif isinstance(effect, PeerAttached):
                self.mover.connect(self.half, effect)
            elif isinstance(effect, StartWrite):
                self.mover.start_write(effect, self.requests, self.source, self.now_ns)
            elif isinstance(effect, StartScatter):
                self.mover.start_scatter(effect, self.requests, self.now_ns)
            elif isinstance(effect, RoomEnded):
                self.ended[effect.key.room] = effect
                self.mover.cancel(effect.half, effect.key)
            elif isinstance(effect, RoomReleased):
                self.released.add(effect.key.room)
                self.requests.release(effect.half, effect.key)

    def close(self) -> None:
        self.mover.resources.close()
        for pool in list(self.requests.pools):
            self.requests.let_go(pool)
        os.close(self.descriptor)


Make = Callable[..., Side]


@contextmanager
def side_maker() -> Iterator[Make]:
    """Yield a function that makes sides, which end with the test."""
    made: list[Side] = []

    def build(instance: str, half: Half, page_size: int = 4, **settings: str) -> Side:
        made.append(Side(instance, half, page_size, **settings))
        return made[-1]

    try:
        yield build
    finally:
        for side in made:
            side.close()


def pages(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def endpoint(page_size: int = 4) -> Endpoint:
    return Endpoint("P", KVLayout(MODEL, Parallel(), page_size), (RankAddress(0, "127.0.0.9:1", 7),))


def claim(room: int, end_token: int, listed: bytes, *, offset: int = 0, count: int | None = None) -> Receive:
    return Receive(
        0,
        room,
        endpoint(),
        (CachePages(0, 0, end_token, len(listed) // 4 if count is None else count, listed, offset),),
    )


def offer(room: int, first_token: int, end_token: int, listed: bytes, *, last: bool = True) -> Offer:
    return Offer(0, room, (CachePages(0, first_token, end_token, len(listed) // 4, listed),), last)


def run(source: Side, target: Side, room: int) -> None:
    """Attach two sides and move one room between them until both halves have ended."""
    source.bytes[:] = np.arange(len(source.bytes)) % 251
    assert isinstance(target.say(claim(room, 24, pages(7, 3, 5))), Accepted)
    assert isinstance(
        source.say(offer(room, 0, 24, pages(1, 2, 3, 4, 5, 6))),
        Accepted,
    )
    for _ in range(20_000):
        target.turn(source)
        source.turn(target)
        if room in source.released and room in target.released:
            return
    raise AssertionError(f"room {room} does not end: {source.ended}, {target.ended}")
