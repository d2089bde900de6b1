"""Tests the operator's decisions: every reason of the table is reached, and a steady state needs no write."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration
from operator_scene import DECODE, IMAGES, KEY, NOW_S, PREFILL, Scene, engine, finds, instance, peer, said, settled
from status_scene import worker

from longshore_operator import kinds, names
from longshore_operator.api import Api
from longshore_operator.apply import Applier
from longshore_operator.decide.decision import decide
from longshore_operator.errors import RefusedError
from longshore_operator.observe import Refusal, Warned
from longshore_operator.served import Served
from longshore_operator.world import ChildKey, Key, Poll
from longshore_spec.condition_reasons import TABLE, Truth, reason
from longshore_spec.status import AgentStatus

# As `AllowedWires.fault` says it.
BARRED = "p reaches d over TCP, and transfer.wires allows only RDMA: give the agents its NIC, or add TCP to the list"


def two(one: Any = None, other: Any = None, **spec: Any) -> Scene:
    """Return a settled deployment whose agents reported this."""
    scene = settled(**spec)
    scene.put_agent("a", said=one or said())
    scene.put_agent("b", said=other or said())
    return scene


def role(**more: Any) -> dict[str, Any]:
    return {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}} | more


def incompatible() -> Scene:
    scene = settled()
    scene.body["spec"]["decode"] = {"tensorParallel": 1, "pageSize": 64, "staging": {"poolSize": "100Mi"}}
    return scene


def counted(desired: int, ready: int, updated: int, **agent: Any) -> Scene:
    scene = settled()
    scene.count(desired, ready, updated)
    scene.put_agent("a", ready=False, **agent)
    return scene


def outdated() -> Scene:
    scene = settled(agents={"updateStrategy": {"type": "OnDelete"}})
    scene.put_agent("b", template="older", asked=False)
    scene.count(2, 2, 1)
    return scene


def paused() -> Scene:
    scene = settled()
    scene.body["spec"] |= {"paused": True, "transfer": {"backend": "Mooncake"}}
    return scene


def nodes_of_decode(*taints: str, ready: bool = True) -> Scene:
    """Give decode's only node, whose agent has ended, these taints, or remove it if it would get an agent."""
    scene = settled()
    scene.put(kinds.NODE, {"metadata": {"name": "b"}}, deleted=True)
    labels = {names.DEPLOYMENT_LABEL: KEY.name}
    pod = {"name": f"{KEY.name}-b", "namespace": KEY.namespace, "labels": labels}
    scene.put(kinds.POD, {"metadata": pod, "status": {}}, deleted=True)
    if taints or not ready:
        scene.put_node("b", "decode", *taints, ready=ready)
    return scene


def shared() -> Scene:
    scene = two()
    scene.put_deployment(Key("team", "mistral"))
    scene.put_agent("a", key=Key("team", "mistral"))
    return scene


CRASHED = {
    "restartCount": 3,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 1}},
}
ENDED = {"state": {"terminated": {"exitCode": 0}}}
RUNS = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def crashing(*reports: AgentStatus, **spec: Any) -> Scene:
    """A pod of a prefill engine crashes."""
    scene = two(*reports, **spec)
    scene.put_engine_pod("prefill-0", "llama.prefill", CRASHED)
    return scene


def silent() -> Scene:
    scene = settled()
    scene.put_agent("a", age_s=31)
    return scene


def silent_with_crash() -> Scene:
    scene = silent()
    scene.put_engine_pod("prefill-0", "llama.prefill", CRASHED)
    return scene


def some_silent(**spec: Any) -> Scene:
    scene = settled(**spec)
    scene.put_agent("a", said=said(PREFILL, DECODE))
    scene.put_agent("b", age_s=31)
    return scene


CONNECTED = two(said(PREFILL, peers=(peer("d"),)), said(DECODE, peers=(peer("p"),)))

