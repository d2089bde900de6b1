"""The connector of the reference engine: an extension of its rank processes that moves KV through Longshore.

Loaded by `rank_main`; the demo's driver sends it the commands below by `EngineProcesses.extra`. It is what vLLM's or
SGLang's connector is to them: it shares the rank's pool, offers and claims pages, and hears what became of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from longshore_client import (
    AgentLost,
    Busy,
    Client,
    Endpoint,
    Half,
    RoomEvent,
    RoomEventKind,
    connect,
)
from longshore_lab.devices import CPU
from longshore_lab.engine.errors import EngineError
from longshore_wire.errors import Reason

if TYPE_CHECKING:
    # The driver reads the commands below and must not load torch for it.
    from longshore_lab.engine.rank import EngineRank

# What `RankOptions.extension` says to load this.
EXTENSION = "longshore_lab.engine.connector:Connector"
# The agent may still be starting, with a self-test before it and other processes on the same cores.
CONNECT_TIMEOUT_S = 120.0
ENDPOINT_TIMEOUT_S = 120.0
# A call that meets a full queue, or an agent that is being restarted, is made again until this is over.
CALL_TIMEOUT_S = 30.0
_AGENT_LOST_RETRY_S = 0.1


class Registration(msgspec.Struct, frozen=True):
    """With which agent a rank registers.

    Attributes:
        instance: name of the engine instance there, the same for all its ranks. Peers know a rank by it: an instance
            that registers with two agents has two names.
        socket: the agent's engine socket.
    """

    instance: str
    socket: str


class ConnectorOptions(msgspec.Struct, frozen=True):
    """What the connector is told at its start.

    Attributes:
        half: SOURCE for prefill, TARGET for decode.
        agents: by the names that commands use for them.
    """

    half: Half
    agents: dict[str, Registration]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first, end) of a room and the pages of the sequence that hold them, beginning with that of `first`."""

    room: int
    pages: list[int]
    first: int
    end: int
    last: bool = True


class GetEndpoint(msgspec.Struct, frozen=True, tag=True):
    """Answered by the encoded Endpoint of this instance."""

    agent: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Offer parts. Answered by `Offered`."""

    agent: str
    parts: list[Part]


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Claim parts of an instance's rooms. Answered by an empty body."""

    agent: str
    endpoint: Endpoint
    parts: list[Part]


class Await(msgspec.Struct, frozen=True, tag=True):
    """Wait until every one of these rooms is done and its pages are released. Answered by `Arrived`."""

    agent: str
    rooms: list[int]
    timeout_s: float


class Offered(msgspec.Struct, frozen=True):
    """When the agent had accepted the first part; clock as `Arrived`."""

    first_ns: int


class Arrived(msgspec.Struct, frozen=True):
    """When the last room was done, on this machine's monotonic clock, and the bytes that all of them moved."""

    done_ns: int
    bytes_moved: int


Command = GetEndpoint | Offer | Claim | Await


class TransferFailedError(EngineError):
    """A room failed; carries the reason that the agent gave."""

    reason = Reason.TRANSFER_FAILED


class Connector:
    """See the module. One for each rank process."""

    def __init__(self, engine: EngineRank, options: bytes) -> None:
        self._options = msgspec.msgpack.decode(options, type=ConnectorOptions)
        self._clients: dict[str, Client] = {}
        self._open = ExitStack()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        pool, memory = engine.pool, engine.pool.device_memory
        try:
            for name, agent in self._options.agents.items():
                client = self._open.enter_context(
                    connect(
                        agent.socket,
                        instance=agent.instance,
                        layout=engine.options.layout,
                        device=CPU if memory is None else memory.name,
                        roles=(self._options.half,),
                        timeout_s=CONNECT_TIMEOUT_S,
                    )
                )
                regions = [pool.region_fd] if memory is None else [memory.region]
                # On a GPU the worker compiles the kernels of this layout now, so that no room waits for them.
                client.register_pool(0, pool.geometry, regions, timeout_s=CONNECT_TIMEOUT_S)
                self._clients[name] = client
        except BaseException:
            self._open.close()
            raise

    def handle(self, body: bytes) -> bytes:
        """Carry out one command.

        Raises:
            TransferFailedError: a room failed.
            WaitTimeout: it did not end in time.
            LongshoreError: what the client raises.
        """
        command = self._decoder.decode(body)
        client = self._clients[command.agent]
        match command:
            case GetEndpoint():
                return msgspec.msgpack.encode(client.endpoint(ENDPOINT_TIMEOUT_S))
            case Offer(parts=parts):
                return msgspec.msgpack.encode(self._offer(client, parts))
            case Claim(endpoint=endpoint, parts=parts):
                for part in parts:
                    _insistently(partial(client.receive, part.room, endpoint, part.pages, part.first, part.end))
                return b""
            case Await(rooms=rooms, timeout_s=timeout_s):
                return msgspec.msgpack.encode(self._await(client, rooms, timeout_s))

    def close(self) -> None:
        """Leave the agents, which let go of the pool at once."""
        self._open.close()

    @staticmethod
    def _offer(client: Client, parts: list[Part]) -> Offered:
        first_ns = 0
        for part in parts:
            _insistently(partial(client.send, part.room, part.pages, part.first, part.end, last=part.last))
            first_ns = first_ns or time.monotonic_ns()
        return Offered(first_ns)

    def _await(self, client: Client, rooms: list[int], timeout_s: float) -> Arrived:
        deadline_s = time.monotonic() + timeout_s
        bytes_moved = 0
        for room in rooms:
            event = self._wait(client, room, {RoomEventKind.DONE, RoomEventKind.FAILED}, deadline_s)
            if event.kind is RoomEventKind.FAILED:
                raise TransferFailedError(f"room {room} failed: {event.reason.name}: {event.text}", reason=event.reason)
            bytes_moved += event.bytes_moved
        done_ns = time.monotonic_ns()
        for room in rooms:
            self._wait(client, room, {RoomEventKind.RELEASED}, deadline_s)
        return Arrived(done_ns, bytes_moved)

    def _wait(self, client: Client, room: int, kinds: set[RoomEventKind], deadline_s: float) -> RoomEvent:
        return client.wait(room, self._options.half, kinds=kinds, timeout_s=max(0.0, deadline_s - time.monotonic()))


def _insistently(call: Callable[[], None]) -> None:
    """Make a call again while it meets full queues or an agent that is away; the last error propagates in the end."""
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            call()
        except (Busy, AgentLost) as error:
            retry_s = error.retry_after_s if isinstance(error, Busy) else _AGENT_LOST_RETRY_S
            if time.monotonic() + retry_s > deadline_s:
                raise
            time.sleep(retry_s)
        else:
            return
