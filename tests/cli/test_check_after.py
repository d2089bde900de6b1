"""Tests each check of `longshore check` after an installation: what makes it ok, a warning and an error."""

from __future__ import annotations

import datetime as dt
from typing import Any

import check_scene as scene
import pytest
from check_scene import NO_RIGHT, RELEASE, ROOT, SECTION, SPACE, Body, only, page, pod, reached, served, worker

from longshore_agent.status.snapshot import WorkerSnapshot
from longshore_cli import operator_deployments
from longshore_cli.check import after, conditions, pages, pods
from longshore_cli.check.after import After
from longshore_cli.check.lines import Line, State, as_json, failed, table
from longshore_cli.check.operators import Lease
from longshore_cli.cluster import AgentPod, ClusterError, MissingError
from longshore_spec import condition_reasons as reasons
from longshore_spec import status as structs
from longshore_spec.findings import KINDS

NOW = dt.datetime(2026, 11, 27, 12, 0, 0, tzinfo=dt.UTC)
LEASE = {"spec": {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-11-27T11:59:50.000000Z"}}
PLACE = ("longshore-system", "longshore-operator")


def all_is_well(**changes: Any) -> After:
    found = After(
        version={"gitVersion": "v1.34.4"},
        definition=scene.definition(),
        operators=[scene.operator()],
        leases={PLACE: Lease(LEASE, renewed=True)},
        deployments=[served()],
        pods=[pod("n-0"), pod("n-1", roles="decode")],
        reached=reached(page(worker("a", to="b")), page(worker("b", to="a"))),
        warnings={},
    )
    return found._replace(**changes)


def lines(**changes: Any) -> list[Line]:
    return after.lines(all_is_well(**changes), SPACE, RELEASE)


def test_a_cluster_where_all_is_well_has_no_warning() -> None:
    found = lines()
    assert {line.state for line in found} == {State.OK}, [line for line in found if line.state is not State.OK]
    assert {"version", "lease", "crd", "Ready", "pods", "wires", "keys", "ports"} <= {line.check for line in found}


# -- the operator --------------------------------------------------------------------------------------------------


def test_the_age_of_a_lease_is_since_its_renewal() -> None:
    assert operator_deployments.age_s(LEASE, NOW) == 10.0
    assert operator_deployments.age_s({"spec": {}}, NOW) == float("inf")


@pytest.mark.parametrize(
    ("lease", "state", "about"),
    [
        (Lease(None, renewed=False), "error", "is not there: no replica leads"),
        (Lease({"spec": {"holderIdentity": ""}}, renewed=True), "error", "nobody holds"),
        (
            Lease(LEASE, renewed=False),
            "error",
            "one holds Lease longshore-system/longshore-operator and does not renew",
        ),
        (NO_RIGHT, "warning", "not checked"),
    ],
)
def test_the_lease(lease: Lease | Exception, state: str, about: str) -> None:
    line = only(lines(leases={PLACE: lease}), "lease")
    assert (line.state.value, about in line.message) == (state, True), line


def stopped(available: int) -> Body:
    body: Body = scene.operator().body
    told = {"type": "Available", "status": "False", "message": "Deployment does not have minimum availability."}
    return body | {"status": {"availableReplicas": available, "conditions": [told]}}


@pytest.mark.parametrize(
    ("found", "check", "state", "about"),
    [
        ([], "operator", "error", "no operator serves namespace team"),
        ([scene.operator(watched="other")], "operator", "error", "serves other namespaces"),
        (NO_RIGHT, "operator", "warning", "not checked"),
        (
            [scene.operator(body=stopped(0))],
            "available",
            "error",
            "0 of 1 replicas available: Deployment does not have",
        ),
        ([scene.operator(body=stopped(1))], "available", "warning", "1 of 1 replicas"),
        ([scene.operator(body=stopped(0) | {"spec": {"replicas": 0}})], "available", "error", "scaled to 0 replicas"),
    ],
)
def test_the_operator(found: Any, check: str, state: str, about: str) -> None:
    line = only(lines(operators=found), check)
    assert (line.state.value, about in line.message) == (state, True), line


def test_an_operator_without_replicas_has_one_error() -> None:
    found = lines(
        operators=[scene.operator(body=stopped(0) | {"spec": {"replicas": 0}})],
        leases={PLACE: Lease(None, renewed=False)},
    )
    wrong = [line for line in found if line.state is State.ERROR]
    assert [line.way_out for line in wrong] == [
        "kubectl -n longshore-system scale deployment longshore-operator --replicas=1"
    ]


def test_an_operator_of_another_release_is_a_warning() -> None:
    found = [line for line in lines(operators=[scene.operator(version="0.2.0")]) if line.check.startswith("version")]
    assert ["0.2.0" in line.message for line in found if line.state is State.WARNING] == [True, True]


@pytest.mark.parametrize(
    ("changes", "check", "state", "about"),
    [
        ({"definition": None, "deployments": MissingError("404")}, "crd", "error", "is not there"),
        ({"definition": NO_RIGHT}, "crd", "warning", "not checked"),
        ({"deployments": NO_RIGHT}, "list", "warning", "not checked"),
        (
            {"deployments": MissingError("namespace team has no DisaggDeployment x: it has llama")},
            "list",
            "error",
            "it has llama",
        ),
        ({"deployments": []}, "list", "warning", "namespace team has no DisaggDeployment"),
        ({"pods": NO_RIGHT}, "pods", "warning", "not checked"),
    ],
)
def test_what_cannot_be_read_or_is_not_there(changes: Body, check: str, state: str, about: str) -> None:
    line = only(lines(**changes), check)
    assert (line.state.value, about in line.message) == (state, True), line


# -- conditions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", reasons.TABLE, ids=lambda row: f"{row.condition.value}-{row.name}")
def test_every_reason_of_the_operator_has_a_state_and_a_section_of_the_page(row: reasons.Reason) -> None:
    condition = {"type": row.condition.value, "status": row.truth.value, "reason": row.name, "message": "words"}
    found = conditions.lines(SECTION, served(conditions=[condition]), paused=False)
    assert len(found) == 1
    wants_nothing = not row.remedy and not row.echo
    if found[0].state is State.OK:
        assert wants_nothing or row.condition.value == "NodesShared"
        return
    assert row.truth.value != "True" or reasons.is_good(row.condition.value, "False", "")
    assert found[0].way_out == (row.remedy or "wait: it passes by itself")
    page_text = (ROOT / "docs" / "reference" / "conditions.md").read_text()
    assert f"## {row.condition.value}\n" in page_text and f"| `{row.name}` |" in page_text


def test_the_reasons_that_pass_by_themselves_are_those_of_the_operator() -> None:
    assert {row.name for row in reasons.TABLE} >= conditions.PASSING


@pytest.mark.parametrize(
    ("kind", "status", "reason", "state"),
    [
        ("Ready", "False", "Incompatible", State.ERROR),
        ("AgentsReady", "False", "AgentsUpdating", State.WARNING),
        ("AgentsReady", "False", "NoNodes", State.ERROR),
        ("EnginesConnected", "Unknown", "NoEngines", State.WARNING),
        ("EnginesConnected", "False", "EnginesMissing", State.WARNING),
        ("PeersConnected", "False", "PeersLost", State.ERROR),
        ("TransportVerified", "False", "WireNotAllowed", State.ERROR),
        ("NodesShared", "True", "NodesShared", State.WARNING),
        ("NodesShared", "False", "NodesOwn", State.OK),
        ("Progressing", "False", "Settled", State.OK),
        ("Progressing", "False", "Blocked", State.ERROR),
        ("Progressing", "True", "RollingOut", State.WARNING),
    ],
)
def test_how_bad_a_condition_is(kind: str, status: str, reason: str, state: State) -> None:
    assert conditions.state_of({"type": kind, "status": status, "reason": reason}) is state


def test_a_status_that_is_missing_old_or_paused_is_said() -> None:
    assert conditions.lines(SECTION, scene.deployment(), paused=False)[0].state is State.ERROR
    assert (
        only(conditions.lines(SECTION, served(observedGeneration=0), paused=False), "generation").state is State.WARNING
    )
    paused = served(scene.deployment(paused=True))
    assert only(lines(deployments=[paused]), "paused").state is State.WARNING


# -- pods ----------------------------------------------------------------------------------------------------------


def waiting(reason: str, message: str, node: str = "n-1", **more: Any) -> AgentPod:
    container = {
        "name": "agent", "image": "r/agent:9", "imageID": "", "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}}, **more,
    }  # fmt: skip
    return pod(node, ready=False, containerStatuses=[container], phase="Pending")


CRASHED = {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "restartCount": 4}
UNPLACED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes: Insufficient rdma/hca",
}


@pytest.mark.parametrize(
    ("agents", "check", "state", "about"),
    [
        ([pod("n-0"), pod("n-1")], "images", "ok", "2 of 2 pods"),
        ([pod("n-0"), waiting("ErrImagePull", "not found")], "images", "error", "r/agent:9: not found"),
        ([pod("n-0"), waiting("ImagePullBackOff", "")], "images", "error", "on n-1: r/agent:9: ImagePullBackOff"),
        (
            [waiting("ErrImagePull", "no", "n-0"), waiting("ImagePullBackOff", "Back-off …: ErrImagePull: no")],
            "images",
            "error",
            "n-0, n-1: r/agent:9: no",
        ),
        ([pod("n-0"), waiting("ErrImagePull", "x" * 400)], "images", "error", "xx…"),
        ([pod("n-0"), pod("n-1")], "pods", "ok", "2 of 2 agents are ready"),
        ([pod("n-0"), waiting("CrashLoopBackOff", "", **CRASHED)], "pods", "error", "ended with 137 (OOMKilled)"),
        ([pod("n-0"), pod("n-1", ready=False, phase="Pending", conditions=[UNPLACED])], "pods", "error", "rdma/hca"),
        ([pod("n-0"), pod("n-1", ready=False)], "pods", "error", "n-1: FailedMount: no mps"),
        ([pod("n-0")], "pods", "error", "1 without a pod (FailedCreate: quota)"),
        ([pod("n-0"), pod("n-1")], "restarts", "ok", "no container"),
        (
            [pod("n-0"), waiting("CrashLoopBackOff", "", **CRASHED)],
            "restarts",
            "warning",
            "4 times, last: OOMKilled (137)",
        ),
        ([pod("n-0"), pod("n-1")], "keys", "ok", "keys of revision 1"),
        ([pod("n-0"), pod("n-1", keys="0ld")], "keys", "error", "on n-1 have keys (0ld)"),
    ],
)
def test_the_pods(agents: list[AgentPod], check: str, state: str, about: str) -> None:
    told = {"uid-n-1": "FailedMount: no mps", "llama-agent-prefill": "FailedCreate: quota"}
    line = only(pods.lines(SECTION, served(), agents, told), check)
    assert (line.state.value, about in line.message) == (state, True), line


def test_during_a_rotation_agents_may_have_the_previous_keys() -> None:
    body = served(keys={"revision": 2, "secret": "llama-keys-new", "previous": "llama-keys-abcd"})
    line = only(pods.lines(SECTION, body, [pod("n-0"), pod("n-1", keys="new")], {}), "keys")
    assert (line.state, "llama-keys-abcd" in line.message) == (State.WARNING, True)
    done = only(pods.lines(SECTION, body, [pod("n-0", keys="new")], {}), "keys")
    assert (done.state, "llama-keys-abcd are accepted" in done.message) == (State.OK, True)


def test_a_deployment_without_agents_is_an_error() -> None:
    assert only(pods.lines(SECTION, served(agents={"desired": 0}), [], {}), "pods").state is State.ERROR


# -- one fault is one error ----------------------------------------------------------------------------------------


def untrue(cause: str, reason: str, message: str, ready: str = "AgentsNotReady", blocked: str = "Blocked") -> Body:
    """A deployment as its operator writes it when one condition is not good: Ready and Progressing repeat it."""
    body = served(agents={"desired": 2, "ready": 1})
    written = {
        "Ready": ("False", ready, f"{reason}: {message}"),
        cause: ("False", reason, message),
        "Progressing": ("False" if blocked == "Blocked" else "True", blocked, message),
    }
    for condition in body["status"]["conditions"]:
        if condition["type"] in written:
            condition |= dict(zip(("status", "reason", "message"), written[condition["type"]], strict=True))
    return body


def wrong(**changes: Any) -> list[Line]:
    return [line for line in lines(**changes) if line.state is not State.OK]


PULL = "failed to resolve reference: " + "x" * 400
QUOTA = "FailedCreate: exceeded quota: q"
NO_PULL = waiting("ErrImagePull", PULL)
KILLED = pod(
    "n-1",
    ready=False,
    containerStatuses=[
        {"name": "agent", "image": "a", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, **CRASHED}
    ],
)
NO_LIBRARY = structs.SelfTest("NIXL", "", 0, 0.0, error="no library")


@pytest.mark.parametrize(
    ("body", "agents", "seen", "check", "way_out"),
    [
        (
            untrue("AgentsReady", "AgentsNotReady", f"1 of 2 agents are ready: no pod on n-1 ({QUOTA})"),
            [pod("n-0")],
            reached(page(worker("a"))),
            "pods",
            "kubectl -n team describe daemonsets -l longshore.dev/deployment=llama",
        ),
        (
            untrue("AgentsReady", "AgentsNotReady", f"1 of 2 agents are ready: n-1 ({PULL})"),
            [pod("n-0"), NO_PULL],
            reached(page(worker("a"))),
            "images",
            "correct the image or its pull Secret",
        ),
        (
            untrue("AgentsReady", "AgentsNotReady", "1 of 2 agents are ready: n-1 (OOMKilled)"),
            [pod("n-0"), KILLED],
            [*reached(page(worker("a"))), pages.Reached(KILLED, ClusterError("connection refused"))],
            "pods",
            "kubectl -n team describe pods -l longshore.dev/deployment=llama",
        ),
        (
            untrue("AgentsReady", "AgentsUpdating", "1 of 2 agents are ready", blocked="RollingOut"),
            [pod("n-0"), pod("n-1", ready=False, phase="Pending", conditions=[UNPLACED])],
            reached(page(worker("a"))),
            "pods",
            "kubectl -n team describe pods -l longshore.dev/deployment=llama",
        ),
        # No agent is wanted where a role has no node.
        (
            untrue("AgentsReady", "NoNodes", "no node is picked by decode"),
            [pod("n-0")],
            reached(page(worker("a"))),
            "AgentsReady",
            "Label nodes to match nodeSelector, or change it.",
        ),
        (
            untrue("AgentsReady", "ChildRefused", "DaemonSet llama-agent-decode: denied the request"),
            [pod("n-0")],
            reached(page(worker("a"))),
            "AgentsReady",
            "Change what the response in the message refuses",
        ),
        (
            untrue("Compatible", "InvalidSpec", "spec.decode: …", ready="Incompatible"),
            [pod("n-0"), pod("n-1")],
            reached(page(worker("a", to="b")), page(worker("b", to="a"))),
            "Compatible",
            "Correct the fields that the message names.",
        ),
        # Engines may not use it, although nothing has failed.
        (
            untrue("AgentsReady", "AgentsUpdating", "1 run generation 2", blocked="RollingOut"),
            [pod("n-0"), pod("n-1")],
            reached(page(worker("a", to="b")), page(worker("b", to="a"))),
            "AgentsReady",
            "wait: it passes by itself",
        ),
        # The command may not read the events that the operator has read.
        (
            untrue("AgentsReady", "AgentsNotReady", f"1 of 2 agents are ready: no pod on n-2 ({QUOTA} of another)"),
            [pod("n-0")],
            reached(page(worker("a"))),
            "AgentsReady",
            "Remove the cause that the message gives for each node.",
        ),
        (
            untrue("AgentsReady", "AgentsNotReady", "1 of 2 agents are ready: n-1 (SelfTestFailed: no library)"),
            [pod("n-0"), pod("n-1", ready=False)],
            [*reached(page(worker("a"))), pages.Reached(pod("n-1", ready=False), reached(page(self_test=NO_LIBRARY))[0].page)],
            "readyz",
            "see the agent's log",
        ),
    ],
    ids=["quota", "image", "killed", "no-room", "no-nodes", "refused", "invalid", "rollout", "no-events", "self-test"],
)  # fmt: skip
def test_one_fault_is_one_error(
    body: Body, agents: list[AgentPod], seen: list[pages.Reached], check: str, way_out: str
) -> None:
    told = {"llama-agent-prefill": QUOTA} if "no pod on n-1" in str(body) else {}
    found = wrong(deployments=[body], pods=agents, reached=seen, warnings={SPACE: told})
    (line,) = [line for line in found if line.state is State.ERROR]
    assert line.check == check, line
    assert line.way_out.startswith(way_out) or check == "readyz"
    assert sum(PULL[:100] in line.message for line in found) <= 1


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [
        ("EnginesConnected", "EnginesRefused", "EngineRefused"),
        ("PeersConnected", "PeersLost", "PeerLost"),
        ("PeersConnected", "PeersLost", "PeerRefused"),
        ("TransportVerified", "WireNotAllowed", "PeerWireNotAllowed"),
        ("TransportVerified", "WireUnknown", "WireUnknown"),
    ],
)
def test_a_condition_that_says_what_a_finding_says_is_left_out(kind: str, reason: str, code: str) -> None:
    assert reasons.is_known(reasons.ConditionType(kind), reason) and code in KINDS
    body = served()
    condition = next(each for each in body["status"]["conditions"] if each["type"] == kind)
    condition |= {"status": "False", "reason": reason, "message": "n-0: engine d is refused"}
    told = page(worker("a", to="b"))
    assert [line.check for line in wrong(deployments=[body], reached=reached(told, page(worker("b", to="a"))))] == [
        kind
    ]
    told["findings"] = [{"code": code, "severity": "error", "text": "engine d is refused", "way_out": "w", "link": "l"}]
    (line,) = wrong(deployments=[body], reached=reached(told, page(worker("b", to="a"))))
    assert line.message == f"{code}: n-0: engine d is refused"


