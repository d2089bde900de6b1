"""Holds the NIXL transport's peers and writes. Values only; made and guarded by nixl.py."""

from __future__ import annotations

from typing import Any

import msgspec

from longshore_agent.transports.base import Wire
from longshore_agent.transports.writes import OneWrite


class NixlPeer(msgspec.Struct):
    """One peer in one of its lives."""

    name: str
    life: str
    nixl_name: str
    blob: bytes
    same_host: bool
    device_index: int
    device: str
    wire: Wire = Wire.UNKNOWN


class NixlWrite(OneWrite[NixlPeer]):
    """One write. Its fields are guarded by the transport's outbox lock."""

    __slots__ = ("handle", "notice")

    def __init__(self, peer: NixlPeer, handle: Any, notice: bytes) -> None:
        super().__init__(peer)
        self.handle = handle
        self.notice = notice

    @property
    def title(self) -> str:
        """The write's description in errors."""
        return f"NIXL {super().title}"
