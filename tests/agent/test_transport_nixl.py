"""Tests properties of NIXL alone: open writes, damaged metadata, and that it prints nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from transport_peer import TCP_ALONE, PeerProcess, finish, post, row

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import probe
from longshore_agent.transports.base import WriteState
from longshore_agent.transports.nixl import NixlTransport
from longshore_agent.transports.nixl_library import MAGIC, Envelope, check_reach, inbox_name, unpack, unreachable
from longshore_agent.transports.state import Metadata, seal, unseal
from longshore_wire.names import Wire

# More than the sockets between two processes can hold, so that a write to a stopped peer stays open.
LARGE_BYTES = 64 << 20


class Stopped:
    """A transport over TCP with a write posted to a stopped peer."""

    def __init__(self, name: str) -> None:
        self.peer = PeerProcess("NIXL", f"{name}-peer", {"UCX_TLS": TCP_ALONE})
        self.transport = NixlTransport(name)
        self.source = np.full(LARGE_BYTES, 3, dtype=np.uint8)
        self.transport.register(self.source.ctypes.data, LARGE_BYTES)
        self.target = self.peer.ask("register", length=LARGE_BYTES, fill=0)
        self.name = self.transport.connect(self.peer.metadata())
        # The first write also connects, which a stopped peer could not do.
        assert finish(self.transport, self.post(4096)) is WriteState.DONE
        self.peer.signal(signal.SIGSTOP)
        self.write = self.post(LARGE_BYTES)

    def post(self, length: int):
        return post(self.transport, self.name, row(self.source.ctypes.data), row(self.target), row(length), b"")

    def close(self) -> None:
        self.peer.signal(signal.SIGCONT)
        self.transport.close()
        self.peer.close()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stopped]:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    stopped = Stopped(f"stopped-{request.node.name[:60]}")
    yield stopped
    stopped.close()


def test_an_open_write_is_not_settled_until_its_peer_runs_again_and_it_is_done(stopped: Stopped) -> None:
    assert stopped.transport.state(stopped.write) is WriteState.OPEN
    assert not stopped.transport.release(stopped.write)
    assert stopped.transport.state(stopped.write) is WriteState.OPEN
    stopped.peer.signal(signal.SIGCONT)
    assert finish(stopped.transport, stopped.write) is WriteState.DONE
    assert stopped.transport.release(stopped.write)
    assert stopped.peer.read(0, LARGE_BYTES - 64, 64) == b"\3" * 64


def test_a_write_that_ends_by_a_disconnect_has_failed_but_is_not_settled_over_a_network(stopped: Stopped) -> None:
    stopped.transport.disconnect(stopped.name)
    assert stopped.transport.state(stopped.write) is WriteState.FAILED
    assert stopped.write.error
    assert not stopped.transport.release(stopped.write)
    assert stopped.transport.notices() == []


def test_a_transport_with_an_open_write_closes(stopped: Stopped) -> None:
    stopped.transport.close()
    assert stopped.transport.state(stopped.write) is WriteState.FAILED
    assert not stopped.transport.release(stopped.write)


def test_nixl_writes_nothing_to_the_terminal_when_all_is_well() -> None:
    program = "from longshore_agent.transports import create; t = create('NIXL', 'quiet'); t.metadata(); t.close()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=240
    )
    # UCX warns of a clock that looks unstable on a busy machine.
    lines = (ended.stdout + ended.stderr).splitlines()
    assert [line for line in lines if b"UCX  WARN" not in line] == []


def test_importing_the_factory_loads_no_nixl() -> None:
    program = "import sys, longshore_agent.transports; sys.exit(any(n.startswith('nixl') for n in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=240).returncode == 0


def test_metadata_survives_its_envelope_and_any_damage_to_it_is_found() -> None:
    name = inbox_name("a", "life")
    blob = b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|rest"
    packed = seal(MAGIC, Envelope("a", "life", "host", blob))
    assert unpack(packed).blob == blob
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 1
        with pytest.raises(PeerMetadataError):
            unpack(bytes(damaged))


def test_metadata_of_a_peer_that_does_not_tell_its_gpu_is_read_and_so_is_that_of_one_that_does() -> None:
    name = inbox_name("a", "life")
    blob = b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|rest"

    class Before(Metadata, frozen=True, array_like=True):
        blob: bytes
        device_index: int = -1

    told, untold = Envelope("a", "life", "host", blob, 3, "GPU-1"), Before("a", "life", "host", blob, 3)
    assert unpack(seal(MAGIC, told)) == told
    assert unpack(seal(MAGIC, untold)) == msgspec.structs.replace(told, device="")
    assert unseal(MAGIC, seal(MAGIC, told), Before) == untold


def test_a_list_of_wires_that_leaves_none_between_two_hosts_is_named() -> None:
    far = Envelope("a", "life", "another kernel", b"", alone=True)
    with pytest.raises(TransportError, match=r"transfer\.wires .* must list TCP, or RDMA with an RDMA device"):
        check_reach(far, alone=True)
    # Two pods of one kernel, as on a cluster of containers, may share no memory either.
    assert "transfer.wires (LONGSHORE_WIRES)" in unreachable(alone=True)
    assert unreachable(alone=False) == "which may have ended"


def test_metadata_that_carries_the_name_of_another_agent_never_reaches_nixl() -> None:
    name = inbox_name("victim", "life")
    blob = b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|rest"
    with pytest.raises(PeerMetadataError, match="another NIXL agent"):
        unpack(seal(MAGIC, Envelope("attacker", "life", "host", blob)))


@pytest.mark.parametrize("name", ["", "a~b", "x" * 201])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(TransportError, match="name"):
        NixlTransport(name)


def _counters(sockets: dict[int, int], infiniband: int = 0) -> probe.Counters:
    return probe.Counters(sockets, infiniband)


def test_a_wire_is_named_only_if_a_counter_moved_by_all_that_was_written() -> None:
    before = _counters({1: 100, 2: 50})
    assert probe.carried(before, _counters({1: 100, 2: 1074}), 1024, same_host=True) is Wire.TCP
    assert probe.carried(before, _counters({1: 612, 3: 512}), 1024, same_host=True) is Wire.TCP
    assert probe.carried(before, _counters({1: 100, 2: 60}), 1024, same_host=True) is Wire.SHARED_MEMORY
    assert probe.carried(before, _counters({1: 100, 2: 60}), 1024, same_host=False) is None
    assert probe.carried(before, _counters({1: 900, 2: 60}), 1024, same_host=True) is None
    assert probe.carried(before, _counters({1: 100}, 1024), 1024, same_host=False) is Wire.RDMA
