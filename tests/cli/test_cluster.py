"""Tests what `cluster` says of an API server without the CRD, and of an agent that does not answer."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import check_scene as scene
import msgspec
import pytest

from longshore_cli import cluster
from longshore_cli.check import reading
from longshore_cli.cluster import Cluster, ClusterError, MissingError
from longshore_cli.verify import places
from longshore_cli.verify.places import Engine, Programs, kept_alive
from longshore_spec.verify_messages import Start, Started


class _WithoutDefinition(BaseHTTPRequestHandler):
    """Answers as an API server does for a kind that it does not know."""

    def do_GET(self) -> None:
        body = b"404 page not found\n"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def _connected(folder: Path, port: int) -> Iterator[Cluster]:
    path = folder / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    with Cluster.connect(argparse.Namespace(kubeconfig=str(path), context=None, namespace=None)) as found:
        yield found


def test_a_cluster_without_the_definition_is_said(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _WithoutDefinition) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with _connected(tmp_path, server.server_port) as found:
                for ask in (found.deployments, lambda: found.deployment("llama")):
                    with pytest.raises(MissingError, match="serves no DisaggDeployment of v1alpha1: install the chart"):
                        ask()
        finally:
            server.shutdown()


def test_an_agent_that_does_not_answer_is_named_and_not_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "HTTP_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, _connected(tmp_path, silent.getsockname()[1]) as found:
        with pytest.raises(ClusterError, match=r"the agent in pod team.llama-agent-n-0 does not answer within"):
            found.pages(scene.pod("n-0")).page("/v1/status")
        with pytest.raises(ClusterError, match=r"^the API server http:.* does not answer"):
            found.deployments()


def test_a_program_that_does_not_start_is_given_up_and_its_late_connection_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "START_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, _connected(tmp_path, silent.getsockname()[1]) as found:
        with pytest.raises(ClusterError, match=r"no program has started in pod team/llama-agent-n-0 within 0.2 s"):
            found.start(scene.pod("n-0"), ["true"])
        with _exec_line(silent) as line:
            # The first byte of a frame that closes.
            assert line.recv(1) == b"\x88"


@contextmanager
def _exec_line(server: socket.socket) -> Iterator[socket.socket]:
    """Accept the connection of a program, as the API server does; yield it."""
    line, _ = server.accept()
    with line:
        line.settimeout(cluster.HTTP_TIMEOUT_S)
        asked = b""
        while not asked.endswith(b"\r\n\r\n"):
            asked += line.recv(1 << 16)
        key = next(each.split(b": ")[1] for each in asked.split(b"\r\n") if each.startswith(b"Sec-WebSocket-Key"))
        # As RFC 6455 has it.
        accepted = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        protocol = b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n"
        line.sendall(head + protocol + b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n")
        yield line


def test_test_engines_end_at_once_although_a_line_that_keeps_one_alive_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_ALIVE_EVERY_S", 0.01)
    over, hangs = threading.Event(), threading.Event()

    def serve(server: socket.socket) -> None:
        with _exec_line(server) as line:
            started = b"\x01" + msgspec.json.encode(Started(None, "decode", "host")) + b"\n"
            # A binary frame of standard output. Nothing is read any more.
            line.sendall(bytes([0x82, len(started)]) + started)
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as server, _connected(tmp_path, server.getsockname()[1]) as found:
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        try:
            with Programs() as programs:
                program = found.start(scene.pod("n-0"), ["true"])
                programs.add(program)
                engine = Engine(program, Start("run", False, True, 1, 1, 1.0, "host"))
                _fill(program)
                write = program.write

                def write_and_say(data: bytes) -> None:
                    hangs.set()
                    write(data)

                monkeypatch.setattr(program, "write", write_and_say)
                with kept_alive([engine]):
                    assert hangs.wait(cluster.HTTP_TIMEOUT_S)
                    ended_s = time.monotonic()
            assert time.monotonic() - ended_s < cluster.HTTP_TIMEOUT_S / 2
        finally:
            over.set()
            serving.join()


def _fill(program: cluster.PodProgram) -> None:
    """Write to a connection until its buffers take no more bytes."""
    line = program._client.sock.sock
    line.settimeout(0.5)
    with suppress(TimeoutError):
        while True:
            line.send(bytes(1 << 20))
    line.settimeout(cluster.HTTP_TIMEOUT_S)


class _FailsAt(BaseHTTPRequestHandler):
    """Answers as an API server does that becomes unavailable: `refused` says at which path, and how."""

    refused: tuple[str, int, str]

    def do_GET(self) -> None:
        self._answer(200, {"metadata": {"name": "team"}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        path, status, said = self.refused
        if path in self.path:
            self._answer(status, {"kind": "Status", "message": said})
        else:
            self._answer(201, {"status": {"allowed": True}})

    def _answer(self, status: int, found: dict[str, object]) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("refused", "refusal", "why"),
    [
        (("/pods", 403, 'violates PodSecurity "baseline"'), 'violates PodSecurity "baseline"', ""),
        (("/pods", 500, "failed calling webhook"), "failed calling webhook", ""),
        (("/pods", 503, "etcd is away"), None, "answered 503: etcd is away"),
        (("/selfsubjectaccessreviews", 429, "try again"), None, "answered 429: try again"),
    ],
)
def test_a_dry_run_that_the_api_server_cannot_judge_is_no_refusal(
    tmp_path: Path, refused: tuple[str, int, str], refusal: str | None, why: str
) -> None:
    handler = type("Handler", (_FailsAt,), {"refused": refused})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with _connected(tmp_path, server.server_port) as found:
                tried = reading._tried(found, "team", [])
        finally:
            server.shutdown()
    assert (refusal is None) == (tried.refusal is None)
    assert (refusal or "") in (tried.refusal or "")
    assert why in tried.why and "you may not" not in tried.why


def test_a_server_that_cannot_be_reached_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens at this port.
    with _connected(tmp_path, 9) as found:
        monkeypatch.setattr(reading, "_namespace", lambda *_: {})
        tried = reading._tried(found, "team", [])
    assert tried.refusal is None
    assert "cannot be reached" in tried.why
