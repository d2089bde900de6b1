"""Tests properties of Mooncake alone: completion of its writes, attacks on its ports, and its limits."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_peer import ANSWER_LIMIT_S, PeerProcess, finish, mooncake_ports, post, row, strike

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import mooncake_engine
from longshore_agent.transports.base import WriteState
from longshore_agent.transports.mooncake import MooncakeTransport
from longshore_agent.transports.mooncake_engine import in_brackets, remote_address
from longshore_agent.transports.own_network import numeric
from longshore_agent.transports.state import Regions, seal
from longshore_wire.names import Wire

REGION_BYTES = 16 << 20
BEATS_MIN = 10
TRIES_MAX = 20
POISON = 0xA5
MAGIC = b"LSMOON01"
# The library's framing of a write: bytes, address, operation with the flag that asks for an acknowledgement.
WRITE = struct.Struct("<QQB7x")
ACKNOWLEDGED_WRITE = 0x81
ACKNOWLEDGEMENT = struct.pack("<Q", 0x4D435456 << 32)


class Scene:
    """A transport of this process with one region, connected to a peer process with one region of poison."""

    def __init__(self, name: str) -> None:
        self.peer = PeerProcess("Mooncake", f"{name}-peer")
        self.transport = MooncakeTransport(name)
        self.source = np.random.default_rng(5).integers(0, 256, REGION_BYTES, dtype=np.uint8)
        self.transport.register(self.source.ctypes.data, REGION_BYTES)
        self.target: int = self.peer.ask("register", length=REGION_BYTES, fill=POISON)
        self.name = self.transport.connect(self.peer.metadata())

    def post(self, length: int, offset: int = 0):
        address = self.source.ctypes.data + offset
        return post(self.transport, self.name, row(address), row(self.target + offset), row(length), b"")

    def close(self) -> None:
        self.transport.close()
        if self.peer.process.poll() is None:
            self.peer.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(request.node.name[:60])
    yield scene
    scene.close()


def exchange(link: socket.socket, data: bytes, answer_bytes: int) -> bytes:
    link.settimeout(ANSWER_LIMIT_S)
    link.sendall(data)
    answer = b""
    while len(answer) < answer_bytes and (part := link.recv(answer_bytes - len(answer))):
        answer += part
    return answer


def test_a_write_that_fits_into_the_sockets_is_not_done_before_its_target_has_it(scene: Scene) -> None:
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE
    scene.peer.signal(signal.SIGSTOP)
    write = scene.post(4096, offset=8192)
    assert finish(scene.transport, write, limit_s=0.5) is WriteState.OPEN
    assert not scene.transport.release(write)
    scene.peer.signal(signal.SIGCONT)
    assert finish(scene.transport, write) is WriteState.DONE
    assert scene.transport.release(write)
    assert scene.peer.read(0, 8192, 4096) == scene.source[8192:12288].tobytes()


def test_the_protocol_that_acknowledges_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportError, match="MC_TCP_PROTO"):
        MooncakeTransport("old")


def test_a_healthy_transport_logs_nothing_when_it_starts_and_other_lines_are_kept(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    MooncakeTransport("quiet").close()
    assert capfd.readouterr().err == ""
    with mooncake_engine._without_usual_lines():
        os.write(2, b"E1128 a.cpp:1] Local segment descriptor not found\nE1128 a.cpp:2] no port is free\n")
    assert capfd.readouterr().err == "E1128 a.cpp:2] no port is free\n"
    # Whoever asks for more lines gets all of them at once.
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    with mooncake_engine._without_usual_lines():
        os.write(2, b"E1128 a.cpp:1] Local segment descriptor not found\n")
        assert "descriptor not found" in capfd.readouterr().err


def test_an_open_write_ends_by_a_disconnect_and_is_not_settled(scene: Scene) -> None:
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE
    scene.peer.signal(signal.SIGSTOP)
    write = scene.post(REGION_BYTES)
    scene.transport.disconnect(scene.name)
    assert scene.transport.state(write) is WriteState.FAILED
    assert not scene.transport.release(write)
    assert "disconnected before 1 of its pieces" in write.error
    scene.peer.signal(signal.SIGCONT)


def test_a_first_write_to_a_stopped_peer_holds_up_neither_its_poster_nor_writes_to_others(scene: Scene) -> None:
    other = PeerProcess("Mooncake", "awake")
    target = other.ask("register", length=4096, fill=POISON)
    name = scene.transport.connect(other.metadata())
    scene.peer.signal(signal.SIGSTOP)
    stuck = scene.post(4096)
    write = post(scene.transport, name, row(scene.source.ctypes.data), row(target), row(4096), b"")
    assert finish(scene.transport, write) is WriteState.DONE
    assert scene.transport.state(stuck) is WriteState.OPEN
    scene.peer.signal(signal.SIGCONT)
    assert finish(scene.transport, stuck) is WriteState.DONE
    other.close()


def test_more_pieces_than_the_library_takes_all_arrive_and_threads_go_on_meanwhile(scene: Scene) -> None:
    count, size = 12000, 512
    target = scene.peer.ask("register", length=count * size, fill=POISON)
    scene.transport.connect(scene.peer.metadata())
    steps = np.arange(count, dtype=np.uint64) * np.uint64(size)
    order = np.random.default_rng(2).permutation(count)
    sources, targets = (np.uint64(scene.source.ctypes.data) + steps)[order], (np.uint64(target) + steps)[order]

    def beats() -> int:
        """Write all pieces; return how often another thread ran meanwhile."""
        write = post(scene.transport, scene.name, sources, targets, np.full(count, size, dtype=np.uint64), b"")
        stop, counted = threading.Event(), itertools.count()
        heart = threading.Thread(target=lambda: [next(counted) for _ in iter(lambda: stop.wait(0.001), True)])
        heart.start()
        assert finish(scene.transport, write) is WriteState.DONE
        stop.set()
        heart.join()
        return next(counted)

    # If the call kept Python's GIL, there would be only one or two beats. On a busy machine the thread may get no processor.
    assert any(beats() >= BEATS_MIN for _ in range(TRIES_MAX))
    assert scene.peer.read(1, 0, count * size) == scene.source[: count * size].tobytes()


class CountingEngine:
    """The library's engine, with a count of open requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.open: set[int] = set()
        self.peak_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def transfer_submit_write(self, *arguments: Any) -> int:
        request: int = self._engine.transfer_submit_write(*arguments)
        self.open.add(request)
        self.peak_count = max(self.peak_count, len(self.open))
        return request

    def transfer_check_status(self, request: int) -> int:
        said: int = self._engine.transfer_check_status(request)
        if said:
            self.open.discard(request)
        return said


