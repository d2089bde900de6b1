"""Serves an ASGI application by uvicorn in a thread of its own; the door that checks tokens and speaks TLS."""

from __future__ import annotations

import hmac
import socket
import threading

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from longshore_agent.settings import variable
from longshore_agent.status.app import ErrorBody
from longshore_wire.errors import ConfigError

# Scrapers, probes and people; more connections at once are answered with 503.
CONNECTIONS_MAX = 256
KEEP_ALIVE_S = 30
# Answers take milliseconds; whoever has not got one when the agent stops gets none.
SHUTDOWN_S = 2
START_LIMIT_S = 10.0
# The kubelet probes without a token, and learns nothing from these but yes or no and why.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class StatusServer:
    """A server that runs until `stop`."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, thread: threading.Thread) -> None:
        self._server = server
        self._listener = listener
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that it listens on, found out if 0 was asked for."""
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """End it and wait for its thread: at most a few seconds. Idempotent."""
        self._server.should_exit = True
        self._thread.join(SHUTDOWN_S + 1)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join()
        self._listener.close()


def serve(
    app: ASGIApp, host: str, port: int, *, token: str = "", certificate_file: str = "", key_file: str = ""
) -> StatusServer:
    """Begin to serve `app`; return once it accepts connections.

    Args:
        port: 0 takes a free one.
        token: asked for as `Authorization: Bearer` on all paths but `OPEN_PATHS`; empty: none is.
        certificate_file, key_file: PEM files for TLS; empty: plain HTTP.
    Raises:
        ConfigError: the address is taken or not ours, or the certificate cannot be read.
    """
    config = uvicorn.Config(
        _Door(app, token) if token else app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http="h11",
        ws="none",
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=certificate_file or None,
        ssl_keyfile=key_file or None,
    )
    try:
        config.load()
    except OSError as error:
        names = f"{variable('http_certificate_file')}, {variable('http_key_file')}"
        raise ConfigError([f"{names}: {certificate_file} with {key_file}: {error.strerror or error}"]) from error
    listener = _listen(host, port)
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    running = server.accepts.wait(START_LIMIT_S)
    assert running, "uvicorn did not start on a socket that listens"
    return StatusServer(server, listener, thread)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        names = f"{variable('bind_host')}, {variable('http_port')}"
        raise ConfigError([f"{names}: cannot listen on {host}:{port}: {error.strerror or error}"]) from error


class _Server(uvicorn.Server):
    """Tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepts = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepts.set()


class _Door:
    """Asks for the token before the application sees a request."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        body = msgspec.json.encode(ErrorBody("Unauthorized", "give the agent's token as `Authorization: Bearer`"))
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
