"""What the transport over NIXL keeps of peers, writes and prepared lists. Values only; made and guarded by nixl.py."""

from __future__ import annotations

from typing import Any

import msgspec

from longshore_agent.transports.base import Wire, WriteState


class NixlPeer(msgspec.Struct):
    """One peer in one of its lives."""

    name: str
    nixl_name: str
    blob: bytes
    same_host: bool
    device_index: int
    device: str
    wire: Wire = Wire.UNKNOWN


class NixlWrite:
    """One write, drafted or posted. Its fields are guarded by the transport's outbox lock."""

    __slots__ = ("error", "handle", "notice", "peer", "settled", "state")

    def __init__(self, peer: NixlPeer, handle: Any, notice: bytes) -> None:
        self.peer = peer
        self.handle = handle
        self.notice = notice
        self.state = WriteState.OPEN
        self.error = ""
        self.settled = False


class NixlPrepared:
    """Descriptor lists of both sides that NIXL has looked up; belongs to one life of one peer."""

    __slots__ = ("count", "nixl_name", "source_list", "target_list")

    def __init__(self, nixl_name: str, source_list: Any, target_list: Any, count: int) -> None:
        self.nixl_name = nixl_name
        self.source_list = source_list
        self.target_list = target_list
        self.count = count
