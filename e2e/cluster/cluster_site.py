"""The cluster under test: two real nodes of this machine, or a tester's own cluster. Made by `conftest`.

A tester's own cluster is used if E2E_CLUSTER=own: KUBECONFIG names it, E2E_PREFILL_NODE and E2E_DECODE_NODE name two of its
nodes, and E2E_OPERATOR_IMAGE and E2E_AGENT_IMAGE the images, which the nodes must be able to pull. Tests do not touch its
other objects. Tests that power nodes off are skipped there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controlplane import binaries
from controlplane.image_store import images_folder
from controlplane.network import enter_own_network
from controlplane.real_cluster import RealCluster
from controlplane.real_node import RealNode, missing_rights
from deployments import CHART, ROOT, VERSION

ROLE = "longshore.dev/role"
SYSTEM = "longshore-system"
RELEASE = "longshore"
NEXT_TAG = "0.1.1"
_POD_SECURITY = "pod-security.kubernetes.io/enforce"
_ROLE_KEY = ROLE.replace(".", r"\.")
COMMAND_LIMIT_S = 240.0
_OWN = ("KUBECONFIG", "E2E_PREFILL_NODE", "E2E_DECODE_NODE", "E2E_OPERATOR_IMAGE", "E2E_AGENT_IMAGE")


@dataclass(frozen=True)
class Site:
    """A cluster, the two nodes that tests use, and the images.

    Attributes:
        nodes: names by role.
        real: the nodes of this machine; None for a tester's own cluster.
    """

    kubeconfig: Path
    nodes: dict[str, str]
    operator_image: str
    agent_image: str
    real: RealCluster | None = None

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output; AssertionError has its error output."""
        done = self.try_kubectl(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout.strip()

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return its completed process."""
        return self._run("kubectl", *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm and return its output; AssertionError has its error output."""
        done = self.try_helm(*arguments)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run helm and return its completed process."""
        return self._run("helm", *arguments)

    def longshore(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run our command with this cluster's kubeconfig and return its completed process."""
        return subprocess.run(
            [sys.executable, "-m", "longshore_cli.main", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
        )

    def apply(self, namespace: str, *objects: dict[str, Any]) -> None:
        """Apply objects."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(document))

    def get(self, namespace: str, *what: str) -> dict[str, Any]:
        """Return one object, or a list."""
        return dict(json.loads(self.kubectl("-n", namespace, "get", *what, "-o", "json")))

    def node(self, role: str) -> RealNode:
        """Return the node of a role; skip the test on a tester's own cluster."""
        if self.real is None:
            pytest.skip("turns a node off or cuts it off: only on the nodes that `make e2e-cluster` starts itself")
        return next(node for node in self.real.nodes if node.name == self.nodes[role])

    def type(self, command: str) -> str:
        """Run a command line of a page from the tree's root and return its output; AssertionError has all of it."""
        folders = [str(binaries.find(program).parent) for program in ("kubectl", "helm")]
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": ":".join([*folders, os.environ["PATH"]])},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def tag_images(self, tag: str) -> None:
        """Give both images another tag on both nodes, as if a newer release were pulled."""
        assert self.real is not None
        for node in self.real.nodes:
            for name in (self.operator_image, self.agent_image):
                other = f"{name.rpartition(':')[0]}:{tag}"
                node.run("ctr", "--namespace=k8s.io", "images", "tag", "--force", name, other)

    def values(self) -> list[str]:
        """Return the chart's values that name the images and the nodes."""
        repository, _, tag = self.operator_image.rpartition(":")
        return [
            f"--set=image.repository={repository}",
            f"--set=image.tag={tag}",
            f"--set=agent.image={self.agent_image}",
            # Tests turn off the other node.
            f"--set=nodeSelector.{_ROLE_KEY}=decode",
            f"--set=test.nodeSelector.{_ROLE_KEY}=prefill",
            "--set=allow.image=true",
        ]

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries.find(program), f"--kubeconfig={self.kubeconfig}", *arguments],
            check=False,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=COMMAND_LIMIT_S,
        )


def install_release(site: Site, chart: Path = CHART, *values: str) -> None:
    """Install a chart; its namespace enforces the restricted profile when the operator's pod is created."""
    site.kubectl("create", "namespace", SYSTEM)
    site.kubectl("label", "namespace", SYSTEM, f"{_POD_SECURITY}=restricted")
    site.helm("install", RELEASE, str(chart), "-n", SYSTEM, "--wait", "--timeout=120s", *site.values(), *values)
    # The agents of `helm test` share a folder of the node, which that profile forbids.
    site.kubectl("label", "namespace", SYSTEM, "--overwrite", f"{_POD_SECURITY}=privileged")


def remove_release(site: Site) -> None:
    """Remove the release, if it is there, and its namespace with everything in it."""
    site.try_helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=120s")
    site.try_kubectl("delete", "namespace", SYSTEM, "--timeout=120s")


@contextmanager
def any_site() -> Iterator[Site]:
    """Yield the tester's own cluster, or start one here; skip with the reason if neither is possible."""
    if os.environ.get("E2E_CLUSTER") == "own":
        missing = [name for name in _OWN if not os.environ.get(name)]
        assert not missing, f"E2E_CLUSTER=own needs {', '.join(missing)}"
        kubeconfig, prefill, decode, operator, agent = (os.environ[name] for name in _OWN)
        site = Site(Path(kubeconfig), {"prefill": prefill, "decode": decode}, operator, agent)
        for role, name in site.nodes.items():
            site.kubectl("label", "node", name, f"{ROLE}={role}", "--overwrite")
        yield site
        return
    if reason := missing_rights():
        # In CI a skipped test would go unnoticed.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    names = {"prefill": "node-1", "decode": "node-2"}
    archives = [images_folder() / f"longshore-{name}.tar" for name in ("operator", "agent", "baseline")]
    assert all(path.exists() for path in archives), f"{archives} are missing: run `make images`"
    enter_own_network()
    with RealCluster({name: {ROLE: role} for role, name in names.items()}, archives) as cluster:
        yield Site(
            cluster.plane.kubeconfig,
            names,
            f"localhost/longshore-operator:{VERSION}",
            f"localhost/longshore-agent:{VERSION}",
            cluster,
        )
