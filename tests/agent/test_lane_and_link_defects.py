"""Tests defects of the best known implementation outside its protocol, which ours must not have.

They concern lanes, listeners, arrivals and page lists.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import subprocess
import sys
import threading
import time

import pytest
import zmq
from half_worker import PEERS, ROOM_PAGES, SETTINGS, TOKENS, Halves

from longshore_agent.control.peer_net import PeerNet
from longshore_agent.pipeline.slabs import OutboundSlab, trailer_of
from longshore_agent.transports.base import Write, WriteState
from longshore_agent.transports.loopback import LoopbackTransport
from longshore_agent.worker.health import WorkerHealth
from longshore_client import Half
from longshore_client.pages import packed_pages
from longshore_spec.agent_config import Backend
from longshore_wire.effects import PeerId, RoomEnded
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import PEER, TEXT_CHARACTERS_MAX, Abort, PairKey, Ping, RoomKey
from longshore_wire.slabs import TRAILER_KEY_BYTES
from longshore_wire.ways import Way


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lane-0"}


def test_a_lane_whose_writes_fail_goes_on_and_the_next_room_of_the_same_peer_arrives(make) -> None:
    before = lane_threads()  # of workers that were closed, and whose threads may not have ended yet
    halves = make({"kind": "fail", "count": 3})
    (lane,) = lane_threads() - before
    for room in range(1, 4):
        halves.begin(room)
        end = halves.end(room)
        assert (end.reason, "failed on demand" in end.text) == (Reason.TRANSFER_FAILED, True)
    pages = halves.begin(4)
    assert halves.end(4).reason is Reason.NONE
    assert lane_threads() - before == {lane}
    assert halves.arrived(pages)


def test_a_thread_that_ends_by_a_mistake_of_ours_ends_its_worker_so_that_nobody_waits_for_it() -> None:
    program = (
        "import threading\n"
        "from longshore_agent.worker import main\n"
        "threading.excepthook = main._end_process\n"
        "thread = threading.Thread(target=lambda: 1 // 0)\n"
        "thread.start()\n"
        "threading.Event().wait(600)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240, check=False)
    assert ended.returncode == 70
    assert b"ZeroDivisionError" in ended.stderr


def held_slab(halves: Halves) -> OutboundSlab:
    """The slab whose write the transport holds."""
    halves.run(lambda: transport_of(halves)._waiting)
    (slab,) = halves.prefill.mover.resources.runner.writing()
    return slab


def transport_of(halves: Halves) -> LoopbackTransport:
    found = halves.prefill.mover.resources.transport
    assert isinstance(found, LoopbackTransport)
    return found


@pytest.mark.shows("agent.trailer_deadline_ms")
def test_a_word_of_arrival_that_comes_before_the_bytes_waits_for_them(make) -> None:
    halves = make({"kind": "hold"}, trailer_deadline_ms=60_000)
    pages = halves.begin(1)
    ready = held_slab(halves).ready_message()
    halves.decode.session.receive(PEERS[Half.SOURCE], ready, time.monotonic_ns())
    for _ in range(50):
        halves.decode.turn(0.001)
    # Its scatter has started and found no valid trailer yet.
    assert halves.decode.pages.intact()
    assert not [effect for effect in halves.decode.effects if isinstance(effect, RoomEnded)]
    transport_of(halves).let_go()
    assert halves.end(1).reason is Reason.NONE
    assert halves.arrived(pages)


@pytest.mark.parametrize("way", [Way.STAGED, Way.CONTIGUOUS, Way.SLICES])
def test_mooncakes_target_is_told_by_a_message_that_leaves_after_the_write_is_complete(make, way) -> None:
    halves = make(backend=Backend.MOONCAKE, force_way=way)
    before = halves.begin(2)
    assert halves.end(2).reason is Reason.NONE
    halves.run(lambda: not halves.prefill.session.rooms and not halves.decode.session.rooms)
    halves.decode.effects.clear()
    transport, is_shut = halves.prefill.mover.resources.transport, True
    look = transport.state
    complete: list[object] = []

    def state(write: Write) -> WriteState:
        said = look(write)
        if said is WriteState.DONE:
            complete.append(write)
        return WriteState.OPEN if is_shut else said

    transport.state = state  # type: ignore[method-assign]
    pages = halves.begin(1)
    halves.run(lambda: complete)
    for _ in range(50):
        for half in (halves.prefill, halves.decode):
            half.turn(0.001)
    (pair,) = halves.decode.session.rooms[next(iter(halves.decode.session.rooms))].pairs.values()
    assert pair.done_count == 0
    assert not halves.decode.effects
    is_shut = False
    assert halves.end(1).reason is Reason.NONE
    halves.decode.pages.put(halves.decode.pages.expected, before, halves.data, 0, TOKENS)
    assert halves.arrived(pages)


@pytest.mark.shows("agent.trailer_deadline_ms")
def test_bytes_that_never_come_fail_the_room_and_touch_no_page(make) -> None:
    halves = make({"kind": "hold"}, trailer_deadline_ms=50)
    halves.begin(1)
    ready = held_slab(halves).ready_message()
    halves.decode.session.receive(PEERS[Half.SOURCE], ready, time.monotonic_ns())
    assert halves.end(1).reason is Reason.TRAILER_MISMATCH
    assert halves.decode.pages.intact()
    transport_of(halves).let_go()
    halves.run(lambda: not halves.prefill.session.rooms and not halves.decode.session.rooms)
    assert halves.decode.pages.intact()


@pytest.mark.parametrize("knows_the_key", [False, True])
def test_what_a_stranger_writes_into_the_ring_is_no_slab_though_he_knows_all_of_its_trailer_but_the_key(
    make, knows_the_key
) -> None:
    halves = make({"kind": "hold"}, trailer_deadline_ms=50)
    halves.begin(1)
    held = held_slab(halves)
    assert held.attach.ring is not None and len(held.attach.ring.trailer_key) == TRAILER_KEY_BYTES
    ring = halves.decode.mover.resources.ring_region
    assert ring is not None
    key = held.attach.ring.trailer_key if knows_the_key else bytes(TRAILER_KEY_BYTES)
    slab = b"INTRUDER" * (held.effect.payload_bytes // 8) + trailer_of(held.effect).seal(key).data
    ctypes.memmove(ring.address + held.effect.offset_bytes, slab, len(slab))
    halves.decode.session.receive(PEERS[Half.SOURCE], held.ready_message(), time.monotonic_ns())
    assert halves.end(1).reason is (Reason.NONE if knows_the_key else Reason.TRAILER_MISMATCH)
    assert halves.decode.pages.intact() is not knows_the_key


def test_a_write_that_outlives_its_room_by_the_write_timeout_makes_its_worker_ill_and_one_that_somebody_waits_for_does_not(
    make,
) -> None:
    halves = make({"kind": "hold"}, write_timeout_s=50.0)
    health = WorkerHealth(dataclasses.replace(SETTINGS, write_timeout_s=50.0), halves.prefill.mover, None)
    limit_ns, long_ns, asked_ns = 50 * 10**9, 10**15, 10**18
    halves.begin(1)
    held = held_slab(halves)
    assert health.illness(asked_ns) == health.illness(asked_ns + long_ns) == ""
    assert health.due_ns is None
    # Decode aborts it, and the source knows that.
    (key,) = halves.decode.session.rooms
    halves.decode.session.cancel(key, Reason.CANCELLED, "by the test", time.monotonic_ns())
    halves.run(lambda: held.cancelled)
    given_up_ns = asked_ns + 2 * long_ns
    assert health.illness(given_up_ns) == ""
    assert health.due_ns == given_up_ns + limit_ns
    assert health.illness(health.due_ns - 1) == ""
    assert "a write to rank 0 of decode has not ended" in health.illness(given_up_ns + limit_ns)
    # Meanwhile its memory is not granted to other rooms, and its pages are not released.
    assert [room.busy for room in halves.prefill.session.rooms.values()] == [True]
    transport_of(halves).let_go()
    halves.run(lambda: not halves.prefill.session.rooms)
    assert health.illness(given_up_ns + long_ns) == ""
    assert health.due_ns is None


def test_a_peer_that_reads_nothing_never_holds_up_who_speaks_to_it(make) -> None:
    with zmq.Context() as context, contextlib.closing(PeerNet("127.0.0.1", 0, "decode/0/0/1", None)) as net:
        deaf = context.socket(zmq.ROUTER)
        deaf.linger = 0
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        peer = PeerId("prefill", 0, 0)
        net.dial(peer, f"127.0.0.1:{port}")
        greeted = dict(net.poller.poll(60_000))
        net.receive(greeted)
        # More than any queue holds. The rest is dropped, and timers send it again.
        pair = PairKey(RoomKey("prefill", 1), 0, 0, 1, 1, "decode")
        for _ in range(50_000):
            net.send(Half.TARGET, peer, Abort(pair, Reason.CANCELLED, "x" * TEXT_CHARACTERS_MAX))
        assert net.counters["unsent"] > 0
        net.send(Half.SOURCE, peer, Ping(0, 1))
        assert net.counters["unroutable"] == 1
        net.hang_up(peer)
        deaf.close()


def ask_and_be_gone(address: str) -> None:
    """Send messages without waiting for an answer; they have left this process on return."""
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, b"stranger")
        stranger.connect(f"tcp://{address}")
        for _ in range(100):
            stranger.send(PEER.encode(Ping(1, 1)))
        stranger.close(linger=60_000)


def test_a_stranger_that_asks_and_is_gone_before_the_answer_ends_nobody(make) -> None:
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(contextlib.closing(PeerNet("127.0.0.1", 0, "prefill/0/0/1", None)))
        # Replaces the net's own monitor, since a socket can have only one.
        net._router.monitor("inproc://gone", zmq.EVENT_DISCONNECTED)
        gone = stack.enter_context(net._context.socket(zmq.PAIR))
        gone.connect("inproc://gone")
        end_s = time.monotonic() + 240.0
        # Its last messages can be read when the listener detects its end; on a busy machine maybe before.
        while net.counters["unsent"] == 0 and time.monotonic() < end_s:
            ask_and_be_gone(net.address)
            assert gone.poll(60_000)
            gone.recv_multipart()
            while ready := frozenset(each for each, _ in net.poller.poll(100)):
                net.receive(ready)
        assert net.counters["unsent"] > 0


def test_the_pages_of_a_room_are_what_they_were_when_it_was_asked_for(make) -> None:
    halves = make({"kind": "hold"})
    listed = list(range(ROOM_PAGES))
    packed = packed_pages(listed)
    listed.reverse()
    assert packed == packed_pages(range(ROOM_PAGES))
    pages = halves.begin(1)
    held_slab(halves)
    for half in (halves.prefill, halves.decode):
        ((table,),) = (tables.values() for tables in half.requests.tables.values())
        assert list(table.pages) == pages
        with pytest.raises(ValueError, match="read-only"):
            table.pages[0] = 63
    transport_of(halves).let_go()
    assert halves.end(1).reason is Reason.NONE
    assert halves.arrived(pages)
