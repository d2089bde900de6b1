"""Runs every query of the dashboard, of the alerts and of the page on scaling in a real Prometheus that scrapes real agents and a real operator.

The agents' pods are processes (`controlplane.process_node`), which Prometheus finds by the API server.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_world import room_ids
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from monitored import Scene, scene
from prometheus_server import panels, plain, rule_expressions
from real_agents import PAGE_SIZE, finish
from test_alerts import scaling

# vLLM's own, which e2e/vllm/test_vllm_how_to.py finds on the page of a real vLLM.
OTHERS = "vllm:"
# Panels without data here, and why.
EMPTY = {
    "Share of TTFT": "no vLLM is scraped",
    "TTFT and load": "no vLLM is scraped",
    "Reconcile errors": "no reconcile fails, and its series begin with the first error",
}
QUERIES = {
    f"{panel['title']} {target['refId']}": plain(target["expr"]) for panel in panels() for target in panel["targets"]
}


@pytest.fixture(scope="module")
def watched(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(plane, tmp_path_factory.mktemp("prometheus")) as made:
        made.moves(100)
        made.fails()
        made.reuses(made.moves(500))
        yield made


def test_agents_are_found_by_their_pods_and_have_the_labels_that_alerts_name(watched: Scene) -> None:
    namespace = watched.deployments.namespace
    pods = {pod["metadata"]["name"]: pod for pod in watched.deployments.list("pods")}
    targets = until(lambda: healthy(watched), "all targets are up")
    assert set(targets) == {*pods, "longshore-operator"}
    for name, pod in pods.items():
        labels = targets[name]["labels"]
        assert labels.pop("instance").startswith(pod["status"]["podIP"])
        assert labels == {
            "job": "longshore-agent",
            "namespace": namespace,
            "pod": name,
            "node": pod["spec"]["nodeName"],
            "deployment": "llama",
            "roles": pod["metadata"]["labels"]["longshore.dev/roles"],
        }


def healthy(watched: Scene) -> dict:
    """Return all targets if each is up."""
    targets = watched.prometheus.targets()
    return targets if len(targets) == 3 and {found["health"] for found in targets.values()} == {"up"} else {}


@pytest.mark.parametrize("name", [*QUERIES, *rule_expressions(), *scaling()])
def test_a_query_names_only_series_that_real_agents_and_the_operator_export(watched: Scene, name: str) -> None:
    found = watched.prometheus.named_by((QUERIES | rule_expressions() | scaling())[name])
    assert found
    until(lambda: not missing(watched, found), f"{missing(watched, found)} of {name}")


def missing(watched: Scene, names: set[str]) -> set[str]:
    """Return the names that Prometheus does not know. Speeds are known from the second write on."""
    absent = {name for name in names - watched.prometheus.names() if not name.startswith(OTHERS)}
    if absent:
        watched.moves(100)
    return absent


def test_a_misspelt_name_and_a_query_that_is_none_are_found(watched: Scene) -> None:
    named = watched.prometheus.named_by("sum(rate(longshore_room_total[1m])) / longshore_operator_leader")
    until(lambda: missing(watched, named) == {"longshore_room_total"}, "only the misspelt name is missing")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        watched.prometheus.named_by("sum by (reason (up)")


@pytest.mark.parametrize(
    "panel", [panel for panel in panels() if panel["title"] not in EMPTY], ids=lambda p: p["title"]
)
def test_a_panel_has_data(watched: Scene, panel: dict) -> None:
    def some() -> bool:
        watched.moves(100)
        return any(watched.prometheus.query(plain(target["expr"])) for target in panel["targets"])

    until(some, panel["title"])


def test_the_panels_show_what_happened(watched: Scene) -> None:
    def values(label: str, text: str) -> set[str]:
        return {found["metric"][label] for found in watched.prometheus.query(text)}

    # A page that is not scraped in time, on a busy machine, has no series until the next scrape.
    failed = 'sum by (reason) (longshore_rooms_total{half="target",outcome="failed"}) > 0'
    until(lambda: values("reason", failed) == {"total_mismatch"}, "the failed room")
    written = "sum by (way, wire) (longshore_written_bytes_total)"
    until(lambda: values("way", written) == {"staged"}, "the way of what was written")
    assert values("wire", written) <= {"TCP", "SharedMemory", "Unknown"}
    leaders = "sum(longshore_operator_leader)"
    until(lambda: [found["value"][1] for found in watched.prometheus.query(leaders)] == ["1"], "one leader")


def test_the_queries_of_the_page_on_scaling_count_prompts_that_wait_for_decode_and_for_prefill(watched: Scene) -> None:
    def value(name: str) -> float:
        """Return the result of a query of the page, for the scene's deployment of TP 1 to TP 2; 0 without series, as KEDA."""
        replaced = {"/ 4": "/ 1", "/ 1": "/ 2", "llama-70b": "llama", '"default"': f'"{watched.deployments.namespace}"'}
        pattern = re.compile("|".join(map(re.escape, replaced)))
        found = watched.prometheus.query(pattern.sub(lambda match: replaced[match[0]], scaling()[name]))
        return sum(float(series["value"][1]) for series in found)

    def waiting(decode: float, prefill: float) -> bool:
        return (value("llama-70b-decode 0"), value("llama-70b-prefill 0")) == (decode, prefill)

    until(lambda: waiting(0, 0), "no prompt waits")
    offered, claimed, pages = next(room_ids), next(room_ids), [0]
    endpoint = watched.source.endpoint()
    watched.source.ask("send", room=offered, pages=pages, total=PAGE_SIZE)
    until(lambda: waiting(1, 0), "one prompt waits for decode")
    for rank in watched.target.ranks:
        rank.client.receive(offered, endpoint, pages, 0, PAGE_SIZE)
    finish(watched.source, watched.target, offered)
    for rank in watched.target.ranks:
        rank.client.receive(claimed, endpoint, pages, 0, PAGE_SIZE)
    until(lambda: waiting(0, 1), "one prompt waits for prefill")
    watched.source.ask("send", room=claimed, pages=pages, total=PAGE_SIZE)
    finish(watched.source, watched.target, claimed)
    until(lambda: waiting(0, 0), "no prompt waits")
    for name in ("llama-70b-decode 1", "llama-70b-prefill 1"):
        until(lambda name=name: value(name) > 0, f"{name} is a rate")