def test_a_deployment_without_a_status_is_one_error() -> None:
    found = wrong(deployments=[scene.deployment()], pods=[], reached=[])
    assert [(line.check, line.message) for line in found] == [("conditions", "no operator has written a status yet")]


def test_a_cause_is_that_of_its_own_daemon_sets() -> None:
    told = {"llama-agent-decode": QUOTA, "llama-agent-agent-prefill": "FailedCreate: of the deployment llama-agent"}
    line = only(pods.lines(SECTION, served(), [pod("n-0")], told), "pods")
    assert line.message == f"1 of 2 agents are ready: 1 without a pod ({QUOTA})"


def test_a_second_fault_is_a_second_error() -> None:
    body = untrue("AgentsReady", "AgentsNotReady", "0 of 2 agents are ready: …")
    found = wrong(deployments=[body], pods=[waiting("ErrImagePull", PULL, "n-0"), KILLED], reached=[])
    images, others = (line for line in found if line.state is State.ERROR)
    assert (images.check, others.check) == ("images", "pods")
    assert "n-0" not in others.message and "n-1: agent ended with 137" in others.message


def test_conditions_of_the_same_words_are_one_line() -> None:
    body = served()
    for condition in body["status"]["conditions"][3:6]:
        condition |= {"status": "Unknown", "reason": "NoEngines", "message": "no engine has registered yet"}
    (line,) = wrong(deployments=[body])
    kinds = "EnginesConnected, PeersConnected, TransportVerified"
    assert line.message == f"{kinds} are Unknown, NoEngines: no engine has registered yet"
    assert line.check == "EnginesConnected"


