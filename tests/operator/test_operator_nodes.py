"""Tests which nodes must have an agent, which agents run the current config, and the reasons why others do not start."""

from __future__ import annotations

from typing import Any

import pytest
from operator_scene import KEY, Scene, said, settled

from longshore_operator.decide.placement import place
from longshore_operator.observe import Warned, newest_warnings
from longshore_operator.world import ChildKey, Node
from longshore_spec.taints import Taint

GPU = "nvidia.com/gpu=present:NoSchedule"


def role_of(scene: Scene, name: str) -> dict[str, Any]:
    status = scene.decide().status
    assert status is not None
    found: dict[str, Any] = status[name]
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_a_node_is_not_ready_and_is_named_with_its_selector(role: str) -> None:
    selector = {"nodeSelector": {"role": "nobody"}}
    scene = settled(**{role: {"tensorParallel": 1, "pageSize": 64, **selector}})
    reasons = scene.reasons()
    assert (reasons["Ready"], reasons["AgentsReady"], reasons["Progressing"]) == (
        "AgentsNotReady",
        "NoNodes",
        "Blocked",
    )
    assert scene.message("AgentsReady") == f"no node is picked by {role} (role=nobody)"


def test_without_nodes_to_read_the_daemon_sets_tell_which_role_has_none() -> None:
    scene = settled()
    scene.count(2, 2, 2)
    assert scene.reasons(sees_nodes=False)["AgentsReady"] == "NoNodes"
    assert "decode (role=decode)" in scene.message("AgentsReady", sees_nodes=False)


def test_a_role_whose_node_is_off_is_not_ready_though_the_daemon_set_counts_one_less() -> None:
    scene = settled()
    scene.put_node("b", "decode", ready=False)
    scene.count(1, 1, 1)
    assert scene.reasons()["Ready"] == "AgentsNotReady"
    assert scene.message("AgentsReady") == "no node of decode (role=decode) is ready: b"
    assert role_of(scene, "decode")["summary"] == "0/0 TP1"


def test_one_node_off_among_others_is_named_beside_ready_and_not_counted() -> None:
    scene = settled()
    scene.put_node("c", "decode", "node.kubernetes.io/unreachable=:NoSchedule", ready=False)
    assert scene.reasons()["AgentsReady"] == "AllAgentsReady"
    assert scene.message("AgentsReady") == "2 agents are ready; without an agent: c (not ready)"
    assert role_of(scene, "decode")["summary"] == "1/1 TP1"


def test_a_ready_node_without_an_agent_is_missed_whatever_the_daemon_set_counts() -> None:
    scene = settled()
    scene.put_node("c", "decode")
    assert scene.reasons()["AgentsReady"] == "AgentsUpdating"
    assert scene.message("AgentsReady").startswith("2 of 3 agents are ready")
    assert role_of(scene, "decode")["summary"] == "1/2 TP1"


