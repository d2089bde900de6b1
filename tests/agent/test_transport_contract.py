"""Tests the contract of transports for each of them, with a second process as the peer."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from agent_fleet import over
from transport_pair import KINDS, POISON, REGION_BYTES, WIRES, Pair
from transport_peer import ANSWER_LIMIT_S, finish, post, row

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import create
from longshore_agent.transports.base import METADATA_BYTES_MAX, NOTICE_BYTES_MAX, Pieces, Selection, WriteState
from longshore_agent.transports.loopback import Fault, FaultKind, FaultPlan, LoopbackTransport
from longshore_wire.names import Wire

NIXL = over("nixl-tcp", "nixl-shm", "nixl-alone")
EACH = ["loopback", "mooncake-tcp", *NIXL]


@pytest.fixture(scope="module", params=EACH)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One pair for all tests that leave it usable."""
    pair = Pair(request.param, f"shared-{request.param}")
    yield pair
    pair.close()


@pytest.fixture(params=EACH)
def fresh(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A separate pair for tests that break it."""
    pair = Pair(request.param, f"fresh-{request.param}")
    yield pair
    pair.close()


def test_all_bytes_are_in_the_targets_memory_when_they_are_told_of_and_when_the_write_is_done(pair: Pair) -> None:
    assert pair.write(0, pair.target, REGION_BYTES, b"arrived") is WriteState.DONE
    digest = hashlib.sha256(pair.source).hexdigest()
    assert pair.peer.ask("digest", region=0) == digest
    if pair.transport.notifies:
        (notice,) = pair.peer.wait_notices(1)
        assert bytes.fromhex(notice["notice"]) == b"arrived"
        assert notice["digest"] == digest
    assert pair.notices(0) == []


def test_a_write_of_many_pieces_lands_each_piece_and_touches_nothing_else(pair: Pair) -> None:
    count, size, stride = 1500, 100, 160
    target = pair.peer.ask("register", length=count * stride, fill=POISON)
    region = pair.peer.ask("region_count") - 1
    pair.transport.connect(pair.peer.metadata())
    order = np.random.default_rng(3).permutation(count).astype(np.uint64)
    sources = np.uint64(pair.source.ctypes.data) + order * np.uint64(size)
    targets = np.uint64(target) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
    write = post(pair.transport, pair.name, sources, targets, np.full(count, size, dtype=np.uint64), b"many")
    assert finish(pair.transport, write) is WriteState.DONE
    assert pair.transport.release(write)
    expected = np.full((count, stride), POISON, dtype=np.uint8)
    expected[:, :size] = pair.source[: count * size].reshape(count, size)[order]
    assert pair.peer.read(region, 0, count * stride) == expected.tobytes()
    assert pair.notices(1) == pair.told(b"many")


def test_a_notice_of_any_bytes_up_to_its_limit_arrives_unchanged_with_its_senders_name(pair: Pair) -> None:
    notice = bytes(range(256)) * (NOTICE_BYTES_MAX // 256)
    assert pair.write(0, pair.target, 64, notice) is WriteState.DONE
    assert pair.notices(1) == pair.told(notice)


def test_a_notice_above_its_limit_is_refused_and_nothing_is_written(pair: Pair) -> None:
    before = pair.peer.read(0, 0, 64)
    with pytest.raises(TransportError, match="1024"):
        pair.write(64, pair.target, 64, b"x" * (NOTICE_BYTES_MAX + 1))
    assert pair.peer.read(0, 0, 64) == before


def test_a_done_write_is_settled_however_often_it_is_released(pair: Pair) -> None:
    address = row(pair.source.ctypes.data)
    write = post(pair.transport, pair.name, address, row(pair.target), row(4096), b"")
    assert finish(pair.transport, write) is WriteState.DONE
    assert pair.transport.release(write)
    assert pair.transport.release(write)
    assert pair.transport.state(write) is WriteState.DONE
    assert write.error == ""


def test_memory_that_is_not_registered_is_refused_on_either_side(pair: Pair) -> None:
    stray = np.zeros(64, dtype=np.uint8)
    with pytest.raises(TransportError):
        post(pair.transport, pair.name, row(stray.ctypes.data), row(pair.target), row(64), b"")
    with pytest.raises(TransportError):
        pair.write(0, pair.target + REGION_BYTES - 32, 64)


def test_junk_metadata_is_a_typed_error_and_the_peer_stays_usable(pair: Pair) -> None:
    good = pair.peer.metadata()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x10
    noise = np.random.default_rng(1).bytes(3000)
    for junk in (
        b"",
        b"junk",
        noise,
        good[:-5],
        good[:20],
        bytes(flipped),
        good + b"x",
        b"x" * (METADATA_BYTES_MAX + 1),
    ):
        if KINDS[pair.kind][0] == "Loopback" and junk == bytes(flipped):
            continue  # Mooncake's metadata has no digest: a flipped bit is another address, which the kernel refuses.
        with pytest.raises(PeerMetadataError):
            pair.transport.connect(junk)
    assert pair.write(100, pair.target, 100) is WriteState.DONE
    assert pair.peer.read(0, 0, 100) == pair.source[100:200].tobytes()


def test_memory_registered_later_can_be_written_once_the_newer_metadata_is_connected(pair: Pair) -> None:
    target = pair.peer.ask("register", length=4096, fill=POISON)
    region = pair.peer.ask("region_count") - 1
    with pytest.raises(TransportError):
        pair.write(0, target, 4096)
    assert pair.transport.connect(pair.peer.metadata()) == pair.name
    assert pair.write(0, target, 4096) is WriteState.DONE
    assert pair.peer.read(region, 0, 4096) == pair.source[:4096].tobytes()


def test_a_write_into_memory_that_its_owner_deregistered_lands_except_over_mooncakes_tcp(
    pair: Pair,
) -> None:
    target = pair.peer.ask("register", length=4096, fill=POISON)
    region = pair.peer.ask("region_count") - 1
    pair.transport.connect(pair.peer.metadata())
    assert pair.write(0, target, 2048) is WriteState.DONE
    pair.peer.ask("deregister", region=region)
    pair.write(2048, target + 2048, 2048)
    landed = pair.peer.read(region, 2048, 2048) == pair.source[2048:4096].tobytes()
    # There the target checks every request against its registered memory.
    assert landed is (pair.backend != "Mooncake")


def test_a_write_of_a_peer_whom_the_target_has_disconnected_lands_all_the_same(fresh: Pair) -> None:
    assert fresh.write(0, fresh.target, 2048) is WriteState.DONE
    fresh.peer.ask("disconnect", peer=f"fresh-{fresh.kind}")
    fresh.write(2048, fresh.target + 2048, 2048)
    # So memory is in quarantine until the writer confirms or has ended.
    assert fresh.peer.read(0, 2048, 2048) == fresh.source[2048:4096].tobytes()


# Over NIXL's shared memory a posted write is complete. Mooncake has its own tests.
@pytest.mark.parametrize("fresh", ["loopback", "nixl-tcp"], indirect=True)
def test_a_write_that_had_begun_lands_although_its_memory_and_its_writer_were_let_go(fresh: Pair) -> None:
    if isinstance(fresh.transport, LoopbackTransport):
        fresh.transport.faults = FaultPlan((Fault(FaultKind.HOLD),))
    assert fresh.transport.probe_wire(fresh.name, fresh.source.ctypes.data, fresh.target, 4096) is WIRES[fresh.kind]
    fresh.peer.ask("idle")
    address = row(fresh.source.ctypes.data)
    write = post(fresh.transport, fresh.name, address, row(fresh.target), row(REGION_BYTES), b"")
    assert fresh.transport.state(write) is WriteState.OPEN
    fresh.peer.ask("disconnect", peer=f"fresh-{fresh.kind}")
    fresh.peer.ask("deregister", region=0)
    if isinstance(fresh.transport, LoopbackTransport):
        fresh.transport.let_go()
    assert finish(fresh.transport, write) is WriteState.DONE
    assert fresh.peer.ask("digest", region=0) == hashlib.sha256(fresh.source).hexdigest()


def test_prepared_pieces_land_by_index_and_only_those(pair: Pair) -> None:
    count, size = 64, 512
    target = pair.peer.ask("register", length=count * size, fill=POISON)
    region = pair.peer.ask("region_count") - 1
    pair.transport.connect(pair.peer.metadata())
    steps = np.arange(count, dtype=np.uint64) * np.uint64(size)
    sources = np.uint64(pair.source.ctypes.data) + steps
    targets = np.uint64(target) + steps
    prepared = pair.transport.prepare(pair.name, Pieces(sources, targets, np.full(count, size, dtype=np.uint64)))
    indices = np.arange(0, count, 3, dtype=np.int32)
    for batch in np.array_split(indices, 3):
        write = pair.transport.draft(pair.name, Selection(prepared, batch), b"batch")
        pair.transport.start(write)
        assert finish(pair.transport, write) is WriteState.DONE
        assert pair.transport.release(write)
    pair.transport.release_prepared(prepared)
    pair.transport.release_prepared(prepared)
    expected = np.full((count, size), POISON, dtype=np.uint8)
    expected[indices] = pair.source[: count * size].reshape(count, size)[indices]
    assert pair.peer.read(region, 0, count * size) == expected.tobytes()
    assert pair.notices(3) == pair.told(b"batch", b"batch", b"batch")


def test_four_threads_that_post_at_once_land_every_write_once(pair: Pair) -> None:
    each, size = 25, 16384
    failures: list[str] = []

    def lane(index: int) -> None:
        for turn in range(each):
            offset = (index * each + turn) * size
            state = pair.write(offset, pair.target + offset, size, f"{index}.{turn}".encode())
            if state is not WriteState.DONE:
                failures.append(f"{index}.{turn} {state}")

    threads = [threading.Thread(target=lane, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pair.transport.notices()
        threads[0].join(0.0005)
    assert failures == []
    sent = [f"{index}.{turn}".encode() for index in range(4) for turn in range(each)]
    assert sorted(pair.notices(len(sent))) == sorted(pair.told(*sent))
    assert pair.peer.read(0, 0, 4 * each * size) == pair.source[: 4 * each * size].tobytes()


def test_a_transport_that_notifies_of_nothing_leaves_all_to_messages_and_others_poll_only_where_they_notify(
    pair: Pair,
) -> None:
    transport = pair.transport
    assert transport.notifies or transport.announced_by_message == set(Wire)
    assert not transport.announced_by_message & (transport.swift | transport.driven)


def test_the_probe_names_the_wire_that_carried_it(pair: Pair) -> None:
    address = pair.source.ctypes.data
    assert pair.transport.probe_wire(pair.name, address, pair.target, 1 << 20) is WIRES[pair.kind]
    assert pair.peer.read(0, 0, 1 << 20) == pair.source[: 1 << 20].tobytes()


def test_two_workers_that_probe_each_other_at_once_both_get_their_answer(pair: Pair) -> None:
    received = np.zeros(1 << 20, dtype=np.uint8)
    token = pair.transport.register(received.ctypes.data, len(received))
    name = pair.peer.ask("connect", metadata=pair.transport.metadata().hex())
    pair.peer.tell("probe", peer=name, region=0, target=int(received.ctypes.data), length=len(received))
    ours = pair.transport.probe_wire(pair.name, pair.source.ctypes.data, pair.target, 1 << 20)
    pair.transport.notices()
    end = time.monotonic() + ANSWER_LIMIT_S
    while not received.any() and time.monotonic() < end:
        pair.transport.notices()
    stop = threading.Event()
    driver = threading.Thread(target=lambda: [pair.transport.notices() for _ in iter(lambda: stop.wait(0.0005), True)])
    driver.start()
    theirs = pair.peer.answer()
    stop.set()
    driver.join()
    assert (ours, theirs) == (WIRES[pair.kind], WIRES[pair.kind].value)
    pair.transport.deregister(token)


def test_a_worker_can_write_to_itself(pair: Pair) -> None:
    received = np.zeros(1 << 20, dtype=np.uint8)
    token = pair.transport.register(received.ctypes.data, len(received))
    own = pair.transport.connect(pair.transport.metadata())
    address = row(pair.source.ctypes.data)
    write = post(pair.transport, own, address, row(received.ctypes.data), row(len(received)), b"self")
    arrived: list[tuple[str, bytes]] = []
    end = time.monotonic() + ANSWER_LIMIT_S
    told = [(own, notice) for notice in pair.told(b"self")]
    while (pair.transport.state(write) is WriteState.OPEN or arrived != told) and time.monotonic() < end:
        arrived += pair.transport.notices()
    assert arrived == told
    assert pair.transport.release(write)
    assert received.tobytes() == pair.source[: 1 << 20].tobytes()
    pair.transport.disconnect(own)
    pair.transport.deregister(token)


def test_a_transport_that_nobody_polls_uses_no_processor(pair: Pair) -> None:
    pair.peer.ask("idle")

    def is_quiet() -> bool:
        """Whether it uses at most one tick of 10 ms in half a second. On a busy host stolen time counts as its own."""
        before = pair.peer.cpu_ticks()
        threading.Event().wait(0.5)
        return pair.peer.cpu_ticks() - before <= 1

    quiet = any(is_quiet() for _ in range(10))
    pair.peer.ask("notices", count=0)
    assert quiet


def test_a_notice_that_comes_before_its_sender_is_connected_waits_for_that(fresh: Pair) -> None:
    other = fresh.start_peer(f"early-{fresh.kind}")
    received = np.zeros(4096, dtype=np.uint8)
    fresh.transport.register(received.ctypes.data, len(received))
    other.ask("register", length=4096, fill=POISON)
    name = other.ask("connect", metadata=fresh.transport.metadata().hex())
    target = int(received.ctypes.data)
    other.tell("post", peer=name, region=0, target=target, length=4096, notice=b"early".hex())
    arrived: list[tuple[str, bytes]] = []
    end = time.monotonic() + ANSWER_LIMIT_S
    while not received.all() and time.monotonic() < end:
        arrived += fresh.transport.notices()
    stop = threading.Event()
    driver = threading.Thread(
        target=lambda: [arrived.extend(fresh.transport.notices()) for _ in iter(lambda: stop.wait(0.0005), True)]
    )
    driver.start()
    assert other.answer() == "done"
    stop.set()
    driver.join()
    assert arrived == []
    sender = fresh.transport.connect(other.metadata())
    told = [(sender, notice) for notice in fresh.told(b"early")]
    while arrived != told and time.monotonic() < end:
        arrived += fresh.transport.notices()
    assert arrived == told


def test_a_peer_that_was_disconnected_is_refused_and_its_notices_are_dropped(fresh: Pair) -> None:
    received = np.zeros(4096, dtype=np.uint8)
    fresh.transport.register(received.ctypes.data, len(received))
    name = fresh.peer.ask("connect", metadata=fresh.transport.metadata().hex())
    fresh.transport.disconnect(fresh.name)
    fresh.transport.disconnect("a stranger")
    with pytest.raises(TransportError, match="not connected"):
        fresh.write(0, fresh.target, 64)
    fresh.peer.tell("post", peer=name, region=0, target=int(received.ctypes.data), length=4096, notice=b"late".hex())
    arrived: list[tuple[str, bytes]] = []
    stop = threading.Event()
    driver = threading.Thread(
        target=lambda: [arrived.extend(fresh.transport.notices()) for _ in iter(lambda: stop.wait(0.0005), True)]
    )
    driver.start()
    assert fresh.peer.answer() == "done"
    stop.set()
    driver.join()
    assert fresh.transport.notices() == arrived == []
    assert fresh.transport.connect(fresh.peer.metadata()) == fresh.name
    assert fresh.write(0, fresh.target, 64) is WriteState.DONE
    assert fresh.transport.notices() == []


def test_a_peer_that_restarted_under_its_name_replaces_the_one_that_died(fresh: Pair) -> None:
    assert fresh.write(0, fresh.target, 4096) is WriteState.DONE
    fresh.peer.signal(signal.SIGKILL)
    again = fresh.start_peer(f"fresh-{fresh.kind}-peer")
    again.ask("connect", metadata=fresh.transport.metadata().hex())
    target = again.ask("register", length=4096, fill=POISON)
    assert fresh.transport.connect(again.metadata()) == fresh.name
    assert fresh.write(1000, target, 4096, b"again") is WriteState.DONE
    assert again.read(0, 0, 4096) == fresh.source[1000:5096].tobytes()
    told = fresh.told(b"again")
    assert [bytes.fromhex(item["notice"]) for item in again.wait_notices(len(told))] == told


def test_a_write_to_a_dead_peer_fails_others_go_on_and_the_process_ends_well(fresh: Pair) -> None:
    sender = fresh.start_peer(f"sender-{fresh.kind}")
    sender.ask("register", length=1 << 20, fill=1)
    dying = sender.ask("connect", metadata=fresh.peer.metadata().hex())
    arguments = {"peer": dying, "region": 0, "target": fresh.target, "length": 1 << 20, "notice": b"n".hex()}
    assert sender.ask("post", **arguments) == "done"
    fresh.peer.signal(signal.SIGKILL)
    assert sender.ask("post", **arguments) in ("failed", "TransportError")
    other = fresh.start_peer(f"other-{fresh.kind}")
    target = other.ask("register", length=1 << 20, fill=POISON)
    arguments |= {"peer": sender.ask("connect", metadata=other.metadata().hex()), "target": target}
    assert sender.ask("post", **arguments) == "done"
    assert other.read(0, 0, 1 << 20) == b"\1" * (1 << 20)
    assert sender.close() == 0


def test_no_write_to_a_dead_peer_is_ever_done_however_small(fresh: Pair) -> None:
    assert fresh.write(0, fresh.target, 4096) is WriteState.DONE
    fresh.peer.signal(signal.SIGKILL)
    for length in (64, 4096, 1 << 20):
        with contextlib.suppress(TransportError):
            assert fresh.write(0, fresh.target, length, b"n") is WriteState.FAILED


# Other transports leave no write open if the peer does not read, or have their own tests for it.
@pytest.mark.parametrize("fresh", NIXL, indirect=True)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_write_that_its_peer_never_takes_ends_at_the_latest_when_the_peer_is_disconnected(
    fresh: Pair, end: signal.Signals
) -> None:
    assert fresh.transport.probe_wire(fresh.name, fresh.source.ctypes.data, fresh.target, 4096) is WIRES[fresh.kind]
    fresh.peer.signal(signal.SIGSTOP)
    address, target = row(fresh.source.ctypes.data), row(fresh.target)
    writes = []
    # Notices fill a shared queue of some hundred entries; bytes over TCP fill the kernel's buffers.
    length = REGION_BYTES if WIRES[fresh.kind] is Wire.TCP else 64
    while not writes or (fresh.transport.state(writes[-1]) is not WriteState.OPEN and len(writes) < 10_000):
        writes.append(post(fresh.transport, fresh.name, address, target, row(length), b"waits"))
    assert fresh.transport.state(writes[-1]) is WriteState.OPEN
    fresh.peer.signal(end)
    fresh.transport.disconnect(fresh.name)
    assert fresh.transport.state(writes[-1]) is WriteState.FAILED
    # Inside a host bytes move within our own calls, so none can arrive later.
    assert fresh.transport.release(writes[-1]) is (WIRES[fresh.kind] is Wire.SHARED_MEMORY)
    other = fresh.start_peer(f"other-{fresh.kind}")
    target_of_other = other.ask("register", length=4096, fill=POISON)
    name = fresh.transport.connect(other.metadata())
    assert fresh.write(0, target_of_other, 4096, peer=name) is WriteState.DONE


def test_a_closed_transport_stays_closed_and_says_so(fresh: Pair) -> None:
    address = row(fresh.source.ctypes.data)
    write = post(fresh.transport, fresh.name, address, row(fresh.target), row(64), b"")
    finish(fresh.transport, write)
    fresh.transport.close()
    fresh.transport.close()
    fresh.transport.release(write)
    fresh.transport.disconnect(fresh.name)
    with pytest.raises(TransportError, match="closed"):
        post(fresh.transport, fresh.name, address, row(fresh.target), row(64), b"")
    with pytest.raises(TransportError, match="closed"):
        fresh.transport.metadata()
    with pytest.raises(TransportError, match="closed"):
        fresh.transport.notices()


def test_metadata_of_another_transport_is_refused() -> None:
    loopback = create("Loopback", "a")
    with pytest.raises(PeerMetadataError):
        loopback.connect(msgspec.msgpack.encode(["something", "else"]))
    loopback.close()


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(TransportError, match="Carrier"):
        create("Carrier pigeon", "a")
