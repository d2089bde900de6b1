"""Tests the loopback's faults on demand, by the target's memory and notices."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_peer import PeerProcess, post, row

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.base import WriteState
from longshore_agent.transports.loopback import (
    Fault,
    FaultKind,
    FaultPlan,
    LoopbackTransport,
    LoopbackWrite,
    parse_faults,
)
from longshore_agent.transports.process_memory import ProcessMemory, start_time
from longshore_agent.transports.state import seal

SIZE = 4096


class World:
    """Two transports of this process, memory on both sides, and the sender's fault plan."""

    def __init__(self) -> None:
        self.sender = LoopbackTransport("sender", FaultPlan())
        self.receiver = LoopbackTransport("receiver", FaultPlan())
        self.source = np.full(SIZE, 1, dtype=np.uint8)
        self.target = np.zeros(SIZE, dtype=np.uint8)
        self.sender.register(self.source.ctypes.data, SIZE)
        self.token = self.receiver.register(self.target.ctypes.data, SIZE)
        self.sender.connect(self.receiver.metadata())
        self.receiver.connect(self.sender.metadata())

    def post(self, notice: bytes = b"n") -> LoopbackWrite:
        source, target = self.source.ctypes.data, self.target.ctypes.data
        write: LoopbackWrite = post(self.sender, "receiver", row(source), row(target), row(SIZE), notice)
        return write

    def notices(self) -> list[bytes]:
        return [notice for _, notice in self.receiver.notices()]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.sender.close()
    world.receiver.close()


def test_a_dropped_notice_is_lost_though_the_bytes_land_and_the_next_one_arrives(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.DROP),))
    write = world.post(b"lost")
    assert world.sender.state(write) is WriteState.DONE
    assert world.target.all()
    world.post(b"kept")
    assert world.notices() == [b"kept"]


def test_a_damaged_write_succeeds_with_one_bit_changed_at_the_target(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.DAMAGE),))
    write = world.post()
    assert world.sender.state(write) is WriteState.DONE
    assert world.notices() == [b"n"]
    assert world.target.tolist() == [0] + [1] * (SIZE - 1)
    assert world.source.all()
    world.post()
    assert world.target.all()


def test_a_repeated_notice_arrives_twice(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.REPEAT),))
    world.post()
    assert world.notices() == [b"n", b"n"]


def test_a_mute_write_has_landed_and_nobody_hears_of_it_until_it_may_be_told(world: World, tmp_path: Path) -> None:
    until, mark = tmp_path / "go", tmp_path / "mark"
    world.sender.faults = FaultPlan((Fault(FaultKind.MUTE, until=str(until), mark=str(mark)),))
    write = world.post()
    assert mark.read_text() == "0 receiver\n"
    assert world.target.all()
    assert (world.sender.state(write), world.sender.release(write)) == (WriteState.OPEN, False)
    assert world.notices() == []
    until.touch()
    assert world.sender.state(write) is WriteState.DONE
    assert world.notices() == [b"n"]


def test_a_rule_befalls_only_writes_that_are_posted_while_its_file_is_there(world: World, tmp_path: Path) -> None:
    when = tmp_path / "now"
    world.sender.faults = FaultPlan((Fault(FaultKind.FAIL, count=None, when=str(when)),))
    assert world.post().state is WriteState.DONE
    when.touch()
    assert world.post().state is WriteState.FAILED
    when.unlink()
    assert world.post().state is WriteState.DONE


def test_a_delayed_write_stays_open_without_its_bytes_until_its_time(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.DELAY, delay_ns=3_600_000_000_000),))
    write = world.post()
    assert world.sender.state(write) is WriteState.OPEN
    assert not world.target.any()
    write.due_ns = 1
    assert world.sender.state(write) is WriteState.DONE
    assert world.target.all()
    assert world.notices() == [b"n"]


def test_a_failed_write_leaves_half_its_bytes_no_notice_and_is_settled(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.FAIL),))
    write = world.post()
    assert world.sender.state(write) is WriteState.FAILED
    assert "on demand" in write.error
    assert world.sender.release(write)
    assert world.target.sum() == SIZE // 2
    assert world.notices() == []


def test_late_bytes_land_after_release_and_after_the_target_was_deregistered(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.LATE),))
    write = world.post()
    assert world.sender.state(write) is WriteState.FAILED
    assert not world.sender.release(write)
    world.receiver.deregister(world.token)
    world.source[:] = 9
    assert not world.target.any()
    assert world.sender.let_go() == 1
    assert world.sender.release(write)
    assert (world.target == 1).all()
    assert world.notices() == []


def test_a_held_write_is_open_and_unsettled_until_it_is_let_go_and_others_pass_it(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.HOLD),))
    held = world.post(b"held")
    passing = world.post(b"passing")
    assert world.sender.state(held) is WriteState.OPEN
    assert not world.sender.release(held)
    assert world.sender.state(passing) is WriteState.DONE
    world.target[:] = 0
    assert world.sender.let_go(held.number) == 1
    assert world.sender.state(held) is WriteState.DONE
    assert world.sender.release(held)
    assert world.target.all()
    assert world.notices() == [b"passing", b"held"]


def test_a_held_write_never_lands_once_its_peer_is_disconnected(world: World) -> None:
    world.sender.faults = FaultPlan((Fault(FaultKind.HOLD),))
    held = world.post()
    world.sender.disconnect("receiver")
    assert world.sender.state(held) is WriteState.FAILED
    assert world.sender.release(held)
    assert world.sender.let_go() == 0
    assert not world.target.any()


