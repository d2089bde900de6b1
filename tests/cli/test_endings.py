"""Tests how the command ends: if its reader, its user or a library is gone, and on a terminal of another encoding."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longshore_cli.analyze import rules
from longshore_cli.cluster import CONNECTIONS
from longshore_cli.main import main
from longshore_cli.status_pages import HTTP_TIMEOUT_S

MANIFEST = Path(__file__).parents[2] / "examples" / "llama-70b.yaml"
COMMAND = [sys.executable, "-m", "longshore_cli.main"]


def kubeconfig(path: Path, server: str) -> Path:
    """Write a kubeconfig of a user without credentials."""
    body = {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "one", "user": {}}],
    }
    path.write_text(json.dumps(body))
    return path


class Quiet(BaseHTTPRequestHandler):
    """Prints nothing, also when a command that has read enough closes its connection, perhaps after the test has ended."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server() -> Iterator[str]:
    """Serve a page of text for each request, as a proxy does that wants a login; yield its address."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>log in")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_reader_that_ends_early_is_no_failure_of_the_command() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [*COMMAND, "analyze", "-f", str(MANIFEST)], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    # As the shell says of a program that SIGPIPE ended.
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_terminal_of_another_encoding_shows_what_it_can(tmp_path: Path) -> None:
    given = tmp_path / "größe.yaml"
    given.symlink_to(MANIFEST)
    ended = subprocess.run(
        [*COMMAND, "analyze", "-f", str(given)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"gr??e.yaml" in ended.stdout and ended.stderr == b""


def test_an_interrupt_asks_no_further_agents_and_prints_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[socket.socket] = []
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # Addresses that differ are those of several agents.
        hosts = ["".join(letters) for letters in itertools.product("lL", "oO", "cC", "aA", "lL", ["host"])]
        agents = [f"--agent=http://{host}:{port}" for host in hosts]

        def interrupt_when_all_wait() -> None:
            asked.extend(server.accept()[0] for _ in range(CONNECTIONS))
            # A thread whose connection the interrupt closes before its request would open another one.
            for one in asked:
                one.recv(1, socket.MSG_PEEK)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt_when_all_wait)
        interrupting.start()
        code = main(["rooms", *agents])
        interrupting.join()
        # Each thread is free only now, so it would take the next agent if the interrupt had left it one.
        for one in asked:
            one.close()
        for thread in set(threading.enumerate()) - before:
            thread.join()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (code, capsys.readouterr().err) == (130, "")


@pytest.mark.parametrize("words", [["rooms", "--agent"], ["status", "--agent"], ["check", "--kubeconfig"]])
@pytest.mark.parametrize("begins", [False, True], ids=["silent", "in-the-middle"])
def test_an_interrupt_ends_a_command_at_once_although_a_server_hangs(
    tmp_path: Path, words: list[str], *, begins: bool
) -> None:
    """A server that answers nothing but an API server's version, or only begins to answer."""
    over, hangs = threading.Event(), threading.Event()

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/version" or begins:
                self.send_response(200)
                self.send_header("Content-Length", "2" if self.path == "/version" else "3")
                self.end_headers()
                self.wfile.write(b"{}")
            if self.path != "/version":
                hangs.set()
                over.wait()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            given = str(kubeconfig(tmp_path / "kubeconfig", url)) if words[0] == "check" else url
            with subprocess.Popen([*COMMAND, *words, given], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
                assert hangs.wait(30)
                command.send_signal(signal.SIGINT)
                # Its requests would end later.
                said = command.communicate(timeout=HTTP_TIMEOUT_S / 2)
        finally:
            over.set()
            server.shutdown()
    assert (command.returncode, *said) == (130, b"", b"")


def test_a_server_that_is_no_api_server_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server() as url:
        assert main(["status", "--kubeconfig", str(kubeconfig(tmp_path / "kubeconfig", url))]) == 1
    said = capsys.readouterr().err
    assert f"{url} answered '<html>log in', as no API server does: correct the kubeconfig" in said
    assert len(said.splitlines()) == 1, said


def test_no_text_of_an_error_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--pre", "-f", "no\x1b[2J\u202e"]) == 2
    error = capsys.readouterr().err
    assert "no [2J" in error and error.replace("\n", "").isprintable()


def test_a_kubeconfig_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kubeconfig").write_bytes(b"caf\xe9")
    assert main(["status", "--kubeconfig", str(tmp_path / "kubeconfig")]) == 1
    assert "no cluster is known: 'utf-8' codec can't decode" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules._program.cache_clear()
    for name in ("celpy", "celpy.adapter", "celpy.evaluation"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["analyze", "-f", str(MANIFEST)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longshore analyze: celpy")
    assert line.endswith("cannot be imported: pip install 'longshore-kv[cli]', or '.[cli]' in a checkout")
