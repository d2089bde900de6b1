"""Runs one pod of a process node: its containers are processes of this machine, and it reports their status.

Called by `process_node`, with a thread for each pod. Init containers, HTTP probes, restarts, preStop, SIGTERM and the
grace period are those of a kubelet; pauses between restarts are shorter.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.node_api import Body, NodeApi, NodeApiError
from controlplane.pod_files import PodFiles
from controlplane.processes import Process

_TURN_S = 0.2
# A kubelet starts with 10 s, which is too long for tests.
_RESTART_PAUSE_MIN_S, _RESTART_PAUSE_MAX_S = 1.0, 10.0
_CONTAINER = Path(__file__).with_name("container.py")
# The parts of this machine that replace an image, with the tree and its interpreter.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/sys", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ssl")
_TREE = Path(__file__).resolve().parents[2]
_NOT_FOUND = 404
_NODES_MAX, _PODS_MAX = 200, 250
# The end of the address, and the port, that a node binds as long as it has its number.
_CLAIM, _CLAIM_PORT = 254, 9


@dataclass(frozen=True, slots=True)
class Image:
    """The replacement of an image: its default command and its variables."""

    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(slots=True)
class Probe:
    """One probe of a container: its results, and when it is due again."""

    spec: Body
    due_s: float
    successes: int = 0
    failures: int = 0

    def look(self, address: str, port: int) -> None:
        """Probe if it is due; count the result."""
        if time.monotonic() < self.due_s:
            return
        try:
            url = f"http://{address}:{port}{self.spec['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=self.spec.get("timeoutSeconds", 1)):
                self.successes, self.failures = self.successes + 1, 0
        except (OSError, urllib.error.URLError):
            self.successes, self.failures = 0, self.failures + 1
        self.due_s = time.monotonic() + self.spec.get("periodSeconds", 10)

    @property
    def failed(self) -> bool:
        """Whether its consecutive failures have reached the threshold."""
        return self.failures >= int(self.spec.get("failureThreshold", 3))


class Container:
    """One container that may be restarted."""

    def __init__(self, spec: Body) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.restarts = 0
        self.started = False
        self.ready = False
        self.exit_code: int | None = None
        self.last_exit: int | None = None
        self.began = ""
        self.again_s = 0.0
        self.waits_for = ""
        self.probes: dict[str, Probe] = {}

    def begin(self, process: Process) -> None:
        """Record a start."""
        self.process, self.exit_code, self.began = process, None, _now()
        self.probes = {
            kind: Probe(self.spec[kind], time.monotonic() + self.spec[kind].get("initialDelaySeconds", 0))
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if kind in self.spec
        }
        self.started = "startupProbe" not in self.probes
        self.ready = self.started and "readinessProbe" not in self.probes

    @property
    def main_pid(self) -> int:
        """The command's own PID on this machine."""
        assert self.process is not None
        first = _only_child(self.process.pid)
        return _only_child(first)

    def look(self, address: str) -> bool:
        """Run due probes; return whether the container must be restarted."""
        startup = self.probes.get("startupProbe")
        if not self.started and startup is not None:
            startup.look(address, self.port(startup))
            self.started = startup.successes > 0
            self.ready = self.started and "readinessProbe" not in self.probes
            return startup.failed
        if (readiness := self.probes.get("readinessProbe")) is not None:
            readiness.look(address, self.port(readiness))
            self.ready = readiness.successes > 0 or (self.ready and not readiness.failed)
        if (liveness := self.probes.get("livenessProbe")) is not None:
            liveness.look(address, self.port(liveness))
            return liveness.failed
        return False

    def port(self, probe: Probe) -> int:
        """Return the number of a probe's port, which may be a name."""
        wanted = probe.spec["httpGet"]["port"]
        if isinstance(wanted, int):
            return wanted
        return next(int(port["containerPort"]) for port in self.spec["ports"] if port.get("name") == wanted)

    def status(self) -> Body:
        """Return its part of the pod's status."""
        if self.exit_code is not None:
            reason = "Completed" if self.exit_code == 0 else "Error"
            ended = {"exitCode": self.exit_code, "reason": reason, "startedAt": self.began, "finishedAt": _now()}
            waiting = {"reason": "CrashLoopBackOff", "message": f"it ended with {self.exit_code}"}
            state: Body = {"waiting": waiting} if self.again_s else {"terminated": ended}
        elif self.process is None:
            state = {"waiting": {"reason": self.waits_for or "PodInitializing"}}
        else:
            state = {"running": {"startedAt": self.began}}
        last = {"terminated": {"exitCode": self.last_exit, "reason": "Error"}} if self.last_exit is not None else {}
        image = self.spec["image"]
        return {
            "name": self.spec["name"],
            "image": image,
            "imageID": image,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": state,
            "lastState": last,
        }