def test_no_more_than_a_thousand_requests_to_a_peer_are_under_way_however_many_writes_there_are(scene: Scene) -> None:
    count, size = 1500, 256
    target = scene.peer.ask("register", length=3 * count * size, fill=POISON)
    scene.transport.connect(scene.peer.metadata())
    engine = scene.transport._engine = CountingEngine(scene.transport._engine)
    steps = np.arange(3 * count, dtype=np.uint64) * np.uint64(size)
    sources, lengths = np.uint64(scene.source.ctypes.data) + steps, np.full(count, size, dtype=np.uint64)
    writes = [
        post(scene.transport, scene.name, sources[part], np.uint64(target) + steps[part], lengths, b"")
        for part in (slice(turn * count, (turn + 1) * count) for turn in range(3))
    ]
    assert [finish(scene.transport, write) for write in writes] == [WriteState.DONE] * 3
    assert 100 < engine.peak_count <= 1000
    assert scene.peer.read(1, 0, 3 * count * size) == scene.source[: 3 * count * size].tobytes()


def test_a_write_to_a_peer_that_died_fails_soon_and_says_where_to_and_how_much(scene: Scene) -> None:
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE
    scene.peer.signal(signal.SIGKILL)
    write = scene.post(4096)
    assert finish(scene.transport, write) is WriteState.FAILED
    assert not scene.transport.release(write)
    assert f"peer {scene.name!r} at 127.0.0.1:" in write.error
    assert "1 of them, 4096 bytes" in write.error