SCENES = {
    ("Ready", "Ready"): settled(),
    ("Ready", "Incompatible"): incompatible(),
    ("Ready", "AgentsNotReady"): counted(2, 0, 2),
    ("Compatible", "PlanMade"): settled(),
    ("Compatible", "InvalidSpec"): incompatible(),
    ("Compatible", "NotAllowed"): settled(agents={"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}),
    ("AgentsReady", "AllAgentsReady"): settled(),
    ("AgentsReady", "AgentsUpdating"): counted(2, 1, 1, starting=True),
    ("AgentsReady", "AgentsNotReady"): counted(2, 1, 2),
    ("AgentsReady", "NoNodes"): nodes_of_decode(),
    ("AgentsReady", "NodesTainted"): nodes_of_decode("gpu=present:NoSchedule"),
    ("AgentsReady", "NodesNotReady"): nodes_of_decode(ready=False),
    ("AgentsReady", "AgentsOutdated"): outdated(),
    ("AgentsReady", "Paused"): paused(),
    ("AgentsReady", "SpecNotApplied"): incompatible(),
    ("EnginesConnected", "EnginesConnected"): CONNECTED,
    ("EnginesConnected", "EnginesMissing"): two(said(PREFILL), prefill=role(instances=2)),
    ("EnginesConnected", "EnginesFailing"): crashing(),
    ("EnginesConnected", "EnginesRefused"): two(
        finds("EngineRefused", "engine d/0/0 (target) is refused: decode.pageSize")
    ),
    ("EnginesConnected", "RanksMissing"): two(said(instance("p", "source", complete=False))),
    ("EnginesConnected", "NoEngines"): two(),
    ("EnginesConnected", "AgentSilent"): silent(),
    ("PeersConnected", "PeersConnected"): CONNECTED,
    ("PeersConnected", "PeersConnecting"): two(said(PREFILL, peers=(peer(state="connecting"),))),
    ("PeersConnected", "PeersLost"): two(said(PREFILL, peers=(peer(state="refused"),))),
    ("PeersConnected", "NoPeers"): two(said(PREFILL)),
    ("PeersConnected", "NoEngines"): two(),
    ("PeersConnected", "AgentSilent"): some_silent(),
    ("TransportVerified", "WireVerified"): CONNECTED,
    ("TransportVerified", "WireNotAllowed"): two(
        said(PREFILL, peers=(peer(wire="TCP", error=BARRED),)), transfer={"wires": ["RDMA"]}
    ),
    ("TransportVerified", "WireUnknown"): two(said(PREFILL, peers=(peer(wire="Unknown"),))),
    ("TransportVerified", "NoPeers"): two(said(PREFILL)),
    ("TransportVerified", "NoEngines"): two(),
    ("TransportVerified", "AgentSilent"): some_silent(),
    ("NodesShared", "NodesShared"): shared(),
    ("NodesShared", "NodesOwn"): two(),
    ("DefinitionMatches", "FieldsKnown"): settled(),
    ("DefinitionMatches", "FieldsUnknown"): settled(transfer={"newKnob": "Auto"}),
    ("Progressing", "RollingOut"): counted(2, 0, 2, starting=True),
    ("Progressing", "Settled"): settled(),
    ("Progressing", "Paused"): paused(),
    ("Progressing", "Blocked"): counted(2, 1, 2, trouble="ImagePullBackOff"),
}
# Reasons from answers of the API server, not from the scene's objects.
ANSWERED = {("AgentsReady", "ChildRefused"), ("AgentsReady", "RequestsFail")}


@pytest.mark.parametrize(("condition", "name"), SCENES)
def test_every_reason_is_what_its_scene_says(condition: str, name: str) -> None:
    assert SCENES[condition, name].reasons()[condition] == name


def of_another_release(status: dict[str, Any]) -> Served:
    """Return a CRD whose status has these fields alone."""
    condition = {
        "properties": {"type": {"type": "string", "enum": ["Ready", "AgentsReady"]}, "status": {}, "reason": {}}
    }
    return Served({"properties": {"conditions": {"items": condition}, "agents": {"properties": {}}, **status}})


def test_fields_that_only_a_newer_definition_has_are_ignored_and_named() -> None:
    scene = settled()
    before = scene.reasons()
    volume = {"name": "scratch", "emptyDir": {"medium": "Memory"}, "nextSource": {}}
    scene.body["spec"] |= {"transfer": {"newKnob": "Auto"}, "later": {"a": 1}, "agents": {"volumes": [volume]}}
    waits = {"AgentsReady", "Progressing", "Ready"}
    found = scene.reasons()
    assert {each: found[each] for each in found if before[each] != found[each]}.keys() <= {*waits, "DefinitionMatches"}
    assert (found["Compatible"], found["DefinitionMatches"]) == ("PlanMade", "FieldsUnknown")
    assert scene.message("DefinitionMatches") == (
        "this operator does not know spec.agents.volumes[0].nextSource, spec.later, spec.transfer.newKnob"
    )
    [daemon_set, *_] = [body for kind, body in scene.decide().apply if kind is kinds.DAEMON_SET]
    assert {"name": "scratch", "emptyDir": {"medium": "Memory"}} in daemon_set["spec"]["template"]["spec"]["volumes"]


def test_fields_that_an_older_definition_lacks_are_left_out_and_told_by_an_event() -> None:
    scene = settled()
    scene.world.served = of_another_release({"keys": {}, "observedGeneration": {}})
    decision = scene.decide()
    assert decision.status is not None
    assert set(decision.status) == {"conditions", "agents", "keys", "observedGeneration"}
    assert {entry["type"] for entry in decision.status["conditions"]} == {"Ready", "AgentsReady"}
    assert set(decision.status["conditions"][0]) == {"type", "status", "reason"}
    [told] = [each for each in decision.transitions if each.verdict.condition.value == "DefinitionMatches"]
    assert (told.shown, told.verdict.reason) == (False, "FieldsUnknown")
    assert "status.conditions[Compatible]" in told.verdict.message
    scene.body["status"] = decision.status
    assert scene.decide().status is None, "at rest nothing is written"


@pytest.mark.parametrize(
    ("code", "message", "events"),
    [
        (500, "failed to create typed patch object (team/d): .status.later: field not declared in schema", 1),
        (403, 'disaggdeployments.longshore.dev "d" is forbidden: a webhook denied it', 0),
        (422, "status.agents: Invalid value", 0),
    ],
)
def test_only_a_status_with_an_undeclared_field_is_told_as_such(code: int, message: str, events: int) -> None:
    scene = settled()
    observed = scene.observe()

    class Pool:
        def __init__(self) -> None:
            self.posted: list[dict[str, Any]] = []

        def request(self, method: str, _url: str, *, body: bytes, **_: Any) -> Any:
            if method == "POST":
                self.posted.append(json.loads(body))
                return SimpleNamespace(status=201, data=body)
            return SimpleNamespace(status=code, data=json.dumps({"message": message}).encode())

    pool = Pool()
    client = ApiClient(Configuration())
    client.rest_client.pool_manager = pool
    applier = Applier(Api(client, 1.0), scene.world, lambda: None)
    with pytest.raises(RefusedError, match=re.escape(message)):
        asyncio.run(applier.write_status(observed, {}))
    assert [each["reason"] for each in pool.posted] == ["FieldsUnknown"] * events


def test_a_definition_that_cannot_be_read_has_every_field() -> None:
    assert Served.of({}) == Served.of({"components": {"schemas": {"x": {}}}}) == Served()
    assert Served().part({"anything": [1]}) == ({"anything": [1]}, ())


def test_the_scenes_reach_every_row_of_the_table() -> None:
    assert {(row.condition.value, row.name) for row in TABLE} == {*SCENES, *ANSWERED}


@pytest.mark.shows("field.transfer.wires")
def test_a_pair_that_is_refused_for_its_wire_is_named_with_the_wire_the_allowed_ones_and_the_way_out() -> None:
    text = SCENES["TransportVerified", "WireNotAllowed"].message("TransportVerified")
    assert f"a: worker w to d/0/0: {BARRED}" in text
    assert "allows only RDMA" in text
    assert "or add TCP to the list" in text


def test_nvlink_is_verified_where_cuda_ipc_is_allowed() -> None:
    scene = two(said(PREFILL, peers=(peer(wire="NVLink"),)), transfer={"wires": ["CudaIPC"]})
    assert scene.reasons()["TransportVerified"] == "WireVerified"
    assert scene.message("TransportVerified") == "NVLink"


def test_a_peer_that_was_refused_is_named_with_what_its_agent_says_of_it() -> None:
    scene = two(said(PREFILL, peers=(peer(state="refused", error="two engines have one name"),)))
    assert "a: worker w: d/0/0 is refused: two engines have one name" in scene.message("PeersConnected")


def test_a_wire_that_no_probe_could_name_is_one_that_is_not_allowed_once_an_agent_says_so() -> None:
    refused = peer(wire="Unknown", error="no probe could name it")
    scene = two(said(PREFILL, peers=(refused,)), transfer={"wires": ["RDMA"]})
    assert scene.reasons()["TransportVerified"] == "WireNotAllowed"
    assert "no probe could name it" in scene.message("TransportVerified")
    early = two(said(PREFILL, peers=(peer(wire="Unknown"),)), transfer={"wires": ["RDMA"]})
    assert early.reasons()["TransportVerified"] == "WireUnknown"


def test_engines_of_one_agent_that_copy_directly_need_no_wire_that_is_allowed() -> None:
    near = peer(wire="SharedMemory", ways=("direct",))
    scene = two(said(PREFILL, DECODE, peers=(near,)), transfer={"wires": ["RDMA"]})
    assert scene.reasons()["TransportVerified"] == "WireVerified"
    assert "wires" not in scene.decide().status["prefill"]
    far = peer("e", wire="RDMA", ways=("staged",))
    scene = two(said(PREFILL, DECODE, peers=(near, far)), transfer={"wires": ["RDMA"]})
    assert scene.message("TransportVerified") == "RDMA"
    both = peer(wire="SharedMemory", ways=("direct", "staged"), error=BARRED)
    scene = two(said(PREFILL, DECODE, peers=(both,)), transfer={"wires": ["RDMA"]})
    assert scene.reasons()["TransportVerified"] == "WireNotAllowed"


def test_a_child_that_was_refused_is_told_for_the_generation_that_was_tried() -> None:
    scene = settled()
    refusal = Refusal("Service llama-agent", "exceeded quota", generation=1)
    assert scene.reasons(refusal=refusal)["AgentsReady"] == "ChildRefused"
    older = Refusal("Service llama-agent", "exceeded quota", generation=0)
    assert scene.reasons(refusal=older)["AgentsReady"] == "AllAgentsReady"


def test_requests_that_fail_are_told_without_keys_too_and_nothing_else_is_asked_for() -> None:
    pending = {"keys": {"pending": {"secret": "llama-keys-0123", "accepted": ["k" * 40]}}}
    for status in ({}, pending, settled().body["status"]):
        scene = settled()
        scene.body["status"] = status
        reasons = scene.reasons(failure="CREATE /secrets: 500: no answer")
        assert (reasons["Ready"], reasons["AgentsReady"], reasons["Progressing"]) == (
            "AgentsNotReady",
            "RequestsFail",
            "Blocked",
        )
        assert scene.message("AgentsReady", failure="CREATE /secrets: 500") == "CREATE /secrets: 500"
        decision = scene.decide(failure="CREATE /secrets: 500")
        assert decision.delete == ()
        assert decision.status is not None
        assert decision.status.get("keys") == status.get("keys")


def test_an_agent_that_was_not_heard_yet_leaves_the_conditions_as_they_were() -> None:
    scene = two(said(PREFILL, peers=(peer("d"),)), said(DECODE, peers=(peer("p"),)), prefill=role(instances=1))
    scene.write_status()
    assert scene.reasons()["EnginesConnected"] == "EnginesConnected"
    # The operator has just started: one agent has answered, the other counts as silent only later.
    scene.world.polls.clear()
    scene.world.answered("Pod-llama-a", Poll(NOW_S, said(PREFILL, peers=(peer("d"),))))
    assert scene.decide().status is None
    assert scene.decide().transitions == ()
    scene.world.polls["Pod-llama-b"] = Poll(NOW_S - 31, None)
    assert scene.reasons()["PeersConnected"] == "AgentSilent"


def test_a_steady_state_asks_for_nothing() -> None:
    scene = two(said(PREFILL, peers=(peer("d"),)), said(DECODE, peers=(peer("p"),)))
    scene.write_status()
    assert scene.decide().at_rest
    assert scene.decide().transitions == ()


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    scene = settled()
    scene.write_status()
    for entry in scene.body["status"]["conditions"]:
        entry["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    scene.count(2, 1, 2)
    times = {entry["type"]: entry["lastTransitionTime"] for entry in scene.decide().status["conditions"]}
    assert times["AgentsReady"] == times["Ready"] == "2026-01-01T00:00:00Z"
    assert times["Compatible"] == "2020-01-01T00:00:00Z"


def test_ready_is_false_from_the_moment_a_new_generation_is_seen() -> None:
    scene = settled()
    scene.write_status()
    assert scene.reasons()["Ready"] == "Ready"
    scene.put_deployment(KEY, generation=2, transfer={"backend": "Mooncake"})
    scene.body = scene.world.deployments[KEY]
    scene.body["status"] = {"keys": {"revision": 1, "secret": "llama-keys-0123", "accepted": ["k" * 40]}}
    status = scene.decide().status
    ready = next(entry for entry in status["conditions"] if entry["type"] == "Ready")
    assert (ready["status"], ready["observedGeneration"]) == ("False", 2)


def test_ready_waits_until_the_daemon_sets_controller_has_seen_the_new_version() -> None:
    scene = settled()
    daemon_set = scene.world.children[KEY][ChildKey("DaemonSet", "llama-agent-decode")]
    daemon_set["metadata"]["generation"] = 2
    assert scene.reasons()["AgentsReady"] == "AgentsUpdating"
    daemon_set["status"]["observedGeneration"] = 2
    assert scene.reasons()["AgentsReady"] == "AllAgentsReady"


def test_agents_of_an_incompatible_spec_stay_as_they_were() -> None:
    scene = incompatible()
    decision = scene.decide()
    assert decision.apply == decision.delete == ()
    assert "spec.decode.staging.poolSize" in scene.message("Compatible")


def test_an_unready_agent_is_named_with_what_the_kubelet_says() -> None:
    scene = counted(2, 1, 2, trouble="ImagePullBackOff")
    assert "a (ImagePullBackOff)" in scene.message("AgentsReady")


@pytest.mark.parametrize(
    ("unready", "now", "words", "reason"),
    [
        # The kubelet says in one step that the container has started, and in the next that it is ready.
        ("2026-01-01T00:00:03Z", "2026-01-01T00:00:06Z", (), "AgentsUpdating"),
        ("2026-01-01T00:00:03Z", "2026-01-01T00:00:06Z", ("the self-test failed",), "AgentsNotReady"),
        ("2026-01-01T00:00:03Z", "2026-01-01T00:02:36Z", (), "AgentsNotReady"),
        ("2026-01-01T00:00:06Z", "2026-01-01T00:00:07Z", (), "AgentsNotReady"),
    ],
    ids=("just started", "it says why", "for long", "it was ready"),
)
def test_an_agent_that_has_just_started_is_updating_until_a_probe_or_it_says_more(
    unready: str, now: str, words: tuple[str, ...], reason: str
) -> None:
    scene = settled()
    scene.count(2, 1, 2)
    report = finds("SelfTestFailed", *words) if words else None
    scene.put_agent("b", ready=False, said=report, started="2026-01-01T00:00:05Z", unready=unready)
    observed = dataclasses.replace(scene.observe(), now=now)
    status = decide(observed, IMAGES).status
    assert status is not None
    assert {entry["type"]: entry["reason"] for entry in status["conditions"]}["AgentsReady"] == reason


STARTS = {"state": {"waiting": {"reason": "ContainerCreating"}}}
NO_PLACE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
CRASH_TEXT = "failing: pod prefill-0 (CrashLoopBackOff: back-off 40s; it ended with Error, exit code 1)"


@pytest.mark.parametrize(
    ("scene", "reason", "text"),
    [
        (crashing(), "EnginesFailing", f"no engine has registered yet; {CRASH_TEXT}"),
        (
            crashing(said(DECODE)),
            "EnginesFailing",
            f"0 of any prefill, 1 of any decode instances have registered; {CRASH_TEXT}",
        ),
        (
            crashing(said(PREFILL), prefill=role(instances=2)),
            "EnginesFailing",
            f"1 of 2 prefill, 0 of any decode instances have registered; {CRASH_TEXT}",
        ),
        # A pod that crashes beside as many instances as are expected is the business of what scales it.
        (crashing(said(PREFILL)), "EnginesConnected", "1 of any prefill, 0 of any decode instances have registered"),
        # Its engine may have registered at the agent that is silent.
        (silent_with_crash(), "AgentSilent", f"1 agents do not answer: a; {CRASH_TEXT}"),
    ],
)
def test_pods_of_engines_that_fail_are_named(scene: Scene, reason: str, text: str) -> None:
    assert (scene.reasons()["EnginesConnected"], scene.message("EnginesConnected")) == (reason, text)


def test_pods_of_engines_are_seen_until_they_have_registered() -> None:
    scene = two(said(instance("d", "target", host="decode-0")), prefill=role(instances=2))
    label = "llama.prefill"
    scene.put_engine_pod("decode-0", "llama.decode", RUNS)
    scene.put_engine_pod("creating", label, STARTS)
    scene.put_engine_pod("no-node", label, conditions=[NO_PLACE])
    scene.put_engine_pod("running", label, RUNS)
    scene.put_engine_pod("registered", label, RUNS)
    scene.put_engine_pod("ended", label, ENDED, phase="Succeeded")
    scene.put_engine_pod("of-another", "mistral.prefill", CRASHED)
    scene.put_engine_pod("of-nobody", "llama", CRASHED)
    scene.put_agent("b", said=said(instance("p", "source", host="registered")))
    assert scene.message("EnginesConnected") == (
        "1 of 2 prefill, 1 of any decode instances have registered; "
        "failing: pod no-node (Unschedulable: 0/2 nodes are available); starting: creating; "
        "running but not registered: running"
    )
    # The cluster warns of a pod that cannot start.
    decision = scene.decide()
    assert decision.waits
    pod = next(pod for pod in scene.observe().engine_pods if pod.name == "creating")
    warned = {pod.uid: Warned("FailedMount: /run/longshore/team/llama is not a directory", "2026-01-01T00:00:00Z")}
    scene.world.engine_pods[KEY][pod.uid] = dataclasses.replace(pod, created="2025-12-31T23:59:00Z")
    text = scene.message("EnginesConnected", warnings=warned)
    assert "pod creating (FailedMount: /run/longshore/team/llama is not a directory)" in text
    # Without a host name of each rank, nothing is said of pods that run.
    scene.put_agent("b", said=said(instance("p", "source", host="")))
    assert "running but not registered" not in scene.message("EnginesConnected")


def test_an_agent_that_was_not_asked_yet_is_not_called_silent() -> None:
    scene = settled()
    scene.put_agent("a", asked=False)
    assert scene.reasons()["EnginesConnected"] == "NoEngines"


def test_what_answers_is_enough_where_it_proves_the_condition() -> None:
    reasons = some_silent(prefill=role(instances=1)).reasons()
    assert reasons["EnginesConnected"] == "EnginesConnected"
    assert some_silent(prefill=role(instances=2)).reasons()["EnginesConnected"] == "AgentSilent"


def test_an_instance_that_spans_nodes_counts_once() -> None:
    scene = two(said(PREFILL), said(PREFILL))
    assert scene.decide().status["prefill"]["instances"] == 1


@pytest.mark.shows("operator.watch_nodes")
def test_without_nodes_the_roles_agents_are_not_counted() -> None:
    status = two().decide(sees_nodes=False).status
    assert status["prefill"] == {"summary": "TP4", "instances": 0}
    assert status["agents"]["summary"] == "2/2"


def test_the_sum_of_shared_staging_is_of_all_deployments_there() -> None:
    assert "512Mi of staging a prefill rank and 8Gi a decode rank" in shared().message("NodesShared")


def test_new_keys_are_asked_for_before_anything_else() -> None:
    scene = settled()
    scene.body["status"] = {}
    decision = scene.decide()
    assert decision.keys is not None
    assert (decision.keys.revision, decision.keys.accepted) == (1, ())
    assert decision.apply == ()


def test_a_raised_revision_asks_for_keys_that_still_let_the_old_clients_in() -> None:
    scene = Scene(agents={"keysRevision": 2})
    keys = scene.decide().keys
    assert keys is not None
    assert (keys.revision, keys.accepted, keys.previous) == (2, ("k" * 40,), "llama-keys-0123")


def test_new_keys_wait_for_agents_that_would_not_know_them_and_ready_says_so() -> None:
    scene = settled()
    scene.body["spec"]["agents"] = {"keysRevision": 2}
    scene.put_agent("a", keys="0000")
    scene.put_agent("b", keys="0123")
    assert scene.decide().keys is None
    assert scene.reasons()["AgentsReady"] == "AgentsUpdating"
    assert scene.message("AgentsReady").endswith("wait until all agents have those of revision 1: a")
    assert scene.decide(keys_missing=True).keys is not None
    scene.put_agent("a", keys="0123")
    assert scene.decide().keys is not None


@pytest.mark.shows("field.paused")
def test_nothing_is_written_while_paused_and_what_waits_is_named() -> None:
    scene = paused()
    scene.body["spec"]["agents"] = {"networkPolicy": False, "allowOpenDataPath": True, "keysRevision": 2}
    decision = scene.decide()
    assert decision.keys is None
    assert decision.apply == decision.delete == ()
    message = scene.message("AgentsReady")
    for name in ("ConfigMap llama-agent", "DaemonSet llama-agent-prefill", "NetworkPolicy llama-agent", "revision 2"):
        assert name in message
    assert scene.reasons()["Ready"] == "AgentsNotReady"


def test_a_pause_of_a_deployment_that_matches_its_spec_leaves_it_ready() -> None:
    scene = settled()
    scene.body["spec"]["paused"] = True
    assert (scene.reasons()["Ready"], scene.reasons()["Progressing"]) == ("Ready", "Paused")


def test_a_deployment_that_begins_paused_has_no_keys_and_no_children() -> None:
    scene = Scene(paused=True)
    scene.body["status"] = {}
    decision = scene.decide()
    assert (decision.keys, decision.apply) == (None, ())
    assert "keys of revision 1" in scene.message("AgentsReady")


def test_the_daemon_set_of_all_nodes_goes_when_there_is_one_for_each_role() -> None:
    both = {"nodeSelector": {"role": "prefill"}, "pageSize": 64}
    scene = settled(prefill=both | {"tensorParallel": 4}, decode=both | {"tensorParallel": 1})
    scene.put_deployment(KEY, generation=2)
    scene.world.deployments[KEY]["status"] = scene.body["status"]
    decision = scene.decide()
    assert decision.delete == (ChildKey("DaemonSet", "llama-agent"),)
    scene.apply()
    scene.count(2, 2, 2)
    # Its agents do not run the current spec.
    assert scene.reasons()["AgentsReady"] == "AgentsUpdating"


@pytest.mark.parametrize(("made_for", "strategy"), [("", "OnDelete"), ("older", "RollingUpdate")])
def test_a_new_selector_keeps_agents_of_the_same_template_and_stops_no_rollout(made_for: str, strategy: str) -> None:
    scene = settled()
    found = scene.world.children[KEY][ChildKey("DaemonSet", "llama-agent-prefill")]
    template = made_for or found["spec"]["template"]["metadata"]["annotations"][names.TEMPLATE_ANNOTATION]
    scene.put_agent("a", roles="prefill", template=template)
    scene.body["spec"]["prefill"] = role(nodeSelector={"role": "prefill", "zone": "a"})
    applied = {body["metadata"]["name"]: body for _, body in scene.decide().apply}
    # Decode's nodes are the same.
    assert "llama-agent-decode" not in applied
    assert applied["llama-agent-prefill"]["spec"]["updateStrategy"]["type"] == strategy
    scene.apply()
    scene.put(kinds.NODE, {"metadata": {"name": "a", "labels": {"role": "prefill", "zone": "a"}}})
    scene.count(2, 2, 0)
    assert (scene.reasons()["AgentsReady"] == "AllAgentsReady") is (strategy == "OnDelete")


def test_a_new_image_of_the_operator_alone_replaces_no_agent() -> None:
    scene = settled()
    newer = dataclasses.replace(IMAGES, operator_image="operator:2")
    assert scene.decide(newer).apply == ()
    # Somebody else's edit of the image, which runs as root, is still taken back.
    edited = next(body for child, body in scene.world.children[KEY].items() if child.kind == "DaemonSet")
    edited["spec"]["template"]["spec"]["initContainers"][0]["image"] = "another:1"
    [(_, taken_back)] = scene.decide(newer).apply
    assert taken_back["spec"]["template"]["spec"]["initContainers"][0]["image"] == "operator:1"
    # With the agents' next image, their init containers get the operator's.
    found = [
        body
        for kind, body in scene.decide(dataclasses.replace(newer, image="agent:2")).apply
        if kind is kinds.DAEMON_SET
    ]
    assert [body["spec"]["template"]["spec"]["initContainers"][0]["image"] for body in found] == ["operator:2"] * 2


def test_agents_are_updated_by_the_digest_of_their_own_roles() -> None:
    scene = settled()
    configs = {}
    for child, body in scene.world.children[KEY].items():
        if child.kind == "DaemonSet":
            metadata = body["spec"]["template"]["metadata"]
            configs[metadata["labels"][names.ROLES_LABEL]] = metadata["annotations"][names.CONFIG_ANNOTATION]
    assert configs["prefill"] != configs["decode"]

    def updated(node: str, roles: str, config: str) -> tuple[int, int]:
        scene.put_agent(node, roles=roles, config=config)
        status = scene.decide().status
        return status["prefill"]["updatedAgents"], status["decode"]["updatedAgents"]

    assert updated("a", "prefill", configs["decode"]) == (0, 1)
    assert updated("a", "prefill", configs["prefill"]) == (1, 1)
    assert updated("b", "decode", configs["prefill"]) == (1, 0)


def test_a_lost_secret_asks_for_new_keys() -> None:
    keys = settled().decide(keys_missing=True).keys
    assert keys is not None
    # A lost Secret cannot be mounted with them.
    assert keys.previous == ""


def test_a_switched_off_child_is_deleted_and_a_strangers_is_not() -> None:
    scene = settled()
    stranger = {"metadata": {"name": "x", "namespace": "team", "labels": {"longshore.dev/deployment": "llama"}}}
    scene.put(kinds.CONFIG_MAP, stranger)
    assert scene.decide().delete == ()
    scene.body["spec"]["agents"] = {"networkPolicy": False, "allowOpenDataPath": True}
    assert scene.decide().delete == (ChildKey("NetworkPolicy", "llama-agent"),)


@pytest.mark.parametrize("kind", ["ServiceAccount", "ConfigMap", "NetworkPolicy", "Service", "DaemonSet"])
def test_a_child_that_is_gone_or_changed_is_applied_again(kind: str) -> None:
    scene = settled()
    child = ChildKey(kind, "llama-agent-prefill" if kind == "DaemonSet" else "llama-agent")
    body = scene.world.children[KEY].pop(child)
    assert [applied.name for applied, _ in scene.decide().apply] == [kind]
    changed = copy.deepcopy(body)
    changed["metadata"]["labels"].pop("app.kubernetes.io/part-of")
    scene.world.children[KEY][child] = changed
    assert [applied.name for applied, _ in scene.decide().apply] == [kind]
    scene.world.settled[KEY, child] = changed["metadata"]["resourceVersion"]
    assert scene.decide().apply == ()


def test_what_the_server_adds_to_a_child_is_no_difference() -> None:
    scene = settled()
    body = scene.world.children[KEY][ChildKey("DaemonSet", "llama-agent-prefill")]
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["terminationMessagePath"] = "/dev/termination-log"
    container["livenessProbe"]["successThreshold"] = 1
    body["metadata"]["annotations"]["somebody.dev/x"] = "y"
    assert scene.decide().apply == ()


def test_an_agent_that_is_not_ready_is_named_with_what_it_says_of_itself() -> None:
    scene = settled()
    scene.count(2, 0, 2)
    for node, text in (("a", "NIXL: it took TCP"), ("b", "x" * 10_000)):
        scene.put_agent(node, ready=False, said=finds("WireNotAllowed", text))
    assert scene.reasons()["AgentsReady"] == "AgentsNotReady"
    assert "a (WireNotAllowed: NIXL: it took TCP), b (WireNotAllowed: xxx" in scene.message("AgentsReady")
    assert len(scene.message("AgentsReady")) < 1000
    scene.put_agent("a", ready=False, trouble="ImagePullBackOff", said=said())
    assert "a (ImagePullBackOff)" in scene.message("AgentsReady")


def test_workers_that_die_again_and_again_are_named_in_the_condition() -> None:
    scene = settled()
    scene.count(2, 1, 2)
    text = "the worker of d rank 0 has died 3 times within a minute, last because it ended with -11"
    scene.put_agent("b", ready=False, said=finds("WorkersDying", text))
    assert scene.reasons()["AgentsReady"] == "AgentsNotReady"
    assert f"b (WorkersDying: {text})" in scene.message("AgentsReady")


def test_what_keeps_strangers_from_data_ports_is_in_the_status_of_each_role_the_best_first() -> None:
    scene = settled()
    assert "dataPaths" not in scene.decide().status["prefill"]
    for node, entry, protections in (("a", PREFILL, ("Open", "Filtered")), ("b", DECODE, ("Absent", ""))):
        engines = (engine(entry.instance, *entry.roles),)
        workers = tuple(
            worker(f"w{number}", engines=engines, data_path=path) for number, path in enumerate(protections)
        )
        scene.put_agent(node, said=said(entry, workers=workers, node=node))
    status = scene.decide().status
    assert (status["prefill"]["dataPaths"], status["decode"]["dataPaths"]) == (["Filtered", "Open"], ["Absent"])


def test_events_tell_of_transitions_and_of_nothing_twice() -> None:
    scene = settled()
    first = {entry.verdict.reason for entry in scene.decide().transitions}
    assert {"Ready", "PlanMade", "AllAgentsReady"} <= first
    scene.write_status()
    scene.count(2, 1, 2)
    changed = [(entry.before, entry.verdict.reason) for entry in scene.decide().transitions]
    assert ("True", "AgentsNotReady") in changed
    assert all(name != "PlanMade" for _, name in changed)


def test_a_reason_that_is_false_says_what_to_do_or_goes_by_itself() -> None:
    passing = {"AgentsUpdating", "PeersConnecting", "NodesOwn", "Settled"}
    assert {row.name for row in TABLE if row.truth is Truth.FALSE and not row.remedy} == passing


def test_a_reason_outside_the_table_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        reason(TABLE[0].condition, "NoSuchReason")
