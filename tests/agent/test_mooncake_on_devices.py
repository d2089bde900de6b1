"""Tests Mooncake's transport for GPU memory with a fake of the library's engine: its lifetime, its writes, its refusals.

tests/gpu/test_mooncake_on_gpu.py tests the library itself, with a GPU if there is one.
"""

from __future__ import annotations

import ctypes
import re
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_scene import EventScene
from fake_device import outbound_slab
from transport_peer import finish, post, row

from longshore_agent.errors import TransportError
from longshore_agent.memory.cuda import Device
from longshore_agent.settings import Settings
from longshore_agent.transport_choice import make_transport
from longshore_agent.transports import mooncake_engine, nvml
from longshore_agent.transports.base import Pieces, WriteState
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.mooncake import MooncakeTransport
from longshore_agent.transports.mooncake_engine import MooncakeMetadata, reach_fault
from longshore_agent.transports.own_network import host_identity
from longshore_agent.transports.state import seal
from longshore_spec.agent_config import Backend
from longshore_wire.errors import Reason
from longshore_wire.names import Wire
from longshore_wire.peer_messages import RegionInfo
from longshore_wire.slabs import slab_bytes

SIZE = 1 << 20
LIMIT_S = 120.0
REFUSED = ("MC_FORCE_TCP", "MC_FORCE_SHM", "MC_USE_TENT", "MC_USE_TEV1", "MC_SLICE_TIMEOUT")


