"""Serves an ASGI application by uvicorn in its own thread, with tokens, TLS, and limits that keep probes answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from longshore_agent.status.app import ErrorBody
from longshore_spec.environment import variable
from longshore_wire.errors import ConfigError

# Descriptors for HTTP, of the usual limit of 1,024 for a process. A further connection closes the oldest idle ones.
# So probes, which use new connections, are always answered.
CONNECTIONS_MAX = 512
# Connections accepted in one turn of the server's loop, and closed together. New ones are never among the oldest.
ACCEPTS_PER_TURN_MAX = 64
# A long queue is served within milliseconds. If the queue were full, a probe would wait for a second.
BACKLOG = 4096
# Requests in progress, without probes; more get 503. There are 40 threads, so some are left for probes.
REQUESTS_MAX = 32
KEEP_ALIVE_S = 30
# Time limit from a connection's start, or from the end of its keep-alive time, to its response. Then it is closed.
EXCHANGE_LIMIT_S = 10.0
# Time for open requests when the agent stops. Responses take milliseconds.
SHUTDOWN_S = 2
START_LIMIT_S = 10.0
# Paths of the kubelet's probes, which are answered without a token and also while the agent is busy. They reveal only the
# health and its reasons.
PROBE_PATHS = frozenset({"/healthz", "/readyz"})
# The web page asks its reader for the token. It reveals nothing.
OPEN_PATHS = PROBE_PATHS | {"/"}
_STARVED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class StatusServer:
    """A server that runs until `stop`."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, thread: threading.Thread) -> None:
        self._server = server
        self._listener = listener
        self._thread = thread

    @property
    def port(self) -> int:
        """The port on which it listens, also if 0 was requested."""
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """Stop it and wait for its thread, at most a few seconds. Idempotent."""
        self._server.should_exit = True
        self._thread.join(SHUTDOWN_S + 1)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join()
        self._listener.close()


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str = "",
    certificate_file: str = "",
    key_file: str = "",
    refused: Callable[[], None] = lambda: None,
) -> StatusServer:
    """Start to serve `app`; return once it accepts connections.

    Args:
        port: 0 selects a free one.
        token: required as `Authorization: Bearer` on all paths except `OPEN_PATHS`; empty for none.
        certificate_file, key_file: PEM files for TLS; empty for plain HTTP.
        refused: called in the server's thread for each request that is malformed, has no valid token, or exceeds the limit.
    Raises:
        ConfigError: the address is in use or not ours, or the certificate cannot be read.
    """
    config = _Config(
        _Door(app, token, refused),
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http=_Connection,
        ws="none",
        server_header=False,
        backlog=ACCEPTS_PER_TURN_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=certificate_file or None,
        ssl_keyfile=key_file or None,
    )
    config.refused = refused
    try:
        config.load()
    except OSError as error:
        names = f"{variable('http_certificate_file')}, {variable('http_key_file')}"
        raise ConfigError([f"{names}: {certificate_file} with {key_file}: {error.strerror or error}"]) from error
    server = _Server(config)
    listener = _listen(host, port, server.busy)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    running = server.accepts.wait(START_LIMIT_S)
    assert running, "uvicorn did not start on a socket that listens"
    return StatusServer(server, listener, thread)


def _listen(host: str, port: int, busy: Callable[[], set[int]]) -> _Listener:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _Listener(socket.create_server((host, port), family=family), busy)
    except OSError as error:
        names = f"{variable('bind_host')}, {variable('http_port')}"
        raise ConfigError([f"{names}: cannot listen on {host}:{port}: {error.strerror or error}"]) from error


class _Listener(socket.socket):
    """Limits connections at `accept`, which includes those before their TLS handshake."""

    def __init__(self, listening: socket.socket, busy: Callable[[], set[int]]) -> None:
        super().__init__(fileno=listening.detach())
        self._busy = busy
        self._taken: dict[int, socket.socket] = {}  # by descriptor, oldest first

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Listen with `BACKLOG`. The loop's argument is its number of accepts in a turn."""
        super().listen(max(backlog, BACKLOG))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; close older ones if there are too many, or if no descriptor is left."""
        try:
            taken, address = super().accept()
        except OSError as error:
            if error.errno in _STARVED and self._close_oldest():
                # The closed descriptors are free in the loop's next turn.
                raise BlockingIOError(errno.EAGAIN, "no descriptor is left") from error
            raise
        if len(self._taken) >= CONNECTIONS_MAX:
            self._close_oldest()
        # A descriptor number is reused only after it was closed.
        self._taken.pop(taken.fileno(), None)
        self._taken[taken.fileno()] = taken
        return taken, address

    def _close_oldest(self) -> bool:
        """Close the oldest idle connections, or the oldest of all if none is idle; return whether there were any."""
        self._taken = {number: taken for number, taken in self._taken.items() if taken.fileno() == number}
        busy = self._busy()
        oldest = [number for number in self._taken if number not in busy] or list(self._taken)
        for number in oldest[:ACCEPTS_PER_TURN_MAX]:
            with contextlib.suppress(OSError):
                # The loop owns the descriptor. It sees the end of the connection and closes it.
                self._taken.pop(number).shutdown(socket.SHUT_RDWR)
        return bool(oldest)


class _Config(uvicorn.Config):
    """A configuration with the callback for refused requests."""

    refused: Callable[[], None]


class _Connection(H11Protocol):
    """One connection with a time limit. uvicorn limits only the keep-alive time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow(EXCHANGE_LIMIT_S)

    def on_response_complete(self) -> None:
        self._allow(KEEP_ALIVE_S + EXCHANGE_LIMIT_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        assert isinstance(self.config, _Config)
        self.config.refused()
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _allow(self, limit_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # `close` would wait until the client has read the whole response.
        self._deadline = self.loop.call_later(limit_s, self.transport.abort)


class _Server(uvicorn.Server):
    """Reports when it accepts connections, and which of them have a request in progress."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepts = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepts.set()

    def busy(self) -> set[int]:
        """Return the descriptors of connections with a request in progress."""
        under_way = [
            connection.transport.get_extra_info("socket").fileno()
            for connection in self.server_state.connections
            if isinstance(connection, _Connection)
            and connection.cycle is not None
            and not connection.cycle.response_complete
        ]
        return set(under_way)


class _Door:
    """ASGI middleware that checks the token and limits the requests in progress."""

    def __init__(self, app: ASGIApp, token: str, refused: Callable[[], None]) -> None:
        self._app = app
        self._refused = refused
        self._wanted = b"Bearer " + token.encode() if token else b""
        self._under_way_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
        elif self._wanted and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            self._refused()
            body = ErrorBody("Unauthorized", "give the agent's token as `Authorization: Bearer`")
            await _answer(send, 401, body, (b"www-authenticate", b"Bearer"))
        elif self._under_way_count >= REQUESTS_MAX:
            self._refused()
            await _answer(send, 503, ErrorBody("Busy", f"{REQUESTS_MAX} requests are under way: try again"))
        else:
            self._under_way_count += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._under_way_count -= 1

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)


async def _answer(send: Send, status: int, body: ErrorBody, *headers: tuple[bytes, bytes]) -> None:
    fields = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
