"""The effect of each value of the chart on the installed objects. Needs only Helm, no cluster."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane import binaries
from deployments import BASELINE_FOLDER, CHART, VERSION, rendered_chart

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


RULED = {"podMonitor": {"enabled": True}, "monitoring": {"rules": {"enabled": True}}}
SETTINGS = {"LONGSHORE_POLL_S": "7"}
TOLERATIONS = [{"operator": "Exists"}]
# Path of the value -> the values to set (with others that make the effect visible), where to look, and results before and
# after.
VALUES: dict[str, tuple[Body, Callable[[Objects], object], object, object]] = {
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
    "agent.pullPolicy": (
        {"agent": {"pullPolicy": "Never"}},
        variable("AGENT_IMAGE_PULL_POLICY"),
        "IfNotPresent",
        "Never",
    ),
    "agent.pullSecrets": ({"agent": {"pullSecrets": ["a", "b"]}}, variable("AGENT_IMAGE_PULL_SECRETS"), "", "a,b"),
    "agent.runtimeClassName": ({"agent": {"runtimeClassName": "n"}}, variable("AGENT_RUNTIME_CLASS"), "", "n"),
    "allow.image": ({"allow": {"image": True}}, variable("ALLOW"), "", "image"),
    "allow.hostNetwork": ({"allow": {"hostNetwork": True}}, variable("ALLOW"), "", "hostNetwork"),
    "allow.hostIPC": ({"allow": {"hostIPC": True}}, variable("ALLOW"), "", "hostIPC"),
    "allow.noNetworkPolicy": ({"allow": {"noNetworkPolicy": True}}, variable("ALLOW"), "", "networkPolicy"),
    "allow.capabilities": (
        {"allow": {"capabilities": ["IPC_LOCK", "NICE"]}},
        variable("ALLOW_CAPABILITIES"),
        "",
        "IPC_LOCK,NICE",
    ),
    "allow.hostPaths": ({"allow": {"hostPaths": ["/a", "/b"]}}, variable("ALLOW_HOST_PATHS"), "", "/a,/b"),
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
    "value.imagePullSecrets",
    "value.mode",
    "value.watchNodes",
    "value.crds.install",
    "value.agent.{image,pullPolicy,pullSecrets,runtimeClassName}",
    "value.allow.{image,hostNetwork,hostIPC,noNetworkPolicy,capabilities,hostPaths}",
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


def test_a_path_of_mps_in_pods_needs_one_on_nodes() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        changed({"gpu": {"mps": {"pipeDirectory": "/m"}}})
    assert "hostDirectory" in caught.value.stderr


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