class ScriptedEngine:
    """A fake of the library's engine. The test completes its copies."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.requests = 0

    def get_rpc_port(self) -> int:
        return 12345

    def register_memory(self, address: int, length: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def send_probe(self, address: str) -> int:
        return 0

    def transfer_submit_write(self, address: str, source: int, target: int, length: int) -> int:
        self.scene.submitted.append((source, target, length))
        self.scene.copy(source, target, length)
        self.requests += 1
        return self.requests

    def transfer_check_status(self, request: int) -> int:
        self.scene.asked.append(request)
        return 0 if self.scene.held or self.scene.stream else 1


class Scene:
    """A writing and a receiving transport, with one region each."""

    def __init__(self) -> None:
        self.held = False
        self.now_ns = 0
        self.asked: list[int] = []
        self.stream: list[tuple[int, int, int]] = []  # queued copies, if a test queues them
        self.submitted: list[tuple[int, int, int]] = []
        self.writers: list[weakref.ref[ScriptedEngine]] = []
        self.copy: Callable[[int, int, int], Any] = lambda source, target, length: ctypes.memmove(
            target, source, length
        )

    def begin(self) -> None:
        self.near, self.far = (self.make(name) for name in ("near", "far"))
        self.source = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
        self.target = np.zeros(SIZE, dtype=np.uint8)
        self.near.register(self.source.ctypes.data, SIZE)
        self.far.register(self.target.ctypes.data, SIZE)
        self.peer = self.near.connect(self.far.metadata())

    def make(self, name: str) -> MooncakeTransport:
        return MooncakeTransport(name, device_index=0, device=f"GPU of {name}")

    def writer(self, host: str) -> ScriptedEngine:
        engine = ScriptedEngine(self)
        self.writers.append(weakref.ref(engine))
        return engine

    def post(self, length: int = SIZE) -> Any:
        return post(self.near, self.peer, *self.pieces(length), b"")

    def pieces(self, length: int = SIZE) -> Pieces:
        return Pieces.one(self.source.ctypes.data, self.target.ctypes.data, length)

    def living(self) -> list[bool]:
        return [engine() is not None for engine in self.writers]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene()
    monkeypatch.setattr(mooncake_engine, "start_on_device", lambda host: ScriptedEngine(scene))
    monkeypatch.setattr(mooncake_engine, "start_writer", scene.writer)
    scene.begin()
    yield scene
    scene.held = False
    scene.near.close()
    scene.far.close()


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s
        select.select([], [], [], 0.005)


def test_an_engine_writes_to_one_life_of_a_peer_and_goes_with_it(scene: Scene) -> None:
    assert finish(scene.near, scene.post()) is WriteState.DONE
    assert np.array_equal(scene.target, scene.source)
    assert scene.living() == [True]
    scene.near.disconnect(scene.peer)
    wait_until(lambda: scene.living() == [False])
    scene.near.connect(scene.far.metadata())
    assert finish(scene.near, scene.post()) is WriteState.DONE
    assert scene.living() == [False, True]


def test_an_engine_stays_while_a_copy_of_it_runs_after_its_peer_went(scene: Scene) -> None:
    assert finish(scene.near, scene.post()) is WriteState.DONE
    scene.held = True
    write = scene.post()
    scene.near.disconnect(scene.peer)
    assert scene.near.state(write) is WriteState.FAILED
    assert "disconnected" in write.error
    assert not scene.near.release(write)
    unmapper = next(each for each in threading.enumerate() if each.name == "mooncake-unmapper")
    unmapper.join(0.2)
    assert scene.living() == [True]
    scene.held = False
    wait_until(lambda: scene.living() == [False])


def test_a_peer_that_registered_more_is_written_to_by_another_engine(scene: Scene) -> None:
    assert finish(scene.near, scene.post()) is WriteState.DONE
    assert scene.near.connect(scene.far.metadata()) == scene.peer
    assert finish(scene.near, scene.post()) is WriteState.DONE
    assert scene.living() == [True]
    more = np.zeros(4096, dtype=np.uint8)
    scene.far.register(more.ctypes.data, 4096)
    scene.near.connect(scene.far.metadata())
    source, _, _ = scene.pieces()
    write = post(scene.near, scene.peer, source, row(more.ctypes.data), row(4096), b"")
    assert finish(scene.near, write) is WriteState.DONE
    assert np.array_equal(more, scene.source[:4096])
    wait_until(lambda: scene.living() == [False, True])


def test_a_draft_begins_nothing_until_it_is_started_and_one_that_is_given_back_never_does(scene: Scene) -> None:
    dropped, started = (scene.near.draft(scene.peer, scene.pieces(), b"") for _ in range(2))
    assert scene.near.release(dropped)
    assert scene.near.state(started) is WriteState.DRAFT
    assert scene.submitted == []
    scene.near.start(started)
    assert finish(scene.near, started) is WriteState.DONE
    assert scene.near.release(started)
    assert scene.near.release(dropped)
    assert len(scene.submitted) == 1
    with pytest.raises(TransportError, match="not in registered memory"):
        scene.near.draft(scene.peer, scene.pieces(SIZE + 1), b"")


def test_a_draft_from_before_its_peer_registered_more_fails_and_begins_nothing(scene: Scene) -> None:
    draft = scene.near.draft(scene.peer, scene.pieces(), b"")
    more = np.zeros(4096, dtype=np.uint8)
    scene.far.register(more.ctypes.data, 4096)
    scene.near.connect(scene.far.metadata())
    scene.near.start(draft)
    assert scene.near.state(draft) is WriteState.FAILED
    assert draft.error
    assert scene.near.release(draft)
    assert scene.submitted == []


@pytest.mark.parametrize(("taken_ns", "wire"), [(40_000, Wire.CUDA_IPC), (300_000, None)])
def test_of_bytes_that_no_network_saw_only_fast_ones_went_over_cuda_ipc(
    taken_ns: int, wire: Wire, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fake clock on which a copy takes that long.
    scene.copy = lambda *_: setattr(scene, "now_ns", scene.now_ns + taken_ns)
    monkeypatch.setattr("time.perf_counter_ns", lambda: scene.now_ns)
    source, target, length = (int(each[0]) for each in scene.pieces())
    assert scene.near.probe_wire(scene.peer, source, target, length) is wire


def test_fast_bytes_between_gpus_that_nvlink_joins_went_over_nvlink(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[str, str]] = []
    monkeypatch.setattr(nvml, "joined_by_nvlink", lambda *devices: not joined.append(devices))
    scene.copy = lambda *_: setattr(scene, "now_ns", scene.now_ns + 40_000)
    monkeypatch.setattr("time.perf_counter_ns", lambda: scene.now_ns)
    source, target, length = (int(each[0]) for each in scene.pieces())
    assert scene.near.probe_wire(scene.peer, source, target, length) is Wire.NVLINK
    # The peer's GPU came with its metadata.
    assert joined == [("GPU of near", "GPU of far")]


def test_bytes_that_went_over_tcp_are_told_as_such(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        reader, _ = server.accept()

        def read() -> None:
            count = 0
            while data := reader.recv(1 << 16):
                count += len(data)
                if count % SIZE == 0:
                    reader.sendall(b"!")

        thread = threading.Thread(target=read)
        thread.start()

        def send(source: int, target: int, length: int) -> None:
            link.sendall(bytes(length))
            # The answer acknowledges every byte, as the kernel's counters show.
            link.recv(1)

        scene.copy = send
        source, target, length = (int(each[0]) for each in scene.pieces())
        found = scene.near.probe_wire(scene.peer, source, target, length)
        link.shutdown(socket.SHUT_RDWR)
        thread.join()
        reader.close()
    assert found is Wire.TCP


def test_what_a_probe_leaves_open_is_never_asked_after_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore_agent.transports.probe._LIMIT_NS", 50_000_000)
    assert finish(scene.near, scene.post()) is WriteState.DONE
    scene.held = True
    source, target, length = (int(each[0]) for each in scene.pieces())
    assert scene.near.probe_wire(scene.peer, source, target, length) is None
    assert 2 in scene.asked
    scene.held = False
    scene.asked.clear()
    assert finish(scene.near, scene.post()) is WriteState.DONE
    scene.near.disconnect(scene.peer)
    wait_until(lambda: scene.living() == [False])
    assert set(scene.asked) == {3}


def test_lanes_go_on_although_writes_of_one_stream_end_together_and_their_targets_are_told_by_message(
    scene: Scene,
) -> None:
    payload_bytes, slabs = SIZE // 16 - 4096, 12
    step = slab_bytes(payload_bytes)
    events = EventScene(memory_bytes=4 * step, transport=scene.near, base=scene.source.ctypes.data)
    scene.copy = lambda *piece: scene.stream.append(piece)
    for number in range(slabs):
        slab = outbound_slab(number, payload_bytes)
        slab.peer_name, slab.transport_announces = scene.peer, False
        slab.attach = SimpleNamespace(ring=RegionInfo(scene.target.ctypes.data, SIZE))
        events.runner.send(slab)
    peak_count = 0
    for turn in range(40 * slabs):
        for copy in events.device.gathers:
            if not copy.done:
                scene.source[copy.begin_bytes : copy.begin_bytes + step] = copy.slab.effect.slab + 1
                copy.done = True
        peak_count = max(peak_count, len(scene.stream))
        # The library reports a write as complete when all work on its stream is complete.
        if turn % 4 == 3:
            for source, target, length in scene.stream:
                ctypes.memmove(target, source, length)
            scene.stream.clear()
        events.turn()
    assert sorted(events.outcomes()) == [(number, "", False) for number in range(slabs)]
    assert all(end.must_announce for end in events.ended)
    assert 1 < peak_count < 4
    assert not events.runner.busy
    for slab in range(slabs):
        assert set(scene.target[slab * step : (slab + 1) * step].tolist()) == {slab + 1}


def test_over_cuda_ipc_nothing_notifies(scene: Scene) -> None:
    assert not scene.near.notifies


def test_hosts_and_kinds_of_memory_that_cannot_be_reached_are_known_by_name() -> None:
    here, elsewhere = host_identity(), "another kernel"
    on_device = MooncakeMetadata("peer", "life", here, "127.0.0.1", 5, (), 0)
    on_host = MooncakeMetadata("peer", "life", here, "127.0.0.1", 5, ())
    assert reach_fault(on_device, 1) == reach_fault(on_host, -1) == ""
    assert reach_fault(MooncakeMetadata("peer", "life", elsewhere, "10.0.0.1", 5, ()), -1) == ""
    far = reach_fault(MooncakeMetadata("peer", "life", elsewhere, "10.0.0.1", 5, (), 0), 0)
    assert re.search(r"'peer' is on another host.*use NIXL", far)
    for metadata, index in ((on_device, -1), (on_host, 0)):
        assert "two of a kind" in reach_fault(metadata, index)


def test_a_peer_with_memory_of_another_kind_is_known_and_only_its_writes_are_refused(scene: Scene) -> None:
    region = (scene.target.ctypes.data, scene.target.nbytes)
    other = MooncakeMetadata("host peer", "life", host_identity(), "127.0.0.1", 5, (region,))
    peer = scene.near.connect(seal(scene.near.magic, other))
    assert peer == "host peer"
    pieces = Pieces.one(scene.source.ctypes.data, *region)
    with pytest.raises(TransportError, match="two of a kind") as caught:
        scene.near.draft(peer, pieces, b"")
    assert caught.value.reason is Reason.UNSUPPORTED
    with pytest.raises(TransportError, match="two of a kind"):
        scene.near.probe_wire(peer, scene.source.ctypes.data, region[0], 1 << 10)
    assert scene.submitted == []
    scene.near.disconnect(peer)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REFUSED:
        monkeypatch.delenv(name, raising=False)
    # Restores the variables after the test.
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "1")


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("name", REFUSED)
def test_an_environment_that_leads_elsewhere_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(TransportError, match=f"{name} is set.*unset it") as caught:
        mooncake_engine.start_on_device(DataPorts())
    assert caught.value.reason is Reason.UNSUPPORTED


def any_device() -> Device:
    """A device that is never opened."""
    device = Device.__new__(Device)
    device.index, device.name = 0, ""
    return device


@pytest.mark.usefixtures("clean_environment")
def test_a_wheel_without_nvlink_is_refused_and_the_right_one_named() -> None:
    pytest.importorskip("mooncake.engine")
    settings = Settings(backend=Backend.MOONCAKE)
    with pytest.raises(TransportError, match=r"no NVLink transport: .*longshore-kv\[mooncake-cuda13\]") as caught:
        make_transport(settings, "worker", DataPorts(), any_device())
    assert caught.value.reason is Reason.UNSUPPORTED


def test_memory_of_a_gpu_is_refused_to_the_loopback() -> None:
    with pytest.raises(
        TransportError, match=r"only NIXL and Mooncake move memory of a GPU: choose one of them$"
    ) as caught:
        make_transport(Settings(backend=Backend.LOOPBACK), "worker", DataPorts(), any_device())
    assert caught.value.reason is Reason.UNSUPPORTED
