"""The door of a worker: pools, page lists and their parts, and which wires may carry bytes; in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from longshore_agent.path.admit import PARTIAL_CLAIMS_MAX, Desk
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.moving import Mover
from longshore_client.memory import create_region, pool_geometry
from longshore_wire.effects import PeerAttached, PeerId, RoomEnded, RoomReleased, StartScatter, StartWrite
from longshore_wire.engine_messages import (
    Accepted,
    Cancel,
    DeviceRegion,
    Endpoint,
    Half,
    Hello,
    Offer,
    RankAddress,
    Receive,
    Refused,
    RegisterPool,
    UnregisterPool,
)
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

MODEL = ModelShape(layers=2, kv_heads=2, head_dim=8, element_bytes=2)
PAGE_COUNT = 32


class Side:
    """A worker without its sockets: a core, a desk and the parts that move bytes."""

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
        self.config = WorkerConfig(f"{instance}/0/0", "d", instance, 7, layout, (half,), variables, 0, -1)
        found = Settings.from_environment(variables)
        session = self.config.session_config(found)
        self.peer = PeerId(instance, 0, 0)
        self.source = SourceSession(session, now_ns=1) if half is Half.SOURCE else None
        self.target = TargetSession(session, now_ns=1) if half is Half.TARGET else None
        self.core = self.source or self.target
        assert self.core is not None
        self.metrics = Metrics()
        self.mover = Mover(self.config, found, self.metrics, SpanRecorder(100), lambda *_: None)
        self.desk = Desk(layout, self.mover.parts.transport, self.source, self.target)
        self.geometry = pool_geometry(layout, PAGE_COUNT)
        self.descriptor, memory = create_region(self.geometry.region_bytes[0])
        self.bytes = np.frombuffer(memory, np.uint8)
        self.ended: dict[int, RoomEnded] = {}
        self.released: set[int] = set()
        self._request = 0
        self.describe()

    def say(self, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> Accepted | Refused | None:
        """Give the desk one request with a number of its own, and return its answer."""
        self._request += 1
        request = message if isinstance(message, Hello) else msgspec.structs.replace(message, request=self._request)
        answer = self.desk.handle(request, [os.dup(descriptor) for descriptor in descriptors], self.now_ns)
        assert answer is None or answer.request in (self._request, 0)
        return answer

    def register(self, pool: int = 0) -> Accepted | Refused | None:
        answer = self.say(RegisterPool(0, pool, self.geometry), (self.descriptor,))
        self.describe()
        return answer

    def describe(self) -> None:
        pools = {number: pool.info(number) for number, pool in self.desk.pools.items()}
        self.core.describe(
            self.mover.parts.transport.metadata(), self.mover.parts.ring_region, pools, self.mover.parts.probe_region
        )

    def turn(self, other: Side) -> None:
        """What a worker's loop does once; messages go straight to the other side."""
        self.now_ns += 1_000_000
        self.mover.collect()
        for peer, message in self.mover.take_results(self.half, self.core, self.now_ns):
            assert peer == other.peer
            other.core.receive(self.peer, message, other.now_ns)
        if self.target is not None:
            for peer, message in self.mover.notices():
                self.target.receive(peer, message, self.now_ns)
        self.core.tick(self.now_ns)
        for effect in self.core.take_effects():
            if isinstance(effect, PeerAttached):
                self.mover.connect(self.half, effect)
            elif isinstance(effect, StartWrite):
                self.mover.start_write(effect, self.desk, self.source, self.now_ns)
            elif isinstance(effect, StartScatter):
                self.mover.start_scatter(effect, self.desk, self.now_ns)
            elif isinstance(effect, RoomEnded):
                self.ended[effect.key.room] = effect
                self.mover.cancel(effect.half, effect.key)
            elif isinstance(effect, RoomReleased):
                self.released.add(effect.key.room)
                self.desk.tables.pop((effect.half, effect.key), None)
        for _, message in self.core.take_outbox():
            other.core.receive(self.peer, message, other.now_ns)

    def close(self) -> None:
        self.mover.parts.close()
        for pool in list(self.desk.pools):
            self.desk.let_go(pool)
        os.close(self.descriptor)


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Side] = []

    def build(instance: str, half: Half, page_size: int = 4, **settings: str) -> Side:
        made.append(Side(instance, half, page_size, **settings))
        return made[-1]

    yield build
    for side in made:
        side.close()


