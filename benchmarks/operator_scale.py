"""Measures how soon the operator applies a change with 1,000 nodes and 100 deployments, and its load at rest.

A real control plane runs in its own network namespace, with nodes and pods simulated by KWOK. The operator is a process
with polling on. One responder serves the status pages of all agents; 1 % of them never answer. A change is a new ring
size of one deployment. It counts as applied when a watch shows the DaemonSet with it. The run fails unless each change is
applied within 120 s and every deployment is then Ready at its generation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes
import urllib3

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from agent_responder import AgentResponder
from controlplane.cluster import ControlPlane
from controlplane.network import enter_own_network
from controlplane.nodes import add_nodes, start_kwok
from controlplane.ports import free_port
from controlplane.waiting import until
from deployments import install_definition, manifest
from operator_process import OperatorProcess

from longshore_spec.names import DEPLOYMENT_LABEL, INJECT_LABEL

NAMESPACE = "scale"
KIND = ("longshore.dev", "v1alpha1", NAMESPACE, "disaggdeployments")
POD_NETWORK = "10.128.0.0/10"
SETTLE_LIMIT_S = 900.0
# Nodes in one request. The API server limits the size of a request.
NODES_AT_ONCE = 250
TARGETS = {"p99": 1.0, "memory": 200.0, "writes": 0}


class Watcher:
    """Results of the benchmark's own watches: the time of each config of each DaemonSet, and the Ready deployments."""

    def __init__(self, client: Any) -> None:
        self.seen: dict[tuple[str, str], float] = {}
        self.current: dict[str, str] = {}
        self.ready: set[str] = set()
        self._apps = kubernetes.client.AppsV1Api(client)
        self._objects = kubernetes.client.CustomObjectsApi(client)
        for run in (self._watch_children, self._watch_deployments):
            threading.Thread(target=run, daemon=True).start()

    def _watch_children(self) -> None:
        watch = kubernetes.watch.Watch()  # type: ignore[no-untyped-call]
        stream = watch.stream(self._apps.list_namespaced_daemon_set, NAMESPACE)  # type: ignore[no-untyped-call]
        # The stream ends with the API server, at the end of the run.
        with suppress(urllib3.exceptions.HTTPError):
            for event in stream:
                metadata = event["raw_object"]["metadata"]
                config = event["raw_object"]["spec"]["template"]["metadata"]["annotations"]["longshore.dev/config"]
                self.seen.setdefault((metadata["name"], config), time.monotonic())
                self.current[metadata["name"]] = config

    def _watch_deployments(self) -> None:
        watch = kubernetes.watch.Watch()  # type: ignore[no-untyped-call]
        stream = watch.stream(self._objects.list_namespaced_custom_object, *KIND)  # type: ignore[no-untyped-call]
        with suppress(urllib3.exceptions.HTTPError):
            for event in stream:
                metadata = event["raw_object"]["metadata"]
                listed = event["raw_object"].get("status", {}).get("conditions", [])
                entry: dict[str, Any] = next((entry for entry in listed if entry["type"] == "Ready"), {})
                is_ready = (entry.get("status"), entry.get("observedGeneration")) == ("True", metadata["generation"])
                (self.ready.add if is_ready else self.ready.discard)(metadata["name"])


