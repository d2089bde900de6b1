"""Tests that the status is true under common faults: the API server fails, the operator restarts, nodes or pods fail."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from agent_responder import AgentResponder, instance, peer, report
from controlplane.cluster import ControlPlane
from controlplane.ports import HOST, free_port
from controlplane.waiting import until
from deployments import Deployments, to_text
from operator_process import OperatorProcess, Start

pytestmark = pytest.mark.usefixtures("nodes")

# A fault must be reported after at most this many failed reconciles: with the queue's backoffs, the fifth fails after 8 s.
FAILURES_MAX = 10
# Reconciles after which a change would have been seen.
LOOKS = 8
PREFILL_NODES = {"nodeSelector": {"longshore.dev/role": "prefill"}}


def webhook(namespace: str, group: str, kind: str) -> dict[str, Any]:
    """A policy webhook for one kind of objects of a namespace, at an address without a listener."""
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["*"], "resources": [kind]}
    hook = {
        "name": "policy.example.com",
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "clientConfig": {"url": f"https://{HOST}:{free_port()}/"},
        "timeoutSeconds": 1,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [hook],
    }


def refused(plane: ControlPlane, namespace: str, group: str, kind: str) -> bool:
    """Whether the webhook is in force. The API server learns of it with a delay."""
    resource = f"{kind}.{group}" if group else kind
    done = plane.try_kubectl("delete", resource, "-n", namespace, "--all", "--dry-run=server")
    name = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "probe", "namespace": namespace}}
    if kind == "secrets":
        done = plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(name))
    return "failed calling webhook" in done.stderr


@pytest.mark.parametrize(("group", "kind"), [("", "secrets"), ("apps", "daemonsets")])
def test_a_webhook_that_is_down_is_told_in_time_and_so_is_its_end(
    plane: ControlPlane, deployments: Deployments, start: Start, group: str, kind: str
) -> None:
    one = start()
    if kind == "daemonsets":
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
    plane.kubectl("create", "-f", "-", stdin=to_text(webhook(deployments.namespace, group, kind)))
    try:
        until(lambda: refused(plane, deployments.namespace, group, kind), "the webhook is in force")
        before = failures(one)
        deployments.apply(transfer={"backend": "Mooncake"})
        found = deployments.wait_reason("AgentsReady", "RequestsFail", about="failed calling webhook")
        assert failures(one) - before <= FAILURES_MAX
        assert "500" in found["message"]
        until(lambda: deployments.events("RequestsFail"), "an event")
        assert deployments.condition("Ready")["status"] == "False"
        assert deployments.condition("Progressing")["reason"] == "Blocked"
    finally:
        plane.kubectl("delete", "validatingwebhookconfiguration", deployments.namespace)
    deployments.wait_reason("Ready", "Ready")


def failures(one: OperatorProcess) -> float:
    """Return the number of failed reconciles."""
    lines = [
        line
        for line in one.page("/metrics").splitlines()
        if line.startswith("longshore_operator_reconcile_errors_total")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def settled_with(deployments: Deployments, *operators: OperatorProcess) -> tuple[list[Any], str, int]:
    """Return `told` once several looks of each operator have changed nothing in it.

    A status is written before its events, and an agent may be polled later than the deployment is settled.
    """

    def quiet() -> tuple[list[Any], str, int] | None:
        before, seen = told(deployments), [looks(one) for one in operators]
        until(
            lambda: all(looks(one) >= count + LOOKS for one, count in zip(operators, seen, strict=True)),
            "several looks",
        )
        return before if told(deployments) == before else None

    found = until(quiet, "nothing changes any more")
    assert found is not None
    return found


def told(deployments: Deployments) -> tuple[list[Any], str, int]:
    """Return the conditions, the version of the deployment, and the number of its events."""
    body = deployments.get("dgdep", "llama")
    events = sum(
        entry.get("count") or 1 for entry in deployments.list("events") if entry["involvedObject"]["name"] == "llama"
    )
    return body["status"]["conditions"], body["metadata"]["resourceVersion"], events


@pytest.mark.parametrize("silent", [False, True])
def test_a_restart_of_the_operator_changes_no_condition_and_posts_no_event(
    deployments: Deployments, start: Start, responder: AgentResponder, *, silent: bool
) -> None:
    # Agents that answer must not count as silent on a busy machine.
    settings = {"poll_stale_s": 4 if silent else 60, "resync_s": 1}
    one = start(**settings)
    role = {"tensorParallel": 1, "pageSize": 64, "instances": 1, **PREFILL_NODES}
    deployments.apply(prefill=role, decode=role)
    deployments.wait_reason("Ready", "Ready")
    first, second = [pod["status"]["podIP"] for pod in deployments.pods()]
    responder.answers[first] = report(instance("p-0", "source"), peers=(peer("d-0", "NVLink"),))
    responder.answers[second] = report(instance("d-0", "target"), peers=(peer("p-0", "NVLink"),))
    deployments.wait_reason("TransportVerified", "WireVerified")
    if silent:
        responder.silent |= {first, second}
        for condition in ("EnginesConnected", "PeersConnected", "TransportVerified"):
            deployments.wait_reason(condition, "AgentSilent")
    deployments.wait_reason("Progressing", "Settled")
    before = settled_with(deployments, one)
    one.process.stop()
    again = start(**settings)
    # Long enough for this operator to report an agent without an answer as silent.
    seen = looks(again)
    began_s = time.monotonic()
    until(lambda: looks(again) >= seen + LOOKS and time.monotonic() > began_s + 8, "it has looked several times")
    assert told(deployments) == before
    responder.silent -= {first, second}


def test_each_new_slab_with_differing_digests_is_told_by_one_event_of_its_worker(
    deployments: Deployments, start: Start, responder: AgentResponder
) -> None:
    one = start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    address = deployments.pods()[0]["status"]["podIP"]
    text = "room 7 of p-0: digest of layer 3, K of head 5 differs"

    def reported(count: int) -> None:
        found = report(instance("d-0", "target"))
        found["workers"][0] |= {"mismatches": count, "mismatch": text}
        responder.answers[address] = found

    def events() -> list[tuple[str, int]]:
        return [(entry["type"], entry["count"]) for entry in deployments.events("DigestMismatch")]

    reported(0)
    deployments.wait_reason("EnginesConnected", "EnginesConnected")
    assert events() == []
    for count in (1, 3):
        reported(count)
        until(lambda count=count: events() == [("Warning", min(count, 2))], "an event")
    (event,) = deployments.events("DigestMismatch")
    assert text in event["message"]
    assert "w/0/0 on " in event["message"]
    one.process.stop()
    again = start()
    seen = looks(again)
    until(lambda: looks(again) >= seen + 3, "it has looked several times")
    assert events() == [("Warning", 2)]


def looks(one: OperatorProcess) -> float:
    return one.metric("longshore_operator_reconcile_seconds_count")


def test_an_agent_that_redirects_is_not_followed(
    deployments: Deployments, start: Start, responder: AgentResponder
) -> None:
    inside = AgentResponder(free_port())
    try:
        start(poll_stale_s=3)
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
        address = deployments.pods()[0]["status"]["podIP"]
        responder.redirects[address] = f"http://{HOST}:{inside.port}/internal"
        deployments.wait_reason("EnginesConnected", "AgentSilent")
        assert inside.asked == set()
    finally:
        responder.redirects.clear()
        inside.stop()


def test_releases_that_overlap_settle_and_name_no_other_tenant(
    plane: ControlPlane, deployments: Deployments, start: Start
) -> None:
    tenant = f"{deployments.namespace}-tenant"
    plane.kubectl("create", "namespace", tenant)
    try:
        Deployments(plane, tenant, deployments.http_port).apply("theirs")
        # A Lease that expires in a pause of a busy machine would change the serving operator.
        short = {"lease_s": 60, "lease_renew_s": 1, "resync_s": 1}
        wide = start(watch_namespace="", lease_name="wide", **short)
        deployments.apply()
        deployments.wait_reason("NodesShared", "NodesShared")
        assert served(deployments) == {"lease": f"{deployments.namespace}/wide", "scope": "Cluster"}
        narrow = start(lease_name="narrow", **short)
        until(lambda: served(deployments)["lease"].endswith("/narrow"), "the narrower one serves")
        deployments.wait_reason("NodesShared", "NodesOwn")
        until(lambda: wide.metric("longshore_operator_left_deployments") == 1, "the other one has left it")
        event = until(lambda: deployments.events("ServedByAnother"), "it says so")[0]
        assert "/wide leaves this deployment to that of" in event["message"]
        # Operators that do not agree would write again and again.
        settled_with(deployments, wide, narrow)
        assert tenant not in to_text(deployments.get("dgdep", "llama"))
        assert tenant not in to_text(deployments.list("events"))
        narrow.process.stop(signal.SIGKILL)
        plane.kubectl("delete", "lease", "narrow", "-n", deployments.namespace)
        until(lambda: served(deployments)["lease"].endswith("/wide"), "the other one serves again")
        deployments.wait_reason("Ready", "Ready")
    finally:
        plane.kubectl("delete", "namespace", tenant, "--wait=false")


def served(deployments: Deployments) -> dict[str, str]:
    """Return the operator that serves the deployment."""
    found: dict[str, str] = deployments.get("dgdep", "llama")["status"].get("operator") or {"lease": ""}
    return found


def test_trouble_has_one_warning_and_its_repetition_counts(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    name = deployments.pods()[0]["metadata"]["name"]
    for count in (1, 2):
        for status, condition in (("False", "AgentsNotReady"), ("True", "AllAgentsReady")):
            deployments.patch_status(name, {"conditions": [{"type": "Ready", "status": status}]})
            deployments.wait_reason("AgentsReady", condition)
        until(lambda count=count: warned(deployments) == [("AgentsNotReady", count)], "one warning with its count")


def warned(deployments: Deployments) -> list[tuple[str, int]]:
    """Return the reason and the count of each warning about a deployment."""
    return [
        (entry["reason"], entry["count"])
        for entry in deployments.list("events")
        if entry["type"] == "Warning" and entry["involvedObject"]["kind"] == "DisaggDeployment"
    ]


@pytest.mark.parametrize("nodes_watched", [True, False])
def test_the_operator_is_ready_soon_whatever_it_watches_and_however_seldom_it_lists(
    plane: ControlPlane, namespace: str, *, nodes_watched: bool
) -> None:
    settings = {"watch_namespace": namespace, "watch_nodes": nodes_watched, "resync_s": 3600}
    one = OperatorProcess(plane, namespace, **settings)
    try:
        until(lambda: one.process.check() and one.status("/readyz") == 200, "it is ready")
    finally:
        one.process.stop()