def test_a_peer_that_died_before_the_first_write_is_not_reached_and_nothing_was_begun(scene: Scene) -> None:
    scene.peer.signal(signal.SIGKILL)
    write = scene.post(4096)
    assert finish(scene.transport, write) is WriteState.FAILED
    assert scene.transport.release(write)
    assert "cannot be reached" in write.error


def test_a_write_that_had_begun_lands_after_its_memory_was_deregistered(scene: Scene) -> None:
    half = 32768
    with socket.create_connection(("127.0.0.1", mooncake_ports(scene.peer.process.pid)["data"])) as link:
        link.sendall(WRITE.pack(2 * half, scene.target, ACKNOWLEDGED_WRITE) + b"\1" * half)
        end = time.monotonic() + ANSWER_LIMIT_S
        while scene.peer.read(0, 0, 1) != b"\1" and time.monotonic() < end:
            pass
        scene.peer.ask("deregister", region=0)
        assert exchange(link, b"\2" * half, len(ACKNOWLEDGEMENT)) == ACKNOWLEDGEMENT
    assert scene.peer.read(0, half, half) == b"\2" * half


def test_junk_on_the_data_port_changes_no_memory_and_ends_nothing(scene: Scene) -> None:
    port = mooncake_ports(scene.peer.process.pid)["data"]
    for junk in (
        os.urandom(1000),
        b"short",
        WRITE.pack(1 << 40, 1, ACKNOWLEDGED_WRITE),
        WRITE.pack((1 << 64) - 1, scene.target, ACKNOWLEDGED_WRITE),
        WRITE.pack(4096, scene.target + REGION_BYTES - 4095, ACKNOWLEDGED_WRITE) + b"x" * 4096,
    ):
        with socket.create_connection(("127.0.0.1", port)) as link, contextlib.suppress(OSError):
            # A refused connection is closed, maybe before all of it was sent.
            link.sendall(junk)
            link.shutdown(socket.SHUT_WR)
            link.settimeout(ANSWER_LIMIT_S)
            link.recv(8)
    assert scene.peer.read(0, 0, REGION_BYTES) == bytes([POISON]) * REGION_BYTES
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE


def test_junk_on_the_handshake_port_ends_that_process_and_no_other(scene: Scene) -> None:
    """A fact about the library, not a contract of ours: the reason why only pods of the deployment may reach the port."""
    other = PeerProcess("Mooncake", "bystander")
    target = other.ask("register", length=4096, fill=POISON)
    name = scene.transport.connect(other.metadata())
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE
    strike(mooncake_ports(scene.peer.process.pid)["handshake"])
    assert scene.peer.process.wait(ANSWER_LIMIT_S) == -signal.SIGABRT
    assert finish(scene.transport, scene.post(4096)) is WriteState.FAILED
    write = post(scene.transport, name, row(scene.source.ctypes.data), row(target), row(4096), b"")
    assert finish(scene.transport, write) is WriteState.DONE
    assert other.close() == 0


