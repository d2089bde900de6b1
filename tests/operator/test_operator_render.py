"""Tests the rendered children: least privilege, the agents' config, and no dependence on time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from operator_scene import KEY, Scene, settled

from longshore_agent.control.curve import CurveKeys
from longshore_agent.settings import Settings as AgentSettings
from longshore_cli.analyze.definition import parse
from longshore_operator import keys, kinds, names
from longshore_operator.reference import CRD, pages
from longshore_operator.render.children import keys_secret
from longshore_operator.settings import Settings
from longshore_spec.agent_config import load
from longshore_spec.manifest import Agents, Spec
from longshore_spec.names import KEYS_FILE, PREVIOUS_KEYS_FILE
from longshore_wire.errors import ConfigError

ROOT = Path(__file__).parents[2]


def children(**spec: Any) -> dict[str, dict[str, Any]]:
    return {kind.name: body for kind, body in Scene(**spec).decide().apply}


def pod_of(**spec: Any) -> dict[str, Any]:
    template: dict[str, Any] = children(**spec)["DaemonSet"]["spec"]["template"]
    return template["spec"]


def test_the_config_map_holds_what_agents_read() -> None:
    text = children()["ConfigMap"]["data"]["agent.json"]
    config = load(text)
    assert (config.deployment.name, config.prefill.tensor_parallel) == ("llama", 4)
    settings = AgentSettings.from_config(config)
    variables = {entry["name"]: entry.get("value", "10.0.0.1") for entry in pod_of()["containers"][0]["env"]}
    AgentSettings.from_environment(variables, base=settings)


def test_the_same_spec_renders_to_the_same_bytes() -> None:
    assert json.dumps(children()) == json.dumps(children())


def test_agents_run_with_the_least_privilege_that_works() -> None:
    pod = pod_of()
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    container = pod["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "privileged" not in json.dumps(pod)
    assert pod["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


def daemon_sets(**spec: Any) -> dict[str, dict[str, Any]]:
    """Return the DaemonSets by the roles of their nodes."""
    found = [body for kind, body in Scene(**spec).decide().apply if kind is kinds.DAEMON_SET]
    return {body["metadata"]["labels"][names.ROLES_LABEL]: body for body in found}


def roles_with(prefill: dict[str, str], decode: dict[str, str]) -> dict[str, Any]:
    return {
        "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": prefill},
        "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": decode},
    }


def holds(term: dict[str, Any], node: dict[str, str]) -> bool:
    """Whether a node matches a term, by the scheduler's rules."""
    found = {
        "In": lambda entry: node.get(entry["key"]) in entry["values"],
        "NotIn": lambda entry: node.get(entry["key"]) not in entry["values"],
    }
    return all(found[entry["operator"]](entry) for entry in term["matchExpressions"])


_A, _B = {"zone": "a"}, {"zone": "b"}
SELECTORS = {
    "of two values": (_A, _B, {"prefill", "decode"}),
    "of two values beside others": (_A | {"gpu": "h100"}, _B | {"gpu": "h100"}, {"prefill", "decode"}),
    "equal": (_A, _A, {"both"}),
    "of every node": ({}, {}, {"both"}),
    "of every node and of some": ({}, _A, {"prefill", "both"}),
    "of more labels": (_A | {"gpu": "h100"}, _A, {"decode", "both"}),
    "of other keys": (_A, {"gpu": "h100"}, {"prefill", "decode", "both"}),
    "of several other keys": (_A | {"rack": "1"}, {"gpu": "h100", "rdma": "yes"}, {"prefill", "decode", "both"}),
}


@pytest.mark.parametrize(("prefill", "decode", "wanted"), SELECTORS.values(), ids=list(SELECTORS))
def test_each_node_that_a_role_picks_has_one_agent_of_all_its_roles(
    prefill: dict[str, str], decode: dict[str, str], wanted: set[str]
) -> None:
    found = daemon_sets(**roles_with(prefill, decode))
    assert set(found) == wanted
    values = {"zone": ("a", "b", None), "gpu": ("h100", "l4", None), "rack": ("1", None), "rdma": ("yes", None)}
    for labels in itertools.product(*values.values()):
        node = {key: value for key, value in zip(values, labels, strict=True) if value is not None}
        roles = {
            roles
            for roles, body in found.items()
            for affinity in [body["spec"]["template"]["spec"].get("affinity")]
            if affinity is None
            or any(
                holds(term, node)
                for term in affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                    "nodeSelectorTerms"
                ]
            )
        }
        picked = {name for name, labels in (("prefill", prefill), ("decode", decode)) if labels.items() <= node.items()}
        assert roles == ({"both"} if len(picked) == 2 else picked), node