def test_a_pause_is_said_once() -> None:
    progress = {"type": "Progressing", "status": "Unknown", "reason": "Paused", "message": "only the status is written"}
    body = scene.deployment(paused=True)
    alone = served(body, conditions=[*served()["status"]["conditions"][:-1], progress])
    assert [line.check for line in wrong(deployments=[alone])] == ["paused"]
    held = untrue("AgentsReady", "Paused", "spec.paused is true, so this waits: DaemonSet llama-agent-decode")
    waits = held | {"spec": body["spec"]}
    waits["status"]["conditions"][-1] = progress
    assert [line.check for line in wrong(deployments=[waits])] == ["AgentsReady"]


def test_an_operator_that_does_not_run_and_cannot_renew_its_lease_is_one_error() -> None:
    found = wrong(operators=[scene.operator(body=stopped(0))], leases={PLACE: Lease(LEASE, renewed=False)})
    assert [line.check for line in found] == ["available"]


def test_an_operator_without_a_pod_is_looked_up_at_its_replica_set() -> None:
    body = stopped(0)
    failed_create = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}
    body["status"]["conditions"].append(failed_create)
    line = only(lines(operators=[scene.operator(body=body)]), "available")
    assert "exceeded quota" in line.message
    assert line.way_out.startswith("kubectl -n longshore-system describe replicasets -l ")


