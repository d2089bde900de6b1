"""Tests the settings of agents' pods: rendered, overridden by role, checked, and allowed or refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from operator_scene import IMAGES, MPS, Scene

from longshore_agent.settings import Role, Settings
from longshore_operator import kinds, names
from longshore_operator.render.wanted import MpsDirectory
from longshore_spec.environment import from_json, variable
from longshore_spec.permission import Allowed
from longshore_spec.pod_settings import AGENT_VARIABLES, LIBRARY_VARIABLES

Body = dict[str, Any]
CRD = Path(__file__).parents[2] / "crds" / "disaggdeployments.longshore.dev.yaml"
PREFILL = {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}}
DECODE = {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"role": "decode"}}


def templates(**spec: Any) -> dict[str, Body]:
    """The pod templates by the roles of their nodes."""
    found = [body for kind, body in Scene(**spec).decide().apply if kind is kinds.DAEMON_SET]
    return {body["metadata"]["labels"][names.ROLES_LABEL]: body["spec"]["template"] for body in found}


def pod(**agents: Any) -> Body:
    spec: Body = templates(agents=agents)["decode"]["spec"]
    return spec


def container(**agents: Any) -> Body:
    return dict(pod(**agents)["containers"][0])


def fault(**spec: Any) -> str:
    scene = Scene(**spec)
    assert scene.reasons()["Compatible"] == "InvalidSpec"
    assert scene.decide().apply == ()
    return scene.message("Compatible")


VOLUMES = [
    {"name": "conf", "configMap": {"name": "topology"}},
    {"name": "secret", "secret": {"secretName": "token"}},
    {"name": "scratch", "emptyDir": {}},
    {"name": "all", "projected": {"sources": [{"configMap": {"name": "topology"}}]}},
    {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    {"name": "driver", "csi": {"driver": "csi.example.com", "volumeAttributes": {"a": "b"}}},
    {"name": "verbs", "hostPath": {"path": "/dev/infiniband"}},
]
MOUNTS = [
    {"name": entry["name"], "mountPath": f"/mnt/{entry['name']}", "subPath": "a", "readOnly": True} for entry in VOLUMES
]


# The same fields of pods are in `agents` and in both roles.
@pytest.mark.shows(
    "field.{,prefill.,decode.}agents.{annotations,labels,priorityClassName}",
    "field.{,prefill.,decode.}agents.env.{name,value}",
    "field.{,prefill.,decode.}agents.resources.{limits,requests}",
    "field.{,prefill.,decode.}agents.resources.claims.{name,request}",
    "field.{,prefill.,decode.}agents.resourceClaims.{name,resourceClaimName,resourceClaimTemplateName}",
    "field.{,prefill.,decode.}agents.securityContext.capabilities.add",
    "field.{,prefill.,decode.}agents.securityContext.seLinuxOptions.{level,type}",
    "field.{,prefill.,decode.}agents.volumes.{name,configMap,secret,emptyDir,projected,downwardAPI,csi,hostPath}",
    "field.{,prefill.,decode.}agents.volumeMounts.{name,mountPath,readOnly,subPath}",
)
def test_fields_of_pods_are_where_kubernetes_has_them() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "all-gpus"}, {"name": "nic", "resourceClaimName": "nics"}]
    agents = {
        "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
        "labels": {"team": "inference"},
        "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}, {"name": "LONGSHORE_LOG_LEVEL", "value": "debug"}],
        "priorityClassName": "system-node-critical",
        "resources": {
            "requests": {"memory": "1Gi"},
            "limits": {"rdma/hca": 1, "memory": "2Gi"},
            "claims": [{"name": "gpu"}, {"name": "nic", "request": "r"}],
        },
        "resourceClaims": claims,
        "securityContext": {
            "capabilities": {"add": ["IPC_LOCK"]},
            "seLinuxOptions": {"type": "container_t", "level": "s0:c1"},
        },
        "volumes": VOLUMES,
        "volumeMounts": MOUNTS,
    }
    for template in templates(agents=agents).values():
        metadata, spec = template["metadata"], template["spec"]
        assert metadata["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"
        assert metadata["annotations"][names.CONFIG_ANNOTATION]
        assert metadata["labels"]["team"] == "inference"
        assert spec["priorityClassName"] == "system-node-critical"
        assert spec["resourceClaims"] == claims
        assert spec["securityContext"]["seLinuxOptions"] == {"type": "container_t", "level": "s0:c1"}
        assert spec["volumes"][-len(VOLUMES) :] == VOLUMES
        agent = spec["containers"][0]
        assert agent["env"][-2:] == agents["env"]
        assert agent["resources"] == agents["resources"]
        assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert agent["volumeMounts"][-len(MOUNTS) :] == MOUNTS
        assert not {"volumes", "env"} & spec["initContainers"][0].keys()


@pytest.mark.shows(
    "field.{,prefill.,decode.}agents.{annotations,labels,priorityClassName,runtimeClassName}",
    "field.{,prefill.,decode.}agents.env.{name,value}",
    "field.{,prefill.,decode.}agents.resources.{limits,requests}",
    "field.{,prefill.,decode.}agents.resources.claims.{name,request}",
    "field.{,prefill.,decode.}agents.resourceClaims.{name,resourceClaimName,resourceClaimTemplateName}",
    "field.{,prefill.,decode.}agents.securityContext.capabilities.add",
    "field.{,prefill.,decode.}agents.securityContext.seLinuxOptions.{level,type}",
    "field.{,prefill.,decode.}agents.volumes.{name,configMap,secret,emptyDir,projected,downwardAPI,csi,hostPath}",
    "field.{,prefill.,decode.}agents.volumeMounts.{name,mountPath,readOnly,subPath}",
)
def test_a_role_overrides_the_settings_of_all_agents_entry_by_entry() -> None:
    common = {
        "env": [{"name": "UCX_TLS", "value": "all"}, {"name": "UCX_LOG_LEVEL", "value": "warn"}],
        "labels": {"team": "a", "tier": "kv"},
        "runtimeClassName": "nvidia",
        "resources": {"limits": {"memory": "1Gi"}},
    }
    own = {
        "env": [{"name": "UCX_TLS", "value": "rc"}],
        "labels": {"team": "b"},
        "runtimeClassName": "other",
        "resources": {"limits": {"rdma/hca": 1}},
    }
    found = templates(agents=common, prefill=PREFILL | {"agents": own})

    def seen(role: str) -> tuple[Any, ...]:
        agent = found[role]["spec"]["containers"][0]
        values = {entry["name"]: entry.get("value") for entry in agent["env"]}
        labels = found[role]["metadata"]["labels"]
        shown = (values["UCX_TLS"], values["UCX_LOG_LEVEL"], labels["team"], labels["tier"])
        return *shown, found[role]["spec"]["runtimeClassName"], agent["resources"]["limits"]

    assert seen("prefill") == ("rc", "warn", "b", "kv", "other", {"memory": "1Gi", "rdma/hca": 1})
    assert seen("decode") == ("all", "warn", "a", "kv", "nvidia", {"memory": "1Gi"})
    # An edit for one role does not change the other's pods.
    assert templates(agents=common)["decode"] == found["decode"]


def test_overrides_that_contradict_each_other_are_refused_where_nodes_may_have_both_roles() -> None:
    tls = [[{"name": "UCX_TLS", "value": value}] for value in ("rc", "tcp")]
    one, other = ({"env": env, "priorityClassName": env[0]["value"]} for env in tls)
    assert set(templates(prefill=PREFILL | {"agents": one}, decode=DECODE | {"agents": other})) == {"prefill", "decode"}
    near = {"nodeSelector": {"zone": "a"}}
    message = fault(prefill=PREFILL | near | {"agents": one}, decode=DECODE | near | {"agents": other})
    assert "spec.prefill.agents.env[UCX_TLS] and spec.decode.agents.env[UCX_TLS] differ" in message
    assert "agents.priorityClassName" in message
    both = templates(prefill=PREFILL | near | {"agents": one}, decode=DECODE | near | {"agents": one})["both"]
    assert both["spec"]["priorityClassName"] == "rc"


FAULTS = {
    "no such setting": ({"env": [{"name": "LONGSHORE_LOG_LEVLE"}]}, "the nearest is LONGSHORE_LOG_LEVEL"),
    "a setting of a field": ({"env": [{"name": "LONGSHORE_BACKEND"}]}, "a field of the spec or the operator sets it"),
    "a setting of the operator": ({"env": [{"name": "LONGSHORE_BIND_HOST"}]}, "or the operator sets it"),
    "our annotation": ({"annotations": {"longshore.dev/config": "x"}}, "longshore.dev/config is set by the operator"),
    "our label": ({"labels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name is set by the operator"),
    "our volume": ({"volumes": [{"name": "keys", "emptyDir": {}}]}, "the agent has a volume keys"),
    **{
        f"a mount at {path}": ({"volumeMounts": [{"name": "a", "mountPath": path}]}, f"{path} is not below /mnt")
        for path in (
            "/etc/longshore/keys",
            "/run",
            "/mnt",
            "/mnt/../opt/longshore",
            "/opt/longshore/lib/python3.12/site-packages/sitecustomize.py",
            "/dev/infiniband",
        )
    },
}


@pytest.mark.parametrize(("agents", "message"), FAULTS.values(), ids=list(FAULTS))
@pytest.mark.parametrize("section", ["agents", "prefill.agents", "decode.agents"])
def test_a_setting_that_would_break_agents_is_refused_by_its_field(section: str, agents: Body, message: str) -> None:
    spec = {
        "agents": {"agents": agents},
        "prefill.agents": {"prefill": PREFILL | {"agents": agents}},
        "decode.agents": {"decode": DECODE | {"agents": agents}},
    }[section]
    said = fault(**spec)
    assert message in said
    assert f"spec.{section}.{next(iter(agents))}" in said


def test_the_variables_of_agents_are_the_settings_that_nothing_else_sets() -> None:
    ours = {entry["name"] for entry in container()["env"]}
    # The Service, the probes and the operator use the agents' HTTP server.
    page = {"LONGSHORE_HTTP_TOKEN_FILE", "LONGSHORE_HTTP_CERTIFICATE_FILE", "LONGSHORE_HTTP_KEY_FILE"}
    free = {
        variable(row.name)
        for row in dataclasses.fields(Settings)
        if not row.metadata["file"] and row.metadata["role"] is not Role.TEST
    }
    assert set(AGENT_VARIABLES) == free - ours - page
    assert list(AGENT_VARIABLES) == sorted(AGENT_VARIABLES)


def test_the_definition_takes_every_variable_that_the_operator_passes_on() -> None:
    schema = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    agents = schema["properties"]["spec"]["properties"]["agents"]["properties"]
    pattern = agents["env"]["items"]["properties"]["name"]["pattern"]
    names = [*AGENT_VARIABLES, *LIBRARY_VARIABLES, "LD_PRELOAD", "https_proxy"]
    assert [name for name in names if not re.search(pattern, name)] == []


# -- GPUs ----------------------------------------------------------------------------------------------------------


def variables(**agents: Any) -> Body:
    return {entry["name"]: entry.get("value") for entry in container(**agents)["env"]}


@pytest.mark.shows("field.{,prefill.,decode.}agents.gpuAccess")
def test_agents_see_all_gpus_by_the_nvidia_runtime() -> None:
    found = pod(gpuAccess="Runtime")
    assert found["runtimeClassName"] == "nvidia"
    assert variables(gpuAccess="Runtime")["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables(gpuAccess="Runtime")["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert pod(gpuAccess="Runtime", runtimeClassName="nv2")["runtimeClassName"] == "nv2"
    narrower = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0,1"}]
    assert variables(gpuAccess="Runtime", env=narrower)["NVIDIA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.shows("field.{,prefill.,decode.}agents.gpuAccess")
def test_agents_see_all_gpus_by_cdi() -> None:
    template = templates(agents={"gpuAccess": "CDI"})["decode"]
    assert template["metadata"]["annotations"]["cdi.k8s.io/longshore-agent"] == "nvidia.com/gpu=all"
    assert "runtimeClassName" not in template["spec"]
    assert variables(gpuAccess="CDI")["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize(
    "agents",
    [
        {"gpuAccess": "Runtime"},
        {"gpuAccess": "CDI"},
        {"runtimeClassName": "nvidia"},
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        {"gpuAccess": "CDI", "tolerations": [{"key": "team", "operator": "Exists"}]},
    ],
    ids=str,
)
def test_agents_with_gpus_tolerate_the_taint_of_gpu_nodes(agents: Body) -> None:
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(**agents)["tolerations"]


@pytest.mark.parametrize("own", [{"operator": "Exists"}, {"key": "nvidia.com/gpu", "value": "h100"}], ids=str)
def test_an_own_toleration_of_that_taint_stands(own: Body) -> None:
    assert pod(gpuAccess="CDI", tolerations=[own])["tolerations"] == [own]


def engine_variables(**spec: Any) -> dict[str, Body]:
    """The variables of engines' pods by role."""
    found = [body for kind, body in Scene(**spec).decide().apply if kind is kinds.CONFIG_MAP]
    return {role: body["data"] for body in found if (role := body["metadata"]["labels"].get(names.ENGINE_LABEL))}