def test_a_daemon_set_selects_its_own_pods_and_the_service_all() -> None:
    found = daemon_sets(**roles_with(_A, {"gpu": "h100"}))
    assert {roles: body["metadata"]["name"] for roles, body in found.items()} == {
        "prefill": "llama-agent-prefill",
        "decode": "llama-agent-decode",
        "both": "llama-agent",
    }
    for body in found.values():
        labels = body["spec"]["template"]["metadata"]["labels"]
        assert body["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert children()["Service"]["spec"]["selector"].items() <= labels.items()
    assert found["prefill"]["spec"]["selector"] != found["decode"]["spec"]["selector"]


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "prefill's staging": ({"prefill": {"staging": {"lanes": 2}}}, {"prefill", "both"}),
    "prefill's layout": ({"prefill": {"tensorParallel": 8}}, {"prefill", "both"}),
    "prefill's instances": ({"prefill": {"instances": 5}}, set()),
    "decode's staging": ({"decode": {"staging": {"poolSize": "8Gi"}}}, {"decode", "both"}),
    "chunks": ({"transfer": {"chunkTokens": 4096}}, set()),
    "the order of wires": ({"transfer": {"wires": ["TCP", "RDMA"]}}, set()),
    "the backend": ({"transfer": {"backend": "Mooncake"}}, {"prefill", "decode", "both"}),
    "a wire": ({"transfer": {"wires": ["RDMA"]}}, {"prefill", "decode", "both"}),
    "a pause": ({"paused": False}, set()),
    "the way of updates": ({"agents": {"updateStrategy": {"type": "OnDelete"}}}, set()),
}


@pytest.mark.parametrize(("change", "restarted"), CHANGES.values(), ids=list(CHANGES))
def test_a_change_replaces_the_agents_that_read_it_at_start_and_no_others(
    change: dict[str, Any], restarted: set[str]
) -> None:
    spec = roles_with(_A, {"gpu": "h100"}) | {"transfer": {"wires": ["RDMA", "TCP"]}}
    after = {**spec}
    for name, value in change.items():
        known: Any = spec.get(name)
        after[name] = known | value if isinstance(known, dict) else value
    before, now = daemon_sets(**spec), daemon_sets(**after)
    assert {roles for roles in before if before[roles]["spec"]["template"] != now[roles]["spec"]["template"]} == (
        restarted
    )


@pytest.mark.shows("field.agents.updateStrategy.type", "field.agents.updateStrategy.rollingUpdate.maxUnavailable")
@pytest.mark.parametrize("limit", [3, "10%"])
def test_as_many_agents_are_away_at_a_time_as_the_spec_says(limit: object) -> None:
    def strategies(**agents: Any) -> list[Any]:
        return [body["spec"]["updateStrategy"] for body in daemon_sets(agents=agents).values()]

    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert strategies() == [rolling, rolling]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": limit}}
    assert strategies(updateStrategy={"rollingUpdate": {"maxUnavailable": limit}}) == [rolling, rolling]
    assert strategies(updateStrategy={"type": "OnDelete"}) == [{"type": "OnDelete"}, {"type": "OnDelete"}]


def test_under_the_nodes_network_ports_are_declared() -> None:
    pod = pod_of(agents={"hostNetwork": True, "allowOpenDataPath": True, "httpPort": 9000})
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    ports = [(port["name"], port["containerPort"], port["hostPort"]) for port in pod["containers"][0]["ports"]]
    assert ports == [("http", 9000, 9000), ("worker", 9001, 9001)]
    assert [port["name"] for port in pod_of()["containers"][0]["ports"]] == ["http"]


def test_an_agent_that_drains_is_not_killed_meanwhile() -> None:
    pod = pod_of()
    drain_s = next(
        float(entry["value"]) for entry in pod["containers"][0]["env"] if entry["name"] == "LONGSHORE_DRAIN_S"
    )
    assert pod["terminationGracePeriodSeconds"] > drain_s + 10


@pytest.mark.shows("field.agents.networkPolicy")
def test_only_agents_of_the_deployment_reach_each_others_data_path() -> None:
    rules = children()["NetworkPolicy"]["spec"]["ingress"]
    pods = {"podSelector": {"matchLabels": {"longshore.dev/deployment": "llama"}}}
    assert rules == [{"from": [pods]}, {"ports": [{"protocol": "TCP", "port": 9470}]}]


def test_new_keys_replace_agents() -> None:
    def template(**spec: Any) -> object:
        return children(**spec)["DaemonSet"]["spec"]["template"]

    scene = Scene()
    scene.body["status"]["keys"]["secret"] = "llama-keys-4567"
    assert {k.name: b for k, b in scene.decide().apply}["DaemonSet"]["spec"]["template"] != template()


