"""Tests that `longshore analyze` says of a change what the operator then renders, for every field of a DisaggDeployment."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from operator_scene import IMAGES

from longshore_cli.analyze.changes import Effect, effects
from longshore_cli.analyze.definition import parse
from longshore_cli.analyze.sizes import sizes
from longshore_operator import names
from longshore_operator.render.children import render
from longshore_operator.render.wanted import Wanted
from longshore_spec.manifest import DisaggDeployment, read
from longshore_spec.node_groups import role_names
from longshore_spec.quantity import parse_quantity
from longshore_wire.crossover import WHOLE_PAGES

Body = dict[str, Any]
ROOT = Path(__file__).parents[2]
BASE: Body = {
    "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
    "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}},
    "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"role": "decode"}},
}
# The same with nodes of both roles, and with nodes of either kind.
SELECTORS: dict[str, tuple[Body, Body]] = {
    "apart": ({"role": "prefill"}, {"role": "decode"}),
    "both": ({"role": "kv"}, {"role": "kv"}),
    "any": ({"a": "yes"}, {"b": "yes"}),
}
POD: dict[str, Any] = {
    "gpuAccess": "CDI",
    "annotations": {"team": "kv"},
    "labels": {"team": "kv"},
    "env": [{"name": "UCX_TLS", "value": "rc"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "resources": {"limits": {"cpu": 2}},
    "guaranteed": True,
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpus"}],
    "securityContext": {"seLinuxOptions": {"type": "container_t"}},
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
}
ROLE: dict[str, Any] = {
    "instances": 3,
    "tensorParallel": 2,
    "pipelineParallel": 2,
    "dataParallel": 3,
    "pageSize": 16,
    "pageOrder": "HND",
    "nodeSelector": {"role": "other"},
    "ranksPerNode": 8,
}
# Every field with another value than its default; with the fields that it requires.
FIELDS: dict[str, Any] = {
    "paused": True,
    **{f"prefill.{name}": value for name, value in ROLE.items()},
    **{f"decode.{name}": value for name, value in ROLE.items()},
    **{f"prefill.agents.{name}": value for name, value in POD.items()},
    **{f"decode.agents.{name}": value for name, value in POD.items()},
    "prefill.staging.bufferSize": "32Mi",
    "prefill.staging.lanes": 2,
    "decode.staging.poolSize": "2Gi",
    "decode.target": "Host",
    "transfer.backend": "Mooncake",
    "transfer.staging": "Always",
    "transfer.chunkTokens": 4096,
    "transfer.wires": ["TCP", "RDMA"],
    "integrity.digest": True,
    "gpu.mps": True,
    **{f"agents.{name}": value for name, value in POD.items()},
    "agents.image": "other:2",
    "agents.hostNetwork": True,
    "agents.hostIPC": True,
    "agents.allowOpenDataPath": True,
    "agents.networkPolicy": False,
    "agents.podMonitor": True,
    "agents.podMonitorLabels": {"release": "kube"},
    "agents.httpPort": 9500,
    "agents.workerPort": 9700,
    "agents.keysRevision": 2,
    "agents.updateStrategy.type": "OnDelete",
    "agents.updateStrategy.rollingUpdate.maxUnavailable": "50%",
}
OPEN = {"agents.hostNetwork", "agents.networkPolicy"}


def with_fields(base: Body, fields: dict[str, Any]) -> Body:
    spec = copy.deepcopy(base)
    for path, value in fields.items():
        *folders, last = path.split(".")
        place = spec
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return spec


def based(selectors: str) -> Body:
    prefill, decode = SELECTORS[selectors]
    return with_fields(BASE, {"prefill.nodeSelector": prefill, "decode.nodeSelector": decode})


def deployment(spec: Body) -> DisaggDeployment:
    metadata = {"name": "llama", "namespace": "team"}
    return read(
        {"apiVersion": "longshore.dev/v1alpha1", "kind": "DisaggDeployment", "metadata": metadata, "spec": spec}
    )


def rendered(found: DisaggDeployment) -> dict[str, Body]:
    """Return what the operator renders. As it does, new keys have another Secret."""
    revision = found.spec.agents.keys_revision
    keys = f"llama-keys-{revision}"
    config = found.unchecked_config()
    wanted = Wanted(found, config, "uid", IMAGES, keys, str(revision))
    return {f"{kind.name}/{body['metadata']['name']}": body for kind, body in render(wanted)}


def daemon_sets(children: dict[str, Body]) -> dict[str, Body]:
    return {
        body["metadata"]["labels"][names.ROLES_LABEL]: body
        for name, body in children.items()
        if name.startswith("DaemonSet/")
    }


def template(body: Body) -> str:
    return str(body["spec"]["template"]["metadata"]["annotations"][names.TEMPLATE_ANNOTATION])


def affinity(body: Body) -> Body:
    return body["spec"]["template"]["spec"].get("affinity") or {}


def truth(before: DisaggDeployment, after: DisaggDeployment) -> tuple[set[tuple[str, str]], set[str]]:
    """Return (roles, effect) for each DaemonSet, and the roles whose engines' variables change, as rendered."""
    one, two = rendered(before), rendered(after)
    old, new = daemon_sets(one), daemon_sets(two)
    found = {(roles, "created") for roles in new.keys() - old.keys()}
    found |= {(roles, "deleted") for roles in old.keys() - new.keys()}
    both = old.keys() & new.keys()
    found |= {(roles, "replaced") for roles in both if template(old[roles]) != template(new[roles])}
    found |= {(roles, "moved") for roles in both if affinity(old[roles]) != affinity(new[roles])}
    maps = {role: f"ConfigMap/{names.engine('llama', role)}" for role in ("prefill", "decode")}
    return found, {role for role, name in maps.items() if one[name]["data"] != two[name]["data"]}


