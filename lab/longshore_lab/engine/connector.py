"""Moves the reference engine's KV through Longshore: an extension of its rank processes.

Loaded by `rank_main`. The demo's driver sends it the commands below by `EngineProcesses.extra`. It corresponds to the
connectors of vLLM and SGLang: it registers the rank's pool, offers and claims pages, and receives their events.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from longshore_client import Client, Endpoint, Half, RoomEvent, RoomEventKind, TargetMemory, connect
from longshore_lab.engine.errors import EngineError
from longshore_lab.test_engine.ranks import insist, left_s, registered
from longshore_wire.errors import Reason

if TYPE_CHECKING:
    # The driver imports the commands below and must not load torch.
    from longshore_lab.engine.cache import PagePool
    from longshore_lab.engine.rank import EngineRank

# The value of `RankOptions.extension` that loads this module.
EXTENSION = "longshore_lab.engine.connector:Connector"
# The agent may still be starting and running its self-test, on cores that it shares with other processes.
CONNECT_TIMEOUT_S = 120.0
ENDPOINT_TIMEOUT_S = 120.0
# A call that fails because of a full queue or a restarting agent is retried for this long.
CALL_TIMEOUT_S = 30.0


class Registration(msgspec.Struct, frozen=True):
    """A rank's registration with one agent.

    Attributes:
        instance: name of the engine instance there, the same for all of its ranks. Peers identify a rank by it: an
            instance that registers with two agents has two names.
        socket: the agent's engine socket.
        host: its rooms go into pages of one token in host memory. The rank copies them into its own pages afterwards, as an
            engine does that pages in what a step needs.
    """

    instance: str
    socket: str
    host: bool = False


class ConnectorOptions(msgspec.Struct, frozen=True):
    """Options of the connector.

    Attributes:
        half: SOURCE for prefill, TARGET for decode.
        agents: registrations by the names that commands use.
    """

    half: Half
    agents: dict[str, Registration]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first, end) of a room and the pages that hold them, beginning with the page of `first`."""

    room: int
    pages: list[int]
    first: int
    end: int
    last: bool = True


class GetEndpoint(msgspec.Struct, frozen=True, tag=True):
    """Ask for the encoded Endpoint of this instance."""

    agent: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Offer parts. Answered by `Offered`."""

    agent: str
    parts: list[Part]


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Claim parts of an instance's rooms, with digests or without. Answered by an empty body."""

    agent: str
    endpoint: Endpoint
    parts: list[Part]
    digest: bool = False


class Await(msgspec.Struct, frozen=True, tag=True):
    """Wait until all of these rooms are done and their pages are released. Answered by `Arrived`."""

    agent: str
    rooms: list[int]
    timeout_s: float


class Offered(msgspec.Struct, frozen=True):
    """The time at which the agent accepted the first part, by the clock of `Arrived`."""

    first_ns: int


class Arrived(msgspec.Struct, frozen=True):
    """The time at which the last room was done, on this machine's monotonic clock, and the bytes of all rooms."""

    done_ns: int
    bytes_moved: int


Command = GetEndpoint | Offer | Claim | Await


class TransferFailedError(EngineError):
    """A room failed; carries the agent's reason."""

    reason = Reason.TRANSFER_FAILED


class Connector:
    """The extension of one rank process."""

    def __init__(self, engine: EngineRank, options: bytes) -> None:
        self._options = msgspec.msgpack.decode(options, type=ConnectorOptions)
        self._clients: dict[str, Client] = {}
        self._pool = engine.pool
        # Pages of one token for `Registration.host`, and the parts that are claimed into them, by room.
        self._host_pool: PagePool | None = None
        self._host_parts: dict[int, Part] = {}
        self._open = ExitStack()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        try:
            for name, agent in self._options.agents.items():
                self._clients[name] = self._registered_host(agent) if agent.host else self._registered(agent)
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
            case Claim(endpoint=endpoint, parts=parts, digest=digest):
                host = self._options.agents[command.agent].host
                memory = TargetMemory.HOST if host else TargetMemory.DEVICE
                for part in parts:
                    pages = self._host_pages(part) if host else part.pages
                    where = (part.room, endpoint, pages, part.first, part.end)
                    insist(partial(client.receive, *where, memory=memory, digest=digest), _call_end_s())
                    if host:
                        self._host_parts[part.room] = part
                return b""
            case Await(rooms=rooms, timeout_s=timeout_s):
                return msgspec.msgpack.encode(self._await(client, rooms, timeout_s))

    def close(self) -> None:
        """Disconnect from the agents, which unmap the pools at once."""
        self._open.close()

    def _registered(self, agent: Registration) -> Client:
        roles = (self._options.half,)
        client = registered(agent.socket, agent.instance, self._pool, roles, CONNECT_TIMEOUT_S)
        return self._open.enter_context(client)

    def _registered_host(self, agent: Registration) -> Client:
        """Register pages in host memory alone, for as many tokens as the rank's own pool has."""
        pool = self._pool
        if self._host_pool is None:
            layout = msgspec.structs.replace(pool.layout, page_size=1)
            self._host_pool = type(pool)(layout, pool.page_count * pool.layout.page_size)
            self._open.callback(self._host_pool.close)
        host = self._host_pool
        client = self._open.enter_context(
            connect(
                agent.socket,
                instance=agent.instance,
                layout=pool.layout,
                device=pool.memory.device_name,
                roles=(self._options.half,),
                host_layout=host.layout,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        )
        client.register_pool(0, host.geometry, host.memory.regions, TargetMemory.HOST)
        return client

    def _host_pages(self, part: Part) -> list[int]:
        """Return a page of one token for each token of a part, wherever its own pages are."""
        size = self._pool.layout.page_size
        return [
            part.pages[token // size - part.first // size] * size + token % size
            for token in range(part.first, part.end)
        ]

    def _page_in(self, room: int) -> None:
        """Copy a room from the pages in host memory into the rank's own."""
        part = self._host_parts.pop(room, None)
        if part is None:
            return
        assert self._host_pool is not None
        pages = self._host_pages(part)
        rows = self._host_pool.dump_tokens([pages[0]] * part.first + pages, part.first, part.end)
        self._pool.put_tokens(part.pages, part.first, part.end, rows)
        self._host_pool.poison(pages)

    @staticmethod
    def _offer(client: Client, parts: list[Part]) -> Offered:
        first_ns = 0
        for part in parts:
            insist(partial(client.send, part.room, part.pages, part.first, part.end, last=part.last), _call_end_s())
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
            self._page_in(room)
        return Arrived(done_ns, bytes_moved)

    def _wait(self, client: Client, room: int, kinds: set[RoomEventKind], deadline_s: float) -> RoomEvent:
        return client.wait(room, self._options.half, kinds=kinds, timeout_s=left_s(deadline_s))


def _call_end_s() -> float:
    return time.monotonic() + CALL_TIMEOUT_S