def test_agents_get_the_keys_before_beside_theirs() -> None:
    def sources(scene: Scene) -> list[Any]:
        pod = {k.name: b for k, b in scene.decide().apply}["DaemonSet"]["spec"]["template"]["spec"]
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "keys")
        assert volume["projected"]["defaultMode"] == 0o440
        return [source["secret"] for source in volume["projected"]["sources"]]

    scene = Scene()
    items = [{"key": "curve.json", "path": KEYS_FILE}]
    assert sources(scene) == [{"name": "llama-keys-0123", "items": items}]
    scene.body["status"]["keys"]["previous"] = "llama-keys-4567"
    items = [{"key": "curve.json", "path": PREVIOUS_KEYS_FILE}]
    assert sources(scene)[1] == {"name": "llama-keys-4567", "items": items, "optional": True}


def test_every_child_is_owned_and_labelled() -> None:
    for body in children(agents={"podMonitor": True}).values():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("DisaggDeployment", "llama", True)
        assert body["metadata"]["labels"]["longshore.dev/deployment"] == "llama"
        assert body["metadata"]["namespace"] == KEY.namespace


def test_a_pod_monitor_is_made_on_request_alone() -> None:
    assert "PodMonitor" not in children()
    assert "PodMonitor" in children(agents={"podMonitor": True})


def test_a_pod_monitor_gives_series_the_labels_that_alerts_select_and_name() -> None:
    spec = children(agents={"podMonitor": True})["PodMonitor"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    made = {entry["sourceLabels"][0]: entry["targetLabel"] for entry in endpoint["relabelings"]}
    assert made == {
        "__meta_kubernetes_pod_label_longshore_dev_deployment": "deployment",
        "__meta_kubernetes_pod_label_longshore_dev_roles": "roles",
        "__meta_kubernetes_pod_node_name": "node",
    }
    pods = children(agents={"podMonitor": True})["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert pods[spec["jobLabel"]] == "longshore-agent"
    assert {"longshore.dev/deployment", "longshore.dev/roles"} <= pods.keys()


def test_made_keys_are_what_agents_take() -> None:
    made = keys.make(("o" * 40, "p" * 40))
    entries = json.loads(made.text)
    CurveKeys(**entries).check()
    for side in ("server", "client"):
        assert zmq.curve_public(entries[f"{side}_secret"].encode()).decode() == entries[f"{side}_public"]
    assert entries["accepted"] == [entries["client_public"], "o" * 40]
    assert made.accepted == tuple(entries["accepted"])


def test_keys_do_not_show_their_secret_halves() -> None:
    made = keys.make()
    entries = json.loads(made.text)
    secret = keys_secret("team", "llama", "u", "n", made.text)
    assert entries["client_secret"] not in repr(made)
    assert entries["server_secret"] not in json.dumps(secret["metadata"])
    assert secret["metadata"] == keys_secret("team", "llama", "u", "n", keys.make().text)["metadata"]


def test_no_two_deployments_share_keys() -> None:
    assert keys.make().text != keys.make().text


def test_the_definition_the_models_and_the_chart_have_the_same_fields() -> None:
    definition = (ROOT / CRD).read_text(encoding="utf-8")
    schema = parse(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

    def compare(kind: Any, place: dict[str, Any], path: str) -> None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        assert fields.keys() == place["properties"].keys(), path
        required = {name for name, field in fields.items() if field.required}
        assert required == set(place.get("required", ())), path
        for name, field in fields.items():
            if hasattr(field.type, "__struct_fields__"):
                compare(field.type, place["properties"][name], f"{path}.{name}")

    compare(Spec, schema, "spec")
    assert (ROOT / "charts/longshore/files/disaggdeployments.longshore.dev.yaml").read_text() == definition


def test_defaults_of_the_definition_are_those_of_the_models() -> None:
    schema = parse((ROOT / CRD).read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    agents = schema["properties"]["spec"]["properties"]["agents"]["properties"]
    given = Agents()
    for field in msgspec.structs.fields(Agents):
        default = agents[field.encode_name].get("default")
        if default not in (None, {}, []):
            assert default == getattr(given, field.name), field.encode_name


@pytest.mark.parametrize("path", pages((ROOT / CRD).read_text(encoding="utf-8")))
def test_what_is_made_from_tables_is_fresh(path: Path) -> None:
    made = pages((ROOT / CRD).read_text(encoding="utf-8"))[path]
    assert (ROOT / path).read_text(encoding="utf-8") == made, "run python -m longshore_operator.reference"


def test_settings_are_read_and_faults_come_all_at_once() -> None:
    assert Settings.from_environment({"LONGSHORE_WATCH_NODES": "false"}).watch_nodes is False
    wrong = {"LONGSHORE_LEASES": "1", "LONGSHORE_POLL_S": "x"}
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment(wrong)
    assert len(caught.value.faults) == 2
    assert "LONGSHORE_LEASE_S" in str(caught.value.faults)
    with pytest.raises(ConfigError, match="three renewals"):
        Settings.from_environment({"LONGSHORE_LEASE_S": "5"})


def test_a_settled_scene_is_really_settled() -> None:
    assert settled().decide().apply == ()
