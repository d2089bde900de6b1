"""Tests a GPU's source worker: notices of direct copies, page lists that are copied to the device, and the worker's end."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_device import RING, FakeDevice, FakeTransport, PlayedOutbound, effect_of
from page_shapes import Shape, opened

from longshore_agent.errors import DeviceError
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import PageTable
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker import moving, resources
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.moving import Mover
from longshore_wire.effects import PeerAttached, PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.links import Link
from longshore_wire.peer_messages import Attach
from longshore_wire.source import SourceSession
from longshore_wire.ways import Way

SHAPE = Shape(layers=2)
SLAB_BYTES = 1 << 20
DIRECT, STAGED = "read direct [0]", "read staged [0]"


def owner(name: str) -> PeerId:
    return PeerId(name, 0, 0)


class Core(SourceSession):
    """A source's core that records the calls about slabs."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.notified: list[int] = []
        self.peers = defaultdict(lambda: Link(owner("decode")))

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
        self.told.append((slab, payload_bytes))
        self.notified += [slab] * announce


class Whole:
    """A GPU's source worker without its processes, and a neighbour whose pool is mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: KVPool, mapped: KVPool, **changes: Any) -> None:
        self.device = FakeDevice()
        transport: Any = FakeTransport()
        transport.register, transport.connect = (lambda *_: 1), bytes.decode
        played: dict[str, object] = {
            "open_device": lambda _: SimpleNamespace(index=0, enter=lambda: None, attribute=lambda _: 0),
            "make_transport": lambda *_: transport,
            "DeviceStagingBuffer": lambda _, length_bytes, **_options: StagingBuffer(length_bytes),
            "device_copier": lambda *_: self.device,
        }
        for name, value in played.items():
            monkeypatch.setattr(resources, name, value)
        monkeypatch.setattr(moving, "OutboundSlab", PlayedOutbound)
        settings = dataclasses.replace(Settings(), lane_bytes=1 << 20, ring_bytes=1 << 20, **changes)
        config = WorkerConfig(
            "p/0/0", "p", 1, SHAPE.layout, tuple(Half), settings, port=0, agent="life.gpu", device="GPU-1"
        )
        self.asked: list[PeerId] = []
        self.mover = Mover(config, Metrics(), SpanRecorder(10), lambda asked, _: self.asked.append(asked.owner))
        said = Attach(2, "test", "decode", 9, SHAPE.layout, "NIXL", b"decode", RING, (), 1 << 20)
        self.mover.connect(Half.SOURCE, PeerAttached(owner("decode"), said))
        self.mover.neighbours._mapped[owner("decode"), 0] = mapped
        self.core = Core()
        self.pool = pool

    def start(self, *slabs: int, way: Way = Way.DIRECT, room: int = 1) -> None:
        for slab in slabs:
            effect = effect_of(slab, SLAB_BYTES, room)
            effect.way = way
            key = effect.pair.key
            requests: Any = SimpleNamespace(
                pools={0: SimpleNamespace(kv_pool=self.pool)},
                tables={(Half.SOURCE, key): {0: PageTable(0, np.zeros(1, "<i4"))}},
            )
            self.mover.start_write(effect, requests, self.core, 0)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[Whole]:
    with ExitStack() as stack:
        near, far = (stack.enter_context(opened(SHAPE, seed=1)) for _ in range(2))
        yield Whole(monkeypatch, near, far)


def test_a_target_is_told_by_a_message_of_each_slab_and_the_worker_looks_until_then(whole: Whole) -> None:
    whole.start(0, 1)
    assert whole.mover.resources.runner.busy
    assert whole.mover.resources.runner.copying
    assert not whole.mover.drive()
    whole.device.directs[0].done = True
    assert whole.mover.drive()
    whole.mover.take_results({Half.SOURCE: whole.core}, 0)
    assert whole.core.notified == [0]
    assert whole.core.told == [(0, SLAB_BYTES)]
    whole.device.directs[1].done = True
    assert whole.mover.drive()
    whole.mover.take_results({Half.SOURCE: whole.core}, 0)
    assert whole.core.notified == [0, 1]
    assert not whole.mover.resources.runner.copying
    while whole.mover.resources.runner.busy:
        whole.mover.drive()
    assert [(lane.busy, lane.slabs) for lane in whole.mover.resources.runner.lanes()] == [(False, 2)] + [(False, 0)] * 3
    assert whole.mover.metrics.snapshot().value("longshore_slabs_total", half="source", way="direct") == 2


def test_a_worker_that_ends_waits_for_its_kernels_and_then_holds_no_page(whole: Whole) -> None:
    whole.start(*range(40))
    given = len(whole.device.directs)
    mapped = whole.device.directs[0].slab.neighbour
    whole.mover.neighbours.pool_gone(owner("decode"))
    assert not whole.pool.close()
    assert not mapped.wait_closed(0)
    whole.mover.finish_copies()
    assert len(whole.device.directs) == given
    assert whole.pool.wait_closed(0)
    assert mapped.wait_closed(0)


def test_a_room_that_is_given_up_is_answered_though_slabs_of_another_wait_before_it(whole: Whole) -> None:
    whole.start(*range(200), way=Way.STAGED)
    begun = len(whole.device.gathers)
    whole.start(500, 501, way=Way.STAGED, room=2)
    whole.mover.cancel(Half.SOURCE, effect_of(500, SLAB_BYTES, 2).pair.key)
    assert whole.mover.drive()
    whole.mover.take_results({Half.SOURCE: whole.core}, 0)
    assert whole.core.told == [(500, 0), (501, 0)]
    assert len(whole.device.gathers) == begun


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ((), [DIRECT, STAGED]),
        ((Way.DIRECT,), [DIRECT]),
        ((Way.STAGED,), [STAGED]),
        ((Way.DIRECT, Way.STAGED), [DIRECT, STAGED]),
    ],
    ids=["not claimed yet", "direct", "staged", "both"],
)
def test_page_ids_go_to_the_device_once_for_each_way_that_may_want_them(
    whole: Whole, ways: tuple[Way, ...], expected: list[str]
) -> None:
    table = PageTable(0, np.zeros(1, "<i4"))
    whole.mover.prepare_pages(whole.pool, table, Half.SOURCE, frozenset(ways))
    assert whole.device.admitted == expected
    whole.mover.prepare_pages(whole.pool, table, Half.TARGET, frozenset())
    assert whole.device.admitted == [*expected, "write staged [0]"]


def test_a_claim_brings_its_pages_to_the_device_before_its_tokens_come_and_a_wrong_page_fails_no_worker(
    whole: Whole,
) -> None:
    pages = np.arange(3, dtype="<i4").tobytes()
    whole.mover.neighbours.expect(owner("decode"), 0, pages, 2 * SHAPE.page_size + 1)
    assert whole.device.admitted == ["write direct [0, 1, 2]"]
    wrong = np.array([SHAPE.page_count], dtype="<i4").tobytes()
    whole.mover.neighbours.expect(owner("decode"), 0, wrong, 0)
    assert whole.device.admitted == ["write direct [0, 1, 2]"]
    assert whole.asked == []


def test_a_claim_asks_for_a_pool_that_is_not_mapped_yet_once(whole: Whole) -> None:
    pages = np.arange(3, dtype="<i4").tobytes()
    for _ in range(2):
        whole.mover.neighbours.expect(owner("later"), 0, pages, 0)
    assert whole.asked == [owner("later")]
    assert whole.device.admitted == []
    # No slab waits for it, so it is dropped and no slab fails.
    whole.mover.neighbours.pool_gone(owner("later"))
    whole.mover.collect()
    whole.mover.take_results({Half.SOURCE: whole.core}, 0)
    assert whole.core.told == []
    whole.mover.neighbours.expect(owner("later"), 0, pages, 0)
    assert whole.asked == [owner("later")] * 2


def test_a_device_that_has_failed_is_asked_for_nothing_and_given_nothing_more_and_its_jobs_do_not_end(
    whole: Whole,
) -> None:
    whole.start(0)
    whole.start(1, way=Way.STAGED)
    (direct,), gathers = whole.device.directs, whole.device.gathers
    for copy in (direct, *gathers):
        copy.broken = DeviceError("it hangs")
    with pytest.raises(DeviceError, match="it hangs"):
        whole.mover.drive()
    whole.mover.fail("it hangs")
    whole.start(2)
    whole.start(3, way=Way.STAGED)
    whole.mover.hurry()
    # The failed turn had not prepared the pages of its requests yet.
    whole.mover.prepare_pages(whole.pool, PageTable(0, np.zeros(1, "<i4")), Half.TARGET)
    assert whole.device.admitted == []
    assert not whole.mover.drive()
    assert whole.device.directs == [direct]
    whole.mover.take_results({Half.SOURCE: whole.core}, 0)
    assert whole.core.told == []
    assert whole.core.told == []
    assert whole.pool.busy
    with pytest.raises(DeviceError, match="it hangs"):
        whole.mover.finish_copies()
