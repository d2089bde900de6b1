"""Runs the operator as a process, for tests and the benchmark."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

from controlplane.cluster import ControlPlane
from controlplane.ports import HOST, free_port
from controlplane.processes import Process
from controlplane.waiting import until

# The value `allow` of an administrator who allows everything.
EVERYTHING = json.dumps(
    dict.fromkeys(("image", "hostNetwork", "hostIPC", "noNetworkPolicy"), True)
    | {name: ["*"] for name in ("annotations", "capabilities", "csiDrivers", "hostPaths", "priorityClasses")}
    | {name: ["*"] for name in ("seLinuxTypes", "tolerations", "variables")}
)
READY_LIMIT_S = 150.0
_ANSWER_LIMIT_S = 60.0


class OperatorProcess:
    """One replica; `pages` reads its HTTP pages.

    Args:
        kubeconfig: its kubeconfig; None for the administrator's.
        namespace: namespace of its Lease, which replicas share.
        tree: of another release, see `deployments.baseline_tree`; None: this one's.
        settings: further settings, by variable without prefix.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        kubeconfig: Path | None = None,
        tree: Path | None = None,
        **settings: object,
    ) -> None:
        self.port = free_port()
        self.identity = f"replica-{uuid.uuid4().hex[:6]}"
        chosen = {
            "namespace": namespace,
            "identity": self.identity,
            "http_host": HOST,
            "http_port": self.port,
            # Short, so that changes without a watch are found within a test's time limit.
            "resync_s": 5,
            "poll_s": 1,
            "lease_s": 6,
            "lease_renew_s": 2,
            **settings,
        }
        if tree is None:
            # JSON of what is allowed. An operator of another release may read it in another form.
            chosen = {"allow": EVERYTHING} | chosen
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
        environment = foreign | {"KUBECONFIG": str(kubeconfig or plane.kubeconfig)}
        if tree is not None:
            environment["PYTHONPATH"] = os.pathsep.join(str(tree / name) for name in ("operator", "spec", "wire"))
        environment |= {f"LONGSHORE_{name.upper()}": str(value) for name, value in chosen.items()}
        command = [sys.executable, "-m", "longshore_operator.main"]
        self.process = Process(f"operator-{self.identity}", command, plane.folder, environment)

    def __enter__(self) -> Self:
        until(lambda: self.process.check() and self.status("/readyz") == 200, "the operator is ready", READY_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def status(self, path: str) -> int:
        """Return the HTTP status of a page; 0 for no answer."""
        return self._get(path)[0]

    def page(self, path: str) -> str:
        """Return a page's text."""
        return self._get(path)[1]

    def metric(self, line: str) -> float:
        """Return the value of the metric whose name and labels are `line`; 0 if there is none."""
        for entry in self.page("/metrics").splitlines():
            name, _, value = entry.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=_ANSWER_LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""


# Starts an operator with these settings.
Start = Callable[..., OperatorProcess]
