"""Serves SGLang's bootstrap server, and tells routers where the KV of a prompt will be. One for each prefill engine.

A router that sends a prompt to prefill, and then to a decode engine other than SGLang, asks here for the handover.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

from longshore_client.errors import ArgumentError
from longshore_engines.asks import VERSION, Ask, Decline, Grant, Left, Message, frames_of, message_of, new_ask, own_key
from longshore_engines.handover import HANDOVER_VERSION, Handover, parameters_for_decode
from longshore_wire.names import room_name

HANDOVER_PATH = "/longshore/handover"
# A router sends a prompt to prefill and asks for its handover at once. Prefill waits half as long for its agent.
HANDOVER_LIMIT_S = 60.0


class HandoverAsks:
    """Asks prefill's first rank where prompts are, as decode ranks do. Used in one event loop."""

    def __init__(self) -> None:
        self._keys = (own_key(os.environ),)
        self._waiting: dict[int, asyncio.Future[Grant | Decline]] = {}
        self._port = 0
        self._hearing: asyncio.Task[None] | None = None

    async def ask(self, host: str, port: int, room: int) -> Grant | Decline:
        """Return the first rank's answer, or a Decline if it gives none."""
        if self._hearing is None:
            address = NetworkAddress(get_local_ip_auto(), 0)
            socket = _socket(zmq.PULL, address)
            self._port = socket.bind_to_random_port(address.to_tcp().rpartition(":")[0])
            self._hearing = asyncio.create_task(self._hear(socket))
        number, here = new_ask(), get_local_ip_auto()
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(host, port, Ask(VERSION, number, room, here, self._port))
            async with asyncio.timeout(HANDOVER_LIMIT_S):
                found: Grant | Decline = await future
                return found
        except TimeoutError:
            text = f"prefill has not got prompt {room_name(room)} within {HANDOVER_LIMIT_S:g} s: send it to prefill at the same time"
            await self._send(host, port, Left(room, here, self._port, text))
            return Decline(number, text)
        finally:
            del self._waiting[number]

    async def _send(self, host: str, port: int, message: Message) -> None:
        address = NetworkAddress(host, port)
        with _socket(zmq.PUSH, address) as socket:
            socket.connect(address.to_tcp())
            await socket.send_multipart(frames_of(message, self._keys))

    async def _hear(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                message = message_of(frames, self._keys)
            except ArgumentError:
                # A stranger's: prefill's first rank has this release and this key. Strangers must not fill the log.
                continue
            if isinstance(message, Grant | Decline):
                future = self._waiting.get(message.ask)
                if future is not None and not future.done():
                    future.set_result(message)


def _socket(kind: int, address: NetworkAddress) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.IPV6, address.is_ipv6)
    socket.setsockopt(zmq.LINGER, int(HANDOVER_LIMIT_S * 1000))
    return socket


def _refused(status: int, text: str) -> Any:
    return web.json_response({"error": {"message": text, "code": status}}, status=status)


class LongshoreBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc] # SGLang is not installed where types are checked
    """SGLang's bootstrap server. It does not say the page size, since decode refuses a prefill with another one.

    It answers `GET /longshore/handover?room=ROOM&tokens=TOKENS` with the `kv_transfer_params` for decode.
    """

    def __init__(self, host: str, port: int) -> None:
        self._asking = HandoverAsks()
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(HANDOVER_PATH, self._handle_handover)

    async def _handle_handover(self, request: Any) -> Any:
        """Answer with the `kv_transfer_params` for decode, as soon as prefill knows the prompt."""
        try:
            room, tokens = (int(request.query[name]) for name in ("room", "tokens"))
        except (KeyError, ValueError):
            return _refused(400, "give room, the prompt's bootstrap_room, and tokens, its length, as numbers")
        if self.dp_size is None or not self._is_ready():
            return _refused(503, "prefill's ranks have not registered yet")
        if self.dp_size > 1:
            return _refused(
                501, f"prefill has {self.dp_size} replicas: handovers of data parallel prefill are untested"
            )
        rank = next(iter(self.prefill_port_table.values()))[0][0][0]
        found = await self._asking.ask(rank.rank_ip, rank.rank_port, room)
        if isinstance(found, Decline):
            return _refused(502, found.text)
        return web.json_response(
            parameters_for_decode(Handover(HANDOVER_VERSION, found.room, tokens, found.endpoint, found.content))
        )

    async def _handle_route_put(self, request: Any) -> Any:
        answer = await super()._handle_route_put(request)
        self.page_size = None
        return answer
