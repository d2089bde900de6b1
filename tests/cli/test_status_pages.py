"""Tests the connection to an agent's pages: the agent closes it, is away, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longshore_cli.status_pages import AgentPageError, AgentPages

HOST = "127.0.0.1"


class _Forgetful(BaseHTTPRequestHandler):
    """Closes each connection after its answer without saying so, as an agent does after its keep-alive time."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(port: int = 0) -> Iterator[int]:
    with ThreadingHTTPServer((HOST, port), _Forgetful) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_closed_connection_is_opened_again_and_an_agent_that_was_away_is_read_when_it_is_back() -> None:
    with served() as port:
        pages = AgentPages.at(f"http://{HOST}:{port}")
        assert [pages.text("/metrics") for _ in range(3)] == ["{}"] * 3
    for _ in range(3):
        with pytest.raises(AgentPageError, match=r"cannot be reached: .*refused"):
            pages.text("/metrics")
    with served(port), pages:
        assert pages.text("/metrics") == "{}"