def pages(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def endpoint(page_size: int = 4) -> Endpoint:
    return Endpoint("P", KVLayout(MODEL, Parallel(), page_size), (RankAddress(0, "h:1", 7),))


def claim(room: int, end_token: int, listed: bytes, *, offset: int = 0, count: int | None = None) -> Receive:
    return Receive(0, room, 0, endpoint(), 0, end_token, offset, len(listed) // 4 if count is None else count, listed)


def reason(answer: Accepted | Refused | None) -> Reason:
    assert isinstance(answer, Refused), answer
    return answer.reason


def test_page_lists_are_checked_by_the_worker_itself_whatever_the_client_did(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    assert reason(source.say(Offer(0, 1, 0, 0, 8, True, pages(1, 2)))) is Reason.UNKNOWN_POOL
    for side in (source, target):
        assert isinstance(side.register(), Accepted)
        assert reason(side.register()) is Reason.ROOM_REUSED
    assert reason(source.say(Offer(0, 1, 0, 0, 8, True, pages(1)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(source.say(Offer(0, 1, 0, 0, 8, True, pages(1, PAGE_COUNT)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(source.say(Offer(0, 1, 0, 0, 8, True, pages(1, -1)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(target.say(claim(1, 8, pages(1, 1)))) is Reason.TOKENS_OVERLAP
    assert reason(target.say(claim(1, 8, pages(1, 2, 3)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(target.say(Offer(0, 1, 0, 0, 8, True, pages(1, 2)))) is Reason.UNSUPPORTED
    assert reason(source.say(claim(1, 8, pages(1, 2)))) is Reason.UNSUPPORTED
    assert reason(source.say(Hello(1, "P", source.config.layout, "cpu", (Half.SOURCE,)))) is Reason.MALFORMED_MESSAGE
    assert not source.core.rooms
    assert not target.core.rooms
    assert not source.desk.tables
    assert not target.desk.tables


@pytest.mark.parametrize("listed", [b"\x01\x02\x03", b"\x01\x00\x00\x00\x02"])
def test_page_lists_that_are_no_numbers_are_refused_and_end_nobody(make, listed):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    source.register()
    target.register()
    assert reason(source.say(Offer(0, 1, 0, 0, 4, True, listed))) is Reason.MALFORMED_MESSAGE
    assert reason(target.say(claim(1, 4, listed, count=1))) is Reason.MALFORMED_MESSAGE


def test_cuda_handles_are_refused_by_a_worker_on_a_cpu_and_nothing_is_mapped(make):
    side = make("P", Half.SOURCE)
    for descriptors in ((), (side.descriptor,)):
        answer = side.say(RegisterPool(0, 0, side.geometry, device_regions=(DeviceRegion(bytes(64), 0),)), descriptors)
        assert reason(answer) is Reason.LAYOUT_MISMATCH
        assert "1 CUDA handles for 1 regions" in answer.text
    assert not side.desk.pools
    assert isinstance(side.register(), Accepted)


def test_a_claim_in_parts_is_answered_by_its_last_part_in_whatever_order_they_come(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 24, pages(5, 6), offset=4, count=6)) is None
    assert target.say(claim(1, 24, pages(1, 2), offset=0, count=6)) is None
    assert isinstance(target.say(claim(1, 24, pages(3, 4), offset=2, count=6)), Accepted)
    ((_, table),) = target.desk.tables.items()
    assert table.pages.tolist() == [1, 2, 3, 4, 5, 6]


def test_parts_that_do_not_make_a_list_are_refused_and_forgotten(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 12, pages(1, 2), count=3)) is None
    assert reason(target.say(claim(1, 12, pages(2, 3), offset=1, count=3))) is Reason.MALFORMED_MESSAGE
    assert reason(target.say(claim(1, 12, pages(1), offset=-1, count=3))) is Reason.MALFORMED_MESSAGE
    assert isinstance(target.say(claim(1, 12, pages(1, 2, 3))), Accepted)
    for room in range(2, PARTIAL_CLAIMS_MAX + 2):
        assert target.say(claim(room, 12, pages(1, 2), count=3)) is None
    assert reason(target.say(claim(99_999, 12, pages(1, 2), count=3))) is Reason.BUSY


def test_a_cancelled_claim_forgets_the_parts_that_have_come(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 12, pages(1, 2), count=3)) is None
    assert isinstance(target.say(Cancel(0, Half.TARGET, "P", 1, 0)), Accepted)
    assert target.say(claim(1, 12, pages(3), offset=2, count=3)) is None


def test_chunks_extend_a_rooms_pages_and_a_sequence_keeps_those_it_has(make):
    source = make("P", Half.SOURCE)
    source.register()
    assert isinstance(source.say(Offer(0, 1, 0, 0, 6, False, pages(3, 9))), Accepted)
    assert reason(source.say(Offer(0, 1, 0, 6, 12, True, pages(8, 4)))) is Reason.TOKENS_OVERLAP
    assert isinstance(source.say(Offer(0, 1, 0, 6, 12, True, pages(9, 4))), Accepted)
    ((_, table),) = source.desk.tables.items()
    assert table.pages.tolist() == [3, 9, 4]


def test_a_pool_is_answered_for_only_when_its_rooms_are_released(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    source.bytes[:] = np.arange(len(source.bytes)) % 251
    assert isinstance(target.say(claim(1, 24, pages(7, 3, 5))), Accepted)
    assert target.say(UnregisterPool(0, 0)) is None
    assert reason(target.say(claim(2, 24, pages(7, 3, 5)))) is Reason.UNKNOWN_POOL
    assert not target.desk.take_left()
    for _ in range(10):
        target.turn(source)
        source.turn(target)
    assert target.ended[1].reason is Reason.CANCELLED
    (answer,) = target.desk.take_left()
    assert isinstance(answer, Accepted)
    assert not target.desk.pools


def test_a_pool_that_a_neighbour_was_given_is_answered_for_only_when_nobody_has_it_mapped(make):
    target = make("D", Half.TARGET, page_size=8)
    target.register()
    target.desk.pools[0].shown = True
    assert target.say(UnregisterPool(0, 0)) is None
    assert target.desk.take_left() == []
    assert not target.desk.pools
    assert target.desk.taken == [0]
    # Its number is not free either: what is told of the old pool must not be taken for the new one's.
    assert reason(target.register()) is Reason.ROOM_REUSED
    assert target.desk.free(1) == []
    (answer,) = target.desk.free(0)
    assert isinstance(answer, Accepted)
    assert target.desk.free(0) == []
    assert isinstance(target.register(), Accepted)


def run(source: Side, target: Side, room: int) -> None:
    """Move one room between two sides that are attached by hand, until both halves have ended."""
    source.bytes[:] = np.arange(len(source.bytes)) % 251
    assert isinstance(target.say(claim(room, 24, pages(7, 3, 5))), Accepted)
    assert isinstance(source.say(Offer(0, room, 0, 0, 24, True, pages(1, 2, 3, 4, 5, 6))), Accepted)
    for _ in range(20_000):
        target.turn(source)
        source.turn(target)
        if room in source.released and room in target.released:
            return
    raise AssertionError(f"room {room} does not end: {source.ended}, {target.ended}")


def test_bytes_move_between_two_workers_without_their_sockets(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    run(source, target, 1)
    assert (source.ended[1].reason, target.ended[1].reason) == (Reason.NONE, Reason.NONE)
    near = source.bytes.reshape(4, PAGE_COUNT * 4, -1)
    far = target.bytes.reshape(4, PAGE_COUNT * 8, -1)
    tokens = np.arange(24)
    there = np.array([7, 3, 5])[tokens // 8] * 8 + tokens % 8
    assert np.array_equal(far[:, there], near[:, 4 + tokens])


def test_no_byte_travels_over_a_wire_that_is_not_allowed_in_the_first_room_or_in_a_later_one(make):
    source = make("P", Half.SOURCE, LONGSHORE_WIRES="SharedMemory,NVLink")
    target = make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    for room in (1, 2):
        run(source, target, room)
        assert source.ended[room].reason is Reason.WIRE_NOT_ALLOWED
        assert target.ended[room].reason is Reason.WIRE_NOT_ALLOWED
        assert "prefill P rank 0 reaches decode D rank 0 over Loopback" in target.ended[room].text
        assert "NVLink, SharedMemory" in target.ended[room].text
    assert not target.bytes.any()
    assert source.metrics.snapshot().value("longshore_writes_total") == 0
