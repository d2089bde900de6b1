"""Types of the part of an agent's `/v1/status` that the operator reads. Pure values.

The agent's own type has more fields. A test checks that the two agree.
"""

from __future__ import annotations

import msgspec


class Instance(msgspec.Struct, frozen=True):
    """The workers of one memory of a replica of an engine instance, as registered with an agent.

    `roles` holds source, target or both; `memory` is device or host.
    """

    instance: str
    roles: tuple[str, ...] = ()
    complete: bool = True
    memory: str = "device"


class Engine(msgspec.Struct, frozen=True):
    """One engine rank at its worker."""

    instance: str
    rank: int
    roles: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True):
    """A worker of another engine rank, as one of the agent's workers reports it."""

    instance: str
    dp_rank: int
    rank: int
    state: str
    wire: str
    error: str = ""
    ways: tuple[str, ...] = ()
    memory: str = "device"


class Worker(msgspec.Struct, frozen=True):
    """One worker of an agent.

    Attributes:
        data_path: one of `names.PROTECTIONS`; empty until the worker reports it.
        mismatches, mismatch: slabs whose digests differed since its start, and the text of the newest one's room.
    """

    worker: str
    engines: tuple[Engine, ...] = ()
    peers: tuple[Peer, ...] = ()
    data_path: str = ""
    mismatches: int = 0
    mismatch: str = ""


class AgentReport(msgspec.Struct, frozen=True):
    """The last report of one agent.

    Attributes:
        config: the digest of the config that it runs, by role; empty for an agent that does not tell.
        unready: a "reason: message" for each cause.
    """

    deployment: str
    node: str
    draining: bool = False
    config: dict[str, str] = {}
    unready: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()
    workers: tuple[Worker, ...] = ()


def read(data: bytes) -> AgentReport:
    """Parse the report in a response.

    Raises:
        ValueError: the bytes are no report.
    """
    try:
        return msgspec.json.decode(data, type=AgentReport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error