def test_rules_count_writes_by_number_and_the_first_that_hits_wins() -> None:
    plan = FaultPlan((Fault(FaultKind.DROP, first=2, every=3, count=2), Fault(FaultKind.FAIL, count=None, peer="b")))
    hits = [(number, fault.kind) for number in range(12) if (fault := plan.fault_of(number, "a"))]
    assert hits == [(2, FaultKind.DROP), (5, FaultKind.DROP)]
    assert all(plan.fault_of(number, "b") is not None for number in range(12))
    assert plan.rules[0] == plan.fault_of(5, "b")


@pytest.mark.parametrize("text", ["{", "{}", '[{"kind": "explode"}]', '[{"kind": "drop", "frist": 1}]'])
def test_faults_that_cannot_be_read_are_refused_when_the_transport_is_made(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LONGSHORE_LOOPBACK_FAULTS", text)
    with pytest.raises(TransportError, match="LONGSHORE_LOOPBACK_FAULTS"):
        LoopbackTransport("a")


@pytest.mark.parametrize("text", ['[{"kind": "drop", "every": 0}]', '[{"kind": "hold", "count": 0}]'])
def test_faults_out_of_range_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(TransportError, match="every >= 1"):
        parse_faults(text)


def test_a_worker_process_is_told_by_its_environment_to_hold_a_write_and_by_a_file_to_let_it_go(tmp_path: Path) -> None:
    go, mark = tmp_path / "go", tmp_path / "held"
    faults = json.dumps([{"kind": "hold", "until": str(go), "mark": str(mark)}])
    peer = PeerProcess("Loopback", "worker", {"LONGSHORE_LOOPBACK_FAULTS": faults})
    transport = LoopbackTransport("here", FaultPlan())
    target = np.zeros(SIZE, dtype=np.uint8)
    transport.register(target.ctypes.data, SIZE)
    peer.ask("register", length=SIZE, fill=5)
    name = peer.ask("connect", metadata=transport.metadata().hex())
    transport.connect(peer.metadata())
    peer.tell("post", peer=name, region=0, target=int(target.ctypes.data), length=SIZE, notice=b"x".hex())
    while not (mark.exists() and mark.read_text()):
        assert peer.process.poll() is None
    assert mark.read_text() == "0 here\n"
    assert not target.any()
    go.touch()
    assert peer.answer() == "done"
    assert (target == 5).all()
    assert transport.notices() == [("worker", b"x")]
    assert peer.close() == 0
    transport.close()


def test_writes_stay_open_while_the_targets_queue_of_notices_is_full_and_none_is_lost(world: World) -> None:
    count = 700
    writes = [world.post(str(number).encode()) for number in range(count)]
    assert any(world.sender.state(write) is WriteState.OPEN for write in writes)
    arrived: list[bytes] = []
    while world.sender.state(writes[-1]) is WriteState.OPEN:
        arrived += world.notices()
    arrived += world.notices()
    assert all(world.sender.state(write) is WriteState.DONE for write in writes)
    assert sorted(arrived, key=int) == [str(number).encode() for number in range(count)]


def test_datagrams_of_strangers_are_nothing(world: World) -> None:
    name = b"\0longshore-loopback-" + world.receiver._life.encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        no_text = b"\x93\xa2\xff\xfe\xa4life\xc4\x01n"
        for junk in (b"", b"junk", no_text, os.urandom(1000), msgspec.msgpack.encode(["who", "life", b"notice"])):
            stranger.sendto(junk, name)
    world.post(b"ours")
    assert world.notices() == [b"ours"]


def fields_of(transport: LoopbackTransport) -> list[Any]:
    """A transport's metadata for peers: name, life, kernel, process, its start, memory."""
    found: list[Any] = msgspec.msgpack.decode(transport.metadata()[len(transport.magic) + 16 :])
    return found


def test_a_process_number_that_now_belongs_to_another_process_is_refused(world: World) -> None:
    fields = fields_of(world.receiver)
    fields[0], fields[1], fields[4] = "impostor", "life", fields[4] + 1
    with pytest.raises(PeerMetadataError, match="another one"):
        world.sender.connect(seal(LoopbackTransport.magic, fields))


def test_an_address_that_is_not_mapped_fails_the_write_and_nobody_crashes(world: World) -> None:
    fields = fields_of(world.receiver)
    fields[0], fields[1], fields[5] = "wrong", "life", [(1 << 20, SIZE)]
    world.sender.connect(seal(LoopbackTransport.magic, fields))
    write = post(world.sender, "wrong", row(world.source.ctypes.data), row(1 << 20), row(SIZE), b"n")
    assert world.sender.state(write) is WriteState.FAILED
    assert world.sender.release(write)


def test_a_process_is_let_go_only_when_no_thread_writes_to_it_any_more():
    data = np.zeros(8, dtype=np.uint8)
    memory = ProcessMemory(os.getpid(), start_time(os.getpid()))
    with memory._kept() as pidfd:
        memory.close()
        os.fstat(pidfd)
        with pytest.raises(TransportError, match="let go"):
            memory.write(row(data.ctypes.data), row(data.ctypes.data), row(8))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)
    assert not memory.lives