def test_tainted_nodes_are_said_to_be_so_and_tolerated_ones_count() -> None:
    scene = settled()
    scene.put_node("c", "decode", GPU)
    assert scene.reasons()["AgentsReady"] == "AllAgentsReady"
    assert f"without an agent: c (tainted {GPU})" in scene.message("AgentsReady")
    assert role_of(scene, "decode")["summary"] == "1/1 TP1"
    # An agent that runs stays, and does not come again.
    scene.put_node("b", "decode", GPU)
    assert scene.reasons()["AgentsReady"] == "AllAgentsReady"
    assert f"taints let these agents run and no new one start: b ({GPU})" in scene.message("AgentsReady")
    evicting = GPU.replace("NoSchedule", "NoExecute")
    scene.put_node("b", "decode", evicting)
    assert scene.reasons()["AgentsReady"] == "NodesTainted"
    assert f"nodes are picked by decode (role=decode) but tainted: b ({evicting})" in scene.message("AgentsReady")
    scene = settled(agents={"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]})
    scene.put_node("c", "decode", GPU)
    assert role_of(scene, "decode")["summary"] == "1/2 TP1"


def test_an_agent_of_the_role_that_a_node_has_left_is_not_one_of_its_new_role() -> None:
    scene = settled()
    scene.put_node("a2", "prefill")
    scene.put_agent("a2", roles="decode", asked=False)
    assert role_of(scene, "prefill")["summary"] == "1/2 TP4"
    assert role_of(scene, "decode")["summary"] == "1/1 TP1"
    assert scene.reasons()["Ready"] == "AgentsNotReady"


TAINT = Taint("k", "v", "NoSchedule")


@pytest.mark.parametrize(
    ("taint", "tolerations", "runs"),
    [
        (TAINT, [], False),
        (TAINT._replace(effect="PreferNoSchedule"), [], True),
        (TAINT._replace(effect="NoExecute"), [], False),
        (TAINT, [{"operator": "Exists"}], True),
        (TAINT, [{"key": "k", "operator": "Exists"}], True),
        (TAINT, [{"key": "j", "operator": "Exists"}], False),
        (TAINT, [{"key": "k", "operator": "Exists", "effect": "NoExecute"}], False),
        (TAINT, [{"key": "k", "value": "v"}], True),
        (TAINT, [{"key": "k", "operator": "Equal", "value": "w"}], False),
        (Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"), [], True),
        (Taint("node.kubernetes.io/memory-pressure", "", "NoSchedule"), [], True),
        (Taint("node.kubernetes.io/network-unavailable", "", "NoSchedule"), [], False),
    ],
)
def test_taints_and_tolerations_count_as_for_a_daemon_set(
    taint: Taint, tolerations: list[dict[str, str]], *, runs: bool
) -> None:
    pod = {"tolerations": tolerations}
    daemon_set = {"metadata": {"labels": {"longshore.dev/roles": "decode"}}, "spec": {"template": {"spec": pod}}}
    found = place("decode", {}, {"n": Node({}, (taint,))}, [daemon_set])
    assert (found.expected, dict(found.tainted)) == (
        (frozenset({"n"}), {}) if runs else (frozenset(), {"n": str(taint)})
    )
    found = place("decode", {}, {"n": Node({}, (taint,))}, [daemon_set], running={"n"})
    ends = not runs and taint.effect == "NoExecute"
    assert (found.expected, dict(found.staying)) == (
        (frozenset(), {}) if ends else (frozenset({"n"}), {} if runs else {"n": str(taint)})
    )


def test_an_agent_that_reports_another_config_than_its_pods_is_not_updated() -> None:
    scene = settled()
    current = scene.configs()
    for config, updated in ((current, 1), ({"prefill": "older", "decode": "older"}, 0), ({}, 1)):
        scene.put_agent("a", said=said(config=config))
        assert role_of(scene, "prefill")["updatedAgents"] == updated
        assert scene.reasons()["AgentsReady"] == ("AllAgentsReady" if updated else "AgentsOutdated")
    scene.put_agent("a", config="older", said=said(config=current))
    assert role_of(scene, "prefill")["updatedAgents"] == 1


def waiting(**agent: Any) -> Scene:
    """Return a deployment whose agent on node a is missing, or as given."""
    scene = settled()
    scene.count(2, 1, 2)
    pod = scene.world.pods.pop("Pod-llama-a")
    scene.world._pods_of[KEY].discard(pod.uid)
    if agent:
        scene.put_agent("a", ready=False, asked=False, **agent)
    scene.write_status()
    return scene


def test_pods_that_cannot_be_created_are_told_in_the_words_of_the_cluster() -> None:
    scene = waiting()
    assert scene.reasons()["AgentsReady"] == "AgentsUpdating"
    uid = scene.world.children[KEY][ChildKey("DaemonSet", "llama-agent-prefill")]["metadata"]["uid"]
    words = 'FailedCreate: Error creating: pods "llama-agent-prefill-x7k2p" is forbidden: exceeded quota: tight'
    now = {uid: Warned(words, "2026-01-01T00:00:00Z")}
    assert scene.reasons(warnings=now)["AgentsReady"] == "AgentsNotReady"
    text = scene.message("AgentsReady", warnings=now)
    assert 'no pod on a (FailedCreate: Error creating: pods "llama-agent-prefill" is forbidden: exceeded quota' in text
    # An older event is not the cause.
    assert scene.reasons(warnings={uid: Warned(words, "2025-12-31T23:00:00Z")})["AgentsReady"] == "AgentsUpdating"


@pytest.mark.parametrize(
    ("created", "last", "told"),
    [
        ("2025-12-31T23:59:00Z", "2025-12-31T23:59:50Z", True),
        ("2025-12-31T23:59:50Z", "2025-12-31T23:59:52Z", False),
        ("2025-12-31T23:55:00Z", "2025-12-31T23:55:02Z", False),
        ("2025-12-31T23:55:00Z", "2025-12-31T23:56:00Z", False),
    ],
)
def test_a_failure_to_start_is_told_if_it_lasts_and_not_if_it_has_passed(
    created: str, last: str, *, told: bool
) -> None:
    scene = waiting(starting=True, created=created)
    warnings = {"Pod-llama-a": Warned('FailedMount: secret "x" not found', last)}
    assert scene.reasons(warnings=warnings)["AgentsReady"] == ("AgentsNotReady" if told else "AgentsUpdating")
    if told:
        assert 'a (FailedMount: secret "x" not found)' in scene.message("AgentsReady", warnings=warnings)


def test_what_has_not_started_in_time_is_told_without_any_words() -> None:
    scene = waiting(starting=True, created="2025-12-31T23:49:00Z")
    assert "a (not started within 600 s)" in scene.message("AgentsReady")
    scene = waiting()
    for entry in scene.body["status"]["conditions"]:
        entry["lastTransitionTime"] = "2025-12-31T23:49:00Z"
    assert "no pod on a (not created within 600 s)" in scene.message("AgentsReady")


def event(uid: str, reason: str, last: str) -> dict[str, object]:
    return {"involvedObject": {"uid": uid}, "reason": reason, "message": "why", "lastTimestamp": last}


def test_a_harmless_warning_hides_no_cause_and_is_none() -> None:
    early, late = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
    harmless = ("MissingClusterDNS", "DNSConfigForming", "Unhealthy", "ProbeWarning")
    events = [event("a", "FailedMount", early), *(event(uid, reason, late) for reason in harmless for uid in "ab")]
    events += [event("c", "Failed", early), event("c", "BackOff", late), event("d", "FailedMount", late)]
    assert newest_warnings(events, {"a", "b", "c"}) == {
        "a": Warned("FailedMount: why", early),
        "c": Warned("BackOff: why", late),
    }