def test_prometheus_evaluates_every_rule_without_an_error(watched: Scene) -> None:
    def evaluated() -> bool:
        rules = watched.prometheus.rules()
        assert set(rules) == set(rule_expressions())
        faults = {name: rule["lastError"] for name, rule in rules.items() if rule.get("lastError")}
        assert faults == {}
        return {rule["health"] for rule in rules.values()} == {"ok"}

    until(evaluated, "every rule was evaluated")


def test_workers_that_die_fire_an_alert_with_the_name_of_their_agent(watched: Scene) -> None:
    pod = next(
        pod["metadata"]["name"] for pod in watched.deployments.list("pods") if "decode" in pod["metadata"]["name"]
    )

    killed: set[int] = set()
    until(lambda: kill_worker(watched, killed) and len(killed) == 3, "three workers are killed", 120)
    (alert,) = until(lambda: watched.prometheus.alerts("LongshoreWorkersRestart"), "an alert")
    assert alert["state"] == "firing"
    assert (alert["labels"]["pod"], alert["labels"]["deployment"]) == (pod, "llama")
    assert f"(pod {pod} on node " in alert["annotations"]["description"]


def kill_worker(watched: Scene, killed: set[int]) -> bool:
    """Kill a worker of decode that was not killed before. Return whether there was one.

    The status page has PIDs of the pod's own namespace, so the workers are found as the agent's children on this machine.
    """
    for tasks in Path(f"/proc/{watched.decode.container.main_pid}/task").glob("*/children"):
        for pid in map(int, tasks.read_text().split()):
            if pid not in killed and b"longshore_agent.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                return True
    return False


def test_an_agent_that_stops_answering_is_pending_as_down_and_as_silent_until_it_goes_on(watched: Scene) -> None:
    def down_in_decode() -> list[dict]:
        """Return the alerts on decode's agent. The other one may be scraped late for a moment."""
        alerts = watched.prometheus.alerts("LongshoreAgentDown")
        return [found for found in alerts if found["labels"]["roles"] == "decode"]

    process = watched.decode.container.main_pid
    os.kill(process, signal.SIGSTOP)
    try:
        (down,) = until(down_in_decode, "the agent is down")
        (silent,) = until(lambda: watched.prometheus.alerts("LongshoreAgentsSilent"), "the agent is silent")
    finally:
        os.kill(process, signal.SIGCONT)
    assert (down["state"], silent["state"]) == ("pending", "pending")
    for name in ("LongshoreAgentDown", "LongshoreAgentsSilent"):
        until(lambda name=name: watched.prometheus.alerts(name) == [], f"{name} is over")
