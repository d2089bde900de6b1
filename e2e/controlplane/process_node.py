"""Simulates a node whose pods are real processes of this machine, without images, cgroups and pod networks.

It handles pods like a kubelet, with a kubelet's certificate and rights (user `system:node:<name>`): it accepts pods
that are bound to it, creates their volumes and variables from the objects that the node may read, runs init containers and
containers with their users, rights and read-only roots, probes, restarts, ends them within their grace period, and reports
their status. Pods get loopback addresses. Every image is replaced by the tree itself; `images` maps each to its command.
NetworkPolicies, resource limits, live updates of ConfigMaps, and probes and hooks other than HTTP are not implemented.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from controlplane.cluster import ControlPlane
from controlplane.node_api import Body, NodeApi, NodeApiError
from controlplane.process_pod import Container, Image, ProcessPod, claim_number, free_address
from controlplane.waiting import until

_TURN_S = 0.3
# Well within the grace period of `cluster`.
_RENEW_EVERY_S = 20.0
_LEASE_S = 120
_CONFLICT = 409
_TRY_LIMIT_S = 30.0
_ERRORS_MAX = 100
_ALLOCATABLE = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}


def missing_rights() -> str:
    """Return which right of a process node this machine does not grant; empty if none is missing."""
    if os.geteuid() != 0:
        return "a process node needs root, for the namespaces and users of its pods"
    command = ["unshare", "--mount", "--pid", "--ipc", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TRY_LIMIT_S)
    return f"a process node needs namespaces and mounts: {done.stderr.strip()}" if done.returncode else ""


class ProcessNode:
    """One node, from `start` to `stop`. `host` stands for its root: host paths are below it."""

    def __init__(self, plane: ControlPlane, name: str, labels: Mapping[str, str], images: Mapping[str, Image]) -> None:
        self.name = name
        self._labels = dict(labels)
        self._images = dict(images)
        parts = urllib.parse.urlsplit(plane.server)
        self._cluster: Body = {"host": parts.hostname, "port": parts.port}
        self._plane = plane
        certificate, key = plane.authority.issue(f"node-{name}", user=f"system:node:{name}", group="system:nodes")
        self._api = NodeApi(plane.server, plane.authority.certificate_path, certificate, key)
        # Short, because paths of UNIX sockets are limited.
        self.folder = Path(tempfile.mkdtemp(prefix="node-"))
        self.host = self.folder / "h"
        self._number, self._claim = claim_number()
        self._count = itertools.count()
        self._pods: dict[str, ProcessPod] = {}
        self._renewed_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # For debugging: the node keeps running after errors of the API server.
        self.errors: deque[str] = deque(maxlen=_ERRORS_MAX)

    def __enter__(self) -> Self:
        self.host.mkdir()
        self._register()
        self._thread.start()
        until(self._is_ready, f"node {self.name} is Ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pod in self._pods.values():
            pod.stop()
        self._plane.try_kubectl("delete", "node", self.name, "--wait=false")
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def pod(self, namespace: str, prefix: str) -> ProcessPod:
        """Return the one pod with this prefix that is not ending. Raises AssertionError unless there is exactly one."""
        found = [
            pod
            for pod in list(self._pods.values())
            if pod.body["metadata"]["namespace"] == namespace
            and pod.body["metadata"]["name"].startswith(prefix)
            and "deletionTimestamp" not in pod.body["metadata"]
            and not pod.over
        ]
        assert len(found) == 1, [pod.body["metadata"]["name"] for pod in found]
        return found[0]

    def pods(self) -> list[ProcessPod]:
        """Return all pods."""
        return list(self._pods.values())

    def container(self, namespace: str, prefix: str) -> Container:
        """Return the first container of that pod."""
        return self.pod(namespace, prefix).containers[0]

    def path(self, host_path: str) -> Path:
        """Return the path on this machine of a path of the node."""
        return self.host / host_path.lstrip("/")

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(_TURN_S):
            try:
                self._renew()
                self._look()
            except OSError as error:
                self.errors.append(str(error))

    def _look(self) -> None:
        """Start new pods, update known ones, drop deleted ones."""
        listed = self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}")["items"]
        by_uid = {body["metadata"]["uid"]: body for body in listed}
        for uid, body in by_uid.items():
            if uid in self._pods:
                self._pods[uid].update(body)
            elif (body.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
                count = next(self._count)
                address = free_address(self._number, count)
                folder = self.folder / f"p{count}"
                self._pods[uid] = ProcessPod(self._api, body, address, folder, self.host, self._images, self._cluster)
        for uid in [uid for uid, pod in self._pods.items() if uid not in by_uid]:
            # Force-deleted, so it gets no grace period.
            self._pods.pop(uid).stop()

    def _register(self) -> None:
        own = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        metadata = {"name": self.name, "labels": own | self._labels}
        self._api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        self._renew()

    def _renew(self) -> None:
        """Renew the node's Lease and its condition."""
        if time.monotonic() - self._renewed_s < _RENEW_EVERY_S:
            return
        now = dt.datetime.now(dt.UTC)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "ProcessNode",
            "message": "pods are processes",
            "lastHeartbeatTime": stamp,
            "lastTransitionTime": stamp,
        }
        status = {"conditions": [ready], "capacity": _ALLOCATABLE, "allocatable": _ALLOCATABLE}
        self._api.merge(f"/api/v1/nodes/{self.name}/status", {"status": status})
        self._hold_lease(now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
        self._renewed_s = time.monotonic()

    def _hold_lease(self, now: str) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": _LEASE_S, "renewTime": now}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}, "spec": spec}
        try:
            self._api.create(leases, body)
        except NodeApiError as error:
            if error.status != _CONFLICT:
                raise
            self._api.merge(f"{leases}/{self.name}", {"spec": spec})

    def _is_ready(self) -> bool:
        conditions = self._api.get(f"/api/v1/nodes/{self.name}")["status"]["conditions"]
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
