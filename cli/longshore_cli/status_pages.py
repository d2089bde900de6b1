"""Reads the HTTP pages of agents: of one at an address, with token and TLS, or of one that `fetch` reaches otherwise.

Called by `local_agents` for agents that it has started, by `agents` for those that the user names, and by `cluster`.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import msgspec

from longshore_cli.words import plain
from longshore_wire.errors import LongshoreError, Reason

# Above an agent's own limit for an answer.
HTTP_TIMEOUT_S = 10.0
OK, UNAUTHORIZED, NOT_FOUND, REFUSED, UNAVAILABLE = 200, 401, 404, 422, 503
# Characters of a body that is no page of an agent, in an error.
_SHOWN_CHARACTERS_MAX = 200


class AgentPageError(LongshoreError):
    """An agent cannot be reached or refuses a request; names the agent and the way out."""

    reason = Reason.INTERNAL


class UnknownRoomError(LongshoreError):
    """No agent knows a room; names the room and the agents."""

    reason = Reason.UNKNOWN_INSTANCE


class Answer(NamedTuple):
    """A page. Times are of our monotonic clock, before the request and after the answer."""

    status: int
    body: bytes
    sent_ns: int
    got_ns: int


class Page(NamedTuple):
    """A page, or the refusal of one."""

    status: int
    body: bytes


class AgentPages:
    """The pages of one agent. A context manager.

    Args:
        name: what messages call it: its address, its node or its pod.
        fetch: gets a path; raises OSError, HTTPException or a LongshoreError.
        close: ends what `fetch` holds.
    """

    def __init__(self, name: str, fetch: Callable[[str], Page], close: Callable[[], None] | None = None) -> None:
        self.name = name
        self._fetch = fetch
        self._close = close

    @classmethod
    def at(cls, url: str, *, token: str = "", authority: Path | None = None, name: str = "") -> Self:
        """Return the pages at an address, over one connection, which is opened again when the agent has closed it.

        Args:
            url: `http://host:port` or `https://host:port`.
            token: the agent's bearer token; empty: it needs none.
            authority: PEM file of the authority that has signed its certificate; None: those of the system.
            name: what messages call it; empty: its address.
        Raises:
            AgentPageError: `url` is no such address, or the authority cannot be read.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection = _connection(url.rstrip("/"), authority)

        def fetch(path: str) -> Page:
            while True:
                reused = connection.sock is not None
                try:
                    connection.request("GET", path, headers=headers)
                    answer = connection.getresponse()
                    return Page(answer.status, answer.read())
                except (OSError, http.client.HTTPException) as error:
                    # Otherwise the next request is refused, because this one has no answer.
                    connection.close()
                    # An agent closes a connection that is idle for a while, and restarts.
                    if not (reused and isinstance(error, ConnectionError)):
                        raise

        def close() -> None:
            # A thread that still reads holds the lock that `close` needs.
            if (line := connection.sock) is not None:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            connection.close()

        return cls(name or url.rstrip("/"), fetch, close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._close:
            self._close()

    def ask(self, path: str) -> Answer:
        """Return a page with any status. Raises what `fetch` raises."""
        sent_ns = time.monotonic_ns()
        status, body = self._fetch(path)
        return Answer(status, body, sent_ns, time.monotonic_ns())

    def page(
        self, path: str, query: Mapping[str, str | int] | None = None, *, fields: Collection[str] = ()
    ) -> tuple[Any, Answer] | None:
        """Return a page decoded, and as it came; None: the agent knows no such room.

        Args:
            fields: those that the page of an agent has.
        Raises:
            AgentPageError: the agent does not answer, wants another token, or refuses the request; or it is no agent.
        """
        asked, answer = self._answer(path, query)
        if answer.status == NOT_FOUND and _reason(answer.body) == "UnknownRoom":
            return None
        body = _decoded(answer.body)
        if answer.status == OK and all(field in body for field in fields):
            return body, answer
        raise self._refusal(asked, answer)

    def status(self) -> dict[str, Any]:
        """Return `/v1/status`, which `agent_report` reads. Raises AgentPageError as `page` does."""
        found = self.page("/v1/status", fields=("node", "workers"))
        assert found is not None, "only a single room can be unknown"
        return dict(found[0])

    def text(self, path: str) -> str:
        """Return a page of text, such as `/metrics`. Raises AgentPageError as `page` does."""
        asked, answer = self._answer(path)
        if answer.status != OK:
            raise self._refusal(asked, answer)
        return answer.body.decode(errors="replace")

    def _answer(self, path: str, query: Mapping[str, str | int] | None = None) -> tuple[str, Answer]:
        try:
            asked = f"{path}?{urlencode(query)}" if query else path
            answer = self.ask(asked)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise AgentPageError(
                f"the agent at {self.name} cannot be reached: {error}: see agent.json in its run directory for its address, and "
                "give --authority for a certificate that this system does not know"
            ) from error
        if answer.status == UNAUTHORIZED:
            raise AgentPageError(
                f"the agent at {self.name} wants its token: give --token-file", reason=Reason.AUTHENTICATION
            )
        return asked, answer

    def _refusal(self, asked: str, answer: Answer) -> AgentPageError:
        body = _decoded(answer.body)
        said = answer.body.decode(errors="replace")[:_SHOWN_CHARACTERS_MAX]
        remedies = {UNAVAILABLE: "it starts, ends or is busy: try again", REFUSED: "it refuses the request"}
        remedy = remedies.get(answer.status, "") if body.get("reason") else ""
        return AgentPageError(
            f"{self.name}{asked} answered {answer.status}, {said!r}: {remedy or 'is an agent of this release there?'}"
        )


def _connection(url: str, authority: Path | None) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path:
            raise ValueError(url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=HTTP_TIMEOUT_S)
        return http.client.HTTPSConnection(parts.netloc, timeout=HTTP_TIMEOUT_S, context=_trust(authority))
    except (ValueError, http.client.InvalidURL) as error:
        raise AgentPageError(f"{url!r} is no agent: give http://HOST:PORT or https://HOST:PORT") from error


def _reason(body: bytes) -> str:
    return str(_decoded(body).get("reason", ""))


def _decoded(body: bytes) -> dict[str, Any]:
    """Return a body, whose texts a terminal does not obey: peers have written some of them. Empty: it is no object."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return _plain(found) if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {plain(name): _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _trust(authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if authority is None else str(authority))
    except OSError as error:
        raise AgentPageError(f"--authority {authority}: {error.strerror or error}: give a PEM file") from error
