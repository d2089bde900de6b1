"""Runs a real node on this machine: containerd, kubelet and kube-proxy in separate namespaces and cgroups.

Used by `real_cluster`. The node's first process is `node_init`. If it is killed, the kernel ends all others, with their
mounts and networks, like a power failure. The node shares the kernel and the processors with the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.image_store import UNUSED_PLUGINS, copy_store
from controlplane.processes import Process
from controlplane.waiting import until

_INIT = Path(__file__).with_name("node_init.py")
_CGROUPS = Path("/sys/fs/cgroup")
_TRY_LIMIT_S = 30.0
COMMAND_LIMIT_S = 120.0
READY_LIMIT_S = 120.0
_GONE_LIMIT_S = 30.0
# A node's further requirements, besides the programs that `binaries` builds, by Debian package.
_NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
}
PLUGINS = Path("/usr/lib/cni")
# The machine's address in the network of the nodes, and their networks.
MACHINE = "10.99.0.1"
BRIDGE = "nodes"


def missing_rights() -> str:
    """Return the requirements of real nodes that this machine lacks; empty if none."""
    if os.geteuid() != 0:
        return "real nodes need root, for namespaces, mounts and cgroups"
    if missing := [package for program, package in _NEEDED.items() if shutil.which(program) is None]:
        return f"real nodes need the Debian packages {', '.join(missing)} (.ci/install-cluster installs them)"
    if not (PLUGINS / "bridge").exists():
        return "real nodes need the Debian package containernetworking-plugins (.ci/install-cluster installs it)"
    if not (_CGROUPS / "memory" / "cgroup.procs").exists():
        return f"real nodes need the hierarchies of cgroup v1 below {_CGROUPS}; this machine has none"
    command = ["unshare", "--mount", "--pid", "--net", "--cgroup", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TRY_LIMIT_S)
    return f"real nodes need namespaces and mounts: {done.stderr.strip()}" if done.returncode else ""


def run(*command: str | Path) -> str:
    """Run a command of the machine and return its output; AssertionError has its error output."""
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
    )
    assert done.returncode == 0, f"{' '.join(str(part) for part in command)}: {done.stderr.strip()}"
    return done.stdout.strip()


class RealNode:
    """One node. `start` after `power_off` boots it again with its disk.

    Args:
        number: from 1; gives the node its addresses.
        count: how many nodes there are. Each has routes to the pods of all others.
        store: the content of containerd that every node begins with.
    """

    def __init__(
        self, plane: ControlPlane, name: str, number: int, count: int, store: Path, labels: dict[str, str]
    ) -> None:
        self.name, self.number = name, number
        self.address = f"10.99.0.{10 + number}"
        self.cable = f"to-{name}"
        self._plane, self._count, self._labels = plane, count, labels
        self._folder = plane.folder / name
        self._cgroup = f"longshore-e2e-{os.getpid()}-{name}"
        self._process: Process | None = None
        self._init_pid = 0
        self._folder.mkdir()
        copy_store(store, self._folder / "root" / "var" / "lib" / "containerd")
        self._write_specification()

    def start(self) -> None:
        """Start the node and connect its cable. It is Ready some seconds later."""
        go = self._folder / "go"
        go.unlink(missing_ok=True)
        os.mkfifo(go)
        self._process = Process(
            self.name, [sys.executable, "-I", _INIT, "enter", self._folder / "node.json"], self._plane.folder
        )
        self._init_pid = until(self._find_init, f"the first process of {self.name}", READY_LIMIT_S)
        pid = str(self._init_pid)
        run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", self.cable, "master", BRIDGE, "up")
        inside = ("nsenter", f"--target={pid}", "--net", "ip")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", "default", "via", MACHINE)
        for other in range(1, self._count + 1):
            if other != self.number:
                run(*inside, "route", "add", f"10.244.{other}.0/24", "via", f"10.99.0.{10 + other}")
        with go.open("w") as gate:
            gate.write("go")

    def until_ready(self) -> None:
        """Wait until the node is Ready in the API server."""
        until(lambda: self._alive() and self.is_ready(), f"node {self.name} is Ready", READY_LIMIT_S)

    def is_ready(self) -> bool:
        """Whether the node is Ready in the API server."""
        path = '{.status.conditions[?(@.type=="Ready")].status}'
        return self._plane.kubectl("get", "node", self.name, f"-o=jsonpath={path}") == "True"

    def power_off(self) -> None:
        """End all processes of the node at once. Its network is removed with them, its disk is kept."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init_pid, signal.SIGKILL)
        self._process.stop(signal.SIGKILL)
        self._process = None
        # The kernel removes the cable some time after the last process of its network.
        until(
            lambda: self.cable not in run("ip", "-o", "link", "show"),
            f"the cable of {self.name} is gone",
            _GONE_LIMIT_S,
        )

    def stop(self) -> None:
        """End the node and remove its cgroups."""
        self.power_off()
        for hierarchy in _CGROUPS.iterdir():
            folder = hierarchy / self._cgroup
            for child in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
                if child.is_dir():
                    until(lambda child=child: _removed(child), f"{child} is empty", _GONE_LIMIT_S)  # type: ignore[misc]
            if folder.is_dir():
                until(lambda folder=folder: _removed(folder), f"{folder} is empty", _GONE_LIMIT_S)  # type: ignore[misc]

    def pull_cable(self) -> None:
        """Cut the node off from all others. Its processes keep running."""
        run("ip", "link", "set", self.cable, "down")

    def plug_cable(self) -> None:
        """Undo `pull_cable`."""
        run("ip", "link", "set", self.cable, "up")

    def received_bytes(self) -> int:
        """Return the bytes that the node has sent over its cable since the cable was connected."""
        (link,) = json.loads(run("ip", "-json", "-statistics", "link", "show", "dev", self.cable))
        return int(link["stats64"]["rx"]["bytes"])

    def run(self, *command: str) -> str:
        """Run a command inside the node."""
        namespaces = ("--mount", "--uts", "--net", "--pid", "--cgroup")
        return run("nsenter", f"--target={self._init_pid}", *namespaces, *command)

    def log(self) -> str:
        """Return the end of the logs of its programs."""
        paths = [self._plane.folder / f"{self.name}.log", *sorted(self._folder.glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def _alive(self) -> bool:
        if self._process is None or not self._process.alive:
            raise RuntimeError(f"{self.name} ended:\n{self.log()}")
        return True

    def _find_init(self) -> int:
        """Return the id of the node's first process; 0 if it has not started yet."""
        self._alive()
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(children) != 1 or _network(children[0]) == _network("self"):
            return 0
        return int(children[0])

    def _write_specification(self) -> None:
        authority, server = self._plane.authority, self._plane.server
        certificate, key = authority.issue(self.name, self.name, self.address, user=f"system:node:{self.name}")
        identity = {"user": f"system:node:{self.name}", "group": "system:nodes"}
        specification = {
            "name": self.name,
            "folder": str(self._folder),
            "cgroup": self._cgroup,
            "address": self.address,
            "pods": f"10.244.{self.number}.0/24",
            "labels": ",".join(f"{label}={value}" for label, value in self._labels.items()),
            "kubelet": str(binaries.find("kubelet")),
            "proxy": str(binaries.find("kube-proxy")),
            "plugins": str(PLUGINS),
            "unused_plugins": json.dumps(UNUSED_PLUGINS),
            "authority": str(authority.certificate_path),
            "certificate": str(certificate),
            "key": str(key),
            "kubeconfig": str(authority.kubeconfig(f"kubelet-{self.name}", server, **identity)),
            "proxy_kubeconfig": str(authority.kubeconfig(f"proxy-{self.name}", server, "system:kube-proxy")),
        }
        (self._folder / "node.json").write_text(json.dumps(specification))


def _network(pid: str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _removed(folder: Path) -> bool:
    """Remove a cgroup; False while a process in it is still ending."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
