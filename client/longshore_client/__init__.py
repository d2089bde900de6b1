"""Lets an engine move its KV pages through Longshore. Imports msgspec and the standard library only."""

from __future__ import annotations

from longshore_client.arguments import CacheTokens
from longshore_client.client import Client
from longshore_client.errors import (
    AgentLost,
    ArgumentError,
    Busy,
    CallTimeout,
    ClientClosed,
    ClientError,
    ConnectError,
    HelloRefused,
    NotPermitted,
    PoolRefused,
    WaitTimeout,
)
from longshore_client.memory import create_region, pool_geometry, torch_region
from longshore_client.registration import connect, new_instance
from longshore_wire.engine_messages import Endpoint, Half, RoomEvent, RoomEventKind
from longshore_wire.errors import CodecError, LayoutError, LongshoreError, Reason, RoomError
from longshore_wire.layout import (
    Attention,
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
    Plane,
    PlaneGeometry,
    PoolGeometry,
    TargetMemory,
)

__all__ = [
    "AgentLost",
    "ArgumentError",
    "Attention",
    "Busy",
    "CacheTokens",
    "CallTimeout",
    "Client",
    "ClientClosed",
    "ClientError",
    "CodecError",
    "ConnectError",
    "Endpoint",
    "Half",
    "HelloRefused",
    "KVLayout",
    "LayoutError",
    "LongshoreError",
    "ModelShape",
    "NotPermitted",
    "PageOrder",
    "Parallel",
    "Plane",
    "PlaneGeometry",
    "PoolGeometry",
    "PoolRefused",
    "Reason",
    "RoomError",
    "RoomEvent",
    "RoomEventKind",
    "TargetMemory",
    "WaitTimeout",
    "connect",
    "create_region",
    "new_instance",
    "pool_geometry",
    "torch_region",
]
