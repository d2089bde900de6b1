"""Tests a worker's jobs when a peer is lost: the jobs of this peer, in whatever state, are reported; others are not."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from agent_world import wait_for
from fake_device import effect_of, pair_of

from longshore_agent.pipeline.runners import ThreadRunner
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker import resources
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.moving import Mover
from longshore_wire.effects import PeerAttached, PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.names import Wire
from longshore_wire.peer_messages import Attach, RegionInfo
from longshore_wire.source import SourceSession
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
PEER = PeerId("decode", 0, 0)
RING = RegionInfo(1 << 30, 1 << 20)


class PlayedTransport:
    """A transport that connects any peer. The test ends its probes."""

    announced_by_message: frozenset[Wire] = frozenset()

    def __init__(self) -> None:
        self.found = threading.Event()

    def register(self, _address: int, _length_bytes: int) -> int:
        return 1

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def disconnect(self, _name: str) -> None:
        pass

    def probe_wire(self, _peer: str, _source: int, _target: int, _length_bytes: int) -> Wire:
        assert self.found.wait(60)
        return Wire.TCP

    def close(self) -> None:
        pass


class Core(SourceSession):
    """A source's core that records the calls about slabs."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str, str]] = []
        self.peers = {}

    def write_done(
        self,
        peer: PeerId,
        pair_key: Any,
        slab: int,
        payload_bytes: int,
        now_ns: int,
        *,
        announce: bool = False,
        **_: Any,
    ) -> None:
        self.told.append((slab, "done" if payload_bytes else "dropped", ""))

    def write_failed(self, peer: PeerId, pair_key: Any, slab: int, text: str, now_ns: int, **_: Any) -> None:
        self.told.append((slab, "failed", text))


class Scene:
    """A CPU's source worker without its processes, one attached target and a pool."""

    def __init__(self, **changes: Any) -> None:
        settings = dataclasses.replace(Settings(), lane_bytes=1 << 20, lane_count=2, **changes)
        roles = (Half.SOURCE,)
        config = WorkerConfig("p/0/0", "p", 1, LAYOUT, roles, settings, port=0, agent="life")
        self.asked: list[tuple[PeerId, int]] = []
        self.mover = Mover(
            config, Metrics(), SpanRecorder(1), lambda asked, _: self.asked.append((asked.owner, asked.cache))
        )
        self.transport: Any = self.mover.resources.transport
        self.core = Core()
        self.attach(RING)

    def attach(self, ring: RegionInfo | None) -> None:
        said = Attach(2, "test", "decode", 9, LAYOUT, "Loopback", b"decode", ring, (), 1 << 20, probe=RING)
        self.mover.connect(Half.SOURCE, PeerAttached(PEER, said))

    def start(self, slab: int, way: Way, room: int = 1) -> None:
        effect: Any = effect_of(slab, 1 << 10, room)
        effect.way = way
        key = pair_of(room).key
        requests: Any = SimpleNamespace(
            pools={0: SimpleNamespace(kv_pool=None)}, tables={(Half.SOURCE, key): {0: None}}
        )
        self.mover.start_write(effect, requests, self.core, 0)

    def told(self) -> list[tuple[int, str, str]]:
        self.mover.collect()
        self.mover.take_results({Half.SOURCE: self.core}, 0)
        return self.core.told

    def close(self) -> None:
        """End the worker's threads, which would otherwise end with its process."""
        self.transport.found.set()
        self.mover.resources.close()
        assert isinstance(self.mover.resources.runner, ThreadRunner)
        for thread in self.mover.resources.runner._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def build(**changes: Any) -> Scene:
        made.append(Scene(**changes))
        return made[-1]

    monkeypatch.setattr(resources, "make_transport", lambda *_: PlayedTransport())
    yield build
    for scene in made:
        scene.close()


def test_a_slab_that_waits_for_a_pool_is_answered_when_its_room_is_given_up_and_those_of_other_rooms_go_on_waiting(
    make: Callable[..., Scene],
) -> None:
    scene = make()
    scene.start(0, Way.DIRECT)
    scene.start(1, Way.DIRECT, room=2)
    scene.mover.cancel(Half.SOURCE, pair_of(1).key)
    assert scene.told() == [(0, "dropped", "")]
    scene.mover.disconnect(Half.SOURCE, PEER)
    # Once each: no state of the first room is left.
    assert [slab for slab, *_ in scene.told()] == [0, 1]


def test_slabs_for_a_neighbour_s_pages_outlive_the_loss_of_its_other_half(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.start(0, Way.DIRECT)
    assert scene.asked == [(PEER, 0)]
    # As our source it is lost; as our target it is attached.
    scene.mover.disconnect(Half.TARGET, PEER)
    assert scene.told() == []
    scene.mover.disconnect(Half.SOURCE, PEER)
    assert [(slab, outcome) for slab, outcome, _ in wait_for(scene.told)] == [(0, "failed")]


def test_a_target_that_takes_its_ring_back_fails_the_slab_that_was_granted_there_and_no_worker(
    make: Callable[..., Scene],
) -> None:
    scene = make()
    scene.attach(None)
    scene.start(0, Way.STAGED)
    found = wait_for(scene.told)
    assert [(slab, outcome) for slab, outcome, _ in found] == [(0, "failed")]
    assert "ring" in found[0][2]
