"""The effect of each value of the chart on the installed objects. Needs only Helm, no cluster."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from controlplane import binaries
from deployments import BASELINE_FOLDER, CHART, VERSION, rendered_chart

from longshore_spec.environment import from_json
from longshore_spec.permission import Allowed

Body = dict[str, Any]
Objects = dict[tuple[str, str], Body]
OPERATOR = "longshore-operator"
INJECTION = "MutatingAdmissionPolicy"
DIGEST = "sha256:" + "0123456789abcdef" * 4
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}


@functools.cache
def rendered(*arguments: str) -> Objects:
    """Return the objects that the chart installs with these values, by kind and name."""
    found = rendered_chart(*arguments, f"--api-versions=admissionregistration.k8s.io/v1beta1/{INJECTION}")
    return {(entry["kind"], entry["metadata"]["name"]): entry for entry in found}


def pod(objects: Objects) -> Body:
    return objects["Deployment", OPERATOR]["spec"]["template"]["spec"]


def container(objects: Objects) -> Body:
    return pod(objects)["containers"][0]


def variable(name: str) -> Callable[[Objects], object]:
    def look(objects: Objects) -> object:
        named = {entry["name"]: entry.get("value") for entry in container(objects)["env"]}
        return named.get(f"LONGSHORE_{name}")

    return look


def there(kind: str) -> Callable[[Objects], object]:
    return lambda objects: any(found == kind for found, _ in objects)


def tried(objects: Objects) -> Body:
    found = next(body for (kind, name), body in objects.items() if kind == "Job" and "test" in name)
    return found["spec"]["template"]["spec"]["containers"][0]


def pods(objects: Objects) -> list[Body]:
    """Return the pods of the operator and of its test."""
    found = [body["spec"]["template"]["spec"] for (kind, _), body in objects.items() if kind in {"Deployment", "Job"}]
    assert len(found) >= 2
    return found


def names_of(objects: Objects) -> set[str]:
    """Return what the names of objects and references to them begin with, without the release's namespace."""
    text = json.dumps([body for (kind, _), body in objects.items() if kind != "CustomResourceDefinition"])
    found = {name.removeprefix("default-") for kind, name in objects if kind != "CustomResourceDefinition"}
    stems = {re.sub("-(test|edit|view)$", "", name) for name in found}
    referred = re.findall(r'"(?:serviceAccountName|LONGSHORE_LEASE_NAME)": "([^"]+)"', text)
    return stems | {re.sub("-test$", "", name) for name in referred}


def with_text(objects: Objects, field: str, key: str) -> set[str]:
    """Return which of all objects and pods have a label or annotation: `ALL` for each one."""
    metadata = {"objects": [], "pods": []}
    for (kind, _), body in objects.items():
        # Any release's; it stays when this one goes.
        if kind != "CustomResourceDefinition":
            metadata["objects"].append(body["metadata"])
        if kind in {"Deployment", "Job"}:
            metadata["pods"].append(body["spec"]["template"]["metadata"])
    having = {name: [key in (entry.get(field) or {}) for entry in entries] for name, entries in metadata.items()}
    assert all(any(each) == all(each) for each in having.values()), having
    return {name for name, each in having.items() if all(each)}


def accounts(objects: Objects) -> set[str]:
    """Return the account of the operator's pod, and those that its bindings name."""
    bound = {
        entry["name"]
        for (kind, name), body in objects.items()
        if kind.endswith("Binding") and "test" not in name
        for entry in body["subjects"]
    }
    return bound | {pod(objects)["serviceAccountName"]}


def try_out(objects: Objects) -> str:
    return json.dumps(tried(objects))


def roles(objects: Objects) -> tuple[bool, bool]:
    """Whether rights hold for the whole cluster, and whether nodes may be read."""
    text = json.dumps([body for (kind, _), body in objects.items() if kind == "ClusterRole"])
    return '"daemonsets"' in text, '"nodes"' in text


def edits(objects: Objects) -> bool:
    """Whether the role `edit` may write deployments."""
    labels = objects["ClusterRole", f"default-{OPERATOR}-edit"]["metadata"]["labels"]
    return "rbac.authorization.k8s.io/aggregate-to-edit" in labels


def monitor_labels(objects: Objects) -> Body:
    return objects["PodMonitor", OPERATOR]["metadata"]["labels"]


