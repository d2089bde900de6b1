"""A deployment on the cluster, and engines in pods that use its agents. Used by the tests."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_site import ROLE, Site
from controlplane.waiting import until
from deployments import ROOT
from example_pods import EXAMPLES

_HERE = Path(__file__).parent
_KIT = "kit"
_PORT = 7000
READY_LIMIT_S = 120.0
ROOMS_LIMIT_S = 180.0
_CHECK_LIMIT_S = 60.0
# The group of the agents' user, which owns their sockets.
_AGENTS_GROUP = 10001
# The model of `room_pod`.
MODEL = {"attention": "GQA", "layers": 4, "kvHeads": 4, "headDim": 32, "dtype": "float32"}
# Of the example of engines in pods, for `kubectl create configmap`.
PROGRAM = [f"--from-file={EXAMPLES / 'engine' / name}" for name in ("own_engine.py", "engine_pod.py")]
# More rooms than any test waits for.
MANY = 1_000_000
_SHARED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

Body = dict[str, Any]


def of_cluster(site: Site, namespace: str, body: Body) -> Body:
    """Return an example's object for this namespace and this cluster's image; the nodes have the examples' labels."""
    text = json.dumps(body).replace("/run/longshore/default/", f"/run/longshore/{namespace}/")
    found: Body = json.loads(text.replace('"longshore-agent:0.1.0"', json.dumps(site.agent_image)))
    found["metadata"]["namespace"] = namespace
    return found