@pytest.mark.shows("field.gpu.mps")
def test_with_gpu_mps_agents_and_engines_find_the_pipes_of_the_nodes_daemon() -> None:
    spec = {"gpu": {"mps": True}}
    for template in templates(**spec).values():
        (agent,) = template["spec"]["containers"]
        assert {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": MPS.pod} in agent["env"]
        # Clients lock a file there.
        assert {"name": "mps", "mountPath": MPS.pod} in agent["volumeMounts"]
        assert {"name": "mps", "hostPath": {"path": MPS.host, "type": "Directory"}} in template["spec"]["volumes"]
        # The init container is root, and has nothing to do there.
        assert "mps" not in str(template["spec"]["initContainers"])
    for data in engine_variables(**spec).values():
        assert data["CUDA_MPS_PIPE_DIRECTORY"] == MPS.pod
        assert data["LONGSHORE_ENGINE_MPS_HOST_DIRECTORY"] == MPS.host
    plain = f"{list(templates().values())} {engine_variables()}"
    assert "mps" not in plain.lower()
    assert set(engine_variables()) == {"prefill", "decode"}


def test_no_own_volume_hides_that_of_the_daemon() -> None:
    agents = {"volumes": [{"name": "mps", "emptyDir": {}}]}
    assert "the agent has a volume mps" in fault(agents=agents, gpu={"mps": True})
    assert Scene(agents=agents).reasons()["Compatible"] == "PlanMade"


def test_mps_is_refused_where_the_administrator_names_no_daemon() -> None:
    strict = dataclasses.replace(IMAGES, mps=MpsDirectory())
    scene = Scene(gpu={"mps": True})
    assert scene.decide(strict).apply == ()
    assert scene.reasons(images=strict)["Compatible"] == "NotAllowed"
    message = scene.message("Compatible", images=strict)
    assert message.startswith("spec.gpu.mps: ")
    assert message.endswith("ask for the chart's value gpu.mps.hostDirectory")
    assert Scene(gpu={"mps": False}).reasons(images=strict)["Compatible"] == "PlanMade"


# -- memory --------------------------------------------------------------------------------------------------------


def memory(role: str = "decode", **spec: Any) -> Body:
    return dict(templates(**spec)[role]["spec"]["containers"][0]["resources"])


def test_agents_request_the_memory_of_their_nodes_staging() -> None:
    # 256Mi of the agent, and for each of 4 ranks 256Mi of its worker and 4 lanes of 64Mi.
    assert memory("prefill") == {"requests": {"memory": "2304Mi"}}
    assert memory("prefill", prefill=PREFILL | {"staging": {"lanes": 8}}) == {"requests": {"memory": "3328Mi"}}
    # One rank with a ring of 4Gi.
    assert memory() == {"requests": {"memory": "4608Mi"}}
    near = {"nodeSelector": {"zone": "a"}}
    assert memory("both", prefill=PREFILL | near, decode=DECODE | near) == {"requests": {"memory": "6656Mi"}}


def test_staging_on_gpus_is_no_memory_of_the_node() -> None:
    assert memory(agents={"gpuAccess": "CDI"}) == {"requests": {"memory": "2304Mi"}}


def test_pages_in_host_memory_take_a_worker_and_a_ring_of_their_own_beside_each_ranks_gpu() -> None:
    host = DECODE | {"target": "Host", "ranksPerNode": 2}
    for agents, each in (({"gpuAccess": "CDI"}, 2048 + 256 + 4096), ({}, 2 * (256 + 4096))):
        expected = {"memory": f"{256 + 2 * each}Mi"}
        assert memory(agents=agents, decode=host) == {"requests": expected, "limits": expected}
    assert memory("prefill", decode=host) == memory("prefill")


@pytest.mark.shows("field.{prefill,decode}.ranksPerNode")
def test_the_ranks_of_a_node_limit_its_agents_memory() -> None:
    eight = {"memory": "35072Mi"}
    assert memory(decode=DECODE | {"ranksPerNode": 8}) == {"requests": eight, "limits": eight}


@pytest.mark.parametrize("given", [{"requests": {"memory": "1Gi"}}, {"limits": {"memory": "1Gi"}}], ids=str)
def test_given_memory_stands(given: Body) -> None:
    assert memory(decode=DECODE | {"ranksPerNode": 8}, agents={"resources": given}) == given


@pytest.mark.shows("field.{,prefill.,decode.}agents.guaranteed")
def test_one_field_makes_pods_guaranteed() -> None:
    resources = {"requests": {"cpu": 2}, "limits": {"rdma/hca": 1}}
    found = pod(guaranteed=True, resources=resources)
    both = {"cpu": 2, "memory": "4608Mi", "rdma/hca": 1}
    assert found["containers"][0]["resources"] == {"requests": both, "limits": both}
    (init,) = found["initContainers"]
    assert init["resources"]["requests"] == init["resources"]["limits"] and "cpu" in init["resources"]["limits"]
    assert "give resources.limits.cpu" in fault(agents={"guaranteed": True})


def test_shared_memory_has_a_limit() -> None:
    def size(role: str) -> str:
        volumes = templates()[role]["spec"]["volumes"]
        (found,) = (entry["emptyDir"]["sizeLimit"] for entry in volumes if entry["name"] == "shared-memory")
        return str(found)

    assert (size("prefill"), size("decode")) == ("512Mi", "320Mi")


# -- what the administrator allows -----------------------------------------------------------------------------------


def volume(**source: Body) -> Body:
    return {"volumes": [{"name": "x", **source}]}


def variable_named(name: str, value: str = "/plug") -> Body:
    return {"env": [{"name": name, "value": value}]}


APPARMOR = {"annotations": {"container.apparmor.security.beta.kubernetes.io/agent": "unconfined"}}
# What an author may write only if the administrator allows it: the settings, a value that allows them, and one that does not.
ASKED: dict[str, tuple[Body, Body, Body]] = {
    "spec.agents.image": ({"image": "other:2"}, {"image": True}, {"hostIPC": True}),
    "spec.agents.hostNetwork": ({"hostNetwork": True, "allowOpenDataPath": True}, {"hostNetwork": True}, {}),
    "spec.agents.hostIPC": ({"hostIPC": True}, {"hostIPC": True}, {}),
    "spec.agents.networkPolicy": (
        {"networkPolicy": False, "allowOpenDataPath": True},
        {"noNetworkPolicy": True},
        {},
    ),
    "spec.agents.securityContext.capabilities.add: SYS_ADMIN": (
        {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
        {"capabilities": ["SYS_ADMIN"]},
        {"capabilities": ["IPC_LOCK"]},
    ),
    "spec.agents.securityContext.seLinuxOptions.type: container_engine_t": (
        {"securityContext": {"seLinuxOptions": {"type": "container_engine_t"}}},
        {"seLinuxTypes": ["container_engine_t"]},
        {"seLinuxTypes": ["container_init_t"]},
    ),
    "spec.agents.volumes: hostPath /dev/infiniband": (
        volume(hostPath={"path": "/dev/infiniband"}),
        {"hostPaths": ["/dev"]},
        {"hostPaths": ["/dev/infini"]},
    ),
    "spec.agents.volumes: hostPath /etc": (
        volume(hostPath={"path": "/dev/infiniband/../../etc"}),
        {"hostPaths": ["/etc"]},
        {"hostPaths": ["/dev"]},
    ),
    "spec.agents.volumes: csi hostpath.csi.k8s.io": (
        volume(csi={"driver": "hostpath.csi.k8s.io", "volumeAttributes": {"path": "/"}}),
        {"csiDrivers": ["hostpath.csi.k8s.io"]},
        {"csiDrivers": ["secrets-store.csi.k8s.io"]},
    ),
    "spec.agents.annotations: cdi.k8s.io/x": (
        {"annotations": {"cdi.k8s.io/x": "vendor.com/device=all"}},
        {"annotations": ["cdi.k8s.io/*"]},
        {"annotations": ["k8s.v1.cni.cncf.io/*"]},
    ),
    "spec.agents.annotations: k8s.v1.cni.cncf.io/networks": (
        {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
        {"annotations": ["k8s.v1.cni.cncf.io/networks=rdma-net"]},
        {"annotations": ["k8s.v1.cni.cncf.io/networks=other"]},
    ),
    "spec.agents.annotations: io.kubernetes.cri-o.Devices": (
        {"annotations": {"io.kubernetes.cri-o.Devices": "/dev/kmsg"}},
        {"annotations": ["io.kubernetes.cri-o.Devices"]},
        {},
    ),
    "spec.agents.annotations: container.apparmor.security.beta.kubernetes.io/agent": (
        APPARMOR,
        {"annotations": ["container.apparmor.security.beta.kubernetes.io/agent=unconfined"]},
        {"annotations": ["container.apparmor.security.beta.kubernetes.io/agent=localhost/*"]},
    ),
    "spec.agents.priorityClassName: system-node-critical": (
        {"priorityClassName": "system-node-critical"},
        {"priorityClasses": ["system-node-critical"]},
        {"priorityClasses": ["high"]},
    ),
    "spec.agents.tolerations: every taint": (
        {"tolerations": [{"operator": "Exists"}]},
        {"tolerations": ["*"]},
        {"tolerations": ["dedicated", "node-role.kubernetes.io/control-plane"]},
    ),
    "spec.agents.tolerations: dedicated": (
        {"tolerations": [{"key": "dedicated", "operator": "Exists"}]},
        {"tolerations": ["dedicated"]},
        {"tolerations": ["dedicated=inference"]},
    ),
    **{
        f"spec.agents.env: {name}": (variable_named(name), {"variables": [name]}, {"variables": [f"{name}X"]})
        for name in (
            "LD_PRELOAD",
            "NIXL_PLUGIN_DIR",
            "UCX_MODULE_DIR",
            "UCX_GDB_COMMAND",
            "UCX_LOG_FILE",
            "NCCL_NET_PLUGIN",
            "NVIDIA_VISIBLE_DEVICES",
            "NVIDIA_DRIVER_CAPABILITIES",
            "MC_CUSTOM_TOPO_JSON",
            "MC_TCP_BIND_ADDRESS",
            "OTEL_EXPORTER_OTLP_CERTIFICATE",
            "OTEL_PYTHON_TRACER_PROVIDER",
        )
    },
}


@pytest.mark.shows("field.agents.image", "field.agents.hostIPC")
@pytest.mark.parametrize("path", ASKED)
def test_only_the_administrator_allows_a_part_of_the_node_or_own_code(path: str) -> None:
    agents, enough, other = ASKED[path]
    scene = Scene(agents=agents)
    for value in ({}, other):
        strict = dataclasses.replace(IMAGES, allowed=from_json(json.dumps(value), Allowed))
        decision = scene.decide(strict)
        assert decision.apply == decision.delete == ()
        assert scene.reasons(images=strict)["Compatible"] == "NotAllowed"
        message = scene.message("Compatible", images=strict)
        assert message.startswith(path)
        assert f"ask for the chart's value allow.{next(iter(enough))}: " in message
    allowed = dataclasses.replace(IMAGES, allowed=from_json(json.dumps(enough), Allowed))
    assert scene.reasons(images=allowed)["Compatible"] == "PlanMade"


def test_the_value_that_a_refusal_names_allows_it() -> None:
    for agents, *_ in ASKED.values():
        scene = Scene(agents=agents)
        strict = dataclasses.replace(IMAGES, allowed=Allowed())
        (named,) = re.findall(r"chart's value allow\.(\S+: [^;]+)", scene.message("Compatible", images=strict))
        value = yaml.safe_load(named.replace(": [", ": ['").replace("]", "']"))
        allowed = dataclasses.replace(IMAGES, allowed=from_json(json.dumps(value), Allowed))
        assert scene.reasons(images=allowed)["Compatible"] == "PlanMade", named


def test_a_refused_variable_names_the_free_one_that_is_meant() -> None:
    strict = dataclasses.replace(IMAGES, allowed=Allowed())
    scene = Scene(agents=variable_named("UCX_NET_DEVICE"))
    assert scene.message("Compatible", images=strict).endswith("; UCX_NET_DEVICES needs no permission")


def test_no_free_variable_names_a_file_a_program_or_an_address_to_listen_at() -> None:
    word = re.compile(
        r"_(DIR|FILE|PATH|PLUGIN|MODULES?|COMMAND|JSON|CERTIFICATE|KEY|BIND|PORT_RANGE|LIB|PROVIDER)(_|$)"
    )
    harmless = {"UCX_RC_PATH_MTU"}
    assert [name for name in LIBRARY_VARIABLES if word.search(name) and name not in harmless] == []
    assert list(LIBRARY_VARIABLES) == sorted(set(LIBRARY_VARIABLES))


def test_the_page_on_permission_has_every_field_of_agents_and_every_value_of_the_chart() -> None:
    page = (CRD.parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
    part = page.partition("## What the author of a deployment may set")[2].partition("\n## ")[0]
    schema = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields = set(schema["properties"]["spec"]["properties"]["agents"]["properties"])
    told = set(
        re.findall(r"`(?:agents)?\.(\w+)", "\n".join(line.split("|")[1] for line in part.splitlines() if "|" in line))
    )
    assert fields - told == set()
    values = set(re.findall(r"`allow\.(\w+)`", part))
    assert values == {field.encode_name for field in msgspec.structs.fields(Allowed)}


def test_devices_of_the_node_may_have_their_own_path() -> None:
    agents = volume(hostPath={"path": "/dev/infiniband"}) | {
        "volumeMounts": [{"name": "x", "mountPath": "/dev/infiniband"}]
    }
    assert Scene(agents=agents).reasons()["Compatible"] == "PlanMade"
    elsewhere = agents | {"volumeMounts": [{"name": "x", "mountPath": "/dev/shm"}]}
    assert "/dev/shm is not below /mnt" in fault(agents=elsewhere)
    scratch = volume(emptyDir={}) | {"volumeMounts": [{"name": "x", "mountPath": "/dev/infiniband"}]}
    assert "/dev/infiniband is not below /mnt" in fault(agents=scratch)
    # A role may mount a volume of all agents.
    assert (
        Scene(
            agents=volume(hostPath={"path": "/dev/infiniband"}),
            decode=DECODE | {"agents": {"volumeMounts": agents["volumeMounts"]}},
        ).reasons()["Compatible"]
        == "PlanMade"
    )


def test_a_path_that_only_begins_alike_is_not_allowed() -> None:
    volumes = [{"name": "x", "hostPath": {"path": "/dev/infinibandage"}}]
    scene = Scene(agents={"volumes": volumes})
    assert scene.reasons()["Compatible"] == "NotAllowed"


def test_the_container_that_is_root_is_of_the_operators_image() -> None:
    found = pod(image="other:2")
    assert found["containers"][0]["image"] == "other:2"
    assert found["initContainers"][0]["image"] == "operator:1"