# -- the agents' pages ---------------------------------------------------------------------------------------------


def said(check: str, *found: Body | Exception, release: str = RELEASE, **spec: Any) -> Line:
    return only(pages.lines(SECTION, scene.spec_of(**spec), reached(*found), release), check)


GPU = "GPU-11111111-1111-1111-1111-111111111111"
FAILED = scene.msgspec.structs.replace(scene.status_scene.PASSED, error="no library")
RING = structs.RingStatus(capacity_bytes=100, used_bytes=0, held_bytes=11, rounds=1)
RDMA = scene.NodeFacts(memlock_bytes=8 << 20, descriptors=99999, infiniband=("uverbs0",))
DIRECT = {"peers": (scene.peer("b", "Unknown", ways=("direct",)),)}


@pytest.mark.parametrize(
    ("check", "workers", "changes", "spec", "state", "about"),
    [
        ("versions", [], {}, {}, "ok", "release 0.1.0"),
        ("versions", [], {"version": "0.0.9"}, {}, "warning", "the operator is of 0.1.0"),
        ("readyz", [], {}, {}, "ok", "passed the self-test"),
        ("readyz", [], {"self_test": FAILED}, {}, "error", "SelfTestFailed: n-0: NIXL: no library"),
        ("workers", [worker("a")], {}, {}, "ok", "1 worker serve"),
        ("workers", [worker("a")], {"restarts_lately": 3}, {}, "warning", "WorkersRestarted: n-0: 3 workers were"),
        ("workers", [worker("a", state=structs.WorkerState.FAILED, error="no memory")], {}, {}, "error", "n-0: worker a/0 failed: no memory"),
        ("workers", [worker("a", silent_s=11.0)], {}, {}, "error", "n-0: worker a/0 has not answered"),
        ("workers", [], {"dying": ("a/0 died",)}, {}, "error", "WorkersDying: n-0: a/0 died"),
        ("peers", [worker("a")], {}, {}, "ok", "none of 1 end"),
        ("peers", [worker("a", peers=(scene.peer("b", "", state="refused", error="NIXL cannot reach"),))], {}, {}, "error", "n-0: worker a/0: b/0/0 is refused: NIXL cannot"),
        ("ports", [], {}, {}, "ok", "no worker has data ports"),
        ("ports", [worker("a", data_path="Bound")], {}, {}, "ok", "the CNI must enforce"),
        ("ports", [worker("a", data_path="Open")], {}, {}, "warning", "a/0 on n-0"),
        ("ports", [worker("a", data_path="Bound")], {}, {"agents": {"networkPolicy": False, "allowOpenDataPath": True}}, "warning", "Bound"),
        ("wires", [], {}, {}, "ok", "no wire is in use"),
        ("wires", [worker("a", "TCP")], {}, {}, "ok", "1 TCP"),
        ("wires", [worker("a", **DIRECT)], {}, {"transfer": {"wires": ["TCP"]}}, "ok", "no wire is in use"),
        ("wires", [], {}, {"transfer": {"wires": ["RDMA"]}}, "error", "agents see RDMA devices on no node"),
        ("wires", [], {"node_facts": RDMA}, {"transfer": {"wires": ["RDMA"]}}, "ok", "no wire is in use"),
        ("wires", [worker("a", peers=(scene.peer("b", "TCP", error="only RDMA"),))], {}, {}, "error", "PeerWireNotAllowed: n-0: worker a/0 to b/0/0: only RDMA"),
        ("wires", [worker("a", "NVLink")], {}, {"transfer": {"wires": ["CudaIPC"]}}, "ok", "1 NVLink"),
        ("wires", [worker("a", "Unknown")], {}, {}, "warning", "WireUnknown: n-0: worker a/0 to other/0/0"),
        ("wires", [worker("a", "TCP", "b"), worker("b", "TCP", "a")], {}, {}, "warning", "may share memory"),
        ("wires", [worker("a", "TCP", "b", device=GPU), worker("b", "CudaIPC", "a", device=GPU)], {}, {}, "warning", "peer access"),
        ("quarantine", [worker("a", ring=RING)], {}, {}, "warning", "QuarantineHigh: n-0: worker a/0"),
        ("quarantine", [worker("a")], {}, {}, "ok", "0%"),
        ("digests", [worker("a", mismatches=2, mismatch="layer 3")], {}, {}, "error", "n-0: worker a/0: 2 slabs with differing digests: layer 3"),
        ("digests", [worker("a")], {}, {}, "ok", "no digests"),
        ("mps", [], {}, {"gpu": {"mps": True}}, "warning", "no worker has a GPU"),
        ("mps", [worker("a", device=GPU, mps=True)], {}, {"gpu": {"mps": True}}, "ok", "1 worker are shared"),
        ("mps", [worker("a", device=GPU, mps=False)], {}, {"gpu": {"mps": True}}, "error", "GpuNotShared: n-0: worker a/0"),
        ("mps", [worker("a", device=GPU)], {}, {"gpu": {"mps": True}}, "warning", "the driver does not tell"),
        ("peer-access", [worker("a", device=GPU, mps=True, peer_access=True)], {}, {}, "ok", "1 worker can"),
        ("peer-access", [worker("a", device=GPU, mps=True, peer_access=False)], {}, {}, "warning", "NoPeerAccess: n-0: worker a/0"),
        ("rooms", [worker("a")], {}, {}, "ok", "no room is open for long"),
        ("limits", [], {}, {}, "ok", "1048576"),
        ("limits", [], {"node_facts": scene.NodeFacts(descriptors=1024)}, {}, "warning", "FewDescriptors: n-0: the agent may open 1024"),
        ("limits", [], {"node_facts": scene.NodeFacts(descriptors=9999, infiniband=("uverbs0",))}, {}, "ok", "9999 files or more, and those with RDMA devices may lock"),
        ("limits", [], {"node_facts": RDMA}, {}, "warning", "LowMemlock: n-0: the agent may lock 8388608 bytes"),
        ("devices", [], {"node_facts": RDMA}, {}, "ok", "RDMA devices on n-0"),
        ("devices", [], {}, {"agents": {"gpuAccess": "CDI"}}, "warning", "n-0"),
        ("devices", [], {"node_facts": scene.NodeFacts(gpus=8)}, {"agents": {"gpuAccess": "CDI"}}, "ok", "8 GPUs on n-0"),
    ],
)  # fmt: skip
def test_a_page(check: str, workers: list[WorkerSnapshot], changes: Body, spec: Body, state: str, about: str) -> None:
    line = said(check, page(*workers, **changes), **spec)
    assert (line.state.value, about in line.message) == (state, True), line


