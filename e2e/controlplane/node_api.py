"""Calls the API server for a process node with the node's own certificate, so that it has a kubelet's rights."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

Body = dict[str, Any]
_ANSWER_LIMIT_S = 30.0


class NodeApiError(OSError):
    """The API server refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class NodeApi:
    """Requests of one node. Thread-safe: each request has its own connection."""

    def __init__(self, server: str, authority: Path, certificate: Path, key: Path) -> None:
        parts = urllib.parse.urlsplit(server)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(certificate, key)

    def get(self, path: str, **query: str) -> Body:
        """Return an object, or a list."""
        return self._ask("GET", path, None, query)

    def create(self, path: str, body: Body) -> Body:
        """Create an object."""
        return self._ask("POST", path, body)

    def merge(self, path: str, body: Body) -> Body:
        """Merge `body` into an object."""
        return self._ask("PATCH", path, body, kind="application/merge-patch+json")

    def delete(self, path: str, body: Body) -> None:
        """Delete an object."""
        self._ask("DELETE", path, body)

    def _ask(
        self,
        verb: str,
        path: str,
        body: Body | None,
        query: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> Body:
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=_ANSWER_LIMIT_S, context=self._context)
        try:
            target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
            data = None if body is None else json.dumps(body)
            connection.request(verb, target, data, {"Content-Type": kind, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise NodeApiError(0, str(error)) from error
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            raise NodeApiError(answer.status, f"{verb} {path}: {text}")
        return dict(json.loads(text))
