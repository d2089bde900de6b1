"""Provides a transport of the test's process, connected to a second process, for each kind in the contract suite."""

from __future__ import annotations

import os

import numpy as np
from transport_peer import TCP_ALONE, PeerProcess, finish, post, row

from longshore_agent.transports import create
from longshore_agent.transports.base import Transport, WriteState
from longshore_wire.names import Wire

# Backend, UCX_TLS, allowed wires. NIXL without TCP opens no port, and UCX reports fewer deaths of peers to it.
KINDS: dict[str, tuple[str, str, tuple[Wire, ...]]] = {
    "loopback": ("Loopback", "", ()),
    "mooncake-tcp": ("Mooncake", "", ()),
    "nixl-alone": ("NIXL", "", (Wire.SHARED_MEMORY,)),
    "nixl-shm": ("NIXL", "", ()),
    "nixl-tcp": ("NIXL", TCP_ALONE, ()),
}
WIRES = {
    "loopback": Wire.LOOPBACK,
    "mooncake-tcp": Wire.TCP,
    "nixl-alone": Wire.SHARED_MEMORY,
    "nixl-shm": Wire.SHARED_MEMORY,
    "nixl-tcp": Wire.TCP,
}
REGION_BYTES = 4 << 20
POISON = 0xA5


class Pair:
    """A transport of this process, with one region, connected to a peer process with one region of poison."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.backend, tls, self.wires = KINDS[kind]
        self.environment = {"UCX_TLS": tls} if tls else {}
        self.peers: list[PeerProcess] = []
        self.peer = self.start_peer(f"{name}-peer")
        before = os.environ.get("UCX_TLS")
        os.environ.update(self.environment)
        options = {"wires": self.wires} if self.wires else {}
        self.transport: Transport = create(self.backend, name, **options)
        if before is None:
            os.environ.pop("UCX_TLS", None)
        else:
            os.environ["UCX_TLS"] = before
        self.source = np.random.default_rng(7).integers(0, 256, REGION_BYTES, dtype=np.uint8)
        self.transport.register(self.source.ctypes.data, REGION_BYTES)
        self.target: int = self.peer.ask("register", length=REGION_BYTES, fill=POISON)
        self.name = self.transport.connect(self.peer.metadata())
        self.peer.ask("connect", metadata=self.transport.metadata().hex())

    def start_peer(self, name: str) -> PeerProcess:
        peer = PeerProcess(self.backend, name, self.environment, self.wires)
        self.peers.append(peer)
        return peer

    def write(self, offset: int, target: int, length: int, notice: bytes = b"", peer: str = "") -> WriteState:
        """Write one piece, wait for its end and release it."""
        address = row(self.source.ctypes.data + offset)
        write = post(self.transport, peer or self.name, address, row(target), row(length), notice)
        state = finish(self.transport, write)
        self.transport.release(write)
        return state

    def told(self, *notices: bytes) -> list[bytes]:
        """Return the notices that a target gets: all if the transport reports arrivals, otherwise none."""
        return list(notices) if self.transport.notifies else []

    def notices(self, count: int) -> list[bytes]:
        """Return the peer's notices since the last call; wait for `count` of them if the transport reports arrivals."""
        found = self.peer.wait_notices(count if self.transport.notifies else 0)
        assert {notice["peer"] for notice in found} <= {f"shared-{self.kind}"}
        return [bytes.fromhex(notice["notice"]) for notice in found]

    def close(self) -> None:
        self.transport.close()
        for peer in self.peers:
            peer.close()