def test_a_finding_has_the_way_out_and_the_page_that_the_agent_gives() -> None:
    dead = scene.msgspec.structs.replace(scene.status_scene.PASSED, error="the self-test ended with -9")
    line = said("readyz", page(self_test=dead))
    assert "its limit is 1024 MiB: raise the memory of agents.resources" in line.way_out
    assert line.link == "docs/runbooks.md#selftestfailed"
    unknown = page()
    unknown["findings"] = [{"code": "New", "severity": "error", "text": "t", "way_out": "w", "link": "l"}]
    line = said("findings", unknown)
    assert (line.state, line.message, line.way_out, line.link) == (State.ERROR, "New: n-0: t", "w", "l")


@pytest.mark.parametrize("code", KINDS)
def test_every_finding_of_an_agent_is_a_line(code: str) -> None:
    told = page()
    told["findings"] = [{"code": code, "severity": "error", "text": "t", "way_out": "w", "link": "l"}]
    found = pages.lines(SECTION, scene.spec_of(), reached(told), RELEASE)
    [line] = [line for line in found if line.message == f"{code}: n-0: t"]
    # The line that says that all is well is replaced.
    assert [each.state for each in found if each.check == line.check] == [State.ERROR]


def test_tcp_between_two_nodes_with_rdma_devices_is_slow() -> None:
    one, other = (page(worker(a, "TCP", b), node_facts=RDMA) for a, b in (("a", "b"), ("b", "a")))
    assert "both agents have RDMA devices" in said("wires", one, other).message
    plain = page(worker("b", "TCP", "a"))
    assert said("wires", one, plain).state is State.OK


