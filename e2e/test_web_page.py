"""Tests the agent's web page in a headless Chromium, with real agents between which rooms move."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from browser import HOST, Browser, program
from controlplane.waiting import until
from page_scene import Pages, pages

TOKEN = "a-token-of-this-test"
PROXY_PATH = "/api/v1/namespaces/team/pods/agent-1:9470/proxy/"
LIMIT_S = 150.0
PHONE = 375
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    if program() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium is installed: run .ci/install-chromium")
    directory = tmp_path_factory.mktemp("pages")
    (directory / "token").write_text(TOKEN)
    (directory / "token").chmod(0o600)
    with pages(directory, LONGSHORE_HTTP_TOKEN_FILE=str(directory / "token")) as found:
        yield found


@pytest.fixture
def browser(scene: Pages, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as found:
        yield found


def shows(browser: Browser, *texts: str) -> str:
    """Wait until the page shows all texts; return what it shows."""

    def look() -> str:
        shown = browser.text()
        assert [text for text in texts if text not in shown] == [], shown
        return shown

    return until(look, f"the page shows {texts}", LIMIT_S)


def gives(browser: Browser, token: str) -> None:
    """Type a token and press the button."""
    browser.run("document.getElementById('token').focus()")
    browser.call("Input.insertText", text=token)
    browser.run("document.querySelector('button').click()")


def test_the_page_asks_for_the_token_and_shows_what_moves(scene: Pages, browser: Browser) -> None:
    browser.has_size(PHONE, 812, phone=True)
    browser.open(f"{scene.decode.http}/")
    assert "llama" not in shows(browser, "The agent wants its token.")
    gives(browser, "another")
    shows(browser, "The agent does not accept this token.")
    gives(browser, TOKEN)
    with scene.waits_for_a_silent_peer(), scene.busy():
        shown = shows(
            browser, "gpu-node-7", "ready", "from llama-prefill-0/0/1", "staged", "llama-prefill-9", "rooms done"
        )
        until(lambda: "received\n0 B/s" not in browser.text() and "received\n-" not in browser.text(), "a rate")
    assert "The agent" not in shown
    assert browser.run("document.title") == "gpu-node-7: ready"
    assert browser.run("document.documentElement.scrollWidth") == PHONE
    scene.fails()
    shows(browser, "Failed rooms", "reason", "peer_lost")
    # The refused requests without a valid token are told as well.
    assert [text for text in browser.complaints if "401" not in text] == []


def test_no_name_becomes_code(scene: Pages, browser: Browser) -> None:
    with _Proxy(scene.decode.http) as proxy, scene.waits_for_a_silent_peer():
        # Agents refuse such a name, so the proxy puts it in their answers.
        proxy.renames = "llama-prefill-", HOSTILE
        browser.open(f"{proxy.url}{PROXY_PATH}")
        shows(browser, "gpu-node-7", f"from {HOSTILE}0/0/1", f"{HOSTILE}9")
    # Images, scripts and attributes would be elements.
    assert browser.run("document.querySelectorAll('main img, main script, [onerror]').length") == 0
    assert browser.run("document.title") == "gpu-node-7: ready"


def test_a_script_that_is_not_the_pages_own_is_refused_by_the_policy(scene: Pages, browser: Browser) -> None:
    browser.open(f"{scene.decode.http}/")
    shows(browser, "The agent wants its token.")
    browser.run(
        "const one = document.createElement('script'); one.textContent = \"document.title = 'owned'\"; document.body.append(one)"
    )
    browser.run("fetch('http://127.0.0.2:9/').catch(() => null)")
    told = until(lambda: [text for text in browser.complaints if "Content Security Policy" in text], "a refusal")
    assert browser.run("document.title") == "Longshore agent"
    assert any("script-src" in text for text in told), told
    assert any("connect-src" in text for text in told), told


def test_the_page_works_below_the_path_of_the_api_servers_proxy_and_says_when_the_agent_is_gone(
    scene: Pages, browser: Browser
) -> None:
    with _Proxy(scene.prefill.http) as proxy:
        browser.open(f"{proxy.url}{PROXY_PATH}")
        shows(browser, "gpu-node-3", "to llama-decode-0/0/0")
        proxy.down = True
        shows(browser, "No answer: v1/status answers 503: error trying to reach service", "no answer")
        proxy.down = False
        until(lambda: "No answer" not in browser.text(), "it reads again", LIMIT_S)


def test_the_page_gives_a_token_to_no_other_agent_that_answers_at_the_same_address(
    scene: Pages, browser: Browser
) -> None:
    with _Proxy(scene.prefill.http) as port:
        port.adds_token = False
        browser.open(f"{port.url}{PROXY_PATH}")
        shows(browser, "The agent wants its token.")
        gives(browser, TOKEN)
        shows(browser, "gpu-node-3", "ready")
        port.passes_to(scene.decode.http)
        assert "gpu-node-7" not in shows(browser, "The agent wants its token.")
        browser.open(f"{port.url}{PROXY_PATH}")
        shows(browser, "The agent wants its token.")
        assert scene.decode.http.removeprefix("http://") not in port.got_token
        port.passes_to(scene.prefill.http)
        browser.open(f"{port.url}{PROXY_PATH}")
        shows(browser, "gpu-node-3", "ready")


class _Proxy(ThreadingHTTPServer):
    """Serves an agent below PROXY_PATH, as the API server's proxy does, and adds the token unless told otherwise.

    Attributes:
        got_token: the agents to which a browser has sent a token.
        renames: a text in the agent's JSON, and the text to put in its place.
    """

    def __init__(self, agent: str) -> None:
        super().__init__((HOST, 0), _Passes)
        self.passes_to(agent)
        self.url = f"http://{HOST}:{self.server_address[1]}"
        self.down = False
        self.adds_token = True
        self.got_token: set[str] = set()
        self.renames: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def passes_to(self, agent: str) -> None:
        self.agent = agent.removeprefix("http://")


class _Passes(BaseHTTPRequestHandler):
    server: _Proxy

    def do_GET(self) -> None:
        agent, given = self.server.agent, self.headers["Authorization"]
        if given:
            self.server.got_token.add(agent)
        if self.server.down or not self.path.startswith(PROXY_PATH):
            self._answer(503, [], b'{"kind": "Status", "message": "error trying to reach service"}')
            return
        line = HTTPConnection(agent, timeout=LIMIT_S)
        token = f"Bearer {TOKEN}" if self.server.adds_token else given
        headers = {"Authorization": token} if token else {}
        line.request(self.command, f"/{self.path.removeprefix(PROXY_PATH)}", headers=headers)
        answer = line.getresponse()
        body = answer.read()
        if self.server.renames and answer.getheader("Content-Type") == "application/json":
            old, new = self.server.renames
            body = body.replace(old.encode(), json.dumps(new)[1:-1].encode())
        self._answer(answer.status, answer.getheaders(), body)
        line.close()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "date", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
