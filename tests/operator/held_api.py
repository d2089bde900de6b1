"""A fake API server for the operator's process: it answers from memory, and holds the requests that a test selects.

It shows facts that a real API server does not: each client's requests, their rate, and how many are concurrent.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from operator_scene import Scene

from longshore_operator import kinds
from longshore_operator.ownership import Claim
from longshore_operator.settings import Settings

HOST = "127.0.0.1"
LIMIT_S = 120.0
# Below Linux's ephemeral ports, and apart from those of other tests.
_PORTS = range(10_000, 20_000)
# Deployments, each of which first needs keys.
DEPLOYMENT_COUNT = 6
# The kinds that the operator watches, and those that kopf requires before it starts.
_KINDS = (
    kinds.DEPLOYMENT,
    *kinds.WATCHED_CHILDREN,
    kinds.POD,
    kinds.NODE,
    kinds.EVENT,
    kinds.Kind("Namespace", "", "v1", "namespaces", namespaced=False),
    kinds.Kind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False),
)


def _discovery() -> dict[str, Any]:
    """Return the discovery documents, by path."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kind in _KINDS:
        entry = {"name": kind.plural, "singularName": "", "namespaced": kind.namespaced, "kind": kind.name}
        groups.setdefault((kind.group, kind.version), []).append(entry | {"verbs": ["get", "list", "watch", "patch"]})
    named = [
        {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
        for group, version in groups
        if group
    ]
    found: dict[str, Any] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": named}}
    for (group, version), resources in groups.items():
        found[f"/apis/{group}/{version}" if group else f"/api/{version}"] = {"resources": resources}
    return found


_DISCOVERY = _discovery()


def free_port(host: str = HOST) -> int:
    """Return a free port that the kernel assigns to no other process: the operator listens there only later."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise AssertionError(f"no port between {_PORTS.start} and {_PORTS.stop} is free")


class ApiServer:
    """Answers an operator's requests from memory; `hold` selects those that wait for its end, `fail` those that get 503."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.leases: list[dict[str, Any]] = []  # each version that was written
        self.hold: Callable[[str, str], bool] = lambda _method, _path: False
        self.fail: Callable[[str, str], bool] = lambda _method, _path: False
        self.held: Counter[str] = Counter()  # requests that are held now, by the last segment of their path
        self.ended = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = type("Quiet", (ThreadingHTTPServer,), {"daemon_threads": True})((HOST, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}"

    def note(self, method: str, path: str) -> None:
        with self._lock:
            self.seen.append((method, path))

    def wait(self, path: str) -> None:
        kind = path.partition("?")[0].rpartition("/")[2]
        with self._lock:
            self.held[kind] += 1
        self.ended.wait()

    def paths(self, method: str = "GET") -> list[str]:
        with self._lock:
            return [path for found, path in self.seen if found == method]

    def stop(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.api.note(self.command, self.path)
        with suppress(OSError):
            if self.api.hold(self.command, self.path):
                self.api.wait(self.path)
            elif self.api.fail(self.command, self.path):
                self._answer(503, {"kind": "Status", "reason": "ServiceUnavailable", "code": 503})
            elif "watch=true" in self.path:
                self._stream()
            else:
                self._answer(*self._result(self.command, self.path.partition("?")[0], body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - the base class names them

    def _result(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        leases = self.api.leases
        if "/leases" in path and method in {"POST", "PUT"}:
            written = json.loads(body)
            written["metadata"]["resourceVersion"] = str(len(leases) + 1)
            leases.append(written)
            return 200, written
        if "/leases/" in path:
            return (200, leases[-1]) if leases else (404, {"kind": "Status", "reason": "NotFound", "code": 404})
        if method != "GET":
            return 201, json.loads(body or b"{}")
        if path in _DISCOVERY:
            return 200, _DISCOVERY[path]
        items = [] if not path.endswith("/disaggdeployments") else [deployment(n) for n in range(DEPLOYMENT_COUNT)]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.api.ended.wait()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def deployment(number: int) -> dict[str, Any]:
    body = Scene().body
    metadata = {
        "name": f"llama-{number}",
        "namespace": "team",
        "uid": str(number),
        "resourceVersion": "1",
        "generation": 1,
    }
    # Already claimed by the operator, so that it first needs keys.
    status = {"operator": Claim.of(Settings()).status()}
    return {**body, "metadata": body["metadata"] | metadata, "status": status}


class Running:
    """An operator's process with these settings, and its own fake API server."""

    def __init__(self, folder: Path, api: ApiServer, **settings: object) -> None:
        settings = {"http_host": HOST, "http_port": free_port(), **settings}
        self.http = f"http://{settings['http_host']}:{settings['http_port']}"
        cluster = {
            "clusters": [{"name": "c", "cluster": {"server": api.address}}],
            "users": [{"name": "u", "user": {}}],
        }
        context = {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x"}
        (folder / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **cluster, **context}))
        self.log = folder / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
        environment |= {f"LONGSHORE_{name.upper()}": str(value) for name, value in settings.items()}
        environment |= {"KUBECONFIG": str(folder / "kubeconfig"), "PYTHONPATH": ":".join(sys.path)}
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "longshore_operator.main"]
            self.process = subprocess.Popen(command, env=environment, stderr=log, stdin=subprocess.DEVNULL)

    def page(self, path: str) -> str:
        """Return a page's text; empty: no answer."""
        with suppress(OSError), urllib.request.urlopen(f"{self.http}{path}", timeout=5) as page:
            text: str = page.read().decode()
            return text
        return ""

    def metric(self, name: str) -> float | None:
        """The value of a metric without labels; None: there is none yet."""
        lines = [line.split() for line in self.page("/metrics").splitlines() if line.startswith(f"{name} ")]
        return float(lines[0][1]) if lines else None

    def stop(self) -> None:
        """Kill it: these tests do not check an orderly end."""
        self.process.kill()
        self.process.wait()
