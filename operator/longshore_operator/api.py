"""The one door to the API server for what the operator reads by itself and writes. Called by `apply`, `lease`, `resync`.

Each call has a time limit and raises one of our errors. Watches are kopf's. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from longshore_operator import kinds, names
from longshore_operator.errors import ApiError, ConflictError, NotFoundError, RefusedError, UnavailableError
from longshore_operator.kinds import Kind
from longshore_wire.errors import ConfigError

Body = dict[str, Any]

_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
# Objects of one page of a list: bounds what one answer takes.
_PAGE_COUNT = 500
# More at once would only queue at the server; the lease has a thread of its own.
_THREADS = 16
_TOO_MANY = 429
_SERVER_FAULT = 500
# They say more than the reason of the whole answer.
_TELLING_CAUSES = frozenset({"NamespaceTerminating", "FieldManagerConflict"})
_STATUS_CLASSES: Mapping[int, type[ApiError]] = {404: NotFoundError, 409: ConflictError, 410: NotFoundError}


class Api:
    """Calls of one operator. `calls` counts them by (verb, kind), for metrics and tests."""

    def __init__(self, client: ApiClient, timeout_s: float) -> None:
        self._configuration: Configuration = client.configuration
        self._pool: urllib3.PoolManager = client.rest_client.pool_manager
        self._timeout = urllib3.Timeout(total=timeout_s)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="api")
        self.calls: dict[tuple[str, str], int] = {}

    @classmethod
    def connect(cls, timeout_s: float) -> Api:
        """Return an Api by the pod's ServiceAccount or, outside a cluster, the kubeconfig. Raises ConfigError: there is neither."""
        configuration = Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                way_out = "run it in a pod with a ServiceAccount, or name a kubeconfig"
                raise ConfigError([f"KUBECONFIG: no cluster is known here: {error} {way_out}"]) from error
        # Retries are the queue's, which knows when one is still wanted.
        configuration.retries = False
        configuration.connection_pool_maxsize = _THREADS
        return cls(ApiClient(configuration), timeout_s)

    async def get(self, kind: Kind, namespace: str, name: str) -> Body:
        """Return one object."""
        return await self._call("GET", kind, kinds.path(kind, namespace, name))

    async def metadata(self, kind: Kind, namespace: str, label: str = "") -> Iterator[Body]:
        """Return the metadata of all objects of a kind in `namespace`, which is all namespaces if empty."""
        found: list[Body] = []
        query: dict[str, str] = {"limit": str(_PAGE_COUNT)} | ({"labelSelector": label} if label else {})
        while True:
            path = f"{kinds.path(kind, namespace)}?{urlencode(query)}"
            page = await self._call("LIST", kind, path, accept=_METADATA_ONLY)
            found += [item["metadata"] for item in page.get("items") or []]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return iter(found)
            query["continue"] = token

    async def apply(self, kind: Kind, body: Body, *, force: bool, subresource: str = "") -> Body:
        """Return what server-side apply of `body` by our field manager makes of the object."""
        metadata = body["metadata"]
        path = kinds.path(kind, metadata["namespace"], metadata["name"], subresource)
        query = urlencode({"fieldManager": names.FIELD_MANAGER, "force": str(force).lower()})
        return await self._call("APPLY", kind, f"{path}?{query}", body, _APPLY)

    async def create(self, kind: Kind, body: Body, *, dry_run: bool = False) -> Body:
        """Return the new object. Raises ConflictError if it is there already."""
        query = f"?{urlencode({'dryRun': 'All'})}" if dry_run else ""
        path = f"{kinds.path(kind, body['metadata']['namespace'])}{query}"
        return await self._call("DRYRUN" if dry_run else "CREATE", kind, path, body)

    async def replace(self, kind: Kind, body: Body) -> Body:
        """Return the object after replacing it; its resourceVersion must be the newest, else ConflictError."""
        metadata = body["metadata"]
        return await self._call("UPDATE", kind, kinds.path(kind, metadata["namespace"], metadata["name"]), body)

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete an object; one that is gone already is fine."""
        try:
            await self._call("DELETE", kind, kinds.path(kind, namespace, name))
        except NotFoundError:
            return

    async def _call(
        self, verb: str, kind: Kind, path: str, body: Body | None = None, content: str = _JSON, accept: str = _JSON
    ) -> Body:
        self.calls[verb, kind.name] = self.calls.get((verb, kind.name), 0) + 1
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._send, verb, path, body, content, accept)

    def _send(self, verb: str, path: str, body: Body | None, content: str, accept: str) -> Body:
        methods = {"LIST": "GET", "APPLY": "PATCH", "CREATE": "POST", "DRYRUN": "POST", "UPDATE": "PUT"}
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": names.COMPONENT}
        # Asked for each time: the token of a pod is replaced while it runs.
        settings: dict[str, Any] = dict(self._configuration.auth_settings())
        headers |= {str(entry["key"]): str(entry["value"]) for entry in settings.values()}
        what = f"{verb} {path.partition('?')[0]}"
        with _foreign_errors(what):
            answer = self._pool.request(
                methods.get(verb, verb),
                f"{self._configuration.host}{path}",
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=self._timeout,
                retries=False,
            )
            data = answer.data
        return _read(what, answer.status, data)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _foreign_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise UnavailableError(f"{what}: no answer from the API server: {error}") from error


def _read(what: str, status: int, data: bytes) -> Body:
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        found = {}
    if status < 300:  # noqa: PLR2004
        return dict(found)
    text = str(found.get("message") or data[:200].decode(errors="replace"))
    causes = (found.get("details") or {}).get("causes") or []
    cause = next((c["reason"] for c in causes if c.get("reason") in _TELLING_CAUSES), found.get("reason") or "")
    default = UnavailableError if status == _TOO_MANY or status >= _SERVER_FAULT else RefusedError
    raise _STATUS_CLASSES.get(status, default)(f"{what}: {status}: {text}", status, cause)