def test_workers_listen_on_the_ports_that_the_manifest_declares() -> None:
    def listening(port: int) -> Body:
        rank = structs.RankStatus(0, f"tcp://10.0.0.1:{port}", "1")
        layout = structs.LayoutStatus.of(scene.status_scene.layout(1))
        instance = structs.InstanceStatus("a", ("source",), layout, (rank,), complete=True)
        return page(worker("a"), instances=(instance,))

    declared = {"agents": {"workerPort": 9500}}
    assert said("ports", listening(9500), **declared).state is State.OK
    assert "tcp://10.0.0.1:40000 on n-0" in said("ports", listening(40000), **declared).message
    assert said("ports", listening(40000)).state is State.OK


def test_agents_that_cannot_be_reached_make_no_ok() -> None:
    broken = pages.lines(SECTION, scene.spec_of(), reached(ClusterError("no route")), RELEASE)
    assert [(line.check, line.state) for line in broken] == [("pages", State.ERROR)]
    refused = pages.lines(SECTION, scene.spec_of(), reached(NO_RIGHT), RELEASE)
    assert [(line.check, line.state) for line in refused] == [("pages", State.WARNING)]
    half = said("pages", page(), ClusterError("no route"))
    assert half.state is State.ERROR and "1 of 2 agents cannot be read (n-1): no route" in half.message