SUBJECTS = {"agents of prefill": "prefill", "agents of decode": "decode", "agents of nodes with both roles": "both"}


def answer(found: list[Effect]) -> tuple[set[tuple[str, str]], set[str]]:
    agents = {(SUBJECTS[each.subject], each.effect) for each in found if each.subject in SUBJECTS}
    engines = {each.subject.removeprefix("engines of ") for each in found if each.effect == "restart"}
    return agents, engines


@pytest.mark.parametrize("selectors", SELECTORS)
@pytest.mark.parametrize("field", FIELDS)
def test_the_answer_to_a_change_of_a_field_is_what_the_operator_renders(field: str, selectors: str) -> None:
    base = with_fields(based(selectors), {"agents.allowOpenDataPath": True} if field in OPEN else {})
    before, after = deployment(base), deployment(with_fields(base, {field: FIELDS[field]}))
    changes = [(before, after), (after, before)]
    # The way back differs by the groups of the running deployment alone.
    for one, two in changes if selectors == "apart" or "nodeSelector" in field else changes[:1]:
        found, expected = effects(one, two), truth(one, two)
        assert answer(found) == expected
        # Every effect names the field, and a field without any is told to be in place.
        assert any(cause.startswith(f"spec.{field}") for each in found for cause in each.fields)
        is_in_place = any(each.effect == "in place" for each in found)
        assert is_in_place == (expected == (set(), set()) and field not in {"decode.target", "paused"}) or (
            field == "paused"
        )


def test_every_field_is_in_the_table() -> None:
    text = (ROOT / "crds/disaggdeployments.longshore.dev.yaml").read_text(encoding="utf-8")
    spec = parse(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

    def leaves(place: Body, path: str) -> list[str]:
        inner = place.get("properties")
        if inner is None or path.rpartition(".")[2] in {"resources", "securityContext"}:
            return [path]
        return [leaf for name, entry in inner.items() for leaf in leaves(entry, f"{path}.{name}" if path else name)]

    # A change of the model is refused.
    wanted = {leaf for leaf in leaves(spec, "") if not leaf.startswith("model.")}
    assert wanted == FIELDS.keys()


def test_several_changes_at_once_name_their_causes() -> None:
    before = deployment(BASE)
    after = deployment(
        with_fields(BASE, {"prefill.tensorParallel": 2, "decode.staging.poolSize": "8Gi", "prefill.instances": 2})
    )
    found = {(each.subject, each.effect): each.fields for each in effects(before, after)}
    assert found == {
        ("agents of prefill", "replaced"): ("spec.prefill.tensorParallel",),
        ("agents of decode", "replaced"): ("spec.decode.staging.poolSize",),
        ("engines of prefill", "restart"): ("spec.prefill.tensorParallel",),
        ("engines of decode", "reconnect"): (),
        ("no agent and no engine", "in place"): ("spec.prefill.instances",),
    }


def test_a_change_of_nothing_has_no_effect() -> None:
    given = {"transfer.backend": "NIXL", "prefill.staging.bufferSize": 64 << 20}
    assert effects(deployment(BASE), deployment(with_fields(BASE, given))) == []


MEMORY: list[dict[str, Any]] = [
    {},
    {"prefill.ranksPerNode": 8, "decode.ranksPerNode": 4},
    {"decode.target": "Host", "decode.staging.poolSize": "1Gi"},
    {"agents.gpuAccess": "CDI", "decode.target": "Host"},
    {"agents.resources": {"limits": {"memory": "3Gi"}}},
    {"agents.resources": {"limits": {"cpu": 2}}, "agents.guaranteed": True},
]


@pytest.mark.parametrize("selectors", SELECTORS)
@pytest.mark.parametrize("fields", MEMORY, ids=lambda fields: ",".join(fields) or "defaults")
def test_the_memory_of_agents_is_what_the_operator_renders(fields: dict[str, Any], selectors: str) -> None:
    found = deployment(with_fields(based(selectors), fields))
    told = sizes(found.spec, found.agent_config(), 8192, WHOLE_PAGES, {"prefill": "CPU", "decode": "CPU"})
    pods = {
        roles: body["spec"]["template"]["spec"]["containers"][0]["resources"]
        for roles, body in daemon_sets(rendered(found)).items()
    }
    for agent in told.agents:
        assert agent.request == pods[agent.roles].get("requests", {}).get("memory", "")
        assert agent.limit == pods[agent.roles].get("limits", {}).get("memory", "")
    assert {agent.roles for agent in told.agents} == pods.keys()
    if "agents.gpuAccess" in fields or "agents.resources" in fields:
        return
    # Without GPUs, a pod's memory is that of its processes and of the staging that is told.
    for agent in told.agents:
        roles = [role for role in told.memory if role.role in role_names(agent.roles)]
        workers = sum(role.ranks_per_node * role.memories for role in roles)
        assert parse_quantity(agent.request) == sum(role.node_bytes for role in roles) + (256 << 20) * (workers + 1)


def test_a_running_object_of_the_api_server_equals_its_manifest() -> None:
    given = with_fields(BASE, {"agents.env": POD["env"]})
    stored = msgspec.to_builtins(deployment(given).spec)
    plain = {key: value for key, value in stored.items() if key in given or key == "transfer"}
    assert effects(deployment(plain), deployment(given)) == []
