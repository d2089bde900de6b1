"""The first process of a real node: prepares its mounts and cgroups, and runs containerd, kube-proxy and kubelet.

A program of its own, started by `real_node` and isolated from this tree: it knows only the standard library.
`enter FILE` joins the node's cgroups and starts `init FILE` in new namespaces. If a program of the node ends, the node ends,
except for its kubelet in the first minute.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# Directories that each node has for itself. Those of the first group are empty after each boot.
_VOLATILE = ("/run/containerd", "/run/longshore", "/var/lib/cni", "/var/log/pods", "/var/log/containers")
_LASTING = ("/var/lib/kubelet", "/var/lib/containerd")
_START_LIMIT_S = 60.0
_TURN_S = 0.1


def main() -> int:
    """Run one of the two phases."""
    phase, path = sys.argv[1:]
    node = json.loads(Path(path).read_text(encoding="utf-8"))
    if phase == "enter":
        enter(node, path)
    return init(node)


def enter(node: dict[str, str], path: str) -> None:
    """Join the node's cgroups, then become the parent of its first process."""
    for hierarchy in hierarchies():
        own = hierarchy / node["cgroup"]
        own.mkdir(exist_ok=True)
        # A cpuset starts without processors and memory.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / file).exists():
                (own / file).write_text((hierarchy / file).read_text())
        (own / "cgroup.procs").write_text(str(os.getpid()))
    namespaces = ("--mount", "--propagation", "private", "--net", "--uts", "--ipc", "--cgroup", "--pid", "--fork")
    os.execvp("unshare", ["unshare", *namespaces, "--kill-child", sys.executable, "-I", __file__, "init", path])


def init(node: dict[str, str]) -> int:
    """Be the node's first process."""
    folder = Path(node["folder"])
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    subprocess.run(["hostname", node["name"]], check=True)
    mount_cgroups()
    mount_directories(folder / "root")
    write_settings(node, folder)
    # Opening it waits until the machine has connected the node's network.
    (folder / "go").read_text()
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    programs = {
        start(folder, "containerd", "containerd", f"--config={folder}/containerd.toml"),
        start(folder, "kube-proxy", node["proxy"], f"--config={folder}/proxy.json"),
    }
    end_s = time.monotonic() + _START_LIMIT_S
    while subprocess.run(["ctr", "version"], check=False, capture_output=True).returncode and time.monotonic() < end_s:
        time.sleep(_TURN_S)
    kubelet = start_kubelet(node, folder)
    # Processes of ended containers become children of this one.
    while True:
        pid, status = os.wait()
        if pid == kubelet and time.monotonic() < end_s:
            # containerd answers `ctr` before it serves kubelets. A machine's service manager starts a kubelet again, too.
            time.sleep(_TURN_S)
            kubelet = start_kubelet(node, folder)
        elif pid in {*programs, kubelet}:
            sys.stderr.write(f"{programs} {kubelet}: {pid} ended with status {status}\n")
            return 1


def start_kubelet(node: dict[str, str], folder: Path) -> int:
    """Start the kubelet; return its id."""
    return start(
        folder,
        "kubelet",
        node["kubelet"],
        f"--config={folder}/kubelet.json",
        f"--kubeconfig={node['kubeconfig']}",
        f"--hostname-override={node['name']}",
        f"--node-ip={node['address']}",
    )


def start(folder: Path, name: str, *command: str) -> int:
    """Start a program of the node with a log of its own; return its id."""
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid


def hierarchies() -> list[Path]:
    """Return where the machine's hierarchies of cgroup v1 are mounted."""
    return [path for path in sorted(_CGROUPS.iterdir()) if (path / "release_agent").exists() and not path.is_symlink()]


def mount_cgroups() -> None:
    """Mount each hierarchy again. In the new cgroup namespace its root is the node's own group."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, target, kind, options = line.split()[:4]
        if kind == "cgroup2":
            subprocess.run(["umount", target], check=True)
        elif kind == "cgroup":
            subprocess.run(["umount", target], check=True)
            common = {"rw", "ro", "relatime", "nosuid", "nodev", "noexec", "xattr", "clone_children"}
            own = [option for option in options.split(",") if option not in common]
            if any(option.startswith("name=") for option in own):
                own.insert(0, "none")
            own = [option for option in own if not option.startswith("release_agent=")]
            subprocess.run(["mount", "-t", "cgroup", "-o", ",".join(own), "cgroup", target], check=True)


def mount_directories(root: Path) -> None:
    """Give the node directories of its own at the paths that all nodes use."""
    for path in (*_VOLATILE, *_LASTING):
        own = root / path.removeprefix("/")
        if path in _VOLATILE:
            shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", str(own), path], check=True)


def write_settings(node: dict[str, str], folder: Path) -> None:
    """Write the settings of containerd, its networks, kube-proxy and the kubelet."""
    networks = folder / "networks"
    networks.mkdir(exist_ok=True)
    addresses = {"type": "host-local", "ranges": [[{"subnet": node["pods"]}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    plugins = [bridge | {"ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    write_json(networks / "10-pods.conflist", {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins})
    (folder / "containerd.toml").write_text(
        f"""version = 2
disabled_plugins = {node["unused_plugins"]}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{node["plugins"]}"
    conf_dir = "{networks}"
""",
        encoding="utf-8",
    )
    write_json(
        folder / "proxy.json",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": "10.244.0.0/16",
            "hostnameOverride": node["name"],
            "bindAddress": "127.0.0.1",
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": node["proxy_kubeconfig"]},
            # They are read-only in a network namespace.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    )
    (folder / "resolv.conf").write_text("")
    write_json(folder / "kubelet.json", kubelet_settings(node, folder))


def kubelet_settings(node: dict[str, str], folder: Path) -> dict[str, object]:
    """Return the kubelet's settings."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node["address"],
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": node["authority"]},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": node["certificate"],
        "tlsPrivateKeyFile": node["key"],
        "healthzBindAddress": "127.0.0.1",
        "resolvConf": str(folder / "resolv.conf"),
        # The disk and the memory are the machine's: a node must not evict pods because of other programs.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        # A volume over its limit is seen this soon. The default is a minute.
        "volumeStatsAggPeriod": "5s",
        # Tests kill containers, and would wait up to five minutes for the next start.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
        "shutdownGracePeriod": "0s",
    }


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write a document. JSON is valid YAML."""
    path.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