class Bench:
    """One run: call `fill`, `change`, `rest` in this order."""

    def __init__(self, plane: ControlPlane, one: OperatorProcess, chosen: argparse.Namespace) -> None:
        self._plane = plane
        self._one = one
        self._chosen = chosen
        configuration = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(  # type: ignore[no-untyped-call]
            str(plane.kubeconfig), client_configuration=configuration
        )
        client = kubernetes.client.ApiClient(configuration)
        self._objects = kubernetes.client.CustomObjectsApi(client)
        self._core = kubernetes.client.CoreV1Api(client)
        self._names = [f"d{number}" for number in range(chosen.deployments)]
        self._watcher = Watcher(client)
        # The API server's time for each write of a change. An applied change needs three writes in a row.
        self.own_s: list[float] = []

    def fill(self, http_port: int) -> float:
        """Apply all deployments at once; return the seconds until all of them are Ready."""
        began_s = time.monotonic()
        for number, name in enumerate(self._names):
            roles = {
                role: {"tensorParallel": tp, "pageSize": 64, "nodeSelector": {"group": str(number)}}
                for role, tp in (("prefill", 4), ("decode", 1))
            }
            body = manifest(NAMESPACE, name, agents={"httpPort": http_port}, **roles)
            self._objects.create_namespaced_custom_object(*KIND, body)
        until(self._all_ready, "all deployments Ready", SETTLE_LIMIT_S)
        return time.monotonic() - began_s

    def start_engines(self) -> None:
        """Create the pods of engines, of both roles of each deployment in turn. Their engines do not register."""
        for number in range(self._chosen.engine_pods):
            index, role = number % len(self._names), ("prefill", "decode")[number // len(self._names) % 2]
            metadata = {"name": f"engine-{number}", "labels": {INJECT_LABEL: f"{self._names[index]}.{role}"}}
            spec: Any = {"nodeSelector": {"group": str(index)}, "containers": [{"name": "engine", "image": "engine"}]}
            body: Any = {"metadata": metadata, "spec": spec}
            self._core.create_namespaced_pod(NAMESPACE, body)

    def change(self) -> list[float]:
        """Change one deployment after another at a limited rate; return the seconds until each was applied."""
        sent: dict[str, tuple[str | None, float]] = {}
        for number in range(self._chosen.changes):
            name = self._names[number % len(self._names)]
            before = self._watcher.current.get(f"{name}-agent")
            patch = {"spec": {"decode": {"staging": {"poolSize": f"{4097 + number}Mi"}}}}
            began_s = time.monotonic()
            self._objects.patch_namespaced_custom_object(*KIND, name, patch)
            self.own_s.append(time.monotonic() - began_s)
            sent[f"{name}/{number}"] = (before, began_s)
            until(partial(self._is_changed, name, before), f"{name} is applied", 120)
            time.sleep(max(0.0, 1.0 / self._chosen.rate - (time.monotonic() - began_s)))
        times = []
        for label, (before, began_s) in sent.items():
            name = f"{label.partition('/')[0]}-agent"
            later = [seen_s - began_s for (n, c), seen_s in self._watcher.seen.items() if n == name and c != before]
            times.append(min(entry for entry in later if entry >= 0))
        return times

    def rest(self) -> dict[str, float]:
        """Wait until all deployments are Ready and writes have stopped; return the load of a period at rest."""
        until(self._all_ready, "all deployments Ready again", SETTLE_LIMIT_S)
        calm: list[tuple[float, float]] = []

        def is_calm() -> bool:
            calm.append((time.monotonic(), self.writes()))
            return any(calm[-1][0] - at_s > self._chosen.calm_s and calm[-1][1] == count for at_s, count in calm)

        until(is_calm, "no more writes", SETTLE_LIMIT_S)
        before = self.writes(), self.calls(), self.cpu_s()
        time.sleep(self._chosen.rest_s)
        minutes = self._chosen.rest_s / 60
        return {
            "writes_per_minute": (self.writes() - before[0]) / minutes,
            "calls_per_minute": (self.calls() - before[1]) / minutes,
            "cpu_percent": 100 * (self.cpu_s() - before[2]) / self._chosen.rest_s,
        }

    def _is_changed(self, name: str, before: str | None) -> bool:
        return self._watcher.current.get(f"{name}-agent") != before

    def _all_ready(self) -> bool:
        return len(self._watcher.ready) == len(self._names)

    def calls(self) -> float:
        """Return the operator's requests, without those for its Lease."""
        return sum(self._counts('kind="Lease"'))

    def writes(self) -> float:
        """Return the operator's writes, without those for its Lease."""
        return sum(self._counts('kind="Lease"', 'verb="GET"', 'verb="LIST"', 'verb="DRY'))

    def _counts(self, *without: str) -> list[float]:
        lines = [
            line for line in self._one.page("/metrics").splitlines() if line.startswith("longshore_operator_api_calls{")
        ]
        return [float(line.rpartition(" ")[2]) for line in lines if not any(part in line for part in without)]

    def cpu_s(self) -> float:
        """Return the operator's processor seconds so far."""
        fields = Path(f"/proc/{self._one.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self, row: str) -> float:
        """Return the operator's memory: `VmRSS` now, `VmHWM` the peak."""
        for line in Path(f"/proc/{self._one.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{row}:"):
                return int(line.split()[1]) / 1024
        raise AssertionError(row)


def run(chosen: argparse.Namespace, plane: ControlPlane) -> dict[str, Any]:
    """Return the figures of one run."""
    start_kwok(plane, POD_NETWORK)
    install_definition(plane)
    plane.kubectl("create", "namespace", NAMESPACE)
    groups = {f"n{number:04d}": {"group": str(number % chosen.deployments)} for number in range(chosen.nodes)}
    for first in range(0, chosen.nodes, NODES_AT_ONCE):
        add_nodes(plane, dict(list(groups.items())[first : first + NODES_AT_ONCE]))
    print(f"{chosen.nodes} nodes are Ready", flush=True)
    responder = AgentResponder(free_port())
    settings: dict[str, Any] = {"resync_s": 60, "poll_s": 10, "lease_s": 15, "lease_renew_s": 5}
    try:
        with OperatorProcess(plane, NAMESPACE, **settings) as one:
            bench = Bench(plane, one, chosen)
            figures: dict[str, Any] = {"all_ready_s": bench.fill(responder.port)}
            print(f"all Ready after {figures['all_ready_s']:.1f} s", flush=True)
            pods = json.loads(plane.kubectl("get", "pods", "-n", NAMESPACE, "-l", DEPLOYMENT_LABEL, "-o", "json"))[
                "items"
            ]
            addresses = sorted(pod["status"]["podIP"] for pod in pods)
            bench.start_engines()
            responder.silent = set(addresses[:: max(1, round(1 / chosen.silent))])
            before = bench.calls(), bench.writes(), bench.cpu_s()
            times = sorted(bench.change())
            figures |= {"p50_s": statistics.median(times), "p99_s": times[min(len(times) - 1, int(len(times) * 0.99))]}
            figures |= {"max_s": times[-1], "changes": len(times), "times_s": times}
            own = sorted(bench.own_s)
            figures |= {"own_p50_s": statistics.median(own), "own_p99_s": own[min(len(own) - 1, int(len(own) * 0.99))]}
            figures |= bench.rest() | {"pods": len(pods), "silent": len(responder.silent)}
            figures["engine_pods"] = chosen.engine_pods
            spent = bench.calls() - before[0], bench.writes() - before[1], bench.cpu_s() - before[2]
            figures |= {"calls_per_change": spent[0] / len(times), "writes_per_change": spent[1] / len(times)}
            figures |= {"cpu_s_per_change": spent[2] / len(times), "rss_mib": bench.memory_mib("VmRSS")}
            figures["peak_mib"] = bench.memory_mib("VmHWM")
            return figures
    finally:
        responder.stop()


def show(figures: dict[str, Any]) -> None:
    """Print the table, with the targets."""
    rows = (
        ("change to applied, p50", f"{figures['p50_s'] * 1000:.0f} ms", ""),
        ("change to applied, p99", f"{figures['p99_s'] * 1000:.0f} ms", f"<= {TARGETS['p99'] * 1000:.0f} ms"),
        (
            "one write of the bench itself, p50, p99",
            f"{figures['own_p50_s'] * 1000:.0f} ms, {figures['own_p99_s'] * 1000:.0f} ms",
            "",
        ),
        (
            "memory at rest, peak",
            f"{figures['rss_mib']:.0f} MiB, {figures['peak_mib']:.0f} MiB",
            f"<= {TARGETS['memory']:.0f}",
        ),
        ("writes a minute at rest, without the Lease", f"{figures['writes_per_minute']:.1f}", f"{TARGETS['writes']}"),
        ("reads a minute at rest", f"{figures['calls_per_minute']:.1f}", ""),
        ("processor at rest", f"{figures['cpu_percent']:.1f} % of a core", ""),
        ("requests a change, with its rollout", f"{figures['calls_per_change']:.1f}", ""),
        ("writes a change, with its rollout", f"{figures['writes_per_change']:.1f}", ""),
        ("all deployments applied at once, all Ready", f"{figures['all_ready_s']:.1f} s", ""),
    )
    print(
        f"\n{figures['pods']} agents, {figures['silent']} silent, {figures['engine_pods']} pods of engines, {figures['changes']} changes; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name, value, target in rows:
        print(f"{name:<45} {value:>24}   {target}")


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--deployments", type=int, default=100)
    parser.add_argument("--engine-pods", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="changes a second, at most")
    parser.add_argument("--silent", type=float, default=0.01, help="share of agents that never answer")
    parser.add_argument("--calm-s", type=float, default=45.0, help="seconds without a write before rest is measured")
    parser.add_argument("--rest-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    enter_own_network(POD_NETWORK)
    with tempfile.TemporaryDirectory(prefix="operator-scale-") as folder, ControlPlane(Path(folder)) as plane:
        figures = run(chosen, plane)
    show(figures)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
