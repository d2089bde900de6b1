"""The operator's cache: order and age of objects, the deployments that they concern, and dead watches."""

from __future__ import annotations

import copy

import pytest
from operator_scene import KEY, Body, Scene, said, settled

from longshore_operator import kinds
from longshore_operator.health import faults
from longshore_operator.watches import WatchLag
from longshore_operator.world import ChildKey, Key, Poll, read_engine_pod

SERVICE = ChildKey("Service", "llama-agent")


def test_an_older_version_does_not_replace_a_newer_one() -> None:
    scene = settled()
    found = scene.world.children[KEY][SERVICE]
    older = copy.deepcopy(found)
    older["metadata"]["resourceVersion"] = "1"
    older["spec"] = {}
    scene.world.take(kinds.SERVICE, older, deleted=False)
    assert scene.world.children[KEY][SERVICE] == found


def test_an_object_that_was_made_anew_replaces_the_one_before() -> None:
    scene = settled()
    anew = copy.deepcopy(scene.world.children[KEY][SERVICE])
    anew["metadata"] |= {"uid": "other", "resourceVersion": "1", "creationTimestamp": "2027-01-01T00:00:00Z"}
    assert scene.world.take(kinds.SERVICE, anew, deleted=False) == {KEY}
    assert scene.world.children[KEY][SERVICE]["metadata"]["uid"] == "other"


def test_the_late_news_of_a_deletion_does_not_take_the_object_that_was_made_since() -> None:
    scene = settled()
    before = copy.deepcopy(scene.world.children[KEY][SERVICE])
    anew = copy.deepcopy(before)
    anew["metadata"] |= {"uid": "other", "resourceVersion": "900", "creationTimestamp": "2027-01-01T00:00:00Z"}
    scene.world.take(kinds.SERVICE, anew, deleted=False)
    scene.world.take(kinds.SERVICE, before, deleted=True)
    assert scene.world.children[KEY][SERVICE]["metadata"]["uid"] == "other"


def test_a_pod_concerns_the_deployments_that_share_its_node() -> None:
    scene = settled()
    other = Key("team", "mistral")
    scene.put_deployment(other)
    scene.put_agent("a")
    scene.put_agent("a", key=other)
    assert scene.world.neighbours(KEY) == {other: {"a"}}
    pod = {"metadata": {"name": "mistral-a", "namespace": "team", "labels": {"longshore.dev/deployment": "mistral"}}}
    assert scene.put(kinds.POD, pod, deleted=True) == {KEY, other}
    assert scene.world.neighbours(KEY) == {}


def test_a_pod_of_an_engine_concerns_the_deployment_of_its_label() -> None:
    scene, other = settled(), Key("team", "mistral")
    runs = {"state": {"running": {}}}
    assert scene.put_engine_pod("p", "llama.prefill") == {KEY}
    assert scene.put_engine_pod("p", "llama.prefill") == set()
    assert scene.put_engine_pod("p", "llama.prefill", runs) == {KEY}
    assert scene.put_engine_pod("p", "mistral.decode", runs) == {KEY, other}
    [pod] = scene.world.engine_pods.pop(other).values()
    assert (pod.role, pod.host, scene.world.engine_pods) == ("decode", "p", {})


@pytest.mark.parametrize(
    ("name", "spec", "host"),
    [
        ("p", {"hostname": "own"}, "own"),
        ("p", {"hostNetwork": True, "nodeName": "node-1"}, "node-1"),
        (f"{'p' * 62}-{'q' * 9}", {}, "p" * 62),
    ],
)
def test_the_host_name_of_a_pod_is_the_one_that_its_containers_see(name: str, spec: Body, host: str) -> None:
    metadata = {"name": name, "namespace": "team", "uid": "1", "labels": {"longshore.dev/inject": "llama.prefill"}}
    pod = read_engine_pod({"metadata": metadata, "spec": spec})
    assert pod is not None
    assert pod.host == host


def test_a_pod_that_changed_nothing_that_counts_concerns_nobody() -> None:
    scene = settled()
    scene.put_agent("a")
    metadata = {"name": "llama-a", "namespace": "team", "labels": {"longshore.dev/deployment": "llama"}}
    known = scene.world.pods["Pod-llama-a"]
    pod = {
        "metadata": metadata
        | {
            "labels": {"longshore.dev/deployment": "llama", "longshore.dev/roles": known.roles},
            "annotations": {"longshore.dev/config": known.config, "longshore.dev/template": known.template},
            "creationTimestamp": known.created,
        },
        "spec": {"nodeName": "a", "containers": []},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"},
    }
    assert scene.put(kinds.POD, pod) == set()


def test_an_answer_that_says_the_same_concerns_nobody() -> None:
    scene = settled()
    scene.put_agent("a", said=said())
    assert scene.world.answered("Pod-llama-a", Poll(2000.0, said())) is None
    assert scene.world.answered("Pod-llama-gone", Poll(2000.0, said())) is None


def test_a_nodes_heartbeat_concerns_nobody_and_its_labels_everybody() -> None:
    scene = Scene()
    scene.put_node("a", "prefill")
    assert scene.put(kinds.NODE, {"metadata": {"name": "a", "labels": {"role": "prefill"}}}) == set()
    assert scene.put(kinds.NODE, {"metadata": {"name": "a", "labels": {"role": "decode"}}}) == {KEY}


def test_nothing_is_left_of_a_deployment_and_its_agents_that_are_gone() -> None:
    scene = settled()
    scene.put_agent("a", said=said())
    for child, body in list(scene.world.children[KEY].items()):
        scene.put(kinds.of(child.kind), body, deleted=True)
    for node in ("a", "b"):
        labels = {"longshore.dev/deployment": "llama"}
        pod = {"metadata": {"name": f"llama-{node}", "namespace": "team", "labels": labels}}
        scene.put(kinds.POD, pod, deleted=True)
    scene.put(kinds.DEPLOYMENT, scene.body, deleted=True)
    world = scene.world
    assert not (world.deployments or world.children or world.pods or world.polls or world.settled)


def test_a_watch_that_misses_a_change_lags_until_it_delivers_it() -> None:
    delivered = {"Service": {"u": "5"}}
    lag = WatchLag(delivered)
    lag.listed("Service", {"u": "5"}, {"u": "5"}, 0.0)
    assert lag.lags_s(100.0) == {"Service": 0.0}
    lag.listed("Service", {"u": "7"}, {"u": "5"}, 100.0)
    lag.listed("Service", {"u": "9"}, {"u": "5"}, 160.0)
    assert lag.lags_s(190.0) == {"Service": 90.0}
    delivered["Service"]["u"] = "9"
    assert lag.lags_s(191.0) == {"Service": 0.0}


def test_a_watch_that_misses_a_deletion_lags_and_one_that_was_just_told_of_it_does_not() -> None:
    delivered = {"Service": {"u": "5", "v": "6"}}
    lag = WatchLag(delivered)
    lag.listed("Service", {}, {"u": "5"}, 0.0)
    assert lag.lags_s(10.0) == {"Service": 10.0}
    del delivered["Service"]["u"]
    assert lag.lags_s(11.0) == {"Service": 0.0}


def test_the_operator_is_not_live_with_a_dead_watch() -> None:
    assert faults({"Service": 90.0, "Pod": 0.0}, [], 90.0) == []
    assert "Service" in faults({"Service": 91.0}, [], 90.0)[0]
    assert "pods" in faults({}, ["watcher for pods.v1@None"], 90.0)[0]
