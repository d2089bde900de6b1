"""Runs a cluster with real nodes on this machine: a control plane, and nodes with kubelets. Used by `e2e/cluster`.

It runs in a separate network namespace, which the calling thread must have entered (`network.enter_own_network`). The
kernel removes that network with its last process, so that no bridge, cable, route or iptables rule of the machine
changes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from controlplane.cluster import ControlPlane
from controlplane.image_store import cluster_folder, make_store
from controlplane.real_node import BRIDGE, MACHINE, RealNode, run

# Two missed renewals of a node's lease, which the kubelet renews every ten seconds.
_GRACE_S = 20
_RUN = "run-"


class RealCluster:
    """A control plane and one real node for each entry of `nodes`, with the images of `archives`."""

    def __init__(self, nodes: Mapping[str, Mapping[str, str]], archives: Sequence[Path]) -> None:
        _remove_old_runs()
        store = make_store(archives)
        # On the file system of the store, for hard links.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_RUN}{os.getpid()}-", dir=cluster_folder()))
        self.plane = ControlPlane(self.folder, host=MACHINE, node_grace_s=_GRACE_S)
        self.nodes = [
            RealNode(self.plane, name, number, len(nodes), store, dict(labels))
            for number, (name, labels) in enumerate(nodes.items(), start=1)
        ]
        self._labels = nodes

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{MACHINE}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for node in self.nodes:
            run("ip", "route", "add", f"10.244.{node.number}.0/24", "via", node.address)
        # The nodes may start first: they retry until the API server answers.
        for node in self.nodes:
            node.start()
        self.plane.start()
        for node in self.nodes:
            node.until_ready()
            self.plane.kubectl("label", "node", node.name, *(f"{k}={v}" for k, v in self._labels[node.name].items()))

    def stop(self) -> None:
        """End all programs by their ids, and remove cgroups and files."""
        # First, because an API server waits for the connections of a node that is off.
        self.plane.stop()
        for node in self.nodes:
            node.stop()
        shutil.rmtree(self.folder)


def _remove_old_runs() -> None:
    """Remove the files of runs that were killed."""
    for folder in cluster_folder().glob(f"{_RUN}*"):
        pid = folder.name.removeprefix(_RUN).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder)
