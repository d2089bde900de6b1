"""A server that answers as an API server does, with what a test gives. Used by tests of `check`, `dump` and `status`."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import check_scene as scene

NAME = "longshore-system/longshore-operator"
DEPLOYMENTS = "/apis/apps/v1/deployments"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/longshore-system/leases/longshore-operator"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disaggdeployments.longshore.dev"
OWN = f"/apis/longshore.dev/v1alpha1/namespaces/{scene.SPACE}/disaggdeployments"
PODS = f"/api/v1/namespaces/{scene.SPACE}/pods"


def lease(age_s: float, holder: str = "pod-1") -> dict[str, Any]:
    renewed = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=age_s)).isoformat().replace("+00:00", "Z")
    return {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}}


def operator(ready: int = 1) -> dict[str, Any]:
    body = scene.operator().body
    return {"items": [{**body, "status": {**body["status"], "readyReplicas": ready}}]}


@contextmanager
def api_server(objects: Mapping[str, Any], path: Path, token: str = "") -> Iterator[str]:
    """Answer by path; refuse other paths as the API server does for missing rights. Yield a kubeconfig.

    Args:
        objects: by path, without or with the query. An answer is an object, text, a status with an object, or a call that
            returns one of these at each request.
        token: the user's.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = unquote(self.path)
            found = objects.get(asked, objects.get(asked.partition("?")[0]))
            # The age of a Lease is that of the request.
            found = found() if callable(found) else found
            refused = {"kind": "Status", "message": f"no right to get this: {asked.partition('?')[0]}"}
            status, body = found if isinstance(found, tuple) else (200, found) if found is not None else (403, refused)
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def handle(self) -> None:
            # A command that is interrupted closes its connection, at which the server would print a traceback.
            with suppress(ConnectionError):
                super().handle()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        body = {
            "current-context": "one",
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": scene.SPACE}}],
            "clusters": [{"name": "one", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "one", "user": {"token": token} if token else {}}],
        }
        path.write_text(json.dumps(body))
        try:
            yield str(path)
        finally:
            server.shutdown()
            thread.join()