@dataclass(frozen=True)
class Placed:
    """A DisaggDeployment in a namespace of its own."""

    site: Site
    namespace: str
    name: str = "rooms"

    def create(
        self, tp: int = 4, *, model: Body | None = None, backend: str = "NIXL", agents: Body | None = None
    ) -> None:
        """Create it: prefill of `tp` with pages of 16 tokens, decode of TP1 with pages of 8."""
        prefill = {"tensorParallel": tp, "pageSize": 16, "staging": {"bufferSize": "8Mi", "lanes": 2}}
        decode = {"tensorParallel": 1, "pageSize": 8, "staging": {"poolSize": "64Mi"}}
        body = {
            "apiVersion": "longshore.dev/v1alpha1",
            "kind": "DisaggDeployment",
            "metadata": {"name": self.name},
            "spec": {
                "model": model or MODEL,
                "prefill": prefill | {"nodeSelector": {ROLE: "prefill"}},
                "decode": decode | {"nodeSelector": {ROLE: "decode"}},
                "transfer": {"backend": backend},
                "agents": agents or {},
            },
        }
        self.site.apply(self.namespace, body)

    def rooms(self) -> Rooms:
        """Create it, and start rooms that move one after the other until the test ends."""
        self.create()
        self.wait("Ready")
        self.start_source()
        rooms = self.start_target(MANY, tokens=1024)
        rooms.more(5)
        return rooms

    def change(self, spec: Body) -> None:
        """Merge `spec` into the deployment's."""
        self.site.kubectl(
            "-n", self.namespace, "patch", "dgdep", self.name, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def wait(self, condition: str, limit_s: float = READY_LIMIT_S) -> None:
        """Wait by `kubectl wait`, as a user does."""
        self.site.kubectl(
            *("-n", self.namespace, "wait", f"--for=condition={condition}", f"dgdep/{self.name}"),
            f"--timeout={limit_s:g}s",
        )

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty: it is not there."""
        found = self.site.get(self.namespace, "dgdep", self.name).get("status", {}).get("conditions", [])
        for entry in found:
            if entry["type"] == kind:
                return entry["status"], entry["reason"], entry["message"]
        return "", "", ""

    def transitions(self) -> dict[str, tuple[str, str]]:
        """Return status and last transition time of each condition."""
        found = self.site.get(self.namespace, "dgdep", self.name)["status"]["conditions"]
        return {entry["type"]: (entry["status"], entry["lastTransitionTime"]) for entry in found}

    def events(self) -> dict[str, tuple[str, int]]:
        """Return text and count of each event about the deployment, by the event's name."""
        found = self.site.get(self.namespace, "events", f"--field-selector=involvedObject.name={self.name}")["items"]
        return {
            entry["metadata"]["name"]: (f"{entry['reason']}: {entry['message']}", entry.get("count") or 1)
            for entry in found
        }

    def checked(self) -> tuple[int, dict[str, Body]]:
        """Return the exit status of `longshore check` on it, and the lines by check."""
        status, text = self.command("check", self.name, "-o", "json")
        return status, {line["check"]: line for line in json.loads(text)}

    def command(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and the output of a command in its namespace."""
        command = [sys.executable, "-m", "longshore_cli.main", *arguments, "-n", self.namespace]
        command += ["--kubeconfig", str(self.site.kubeconfig)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_CHECK_LIMIT_S)
        assert done.stderr == "", done.stderr
        return done.returncode, done.stdout

    def agent(self, role: str) -> str:
        """Return the name of the agent's pod on the node of a role that is not being deleted."""
        names = [
            pod["metadata"]["name"]
            for pod in self.site.get(self.namespace, "pods", "-l", "app.kubernetes.io/name=longshore-agent")["items"]
            if pod["spec"].get("nodeName") == self.site.nodes[role] and "deletionTimestamp" not in pod["metadata"]
        ]
        assert len(names) == 1, f"the agents of {role} are {names}"
        return str(names[0])

    def pod(self, name: str) -> Body:
        """Return a pod."""
        return self.site.get(self.namespace, "pod", name)

    def is_ready(self, pod: str) -> bool:
        """Whether a pod is Ready."""
        return any(c["type"] == "Ready" and c["status"] == "True" for c in self.pod(pod)["status"]["conditions"])

    @property
    def socket(self) -> str:
        """The path of the agent's socket for engines."""
        return f"/run/longshore/{self.namespace}/{self.name}/agent.sock"

    def start_source(self, tp: int = 4) -> None:
        """Start an engine for prefill, and a Service that leads to it."""
        self._install()
        service = {"selector": {"engine": "source"}, "ports": [{"port": _PORT}]}
        self.site.apply(
            self.namespace,
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "source"}, "spec": service},
            self._engine("source", "prefill", ["python", "/kit/room_pod.py", "source", self.socket, _PORT, tp]),
        )

    def start_target(self, rooms: int, tokens: int, name: str = "target") -> Rooms:
        """Start an engine for decode that moves `rooms` rooms."""
        return self._start_decode(name, "target", rooms, tokens)

    def open_room(self) -> Rooms:
        """Start an engine for decode with one room that prefill never sends; return when that room is open."""
        one = self._start_decode("open", "open")
        until(lambda: any("claimed" in line for line in self.lines(one.pod)), "a room is open", ROOMS_LIMIT_S)
        return one

    def start_reference(self, prompts: int, tokens: int) -> str:
        """Start the reference engine in two pods of this machine; return the name of the pod that compares tokens."""
        self._install()
        service = {"selector": {"engine": "reference-source"}, "ports": [{"port": _PORT}]}
        document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "reference"}, "spec": service}
        self.site.apply(self.namespace, document)
        peer = f"{self.site.get(self.namespace, 'service', 'reference')['spec']['clusterIP']}:{_PORT}"
        program = [sys.executable, "/kit/engine_pod.py"]
        self.site.apply(
            self.namespace,
            with_checkout(
                self._engine("reference-source", "prefill", [*program, "source", self.socket, _PORT, prompts])
            ),
            with_checkout(
                self._engine("reference-target", "decode", [*program, "target", self.socket, peer, prompts, tokens])
            ),
        )
        return "reference-target"

    def log(self, pod: str) -> str:
        """Return what a pod has printed; empty before it runs."""
        return self.site.try_kubectl("-n", self.namespace, "logs", pod, "--tail=-1").stdout

    def lines(self, pod: str) -> list[Body]:
        """Return the objects that a pod has printed."""
        return [json.loads(line) for line in self.log(pod).splitlines() if line.startswith("{")]

    def succeeds(self, pod: str, limit_s: float = ROOMS_LIMIT_S) -> None:
        """Wait until a pod has ended well."""

        def ended() -> str:
            phase = str(self.pod(pod)["status"].get("phase"))
            return phase if phase in {"Succeeded", "Failed"} else ""

        phase = until(ended, f"pod {pod} ends", limit_s)
        assert phase == "Succeeded", self.log(pod)[-4000:]

    def _start_decode(self, name: str, what: str, *numbers: int) -> Rooms:
        peer = f"{self.site.get(self.namespace, 'service', 'source')['spec']['clusterIP']}:{_PORT}"
        command = ["python", "/kit/room_pod.py", what, self.socket, peer, *numbers]
        self.site.apply(self.namespace, self._engine(name, "decode", command))
        return Rooms(self, name)

    def _install(self) -> None:
        files = {name: (_HERE / name).read_text(encoding="utf-8") for name in ("room_pod.py", "engine_pod.py")}
        kit = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _KIT}, "data": files}
        self.site.apply(self.namespace, kit)

    def _engine(self, name: str, role: str, command: list[str | int]) -> Body:
        """Return the pod of an engine: the agents' sockets by hostPath, and the agents' group to open them."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"engine": name}},
            "spec": {
                "nodeSelector": {ROLE: role},
                "restartPolicy": "Never",
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 20000,
                    "runAsGroup": 20000,
                    "supplementalGroups": [_AGENTS_GROUP],
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "engine",
                        "image": self.site.agent_image,
                        "imagePullPolicy": "IfNotPresent",
                        "command": [str(part) for part in command],
                        "securityContext": dict(_SHARED),
                        "volumeMounts": [
                            {"name": "run", "mountPath": "/run/longshore", "readOnly": True},
                            {"name": "kit", "mountPath": "/kit"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "run", "hostPath": {"path": "/run/longshore", "type": "DirectoryOrCreate"}},
                    {"name": "kit", "configMap": {"name": _KIT}},
                ],
            },
        }


def share_folders(pod: Body, folders: Iterable[Path]) -> None:
    """Let all containers of a pod read folders of this machine at their paths. /usr is the image's own."""
    spec = pod["spec"]
    for number, folder in enumerate(sorted({str(folder) for folder in folders} - {"/usr"})):
        name = f"host-{number}"
        spec["volumes"].append({"name": name, "hostPath": {"path": folder, "type": "Directory"}})
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            container["volumeMounts"].append({"name": name, "mountPath": folder, "readOnly": True})


