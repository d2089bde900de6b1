"""The operator under faults: downtime, two replicas, other writers, unready agents, failing requests."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from agent_responder import AgentResponder, instance, peer, report
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import MONITORS, Deployments, manifest, to_text
from fault_proxy import FaultProxy
from operator_process import OperatorProcess, Start

pytestmark = pytest.mark.usefixtures("nodes")

# Of a request that a test holds. Longer than the waits of the test for other things.
HELD_LIMIT_S = 280.0


def writes(one: OperatorProcess) -> float:
    """Return the requests that changed an object, except those for the Lease."""
    lines = [line for line in one.page("/metrics").splitlines() if line.startswith("longshore_operator_api_calls{")]
    changing = [
        line for line in lines if 'kind="Lease"' not in line and not ('verb="GET"' in line or 'verb="LIST"' in line)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in changing)


def looks(one: OperatorProcess) -> float:
    return one.metric("longshore_operator_reconcile_seconds_count")


def test_nothing_is_written_while_nothing_happens(deployments: Deployments, start: Start) -> None:
    one = start(resync_s=1)
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")

    def state() -> tuple[float, str]:
        return writes(one), deployments.get("dgdep", "llama")["metadata"]["resourceVersion"]

    def quiet() -> bool:
        """Whether ten looks change nothing. On a busy machine an agent is polled, and an event posted, after Ready."""
        before, seen = state(), looks(one)
        until(lambda: looks(one) >= seen + 10, "ten more looks at it")
        return state() == before

    until(quiet, "nothing is written any more")


def test_what_was_deleted_while_the_operator_was_away_leaves_nothing_behind(
    deployments: Deployments, start: Start
) -> None:
    one = start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    one.process.stop()
    deployments.plane.kubectl("delete", "dgdep", "llama", "-n", deployments.namespace, "--timeout=150s")
    until(lambda: deployments.names("ds,cm,svc,sa,netpol,secret,pod") == set(), "no child is left")


def test_what_changed_while_the_operator_was_killed_is_caught_up_with(deployments: Deployments, start: Start) -> None:
    one = start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    one.process.stop(signal.SIGKILL)
    deployments.apply(transfer={"chunkTokens": 4096})
    deployments.plane.kubectl("delete", "svc", "llama-agent", "-n", deployments.namespace)
    start()
    deployments.wait_reason("Ready", "Ready")
    assert json.loads(deployments.get("cm", "llama-agent")["data"]["agent.json"])["transfer"]["chunkTokens"] == 4096
    assert deployments.get("svc", "llama-agent")


def test_of_two_operators_one_works_and_the_other_takes_over(deployments: Deployments, start: Start) -> None:
    # So long that no pause of a busy machine lets it expire before the first one is killed.
    lease = {"lease_s": 20, "lease_renew_s": 1}
    first = start(**lease)
    until(lambda: first.metric("longshore_operator_leader") == 1, "the first one is active")
    second = start(**lease)
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    assert writes(first) > 0
    assert (second.metric("longshore_operator_leader"), writes(second)) == (0, 0)
    first.process.stop(signal.SIGKILL)
    deployments.apply(transfer={"chunkTokens": 4096})
    until(lambda: second.metric("longshore_operator_leader") == 1, "the second one is active")
    deployments.wait_reason("Ready", "Ready")
    held = deployments.get("lease", "longshore-operator")["spec"]
    assert (held["holderIdentity"], held["leaseTransitions"]) == (second.identity, 1)


def test_a_replica_that_ends_in_order_hands_over_at_once(deployments: Deployments, start: Start) -> None:
    first = start(lease_s=600, lease_renew_s=2)
    until(lambda: first.metric("longshore_operator_leader") == 1, "the first one is active")
    second = start(lease_s=600, lease_renew_s=2)
    assert first.process.stop() == 0
    until(lambda: second.metric("longshore_operator_leader") == 1, "the second one is active")


def test_a_field_that_somebody_else_took_is_taken_back_and_told(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    other = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "llama-agent", "namespace": deployments.namespace},
        "data": {"agent.json": "{}", "theirs": "stays"},
    }
    deployments.plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=somebody", "-f", "-", stdin=to_text(other)
    )
    until(lambda: deployments.get("cm", "llama-agent")["data"]["agent.json"] != "{}", "ours is back")
    assert deployments.get("cm", "llama-agent")["data"]["theirs"] == "stays"
    event = until(lambda: deployments.events("FieldConflict"), "an event")[0]
    assert event["type"] == "Warning"
    assert "somebody" in event["message"] and "agent.json" in event["message"]


def test_what_the_schema_cannot_see_is_told_by_compatible(deployments: Deployments, start: Start) -> None:
    start()
    model = {"attention": "GQA", "layers": 80, "kvHeads": 24, "headDim": 128, "dtype": "bfloat16"}
    selector = {"nodeSelector": {"longshore.dev/role": "prefill"}}
    prefill = {"tensorParallel": 2, "pageSize": 64, **selector}
    decode = {"tensorParallel": 3, "pageSize": 64, **selector}
    deployments.apply(model=model, prefill=prefill, decode=decode)
    deployments.wait_reason("Ready", "Ready")
    before = deployments.get("ds", "llama-agent")["metadata"]["generation"]
    # Two source ranks hold heads 8 to 15 of one target rank, although two are fewer than three: only the planner detects
    # it.
    deployments.apply(model=model, prefill=prefill, decode=decode | {"staging": {"poolSize": "200Mi"}})
    condition = deployments.wait_reason("Compatible", "InvalidSpec")
    assert "spec.decode.staging.poolSize" in condition["message"] and "give at least 268435456" in condition["message"]
    assert deployments.condition("Ready")["status"] == "False"
    assert deployments.get("ds", "llama-agent")["metadata"]["generation"] == before
    until(lambda: deployments.events("InvalidSpec"), "an event")
    deployments.apply(model=model, prefill=prefill, decode=decode)
    deployments.wait_reason("Ready", "Ready")


def test_agents_that_are_not_ready_are_named(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    pod = deployments.pods()[0]
    name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    deployments.patch_status(name, {"conditions": [{"type": "Ready", "status": "False"}]})
    deployments.wait_reason("AgentsReady", "AgentsNotReady", about=node)
    assert deployments.condition("Ready")["status"] == "False"
    deployments.patch_status(name, {"conditions": [{"type": "Ready", "status": "True"}]})
    deployments.wait_reason("Ready", "Ready")


def test_what_agents_say_becomes_conditions(deployments: Deployments, start: Start, responder: AgentResponder) -> None:
    start(poll_stale_s=3)
    selector = {"nodeSelector": {"longshore.dev/role": "prefill"}}
    deployments.apply(
        prefill={"tensorParallel": 4, "pageSize": 64, "instances": 1, **selector},
        decode={"tensorParallel": 1, "pageSize": 64, "instances": 1, **selector},
        transfer={"wires": ["NVLink"]},
    )
    deployments.wait_reason("Ready", "Ready")
    for condition in ("EnginesConnected", "PeersConnected", "TransportVerified"):
        assert deployments.wait_reason(condition, "NoEngines")["status"] == "Unknown"
    one, other = [pod["status"]["podIP"] for pod in deployments.pods()]
    responder.answers[one] = report(instance("p-0", "source"), peers=(peer("d-0", "NVLink"),))
    deployments.wait_reason("EnginesConnected", "EnginesMissing")
    responder.answers[other] = report(instance("d-0", "target", complete=False))
    deployments.wait_reason("EnginesConnected", "RanksMissing")
    responder.answers[other] = report(instance("d-0", "target"), peers=(peer("p-0", "NVLink"),))
    assert deployments.wait_reason("EnginesConnected", "EnginesConnected")["status"] == "True"
    assert deployments.wait_reason("PeersConnected", "PeersConnected")["status"] == "True"
    assert deployments.wait_reason("TransportVerified", "WireVerified")["message"] == "NVLink"

    def roles() -> tuple[Any, ...]:
        prefill, decode = (deployments.get("dgdep", "llama")["status"][role] for role in ("prefill", "decode"))
        return prefill["instances"], prefill.get("wires"), decode.get("wires")

    until(lambda: roles() == (1, ["NVLink"], ["NVLink"]), "the roles' wires")
    responder.answers[other] = report(
        instance("d-0", "target"), peers=(peer("p-0", "TCP", error="over TCP, and transfer.wires allows only NVLink"),)
    )
    deployments.wait_reason("TransportVerified", "WireNotAllowed", about="TCP")
    responder.answers[other] = report(instance("d-0", "target"), peers=(peer("p-0", "NVLink", state="lost"),))
    deployments.wait_reason("PeersConnected", "PeersLost", about="p-0/0/0 is lost")
    responder.silent.add(other)
    found = deployments.wait_reason("EnginesConnected", "AgentSilent")
    assert found["status"] == "Unknown"
    assert deployments.condition("Ready")["status"] == "True"


def test_pods_of_engines_are_seen(deployments: Deployments, start: Start, responder: AgentResponder) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("EnginesConnected", "NoEngines")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p-0",
            "namespace": deployments.namespace,
            "labels": {"longshore.dev/inject": "llama.prefill"},
        },
        "spec": {"containers": [{"name": "engine", "image": "engine"}], "nodeSelector": {"no": "such"}},
    }
    deployments.plane.kubectl("create", "-f", "-", stdin=to_text(pod))
    deployments.wait_reason("EnginesConnected", "EnginesFailing", about="pod p-0 (Unschedulable: ")
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    state = {
        "name": "engine",
        "state": {"waiting": waiting},
        "restartCount": 3,
        "ready": False,
        "image": "",
        "imageID": "",
    }
    deployments.patch_status("p-0", {"containerStatuses": [state]})
    deployments.wait_reason("EnginesConnected", "EnginesFailing", about="pod p-0 (CrashLoopBackOff: back-off 40s")
    until(lambda: deployments.events("EnginesFailing"), "an event")
    responder.answers[deployments.pods()[0]["status"]["podIP"]] = report(instance("p", "source", host="p-0"))
    deployments.wait_reason("EnginesConnected", "EnginesConnected")
    deployments.plane.kubectl("delete", "pod", "p-0", "-n", deployments.namespace, "--grace-period=0", "--force")


def test_two_deployments_on_one_node_tell_of_each_other(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply()
    deployments.apply("mistral")
    said = "512Mi of staging a prefill rank and 8Gi a decode rank"
    found = deployments.wait_reason("NodesShared", "NodesShared", about=said)
    assert found["message"].startswith("mistral on prefill") or found["message"].startswith("mistral on decode")
    deployments.plane.kubectl("delete", "dgdep", "mistral", "-n", deployments.namespace)
    deployments.wait_reason("NodesShared", "NodesOwn")


def test_a_lost_secret_is_replaced_and_agents_with_it(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    name = deployments.get("dgdep", "llama")["status"]["keys"]["secret"]
    deployments.plane.kubectl("delete", "secret", name, "-n", deployments.namespace)
    # The kubelet cannot mount it for a new pod, which stays unready.
    pod = deployments.pods()[0]["metadata"]["name"]
    deployments.patch_status(pod, {"conditions": [{"type": "Ready", "status": "False"}]})
    until(lambda: deployments.get("dgdep", "llama")["status"]["keys"]["secret"] != name, "new keys")
    deployments.wait_reason("Ready", "Ready")
    assert name not in {entry["metadata"]["name"] for entry in deployments.list("secrets")}


def test_an_operator_that_was_late_leaves_the_keys_of_another_as_they_are(
    deployments: Deployments, start: Start, proxy: FaultProxy
) -> None:
    """The late replica is delayed for longer than its Lease, in the middle of a write."""
    # Its write waits for as long as the other replica takes.
    late = start(kubeconfig=proxy.kubeconfig, resync_s=1, request_timeout_s=HELD_LIMIT_S)
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    first = deployments.get("dgdep", "llama")["status"]["keys"]
    held, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int | None:
        if "/leases/" in path and held.is_set():
            return 500
        if method == "PATCH" and "/disaggdeployments/llama/status" in path and not go_on.is_set():
            held.set()
            assert go_on.wait(HELD_LIMIT_S)
        return None

    proxy.refuse = hold
    deployments.apply(agents={"keysRevision": 2})
    assert held.wait(HELD_LIMIT_S)
    start()
    until(lambda: deployments.get("dgdep", "llama")["status"]["keys"].get("revision") == 2, "keys of the one in time")
    second = deployments.get("dgdep", "llama")["status"]["keys"]
    go_on.set()
    until(lambda: "changed meanwhile" in late.process.log_path.read_text(), "the late one was refused")
    deployments.wait_reason("Ready", "Ready")
    assert deployments.get("dgdep", "llama")["status"]["keys"] == second
    assert second["previous"] == first["secret"]
    assert {entry["metadata"]["name"] for entry in deployments.list("secrets")} == {first["secret"], second["secret"]}


@pytest.mark.parametrize("rotates", [False, True])
def test_keys_of_an_operator_that_dies_before_it_writes_the_status_are_taken_over(
    deployments: Deployments, start: Start, proxy: FaultProxy, rotates: bool
) -> None:
    one = start(kubeconfig=proxy.kubeconfig, request_timeout_s=HELD_LIMIT_S)
    first = set()
    if rotates:
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
        first = {entry["metadata"]["name"] for entry in deployments.list("secrets")}
    made, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int | None:
        """Hold the first write of the status after the Secret was created."""
        if method == "POST" and "/secrets" in path and "dryRun" not in path:
            made.set()
        elif method == "PATCH" and "/disaggdeployments/llama/status" in path and made.is_set():
            assert go_on.wait(HELD_LIMIT_S)
            return 500
        return None

    proxy.refuse = hold
    deployments.apply(agents={"keysRevision": 2})
    until(lambda: len(deployments.list("secrets")) > len(first), "a new Secret")
    (pending,) = {entry["metadata"]["name"] for entry in deployments.list("secrets")} - first
    assert deployments.get("dgdep", "llama")["status"]["keys"]["pending"]["secret"] == pending
    one.process.stop(signal.SIGKILL)
    go_on.set()
    start()
    until(lambda: deployments.get("dgdep", "llama")["status"]["keys"].get("revision") == 2, "keys in the status")
    keys = deployments.get("dgdep", "llama")["status"]["keys"]
    assert (keys["secret"], "pending" in keys) == (pending, False)
    deployments.wait_reason("Ready", "Ready")
    assert {entry["metadata"]["name"] for entry in deployments.list("secrets")} == {*first, pending}


@pytest.mark.parametrize("status", [409, 500, 429])
def test_requests_that_fail_are_repeated_until_all_is_as_wanted(
    deployments: Deployments, start: Start, proxy: FaultProxy, status: int
) -> None:
    tries: dict[str, int] = {}

    def refuse(method: str, path: str) -> int | None:
        """Refuse the first two tries of every write."""
        if method == "GET" or "/leases/" in path or path.endswith("/events"):
            return None
        place = path.partition("?")[0]
        tries[place] = tries.get(place, 0) + 1
        return status if tries[place] <= 2 else None

    proxy.refuse = refuse
    start(kubeconfig=proxy.kubeconfig)
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    assert len(proxy.refused) >= 12
    (secret,) = deployments.list("secrets")
    assert secret["metadata"]["name"] == deployments.get("dgdep", "llama")["status"]["keys"]["secret"]
    assert deployments.events("FieldConflict") == []


def test_a_refused_child_is_told_and_tried_again(deployments: Deployments, start: Start) -> None:
    start()
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight", "namespace": deployments.namespace},
        "spec": {"hard": {"services": "0"}},
    }
    deployments.plane.kubectl("create", "-f", "-", stdin=to_text(quota))
    until(lambda: "hard" in deployments.get("resourcequota", "tight").get("status", {}), "the quota is in force")
    deployments.apply()
    found = deployments.wait_reason("AgentsReady", "ChildRefused")
    assert "Service llama-agent" in found["message"] and "exceeded quota" in found["message"]
    until(lambda: deployments.events("ChildRefused"), "an event")
    deployments.plane.kubectl("delete", "resourcequota", "tight", "-n", deployments.namespace)
    deployments.wait_reason("Ready", "Ready")


def test_a_typo_inside_a_volume_is_a_refused_child_and_no_failed_request(
    deployments: Deployments, start: Start
) -> None:
    """The CRD keeps what a volume's source has, as the kinds of volumes are Kubernetes' own."""
    one = start()
    deployments.apply(agents={"volumes": [{"name": "table", "configMap": {"nam": "x"}}]})
    found = deployments.wait_reason("AgentsReady", "ChildRefused")
    assert ".configMap.nam: field not declared in schema" in found["message"]
    assert one.metric('longshore_operator_reconcile_errors_total{error="unavailable"}') == 0
    deployments.apply(agents={"volumes": [{"name": "table", "configMap": {"name": "x", "optional": True}}]})
    deployments.wait_reason("Ready", "Ready")


def test_no_role_is_replaced_if_the_api_server_refuses_the_daemon_set_of_the_other(
    deployments: Deployments, start: Start
) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    name = f"keep-{deployments.namespace}"
    mine = {"matchLabels": {"kubernetes.io/metadata.name": deployments.namespace}}
    rules = [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["daemonsets"]}]
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": rules, "namespaceSelector": mine},
            "validations": [{"expression": "!object.metadata.name.endsWith('-decode')", "message": "decode stays"}],
        },
    }
    binding = policy | {
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    deployments.plane.kubectl(
        "create", "-f", "-", stdin=to_text({"apiVersion": "v1", "kind": "List", "items": [policy, binding]})
    )
    annotate = ("annotate", "ds", "-n", deployments.namespace, "--dry-run=server", "--overwrite")
    until(
        lambda: "decode stays" in deployments.plane.try_kubectl(*annotate, "llama-agent-decode", "a=b").stderr,
        "a refusal",
    )
    before = [deployments.get("ds", f"llama-agent-{role}")["metadata"]["generation"] for role in ("prefill", "decode")]
    try:
        deployments.apply(transfer={"backend": "Mooncake"})
        found = deployments.wait_reason("AgentsReady", "ChildRefused")
        assert "DaemonSet llama-agent-decode" in found["message"] and "decode stays" in found["message"]
        now = [deployments.get("ds", f"llama-agent-{role}")["metadata"]["generation"] for role in ("prefill", "decode")]
        assert now == before
    finally:
        deployments.plane.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name)
    deployments.wait_reason("Ready", "Ready")


@pytest.mark.shows("operator.watch_lag_limit_s")
@pytest.mark.parametrize(("path", "name"), [("/configmaps", "configmaps"), ("inject", "pods")])
def test_a_watch_that_misses_something_makes_the_operator_unlive(
    deployments: Deployments, start: Start, proxy: FaultProxy, path: str, name: str
) -> None:
    one = start(kubeconfig=proxy.kubeconfig, watch_lag_limit_s=3, resync_s=1)
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    # On a busy machine events may be late for a moment.
    until(lambda: one.status("/healthz") == 200, "live")
    # This ends the task of one watch. kopf continues without it.
    proxy.refuse = lambda _method, asked: 400 if path in asked and "watch=true" in asked else None
    proxy.drop_streams()
    until(lambda: one.status("/healthz") == 503 and name in one.page("/healthz"), "not live")


def test_the_manifest_of_another_kind_of_name_is_no_business_of_ours(deployments: Deployments, start: Start) -> None:
    """The operator does not touch a ConfigMap that has our label and another owner."""
    start()
    stranger = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "stranger",
            "namespace": deployments.namespace,
            "labels": {"longshore.dev/deployment": "llama"},
        },
    }
    deployments.plane.kubectl("create", "-f", "-", stdin=to_text(stranger))
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    assert "configmap/stranger" in deployments.names("cm")


def test_a_deployment_that_is_made_anew_under_its_name_gets_children_of_its_own(
    deployments: Deployments, start: Start
) -> None:
    start()
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    deployments.plane.kubectl("delete", "dgdep", "llama", "-n", deployments.namespace, "--wait=false")
    body = manifest(deployments.namespace, "llama", agents={"httpPort": deployments.http_port})
    until(lambda: deployments.plane.try_kubectl("create", "-f", "-", stdin=to_text(body)).returncode == 0, "made anew")
    uid = deployments.get("dgdep", "llama")["metadata"]["uid"]
    deployments.wait_reason("Ready", "Ready")

    def owned() -> bool:
        owners = [
            body["metadata"]["ownerReferences"] for kind in ("ds", "cm", "svc", "sa") for body in deployments.ours(kind)
        ]
        return all([entry["uid"] for entry in found] == [uid] for found in owners)

    until(owned, "all children are the new one's")


def strangers(namespace: str, name: str) -> dict[str, dict[str, Any]]:
    """Objects of other owners with the names of a deployment's children, by kubectl's name of their kind."""
    labels = {"app": "theirs"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "theirs:1"}]}}
    selector = {"matchLabels": labels}
    parts: dict[str, tuple[str, str, dict[str, Any]]] = {
        "sa": ("v1", "ServiceAccount", {}),
        "cm": ("v1", "ConfigMap", {"data": {"theirs": "yes"}}),
        "netpol": ("networking.k8s.io/v1", "NetworkPolicy", {"spec": {"podSelector": selector}}),
        "svc": ("v1", "Service", {"spec": {"selector": labels, "ports": [{"name": "web", "port": 80}]}}),
        "ds": ("apps/v1", "DaemonSet", {"spec": {"selector": selector, "template": template}}),
        "podmonitor": ("monitoring.coreos.com/v1", "PodMonitor", {"spec": {"selector": selector}}),
    }
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {
        short: {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
        for short, (version, kind, content) in parts.items()
    }


@pytest.fixture
def kind_is_served(plane: ControlPlane, kind: str) -> Iterator[None]:
    """Install the kind of a test until its end. Later tests must not find it."""
    if kind == "podmonitor":
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=to_text(MONITORS))
        until(lambda: plane.try_kubectl("get", "podmonitors").returncode == 0, "the kind is served")
    yield
    if kind == "podmonitor":
        plane.kubectl("delete", "crd", MONITORS["metadata"]["name"])


@pytest.mark.usefixtures("kind_is_served")
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("kind", ["sa", "cm", "netpol", "svc", "ds", "podmonitor"])
def test_an_object_of_somebody_else_is_named_and_never_changed_or_deleted(
    plane: ControlPlane, deployments: Deployments, start: Start, kind: str, *, labelled: bool
) -> None:
    name = "datadog-agent-prefill" if kind == "ds" else "datadog-agent"
    theirs = strangers(deployments.namespace, name)[kind]
    if labelled:
        theirs["metadata"]["labels"]["longshore.dev/deployment"] = "datadog"
    plane.kubectl("create", "-f", "-", stdin=to_text(theirs))
    before = deployments.get(kind, name)
    start()
    deployments.apply("datadog", agents={"podMonitor": kind == "podmonitor"})
    # Agents work without a PodMonitor.
    reason = "PodMonitorRefused" if kind == "podmonitor" else "ChildRefused"
    event = until(lambda: deployments.events(reason), "an event")[0]
    assert f"{theirs['kind']} {name}: it exists, its owner is nobody" in event["message"]
    if kind != "podmonitor":
        found = deployments.wait_reason("AgentsReady", "ChildRefused", "datadog")
        assert f"{theirs['kind']} {name}: it exists, its owner is nobody" in found["message"]
    plane.kubectl("delete", "dgdep", "datadog", "-n", deployments.namespace)
    until(
        lambda: not deployments.list("ds,svc,cm,sa,netpol", "-l", "app.kubernetes.io/instance=datadog"), "ours are gone"
    )
    after = deployments.get(kind, name)
    for body in (before, after):
        body.pop("status", None)
        body["metadata"] = {
            key: body["metadata"].get(key) for key in ("uid", "labels", "ownerReferences", "generation")
        }
    assert after == before


def test_a_name_that_is_free_again_is_taken(plane: ControlPlane, deployments: Deployments, start: Start) -> None:
    theirs = strangers(deployments.namespace, "llama-agent")["cm"]
    plane.kubectl("create", "-f", "-", stdin=to_text(theirs))
    start()
    deployments.apply()
    deployments.wait_reason("AgentsReady", "ChildRefused")
    assert deployments.pods() == []
    plane.kubectl("delete", "cm", "llama-agent", "-n", deployments.namespace)
    deployments.wait_reason("Ready", "Ready")