class ProcessPod:
    """One pod. `body` is its first version; `update` takes newer ones; `stop` ends it without a report."""

    def __init__(
        self, api: NodeApi, body: Body, address: str, folder: Path, host: Path, images: dict[str, Image], cluster: Body
    ) -> None:
        self.body = body
        self.address = address
        self.folder = folder
        self._api = api
        self._images = images
        self._cluster = cluster
        self._files = PodFiles(api, body, folder / "volumes", host)
        self._inits = [Container(spec) for spec in body["spec"].get("initContainers") or ()]
        self.containers = [Container(spec) for spec in body["spec"]["containers"]]
        self._began = _now()
        self._reported = ""
        self._pause = threading.Event()
        self._abandoned = False
        body.setdefault("status", {}).update({"podIP": address, "hostIP": address})
        folder.mkdir(parents=True)
        self._thread = threading.Thread(target=self._run, name=body["metadata"]["name"], daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether its thread has ended: the pod is deleted or finished."""
        return not self._thread.is_alive()

    def update(self, body: Body) -> None:
        """Store a newer version of the pod."""
        metadata = self.body["metadata"]
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds"):
            if name in body["metadata"]:
                metadata[name] = body["metadata"][name]
        self._pause.set()

    def stop(self) -> None:
        """Kill its processes at once."""
        self._abandoned = True
        self._pause.set()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._prepare() and self._initialize():
                self._serve()
            if self._ending and not self._abandoned:
                self._end()
                self._delete()
        finally:
            for container in (*self._inits, *self.containers):
                if container.process is not None:
                    container.process.stop(signal.SIGKILL)
            shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    @property
    def _ending(self) -> bool:
        return "deletionTimestamp" in self.body["metadata"]

    def _wait(self, limit_s: float = _TURN_S) -> bool:
        """Wait for the next turn; return whether to continue."""
        self._pause.wait(limit_s)
        self._pause.clear()
        return not (self._abandoned or self._ending)

    def _prepare(self) -> bool:
        """Create the volumes once their objects exist. An image without a replacement is never ready."""
        for container in (*self._inits, *self.containers):
            if container.spec["image"] not in self._images:
                container.waits_for = "ErrImagePull"
        while any(container.waits_for for container in (*self._inits, *self.containers)):
            self._report("Pending")
            if not self._wait():
                return False
        while True:
            try:
                self._files.make()
            except NodeApiError:
                self._report("Pending")
                if not self._wait():
                    return False
            else:
                return True

    def _initialize(self) -> bool:
        for container in self._inits:
            container.begin(self._start(container))
            while self._look_at_end(container) != 0:
                self._report("Pending")
                if not self._wait():
                    return False
                self._start_again(container)
            container.ready = True
        return True

    def _serve(self) -> None:
        for container in self.containers:
            container.begin(self._start(container))
        once = self.body["spec"].get("restartPolicy") == "Never"
        going = True
        while going:
            codes = [self._look_at_end(container) for container in self.containers]
            if once and None not in codes:
                self._report("Failed" if any(codes) else "Succeeded")
                while self._wait():
                    pass
                return
            for container in self.containers if not once else ():
                self._start_again(container)
                if container.exit_code is None and container.look(self.address):
                    self._kill(container, _grace_s(self.body))
            self._report("Running")
            going = self._wait()

    def _look_at_end(self, container: Container) -> int | None:
        """Return a container's exit status; None if it runs."""
        if container.exit_code is None and container.process is not None and not container.process.alive:
            container.exit_code = container.process.stop()
            container.ready = container.started = False
            pause_s = 0.0 if container.restarts == 0 else _RESTART_PAUSE_MIN_S * 2 ** (container.restarts - 1)
            container.again_s = time.monotonic() + min(pause_s, _RESTART_PAUSE_MAX_S)
            done = container in self._inits and container.exit_code == 0
            if done or self.body["spec"].get("restartPolicy") == "Never":
                container.again_s = 0.0
        return container.exit_code

    def _start_again(self, container: Container) -> None:
        if container.exit_code is None or not container.again_s or time.monotonic() < container.again_s:
            return
        container.last_exit, container.again_s = container.exit_code, 0.0
        container.restarts += 1
        container.begin(self._start(container))

    def _start(self, container: Container) -> Process:
        spec = container.spec
        name = f"{spec['name']}-{container.restarts}"
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(self._runtime(spec)))
        return Process(name, [sys.executable, "-I", str(_CONTAINER), str(path)], self.folder)

    def _runtime(self, spec: Body) -> Body:
        """Return the specification for the program `container`."""
        image = self._images[spec["image"]]
        pod, own = self.body["spec"].get("securityContext") or {}, spec.get("securityContext") or {}
        user, group = (own.get(name, pod.get(name, 0)) for name in ("runAsUser", "runAsGroup"))
        must_not_be_root = own.get("runAsNonRoot", pod.get("runAsNonRoot"))
        assert user or not must_not_be_root, f"{spec['name']} is not to run as root"
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        system = [*_SYSTEM, *{str(_TREE), sys.prefix, sys.base_prefix}]
        environment = {
            "HOSTNAME": self.body["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": self._cluster["host"],
            "KUBERNETES_SERVICE_PORT": str(self._cluster["port"]),
            "HOME": "/",
        }
        given = self._files.environment(spec)
        command = [*(spec.get("command") or image.command), *(spec.get("args") or ())]
        return {
            "root": str(root),
            "system": sorted(system),
            "mounts": self._files.mounts(spec),
            "read_only_root": bool(own.get("readOnlyRootFilesystem")),
            "capabilities": (own.get("capabilities") or {}).get("add") or [],
            "may_gain_privileges": own.get("allowPrivilegeEscalation", True),
            "uid": user,
            "gid": group,
            "groups": [*([pod["fsGroup"]] if "fsGroup" in pod else []), *pod.get("supplementalGroups", ())],
            "command": [_expanded(part, given) for part in command],
            "environment": image.environment | environment | given,
        }

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End the pod as a kubelet does: preStop and SIGTERM within the grace period, then SIGKILL."""
        for container in self.containers:
            self._kill(container, _grace_s(self.body))
        self._report("Running")

    def _kill(self, container: Container, grace_s: float) -> None:
        """Send SIGTERM to a container, wait, then kill its remaining processes."""
        process = container.process
        if process is None or not process.alive:
            return
        container.ready = False
        self._report("Running")
        end_s = time.monotonic() + grace_s
        assert "preStop" not in (container.spec.get("lifecycle") or {}), "a process node runs no hooks yet"
        os.kill(process.pid, signal.SIGTERM)
        while process.alive and time.monotonic() < end_s and not self._abandoned:
            self._pause.wait(_TURN_S)
            self._pause.clear()
        container.exit_code = process.stop(signal.SIGKILL) if process.alive else process.stop()
        container.started = False
        container.again_s = 0.0 if self._ending else time.monotonic()

    def _delete(self) -> None:
        metadata = self.body["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        try:
            self._api.delete(self._path, body)
        except NodeApiError as error:
            if error.status != _NOT_FOUND:
                raise

    @property
    def _path(self) -> str:
        metadata = self.body["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    # -- the report ------------------------------------------------------------------------------------------------

    def _report(self, phase: str) -> None:
        """Write the status if it has changed."""
        initialized = all(container.ready for container in self._inits)
        ready = initialized and all(container.ready for container in self.containers)
        found: dict[str, Any] = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self.address,
            "startTime": self._began,
            "initContainerStatuses": [container.status() for container in self._inits],
            "containerStatuses": [container.status() for container in self.containers],
            "conditions": [
                _condition("PodScheduled", holds=True),
                _condition("Initialized", holds=initialized),
                _condition("ContainersReady", holds=ready),
                _condition("Ready", holds=ready),
            ],
        }
        text = json.dumps(found, sort_keys=True)
        times = {f'"{name}": "{_now()}"' for name in ("finishedAt", "lastTransitionTime")}
        for stamp in times:
            text = text.replace(stamp, "")
        if text == self._reported:
            return
        try:
            self._api.merge(f"{self._path}/status", {"status": found})
        except NodeApiError:
            # The pod is deleted, or the next turn retries.
            return
        self._reported = text


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Replace each $(NAME) of a known variable."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def _condition(kind: str, *, holds: bool) -> Body:
    return {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": _now()}


def _grace_s(body: Body) -> float:
    given = body["metadata"].get("deletionGracePeriodSeconds")
    return float(body["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given)


def _only_child(pid: int) -> int:
    found = [
        int(text) for children in Path(f"/proc/{pid}/task").glob("*/children") for text in children.read_text().split()
    ]
    assert len(found) == 1, f"process {pid} has the children {found}"
    return found[0]


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def claim_number() -> tuple[int, socket.socket]:
    """Return a number that no other node on this machine has until the socket is closed."""
    for number in range(_NODES_MAX):
        claim = socket.socket()
        try:
            claim.bind((_address(number, _CLAIM), _CLAIM_PORT))
        except OSError:
            claim.close()
        else:
            return number, claim
    raise AssertionError(f"{_NODES_MAX} nodes run on this machine")


def free_address(number: int, count: int) -> str:
    """Return an unused loopback address for the pod `count` of the node `number`."""
    address = _address(number, count % _PODS_MAX + 1)
    with socket.socket() as probe:
        probe.bind((address, 0))
    return address


def _address(number: int, place: int) -> str:
    return f"127.{200 + number // 100}.{number % 100}.{place}"