def runbooks(objects: Objects) -> list[str]:
    rules = objects.get(("PrometheusRule", OPERATOR), {"spec": {"groups": []}})["spec"]["groups"]
    return [rule["annotations"]["runbook_url"] for group in rules for rule in group["rules"] if "alert" in rule]


def verifying(deployment: str, namespace: str = "") -> Body:
    return {"test": {"verify": {"deployment": deployment, "namespace": namespace}}}


def verified_in(objects: Objects) -> list[str]:
    """Return the namespaces of the objects that run `longshore verify`: its Job, account, role and binding."""
    return sorted(body["metadata"]["namespace"] for (_, name), body in objects.items() if name == f"{OPERATOR}-verify")


def allowed(name: str) -> Callable[[Objects], object]:
    """Look at what the operator reads of one field of the value `allow`."""
    return lambda objects: json.loads(str(variable("ALLOW")(objects)))[name]


ALLOW: Body = {
    "image": True,
    "hostNetwork": True,
    "hostIPC": True,
    "noNetworkPolicy": True,
    "annotations": ["k8s.v1.cni.cncf.io/networks=a,b", "cdi.k8s.io/*"],
    "capabilities": ["IPC_LOCK", "NICE"],
    "csiDrivers": ["secrets-store.csi.k8s.io"],
    "hostPaths": ["/a", "/b"],
    "priorityClasses": ["system-node-critical"],
    "seLinuxTypes": ["container_engine_t"],
    "tolerations": ["dedicated=inference", "*"],
    "variables": ["UCX_*"],
}
ALL = {"objects", "pods"}
SCRATCH = {"name": "x", "emptyDir": {}}
SPREAD = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
RULED = {"podMonitor": {"enabled": True}, "monitoring": {"rules": {"enabled": True}}}
SETTINGS = {"LONGSHORE_POLL_S": "7"}
TOLERATIONS = [{"operator": "Exists"}]
# Path of the value -> the values to set (with others that make the effect visible), where to look, and results before and
# after.
VALUES: dict[str, tuple[Body, Callable[[Objects], object], object, object]] = {
    "nameOverride": ({"nameOverride": "kv"}, names_of, {OPERATOR}, {"longshore-kv-operator"}),
    "fullnameOverride": ({"fullnameOverride": "kv"}, names_of, {OPERATOR}, {"kv"}),
    "commonLabels": ({"commonLabels": {"team": "a"}}, lambda o: with_text(o, "labels", "team"), set(), ALL),
    "commonAnnotations": ({"commonAnnotations": {"a": "b"}}, lambda o: with_text(o, "annotations", "a"), set(), ALL),
    "podLabels": ({"podLabels": {"team": "a"}}, lambda o: with_text(o, "labels", "team"), set(), {"pods"}),
    "podAnnotations": ({"podAnnotations": {"a": "b"}}, lambda o: with_text(o, "annotations", "a"), set(), {"pods"}),
    "extraEnv": (
        {"extraEnv": [{"name": "HTTPS_PROXY", "value": "p"}]},
        lambda o: {entry["name"]: entry.get("value") for entry in container(o)["env"]}.get("HTTPS_PROXY"),
        None,
        "p",
    ),
    "volumes": ({"volumes": [SCRATCH]}, lambda o: SCRATCH in pod(o)["volumes"], False, True),
    "volumeMounts": (
        {"volumes": [SCRATCH], "volumeMounts": [{"name": "x", "mountPath": "/x"}]},
        lambda o: {"name": "x", "mountPath": "/x"} in container(o)["volumeMounts"],
        False,
        True,
    ),
    "securityContext": (
        {"securityContext": {"runAsUser": 7, "runAsNonRoot": False}},
        lambda o: [(one["securityContext"]["runAsUser"], one["securityContext"]["runAsNonRoot"]) for one in pods(o)],
        [(10001, True)] * 2,
        [(7, False)] * 2,
    ),
    "containerSecurityContext": (
        {"containerSecurityContext": {"readOnlyRootFilesystem": False}},
        lambda o: [one["securityContext"]["readOnlyRootFilesystem"] for one in (container(o), tried(o))],
        [True] * 2,
        [False] * 2,
    ),
    "serviceAccount.create": (
        {"serviceAccount": {"create": False}},
        lambda o: (("ServiceAccount", OPERATOR) in o, accounts(o)),
        (True, {OPERATOR}),
        (False, {"default"}),
    ),
    "serviceAccount.name": (
        {"serviceAccount": {"name": "kv"}},
        lambda o: (("ServiceAccount", "kv") in o, accounts(o)),
        (False, {OPERATOR}),
        (True, {"kv"}),
    ),
    "serviceAccount.annotations": (
        {"serviceAccount": {"annotations": {"a": "b"}}},
        lambda o: o["ServiceAccount", OPERATOR]["metadata"].get("annotations"),
        None,
        {"a": "b"},
    ),
    "topologySpreadConstraints": (
        {"topologySpreadConstraints": [SPREAD], "replicas": 2},
        lambda o: pod(o).get("topologySpreadConstraints"),
        None,
        [SPREAD],
    ),
    "openshift.enabled": (
        {"openshift": {"enabled": True}},
        lambda o: (there("SecurityContextConstraints")(o), ["runAsUser" in one["securityContext"] for one in pods(o)]),
        (False, [True, True]),
        (True, [False, False]),
    ),
    "openshift.namespaces": (
        {"openshift": {"enabled": True, "namespaces": ["team"]}},
        lambda o: [
            body["metadata"]["namespace"] for (kind, name), body in o.items() if "agents" in name and "B" in kind
        ],
        [],
        ["team"],
    ),
    "image.registry": (
        {"image": {"registry": "mirror:5000"}},
        lambda o: (container(o)["image"], variable("OPERATOR_IMAGE")(o)),
        (f"{OPERATOR}:{VERSION}",) * 2,
        (f"mirror:5000/{OPERATOR}:{VERSION}",) * 2,
    ),
    "image.repository": (
        {"image": {"repository": "r/x"}},
        lambda o: container(o)["image"],
        f"{OPERATOR}:{VERSION}",
        f"r/x:{VERSION}",
    ),
    "image.tag": ({"image": {"tag": "7"}}, lambda o: container(o)["image"], f"{OPERATOR}:{VERSION}", f"{OPERATOR}:7"),
    "image.digest": (
        {"image": {"digest": DIGEST, "tag": "7"}},
        lambda o: container(o)["image"],
        f"{OPERATOR}:{VERSION}",
        f"{OPERATOR}@{DIGEST}",
    ),
    "image.pullPolicy": (
        {"image": {"pullPolicy": "Always"}},
        lambda o: container(o)["imagePullPolicy"],
        "IfNotPresent",
        "Always",
    ),
    "imagePullSecrets": ({"imagePullSecrets": ["a"]}, lambda o: pod(o).get("imagePullSecrets"), None, [{"name": "a"}]),
    "mode": (
        {"mode": "namespaced"},
        lambda o: (roles(o)[0], variable("WATCH_NAMESPACE")(o)),
        (True, ""),
        (False, "default"),
    ),
    "watchNodes": (
        {"watchNodes": False},
        lambda o: (roles(o)[1], variable("WATCH_NODES")(o)),
        (True, "true"),
        (False, "false"),
    ),
    "crds.install": ({"crds": {"install": False}}, there("CustomResourceDefinition"), True, False),
    "agent.image": ({"agent": {"image": "a:9"}}, variable("AGENT_IMAGE"), f"longshore-agent:{VERSION}", "a:9"),
    "agent.podLabels": (
        {"agent": {"podLabels": {"team": "a"}}},
        lambda o: json.loads(str(variable("AGENT_POD_LABELS")(o))),
        {},
        {"team": "a"},
    ),
    "agent.podAnnotations": (
        {"agent": {"podAnnotations": {"a/b": "c,d"}}},
        lambda o: json.loads(str(variable("AGENT_POD_ANNOTATIONS")(o))),
        {},
        {"a/b": "c,d"},
    ),
    "agent.pullPolicy": (
        {"agent": {"pullPolicy": "Never"}},
        variable("AGENT_IMAGE_PULL_POLICY"),
        "IfNotPresent",
        "Never",
    ),
    "agent.pullSecrets": ({"agent": {"pullSecrets": ["a", "b"]}}, variable("AGENT_IMAGE_PULL_SECRETS"), "", "a,b"),
    "agent.runtimeClassName": ({"agent": {"runtimeClassName": "n"}}, variable("AGENT_RUNTIME_CLASS"), "", "n"),
    "allow.image": ({"allow": {"image": ALLOW["image"]}}, allowed("image"), False, ALLOW["image"]),
    "allow.hostNetwork": (
        {"allow": {"hostNetwork": ALLOW["hostNetwork"]}},
        allowed("hostNetwork"),
        False,
        ALLOW["hostNetwork"],
    ),
    "allow.hostIPC": ({"allow": {"hostIPC": ALLOW["hostIPC"]}}, allowed("hostIPC"), False, ALLOW["hostIPC"]),
    "allow.noNetworkPolicy": (
        {"allow": {"noNetworkPolicy": ALLOW["noNetworkPolicy"]}},
        allowed("noNetworkPolicy"),
        False,
        ALLOW["noNetworkPolicy"],
    ),
    "allow.annotations": (
        {"allow": {"annotations": ALLOW["annotations"]}},
        allowed("annotations"),
        [],
        ALLOW["annotations"],
    ),
    "allow.capabilities": (
        {"allow": {"capabilities": ALLOW["capabilities"]}},
        allowed("capabilities"),
        [],
        ALLOW["capabilities"],
    ),
    "allow.csiDrivers": (
        {"allow": {"csiDrivers": ALLOW["csiDrivers"]}},
        allowed("csiDrivers"),
        [],
        ALLOW["csiDrivers"],
    ),
    "allow.hostPaths": ({"allow": {"hostPaths": ALLOW["hostPaths"]}}, allowed("hostPaths"), [], ALLOW["hostPaths"]),
    "allow.priorityClasses": (
        {"allow": {"priorityClasses": ALLOW["priorityClasses"]}},
        allowed("priorityClasses"),
        [],
        ALLOW["priorityClasses"],
    ),
    "allow.seLinuxTypes": (
        {"allow": {"seLinuxTypes": ALLOW["seLinuxTypes"]}},
        allowed("seLinuxTypes"),
        [],
        ALLOW["seLinuxTypes"],
    ),
    "allow.tolerations": (
        {"allow": {"tolerations": ALLOW["tolerations"]}},
        allowed("tolerations"),
        [],
        ALLOW["tolerations"],
    ),
    "allow.variables": ({"allow": {"variables": ALLOW["variables"]}}, allowed("variables"), [], ALLOW["variables"]),
    "gpu.mps.hostDirectory": (
        {"gpu": {"mps": {"hostDirectory": "/run/m"}}},
        variable("MPS_HOST_DIRECTORY"),
        "",
        "/run/m",
    ),
    "gpu.mps.pipeDirectory": (
        {"gpu": {"mps": {"hostDirectory": "/run/m", "pipeDirectory": "/m"}}},
        variable("MPS_PIPE_DIRECTORY"),
        "",
        "/m",
    ),
    "aggregateToEdit": ({"aggregateToEdit": True}, edits, False, True),
    "inject.enabled": ({"inject": {"enabled": True}}, there(INJECTION), False, True),
    "replicas": (
        {"replicas": 2},
        lambda o: (o["Deployment", OPERATOR]["spec"]["replicas"], "topologySpreadConstraints" in pod(o)),
        (1, False),
        (2, True),
    ),
    "logLevel": ({"logLevel": "debug"}, variable("LOG_LEVEL"), "info", "debug"),
    "logFormat": ({"logFormat": "json"}, variable("LOG_FORMAT"), "text", "json"),
    "settings": ({"settings": SETTINGS}, variable("POLL_S"), None, "7"),
    "resources.requests.cpu": (
        {"resources": {"requests": {"cpu": "2"}}},
        lambda o: container(o)["resources"]["requests"]["cpu"],
        "50m",
        "2",
    ),
    "resources.requests.ephemeral-storage": (
        {"resources": {"requests": {"ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "1Gi"}}},
        lambda o: [one["resources"]["requests"]["ephemeral-storage"] for one in (container(o), tried(o))],
        ["64Mi"] * 2,
        ["1Gi"] * 2,
    ),
    "resources.limits.ephemeral-storage": (
        {"resources": {"limits": {"ephemeral-storage": "1Gi"}}},
        lambda o: [one["resources"]["limits"]["ephemeral-storage"] for one in (container(o), tried(o))],
        ["256Mi"] * 2,
        ["1Gi"] * 2,
    ),
    "resources.requests.memory": (
        {"resources": {"requests": {"memory": "1Gi"}}},
        lambda o: container(o)["resources"]["requests"]["memory"],
        "128Mi",
        "1Gi",
    ),
    "resources.limits.memory": (
        {"resources": {"limits": {"memory": "2Gi"}}},
        lambda o: container(o)["resources"]["limits"]["memory"],
        "512Mi",
        "2Gi",
    ),
    "nodeSelector": ({"nodeSelector": {"a": "b"}}, lambda o: pod(o).get("nodeSelector"), None, {"a": "b"}),
    "tolerations": ({"tolerations": TOLERATIONS}, lambda o: pod(o).get("tolerations"), None, TOLERATIONS),
    "affinity": ({"affinity": AFFINITY}, lambda o: pod(o).get("affinity"), None, AFFINITY),
    "priorityClassName": ({"priorityClassName": "p"}, lambda o: pod(o).get("priorityClassName"), None, "p"),
    "podDisruptionBudget.enabled": (
        {"podDisruptionBudget": {"enabled": False}},
        there("PodDisruptionBudget"),
        True,
        False,
    ),
    "networkPolicy.enabled": ({"networkPolicy": {"enabled": False}}, there("NetworkPolicy"), True, False),
    "test.nodeSelector": (
        {"test": {"nodeSelector": {"zone": "b"}}},
        lambda o: "zone=b" in try_out(o),
        False,
        True,
    ),
    "test.limitSeconds": ({"test": {"limitSeconds": 77}}, lambda o: "77" in try_out(o), False, True),
    "test.verify.deployment": (verifying("llama"), verified_in, [], ["default"] * 4),
    "test.verify.namespace": (verifying("llama", "team"), verified_in, [], ["default", "default", "team", "team"]),
    "podMonitor.enabled": ({"podMonitor": {"enabled": True}}, there("PodMonitor"), False, True),
    "monitoring.rules.enabled": (RULED, there("PrometheusRule"), False, True),
    "monitoring.rules.runbookUrl": (
        {"podMonitor": {"enabled": True}, "monitoring": {"rules": {"enabled": True, "runbookUrl": "https://x/y"}}},
        lambda o: {url.partition("#")[0] for url in runbooks(o)},
        set(),
        {"https://x/y"},
    ),
    "monitoring.dashboard.enabled": (
        {"monitoring": {"dashboard": {"enabled": True}}},
        lambda o: ("ConfigMap", f"{OPERATOR}-dashboard") in o,
        False,
        True,
    ),
}


def changed(values: Body) -> Objects:
    return rendered(*(f"--set-json={name}={json.dumps(value)}" for name, value in values.items()))


@pytest.mark.shows(
    "value.image.{repository,tag,digest,pullPolicy}",
    "value.image.registry",
    "value.{nameOverride,fullnameOverride,commonLabels,commonAnnotations,podLabels,podAnnotations}",
    "value.{extraEnv,volumes,volumeMounts,securityContext,containerSecurityContext,topologySpreadConstraints}",
    "value.serviceAccount.{create,name,annotations}",
    "value.openshift.{enabled,namespaces}",
    "value.agent.{podLabels,podAnnotations}",
    "value.imagePullSecrets",
    "value.mode",
    "value.watchNodes",
    "value.crds.install",
    "value.agent.{image,pullPolicy,pullSecrets,runtimeClassName}",
    "value.allow.{image,hostNetwork,hostIPC,noNetworkPolicy}",
    "value.allow.{annotations,capabilities,csiDrivers,hostPaths,priorityClasses,seLinuxTypes,tolerations,variables}",
    "value.gpu.mps.{hostDirectory,pipeDirectory}",
    "value.aggregateToEdit",
    "value.inject.enabled",
    "value.replicas",
    "value.logFormat",
    "value.logLevel",
    "value.settings",
    "value.resources.requests.{cpu,memory,ephemeral-storage}",
    "value.resources.limits.{memory,ephemeral-storage}",
    "value.nodeSelector",
    "value.tolerations",
    "value.affinity",
    "value.priorityClassName",
    "value.podDisruptionBudget.enabled",
    "value.networkPolicy.enabled",
    "value.test.{nodeSelector,limitSeconds}",
    "value.test.verify.{deployment,namespace}",
    "value.monitoring.rules.{enabled,runbookUrl}",
    "value.monitoring.dashboard.enabled",
    "value.podMonitor.enabled",
)
@pytest.mark.parametrize("path", VALUES)
def test_a_value_changes_what_is_installed(path: str) -> None:
    values, look, before, after = VALUES[path]
    assert (look(rendered()), look(changed(values))) == (before, after)


@pytest.mark.parametrize("settings", [{"LONGSHORE_HTTP_PORT": 9090}, {"LONGSHORE_POLL_S": "soon"}, {"OTHER": "x"}])
def test_a_setting_that_is_unknown_or_set_by_another_value_is_refused(settings: Body) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        changed({"settings": settings})
    assert next(iter(settings)) in caught.value.stderr


def test_the_agents_image_has_a_digest_and_a_registry_as_the_operators() -> None:
    given = {"registry": "mirror:5000", "digest": DIGEST}
    assert variable("AGENT_IMAGE")(changed({"agent": {"image": given}})) == f"mirror:5000/longshore-agent@{DIGEST}"
    tagged = {"repository": "r/x", "tag": "7"}
    assert variable("AGENT_IMAGE")(changed({"agent": {"image": tagged}})) == "r/x:7"
    assert variable("AGENT_IMAGE")(changed({"agent": {"image": {}}})) == f"longshore-agent:{VERSION}"


def test_a_long_name_is_not_cut() -> None:
    """A cut name would rename the objects of a release that has a long name, and might be another release's."""
    assert names_of(changed({"nameOverride": "n" * 40})) == {f"longshore-{'n' * 40}-operator"}


def test_no_label_that_is_given_replaces_one_by_which_pods_are_selected() -> None:
    labels = {"app.kubernetes.io/name": "other", "app.kubernetes.io/instance": "other"}
    spec = changed({"commonLabels": labels, "podLabels": labels})["Deployment", OPERATOR]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_a_path_of_mps_in_pods_needs_one_on_nodes() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        changed({"gpu": {"mps": {"pipeDirectory": "/m"}}})
    assert "hostDirectory" in caught.value.stderr


def test_the_operator_reads_what_the_value_allow_says() -> None:
    text = str(variable("ALLOW")(changed({"allow": ALLOW})))
    assert json.loads(msgspec.json.encode(from_json(text, Allowed))) == ALLOW
    assert from_json(str(variable("ALLOW")(rendered())), Allowed) == Allowed()


def test_no_variable_comes_twice() -> None:
    listed = [entry["name"] for entry in container(changed({"settings": SETTINGS}))["env"]]
    assert len(listed) == len(set(listed))


def test_users_get_roles_in_either_mode() -> None:
    for mode, kind, prefix in (("cluster", "ClusterRole", "default-"), ("namespaced", "Role", "")):
        objects = changed({"mode": mode})
        for name in ("edit", "view"):
            (rule,) = objects[kind, f"{prefix}{OPERATOR}-{name}"]["rules"]
            assert ("create" in rule["verbs"]) is (name == "edit")
            assert rule["resources"] == ["disaggdeployments"]


def test_the_monitor_names_the_job_by_which_alerts_select() -> None:
    objects = changed({"podMonitor": {"enabled": True}})
    label = objects["PodMonitor", OPERATOR]["spec"]["jobLabel"]
    pods = objects["Deployment", OPERATOR]["spec"]["template"]["metadata"]["labels"]
    assert pods[label] == "longshore-operator"


@pytest.mark.shows("value.podMonitor.labels")
def test_labels_of_the_monitor_are_those_that_are_given() -> None:
    plain = changed({"podMonitor": {"enabled": True}})
    labelled = changed({"podMonitor": {"enabled": True, "labels": {"release": "p"}}})
    assert monitor_labels(labelled) == monitor_labels(plain) | {"release": "p"}


def test_rules_and_dashboard_are_the_files_that_promtool_and_prometheus_test() -> None:
    objects = changed({**RULED, "monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}})
    rules = objects["PrometheusRule", OPERATOR]["spec"]
    assert rules == yaml.safe_load((CHART / "files" / "rules.yaml").read_text(encoding="utf-8"))
    (text,) = objects["ConfigMap", f"{OPERATOR}-dashboard"]["data"].values()
    assert json.loads(text) == json.loads((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"))


@pytest.mark.shows(
    "value.monitoring.rules.labels",
    "value.monitoring.dashboard.annotations",
    "value.monitoring.dashboard.labels.grafana_dashboard",
)
def test_labels_and_annotations_of_rules_and_dashboard_are_those_that_are_given() -> None:
    def metadata(**given: Body) -> Body:
        monitoring = {part: {"enabled": True, **given.get(part, {})} for part in ("rules", "dashboard")}
        objects = changed({**RULED, "monitoring": monitoring})
        return {
            "rules": objects["PrometheusRule", OPERATOR]["metadata"],
            "dashboard": objects["ConfigMap", f"{OPERATOR}-dashboard"]["metadata"],
        }

    plain = metadata()
    assert plain["dashboard"]["labels"]["grafana_dashboard"] == "1"
    given = metadata(
        rules={"labels": {"release": "p"}},
        dashboard={"labels": {"grafana_dashboard": None, "find": "me"}, "annotations": {"grafana_folder": "Longshore"}},
    )
    assert given["rules"]["labels"] == plain["rules"]["labels"] | {"release": "p"}
    assert given["dashboard"]["labels"].keys() == plain["dashboard"]["labels"].keys() - {"grafana_dashboard"} | {"find"}
    assert given["dashboard"]["annotations"] == {"grafana_folder": "Longshore"}


def test_rules_without_a_monitor_of_the_operator_are_refused_with_the_remedy() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        changed({"monitoring": {"rules": {"enabled": True}}})
    assert "monitoring.rules.enabled: the alert LongshoreOperatorNotLeading would always fire" in caught.value.stderr
    assert "Set podMonitor.enabled=true" in caught.value.stderr


@pytest.mark.parametrize("url", ["docs/runbooks.md", "https://x/y#z", "https://x/a b"])
def test_an_address_of_runbooks_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        changed({"monitoring": {"rules": {"runbookUrl": url}}})
    assert "runbookUrl" in caught.value.stderr


@pytest.mark.parametrize("commit", ["b8f871c", "a983646"])
def test_templates_work_with_the_values_of_an_older_chart_alone(commit: str, tmp_path: Path) -> None:
    """As `helm upgrade --reuse-values` uses them: without the values that came later."""
    chart = shutil.copytree(CHART, tmp_path / "longshore")
    shutil.copy(BASELINE_FOLDER / f"values-{commit}.yaml", chart / "values.yaml")
    (chart / "values.schema.json").unlink()
    command = [str(binaries.find("helm")), "template", "longshore", str(chart), "--kube-version=1.34.4"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = {body["kind"] for body in yaml.safe_load_all(done.stdout) if body}
    assert {"CustomResourceDefinition", "Deployment", "ClusterRole"} <= kinds


def test_values_of_an_older_chart_have_no_monitoring() -> None:
    assert changed({"monitoring": None}).keys() == rendered().keys()


def test_injection_is_for_namespaces_that_opt_in_and_within_the_releases_own_in_namespaced_mode() -> None:
    def namespaces(**values: object) -> list[Body]:
        objects = changed({"inject": {"enabled": True}, **values})
        kinds = (f"{INJECTION}Binding", "ValidatingAdmissionPolicyBinding")
        found = [body for (kind, _), body in objects.items() if kind in kinds]
        return [body["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] for body in found]

    opted_in = {"longshore.dev/inject": "enabled"}
    assert namespaces() == [opted_in] * 3
    assert namespaces(mode="namespaced") == [opted_in | {"kubernetes.io/metadata.name": "default"}] * 3


def test_injection_takes_the_newest_version_and_is_refused_where_the_api_server_has_none() -> None:
    newer = rendered("--set=inject.enabled=true", f"--api-versions=admissionregistration.k8s.io/v1/{INJECTION}")
    versions = {body["apiVersion"] for (kind, _), body in newer.items() if "Admission" in kind}
    assert versions == {"admissionregistration.k8s.io/v1"}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        rendered_chart("--set=inject.enabled=true")
    assert "inject.enabled: this API server serves no MutatingAdmissionPolicy" in caught.value.stderr


def test_a_deployment_and_a_namespace_whose_names_are_words_of_yaml_are_verified() -> None:
    objects = rendered("--set-string=test.verify.deployment=true", "--set-string=test.verify.namespace=123")
    job = objects["Job", f"{OPERATOR}-verify"]["spec"]["template"]["spec"]["containers"][0]
    assert job["command"] == ["longshore", "verify", "true", "--namespace=123"]
    assert verified_in(objects) == ["123", "123", "default", "default"]
