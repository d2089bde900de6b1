"""Drives a headless Chromium by its DevTools protocol, for tests of the agent's web page and for its pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane.waiting import until
from websocket import create_connection

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
HOST = "127.0.0.1"
START_LIMIT_S = 150.0
ANSWER_LIMIT_S = 100.0
# Without root Chromium has a sandbox of its own. Nothing is fetched for itself.
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


def program() -> str | None:
    """Return the path of a Chromium; None: there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with one tab. A context manager.

    Attributes:
        complaints: what the tab's console and its policy have said, as text.
    """

    def __init__(self, directory: Path) -> None:
        found = program()
        assert found is not None, "there is no Chromium: run .ci/install-chromium"
        self._port_file = directory / "DevToolsActivePort"
        command = [found, *_OPTIONS, f"--user-data-dir={directory}", "about:blank"]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        self._log = (directory / "log").open("ab")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._count = 0
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        try:
            # The file has the port, and then the path behind it. For a moment it is empty.
            lines = until(
                lambda: (found := self._port_file.read_text().splitlines())[1:] and found,
                "Chromium listens",
                START_LIMIT_S,
            )
            self._socket = create_connection(
                f"ws://{HOST}:{lines[0]}{lines[1]}",
                timeout=ANSWER_LIMIT_S,
                suppress_origin=True,
            )
            self._session = ""
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = ""
        self.call("Browser.close")
        self._socket.close()
        self._process.wait(ANSWER_LIMIT_S)
        self._log.close()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        end_s = time.monotonic() + ANSWER_LIMIT_S
        while time.monotonic() < end_s:
            answer = json.loads(self._socket.recv())
            self._hear(answer)
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
        raise AssertionError(f"Chromium has not answered {method}")

    def open(self, url: str) -> None:
        """Show a page."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.run("document.body.innerText"))

    def has_size(self, width: int, height: int, *, phone: bool = False, dark: bool = False, scale: float = 1.0) -> None:
        """Give the tab a size in CSS pixels, and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write what the tab shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(event["params"]))