def test_a_release_that_is_not_known_is_not_compared() -> None:
    assert "operator's release is not known" in said("versions", page(), release="").message


# -- printing ------------------------------------------------------------------------------------------------------


def test_the_table_has_sections_marks_and_ways_out() -> None:
    found = [
        Line("one", "a", State.OK, "it is fine"),
        Line("one", "b", State.ERROR, "it is broken", "mend it", "docs/x.md"),
        Line("two", "c", State.WARNING, "it is odd", "look", "docs/y.md"),
    ]
    shown = table(found, "utf-8").splitlines()
    assert shown[:5] == ["one", "---", "√ it is fine", "× it is broken", "  way out: mend it"]  # noqa: RUF001
    assert shown[-1] == "1 error, 1 warning"
    plain = table(found, "ascii")
    plain.encode("ascii")
    assert "XX it is broken" in plain and "!! it is odd" in plain


def test_no_text_of_a_peer_controls_the_terminal_or_starts_a_line() -> None:
    said = "it said\n\x1b[2Jdone"
    lines = [Line(said, "pods", State.ERROR, said, said, said)]
    shown = table(lines, "utf-8").splitlines()
    assert shown[2:5] == [f"{mark} it said  [2Jdone" for mark in ("×", "  way out:", "  see")]  # noqa: RUF001
    assert all(line.isprintable() for line in shown)
    assert as_json([Line("\x9b\u202e", *lines[0][1:])]).replace("\n", "").isprintable()


def test_json_has_the_fields_of_a_line() -> None:
    found = as_json([Line("one", "a", State.WARNING, "odd", "look", "docs/y.md")])
    want = {
        "section": "one",
        "check": "a",
        "state": "warning",
        "message": "odd",
        "way_out": "look",
        "link": "docs/y.md",
    }
    assert scene.msgspec.json.decode(found) == [want]


@pytest.mark.parametrize(
    ("state", "strict", "fails"),
    [(State.OK, True, False), (State.SKIPPED, True, False), (State.WARNING, False, False), (State.WARNING, True, True), (State.ERROR, False, True)],
)  # fmt: skip
def test_only_errors_fail_and_warnings_if_asked(state: State, *, strict: bool, fails: bool) -> None:
    assert failed([Line("s", "c", state, "m")], strict=strict) is fails


def test_a_thousand_agents_make_short_lines() -> None:
    many = reached(*[page(restarts_lately=1)] * 1000)
    found = pages.lines(SECTION, scene.spec_of(), many, RELEASE)
    assert max(len(line.message) for line in found) < 400
    assert "and 995 more" in only(found, "workers").message
