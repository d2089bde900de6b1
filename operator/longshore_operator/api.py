"""Calls the API server for all writes and for all reads except watches. Called by `reconcile`, `apply` and others.

Each call has a time limit and raises a type of `errors`. kopf runs the watches. This module makes no decisions.
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
from longshore_operator.errors import (
    ApiError,
    ConflictError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UndeclaredFieldError,
)
from longshore_operator.kinds import Kind
from longshore_wire.errors import ConfigError

Body = dict[str, Any]

_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
# Objects in one page of a list. Bounds the memory that one response takes.
_PAGE_COUNT = 500
# Events of a namespace are kept for an hour. More pages would delay a reconcile.
_EVENT_PAGES_MAX = 4
# More concurrent requests would only queue at the server. The lease has a thread of its own.
_THREADS = 16
_TOO_MANY = 429
# A server-side apply with a field that the kind lacks is answered by 500, although no retry can succeed.
_NOT_OF_THE_SCHEMA = "failed to create typed patch object"
_SERVER_FAULT = 500
# These causes are more specific than the reason of the whole response.
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
        """Use the pod's ServiceAccount or, outside a cluster, the kubeconfig. Raises ConfigError without either."""
        configuration = Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                way_out = "run it in a pod with a ServiceAccount, or name a kubeconfig"
                raise ConfigError([f"KUBECONFIG: no cluster is known here: {error} {way_out}"]) from error
        # The work queue retries, since it knows whether the call is still wanted.
        configuration.retries = False
        configuration.connection_pool_maxsize = _THREADS
        return cls(ApiClient(configuration), timeout_s)

    async def get(self, kind: Kind, namespace: str, name: str) -> Body:
        """Return one object."""
        return await self._call("GET", kind, kinds.path(kind, namespace, name))

    async def metadata(self, kind: Kind, namespace: str) -> Iterator[Body]:
        """Return the metadata of all objects of a kind, with its label, in `namespace`; an empty one selects all namespaces."""
        found: list[Body] = []
        query: dict[str, str] = {"limit": str(_PAGE_COUNT)} | ({"labelSelector": kind.label} if kind.label else {})
        while True:
            path = f"{kinds.path(kind, namespace)}?{urlencode(query)}"
            page = await self._call("LIST", kind, path, accept=_METADATA_ONLY)
            found += [item["metadata"] for item in page.get("items") or []]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return iter(found)
            query["continue"] = token

    async def warnings(self, namespace: str) -> list[Body]:
        """Return the warning events of a namespace, of the first pages."""
        found: list[Body] = []
        query = {"limit": str(_PAGE_COUNT), "fieldSelector": "type=Warning"}
        for _ in range(_EVENT_PAGES_MAX):
            page = await self._call("LIST", kinds.EVENT, f"{kinds.path(kinds.EVENT, namespace)}?{urlencode(query)}")
            found += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                break
            query["continue"] = token
        return found

    async def schema(self, group_version: str) -> Body:
        """Return the OpenAPI document of a group and version, which every authenticated user may read."""
        return await self._call("GET", kinds.DEPLOYMENT, f"/openapi/v3/apis/{group_version}")

    async def apply(self, kind: Kind, body: Body, *, force: bool, subresource: str = "", dry_run: bool = False) -> Body:
        """Apply `body` server-side as our field manager; return the resulting object."""
        metadata = body["metadata"]
        path = kinds.path(kind, metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": str(force).lower()} | (
            {"dryRun": "All"} if dry_run else {}
        )
        return await self._call("DRYAPPLY" if dry_run else "APPLY", kind, f"{path}?{urlencode(query)}", body, _APPLY)

    async def create(self, kind: Kind, body: Body, *, dry_run: bool = False) -> Body:
        """Create an object and return it. Raises ConflictError if it exists."""
        query = f"?{urlencode({'dryRun': 'All'})}" if dry_run else ""
        path = f"{kinds.path(kind, body['metadata']['namespace'])}{query}"
        return await self._call("DRYRUN" if dry_run else "CREATE", kind, path, body)

    async def replace(self, kind: Kind, body: Body) -> Body:
        """Replace an object and return it. Raises ConflictError if `body` does not have the newest resourceVersion."""
        metadata = body["metadata"]
        return await self._call("UPDATE", kind, kinds.path(kind, metadata["namespace"], metadata["name"]), body)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str = "") -> None:
        """Delete an object; do nothing if it does not exist. With `uid`, do nothing if the object has another one."""
        options = {"preconditions": {"uid": uid}} if uid else None
        try:
            await self._call("DELETE", kind, kinds.path(kind, namespace, name), options)
        except NotFoundError:
            return
        except ConflictError:
            if not uid:
                raise

    async def _call(
        self, verb: str, kind: Kind, path: str, body: Body | None = None, content: str = _JSON, accept: str = _JSON
    ) -> Body:
        self.calls[verb, kind.name] = self.calls.get((verb, kind.name), 0) + 1
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._send, verb, path, body, content, accept)

    def _send(self, verb: str, path: str, body: Body | None, content: str, accept: str) -> Body:
        methods = {
            "LIST": "GET",
            "APPLY": "PATCH",
            "DRYAPPLY": "PATCH",
            "CREATE": "POST",
            "DRYRUN": "POST",
            "UPDATE": "PUT",
        }
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": names.COMPONENT}
        # Read at each call, since the kubelet rotates the pod's token.
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
        """Stop the threads."""
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
    default: type[ApiError] = RefusedError
    if _NOT_OF_THE_SCHEMA in text:
        default = UndeclaredFieldError
    elif status == _TOO_MANY or status >= _SERVER_FAULT:
        default = UnavailableError
    raise _STATUS_CLASSES.get(status, default)(f"{what}: {status}: {text}", status, cause)
