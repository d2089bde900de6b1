"""What the operator reads of an agent's `/v1/status`: the part of it that conditions are decided from. Pure values.

The agent's own type has more; a test holds the two to each other.
"""

from __future__ import annotations

import msgspec


class Instance(msgspec.Struct, frozen=True):
    """One replica of an engine instance that is registered with an agent. `roles` are source and target."""

    instance: str
    roles: tuple[str, ...] = ()
    complete: bool = True


class Engine(msgspec.Struct, frozen=True):
    """One engine rank at its worker."""

    instance: str
    rank: int
    roles: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True):
    """A worker of another engine rank, as one of the agent's sees it."""

    instance: str
    dp_rank: int
    rank: int
    state: str
    wire: str
    error: str = ""
    ways: tuple[str, ...] = ()


class Worker(msgspec.Struct, frozen=True):
    """One worker of an agent. `data_path` is one of `names.PROTECTIONS`; empty: it has not said yet."""

    worker: str
    engines: tuple[Engine, ...] = ()
    peers: tuple[Peer, ...] = ()
    data_path: str = ""


class AgentReport(msgspec.Struct, frozen=True):
    """What one agent said last. `unready` is why it is not ready, a reason and a message each."""

    deployment: str
    node: str
    draining: bool = False
    unready: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()
    workers: tuple[Worker, ...] = ()


def read(data: bytes) -> AgentReport:
    """Return the report in an answer.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.json.decode(data, type=AgentReport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error
