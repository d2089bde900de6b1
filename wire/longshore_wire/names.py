"""Names and numbers that agents and engines share."""

from __future__ import annotations

import functools
import re
from enum import IntEnum, StrEnum


class Labelled(IntEnum):
    """An enumeration of which messages carry the number.

    Attributes:
        label: how metrics, statuses and texts name a member.
    """

    label: str

    def __init__(self, _number: int) -> None:
        self.label = self.name.lower()


class Wire(StrEnum):
    """The wire that carries bytes between two workers, as a probe write finds it and `transfer.wires` allows it."""

    LOOPBACK = "Loopback"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    RDMA = "RDMA"
    CUDA_IPC = "CudaIPC"
    NVLINK = "NVLink"


# Prefix of all of the product's environment variables. An unknown variable with this prefix is an error.
ENVIRONMENT_PREFIX = "LONGSHORE_"

# The engine socket is in <RUN_DIRECTORY>/<namespace>/<deployment>/. An agent without a deployment has it in RUN_DIRECTORY.
RUN_DIRECTORY = "/run/longshore"
SOCKET_FILE = "agent.sock"
# sun_path has 108 bytes with its terminating zero.
SOCKET_PATH_BYTES_MAX = 107
# Prefix of the variables for engines, which are no settings of our programs.
ENGINE_PREFIX = f"{ENVIRONMENT_PREFIX}ENGINE_"
# The variable in which an engine's client finds the path of the engine socket, if the engine gives none.
ENGINE_SOCKET_VARIABLE = f"{ENGINE_PREFIX}SOCKET"
# The variable with which the names of an engine's instances begin.
INSTANCE_PREFIX_VARIABLE = f"{ENGINE_PREFIX}INSTANCE_PREFIX"
# Instances of `longshore verify` and `longshore bench cluster` have names with this prefix. Agents give their workers less
# staging memory, and the operator does not count them. No agent can tell a test engine from another, so the client refuses
# these names for engines. Names of deployments, with which engines' names begin, have no dot.
TEST_INSTANCE_PREFIX = "longshore.test-"
# Limits of such a worker's staging: of each lane, and of the ring, which then holds two slabs of each of 8 writers. A GPU
# needs longer slabs, or control takes most of the time.
TEST_LANE_BYTES_MAX, TEST_GPU_LANE_BYTES_MAX = 4 << 20, 32 << 20
TEST_RING_BYTES_MAX, TEST_GPU_RING_BYTES_MAX = 64 << 20, 512 << 20
# User and group of the agent's image. The engine socket is for this group.
AGENT_USER_ID = 10001
# The name of an engine's instance. It is used in metrics, routes and transport names.
_INSTANCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_INSTANCE_NAME_CHARACTERS_MAX = 100
# Suffix of an agent's name in endpoints of engines on GPUs.
ON_GPU = ".gpu"
# The name, in statuses and metrics, of a wire that no probe has found.
UNKNOWN_WIRE = "Unknown"


# Connectors and routers draw numbers of rooms at random, far above this one.
_GUESSED_END = 1 << 32
# The form of a room's name, see `room_name`.
ROOM_NAME = r"^([0-9]{1,10}|r[0-9a-f]{16})$"


def room_name(room: int) -> str:
    """Return how pages, logs and messages name a room: by a digest, since who knows a room's number may claim its KV.

    A number below 2**32 can be guessed, so it is its own name.
    """
    if room < _GUESSED_END:
        return str(room)
    # Here, because every engine imports this module, and few need a digest at their start.
    import hashlib

    return f"r{hashlib.sha256(b'longshore room' + room.to_bytes(8, 'little')).hexdigest()[:16]}"


def is_instance_name(text: str) -> bool:
    """Whether an engine's instance may have this name."""
    # A longer text is not kept: a peer's message may be full of it.
    return len(text) <= _INSTANCE_NAME_CHARACTERS_MAX and _matches_name(text)


@functools.lru_cache(1024)
def _matches_name(text: str) -> bool:
    return re.fullmatch(_INSTANCE_NAME, text) is not None


def wire_name(wire: Wire | None) -> str:
    """Return how statuses and metrics name a wire; None: no probe has found it."""
    return wire.value if wire else UNKNOWN_WIRE


# Wires that another one includes: CUDA IPC may use NVLink, so its permissions and measurements also apply to NVLink.
WIDER_WIRES = {Wire.NVLINK.value: Wire.CUDA_IPC.value}