def with_checkout(pod: Body) -> Body:
    """Let a pod see this checkout and its interpreter at the paths of this machine: the reference engine needs torch.

    Such a pod runs as root without capabilities, because the interpreter may be below a folder that only root may enter.
    """
    spec = pod["spec"]
    spec["securityContext"] |= {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    container = spec["containers"][0]
    container["env"] = [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "PYTHONPATH", "value": ":".join(str(ROOT / name) for name in ("wire", "spec", "client", "lab"))},
    ]
    share_folders(pod, {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()})
    spec["volumes"].append({"name": "temporary", "emptyDir": {}})
    container["volumeMounts"].append({"name": "temporary", "mountPath": "/tmp"})
    return pod


@dataclass(frozen=True)
class Rooms:
    """The rooms of a target's pod, as it has printed them."""

    placed: Placed
    pod: str

    def all(self) -> list[Body]:
        """Return the rooms that have ended, in order."""
        return [line for line in self.placed.lines(self.pod) if "room" in line]

    def done(self) -> list[Body]:
        """Return the rooms that were DONE; AssertionError: one of them has wrong bytes."""
        done = [line for line in self.all() if line["end"] == "DONE"]
        assert all(line["equal"] for line in done), [line for line in done if not line["equal"]]
        return done

    def failed(self) -> list[Body]:
        """Return the rooms that FAILED."""
        return [line for line in self.all() if line["end"] == "FAILED"]

    def more(self, count: int, limit_s: float = ROOMS_LIMIT_S) -> None:
        """Wait until `count` more rooms were DONE than now."""
        before = len(self.done())
        until(lambda: len(self.done()) >= before + count, f"{count} more rooms of {self.pod} are DONE", limit_s)

    def longest_gap_s(self) -> float:
        """Return the longest time between two rooms that were DONE one after the other."""
        ends = [line["at"] for line in self.done()]
        return max(later - earlier for earlier, later in itertools.pairwise(ends))
