"""Runs a proxy between the operator (plain HTTP) and the API server (TLS) that refuses requests on demand."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from controlplane.certificates import write_kubeconfig
from controlplane.cluster import ControlPlane
from controlplane.ports import HOST, free_port

# A watch is silent while nothing changes.
_UPSTREAM_LIMIT_S = 600.0
_CHUNK_BYTES = 65536

# (method, path) -> the HTTP status of a refusal, or None to pass the request on.
Refuse = Callable[[str, str], int | None]


class _Handler(BaseHTTPRequestHandler):
    """Forwards or refuses the requests of one connection."""

    proxy: FaultProxy
    context: ssl.SSLContext
    upstream: SplitResult
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.requests.append((self.command, self.path))
        status = self.proxy.refuse(self.command, self.path)
        if status is not None:
            self.proxy.refused.append((self.command, self.path))
            self._answer(status)
            return
        if "watch=true" in self.path:
            self.proxy._streams.add(self.connection)
        self._pass_on(body)
        self.proxy._streams.discard(self.connection)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - the base class names them

    def _answer(self, status: int) -> None:
        reason = {409: "Conflict", 500: "InternalError"}.get(status, "Unknown")
        data = json.dumps(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "code": status,
                "reason": reason,
                "message": "by the proxy",
            }
        ).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPSConnection(
            self.upstream.hostname or HOST, self.upstream.port, context=self.context, timeout=_UPSTREAM_LIMIT_S
        )
        headers = {name: value for name, value in self.headers.items() if name.lower() not in {"host", "connection"}}
        try:
            connection.request(self.command, self.path, body=body or None, headers=headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while data := answer.read1(_CHUNK_BYTES):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            connection.close()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FaultProxy:
    """The proxy. `refuse` decides on each request; `requests` lists all of them, `refused` those not forwarded."""

    def __init__(self, plane: ControlPlane) -> None:
        self.refuse: Refuse = lambda _method, _path: None
        self.requests: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self._streams: set[socket.socket] = set()
        certificate, key = plane.authority.issue("proxy", user="proxy", group="system:masters")
        context = ssl.create_default_context(cafile=str(plane.authority.certificate_path))
        context.load_cert_chain(certificate, key)
        upstream = urlsplit(plane.server)

        parts = {"proxy": self, "context": context, "upstream": upstream}
        port = free_port()
        self._server = _Server((HOST, port), type("Handler", (_Handler,), parts))
        self.kubeconfig: Path = write_kubeconfig(
            plane.folder / f"proxy-{port}.kubeconfig", {"server": f"http://{HOST}:{port}"}, {}
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def drop_streams(self) -> None:
        """Close all open watches; clients start new ones."""
        for stream in list(self._streams):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Stop the proxy. Open streams end with their clients."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
