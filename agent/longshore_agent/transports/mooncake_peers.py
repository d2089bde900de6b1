"""Holds the Mooncake transport's peers and writes. Calls no library; made and guarded by mooncake.py."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import msgspec

from longshore_agent.errors import PeerMetadataError
from longshore_agent.transports import wires
from longshore_agent.transports.base import Pieces, WriteState
from longshore_agent.transports.regions import Regions
from longshore_agent.transports.writes import OneWrite


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """A worker's metadata for peers that write to it.

    Attributes:
        device_index, device: index and UUID of the GPU whose memory is registered; -1 and empty: host memory.
    """

    name: str
    life: str
    kernel: str
    host: str
    port: int
    regions: tuple[tuple[int, int], ...]  # (address, bytes)
    device_index: int = -1
    device: str = ""


class Peer:
    """One life of a peer. All but `gone` is guarded by `lock`, which only threads that write take.

    Attributes:
        engine: for GPU memory, the library's engine that writes to this peer; None: not yet, or no more.
        left: requests that were open when the peer went; only this list still tracks them.
    """

    def __init__(self, metadata: Metadata, regions: Regions, address: str) -> None:
        self.name = metadata.name
        self.life = metadata.life
        self.address = address
        self.same_host = metadata.kernel != "" and metadata.kernel == wires.host_identity()
        self.device = metadata.device
        self.regions = regions
        self.engine: Any = None
        self.gone = False
        self.lock = threading.Lock()
        self.writes: deque[MooncakeWrite] = deque()
        self.left: list[int] = []
        self.under_way_count = 0
        self.answers = False
        self.greeter: threading.Thread | None = None


class MooncakeWrite(OneWrite[Peer]):
    """One write. Its fields are guarded by its peer's lock."""

    __slots__ = ("count", "failed_bytes", "failed_count", "open", "waiting")

    def __init__(self, peer: Peer, pieces: Pieces) -> None:
        super().__init__(peer)
        self.waiting = deque(zip(*(each.tolist() for each in pieces), strict=True))
        self.count = len(self.waiting)
        self.open: deque[tuple[int, int]] = deque()  # (request, bytes)
        self.failed_count = self.failed_bytes = 0

    @property
    def title(self) -> str:
        """The write's description in errors."""
        return f"Mooncake write of {self.count} pieces to peer {self.peer.name!r} at {self.peer.address}"

    def fail(self, why: str, *, settled: bool) -> None:
        """End it; pieces that were not submitted never will be."""
        self.waiting.clear()
        super().fail(why, settled=settled)


def check_reach(peer: Metadata, device_index: int) -> None:
    """Raise PeerMetadataError if a peer's memory cannot be written from that of `device_index` (-1: the host's)."""
    if (peer.device_index < 0) != (device_index < 0):
        ours, theirs = ("the host", "a GPU") if device_index < 0 else ("a GPU", "the host")
        raise PeerMetadataError(
            f"peer {peer.name!r} has memory of {theirs}, this worker of {ours}: Mooncake moves between two of a kind"
        )
    if device_index >= 0 and peer.kernel != wires.host_identity():
        raise PeerMetadataError(
            f"peer {peer.name!r} is on another host: Mooncake moves GPUs' memory inside one only, choose NIXL"
        )


def left(write: MooncakeWrite) -> str:
    """Return a text on the part of an open write that has not ended."""
    return f"{len(write.open) + len(write.waiting)} of its pieces had ended"


def forget_open(peer: Peer, begun: list[MooncakeWrite]) -> None:
    """Stop tracking a probe's open requests, since their stream ends with the probe's thread."""
    with peer.lock:
        for write in begun:
            if write.state is WriteState.OPEN:
                peer.under_way_count -= len(write.open)
                write.open.clear()
                write.fail("the probe did not end in time", settled=False)