@pytest.mark.parametrize("answer", [b"\4[]", b"\1[]", b'\1{"buffers": 7}', b"\4" + b"[" * 4000, b"nonsense", b""])
def test_a_peer_that_answers_with_junk_fails_the_write_and_nothing_else(scene: Scene, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    link.recv(4096)
                    link.sendall(struct.pack("<Q", len(answer)) + answer)

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        name = scene.transport.connect(seal(MAGIC, ["liar", "life", "", "127.0.0.1", port, [(4096, 4096)]]))
        write = post(scene.transport, name, row(scene.source.ctypes.data), row(4096), row(4096), b"")
        assert finish(scene.transport, write) is WriteState.FAILED
        server.shutdown(socket.SHUT_RDWR)
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE


def test_a_later_life_at_an_address_that_is_known_is_met_anew(scene: Scene) -> None:
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE
    fields = msgspec.msgpack.decode(scene.peer.metadata()[len(MAGIC) + 16 :])
    assert scene.transport.connect(seal(MAGIC, [fields[0], "another life", *fields[2:]])) == scene.name
    write = scene.post(4096, offset=4096)
    assert finish(scene.transport, write) is WriteState.DONE
    assert write.peer.address == f"{fields[3]}:0{fields[4]}"
    assert scene.peer.read(0, 4096, 4096) == scene.source[4096:8192].tobytes()


def test_lives_without_end_at_one_address_are_refused_and_the_known_ones_stay(scene: Scene) -> None:
    fields = msgspec.msgpack.decode(scene.peer.metadata()[len(MAGIC) + 16 :])
    for number in range(999):
        scene.transport.connect(seal(MAGIC, ["restless", f"life {number}", *fields[2:]]))
    with pytest.raises(PeerMetadataError, match="restart this worker"):
        scene.transport.connect(seal(MAGIC, ["restless", "one more life", *fields[2:]]))
    assert finish(scene.transport, scene.post(4096)) is WriteState.DONE


def test_the_wire_is_found_although_others_write_at_once(scene: Scene) -> None:
    stop = threading.Event()

    def lane() -> None:
        while not stop.is_set():
            finish(scene.transport, scene.post(1 << 20, offset=2 << 20))

    lanes = [threading.Thread(target=lane) for _ in range(2)]
    for each in lanes:
        each.start()
    found = scene.transport.probe_wire(scene.name, scene.source.ctypes.data, scene.target, 1 << 20)
    stop.set()
    for each in lanes:
        each.join()
    assert found is Wire.TCP


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("localhost", 1),
        ("0.0.0.0", 1),
        ("::", 1),
        ("224.0.0.1", 1),
        ("10.0.0.1:5/x", 1),
        ("10.0.0.1", 0),
        ("::1", 65536),
    ],
)
def test_an_address_that_no_worker_can_have_is_refused(host: str, port: int) -> None:
    with pytest.raises(PeerMetadataError):
        remote_address(host, port, 0)


def test_addresses_of_both_protocols_are_written_as_the_library_reads_them() -> None:
    assert remote_address("10.1.2.3", 15000, 0) == "10.1.2.3:15000"
    assert remote_address("[fd00::1]", 15000, 2) == "[fd00::1]:0015000"
    assert in_brackets(numeric("127.0.0.1")) == "127.0.0.1"
    assert in_brackets(numeric("::1")) == "[::1]"


def test_impossible_memory_in_metadata_is_refused_by_the_peers_name(scene: Scene) -> None:
    for regions in ([(4096, 0)], [(4096, 4096), (8191, 1)], [((1 << 64) - 1, 2)]):
        with pytest.raises(PeerMetadataError, match="liar"):
            scene.transport.connect(seal(MAGIC, ["liar", "life", "", "127.0.0.1", 1, regions]))


def test_memory_that_overlaps_what_is_registered_is_refused_and_can_be_registered_later(scene: Scene) -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    token = scene.transport.register(memory.ctypes.data, 4096)
    with pytest.raises(TransportError, match="overlap"):
        scene.transport.register(memory.ctypes.data + 1024, 4096)
    scene.transport.register(memory.ctypes.data + 4096, 4096)
    scene.transport.deregister(token)
    scene.transport.register(memory.ctypes.data, 4096)


def test_pieces_lie_inside_regions_exactly_up_to_their_edges_and_never_across_them() -> None:
    regions = Regions([(1000, 100), (1100, 50), (1 << 40, 1 << 30)])

    def stray(*pieces: tuple[int, int]) -> int | None:
        return regions.stray(*(np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True)))

    assert stray((1000, 100), (1100, 50), (1149, 1), (1 << 40, 1 << 30)) is None
    assert stray((1000, 100), (1099, 2)) == 1
    assert stray((999, 1)) == stray((1150, 1)) == stray((1000, 1 << 63)) == 0
    assert stray(((1 << 64) - 8, 16)) == stray((1140, (1 << 64) - 1)) == 0
    assert Regions().stray(row(1), row(1)) == 0
