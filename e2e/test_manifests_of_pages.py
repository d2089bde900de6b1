"""Tests that every manifest, part of a manifest and chart values in a page apply as a user would apply them.

An API server takes whole objects and parts, the operator finds each deployment compatible, and Helm renders values. A block
that is none of these fails, so each other kind of block is listed here with its reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, CRD, Deployments, manifest, rendered_chart, to_text
from operator_process import OperatorProcess
from test_code_blocks import Block, commands, of
from tree_of_files import text_files

from longshore_agent.settings import Settings
from longshore_spec import environment
from longshore_spec.names import HTTP_PORT

Body = dict[str, Any]

# Kinds that are only parsed, because this API server has no definition of them, and why.
PARSED_ONLY = {
    "Cluster": "kind reads it, and no API server",
    "Kustomization": "the proxy of Go modules does not have Flux's; test_operator_health.py evaluates its expressions",
}
# Definitions of other projects, in their Go modules.
DEFINITIONS = {"keda": ("github.com/kedacore/keda/v2", "config/crd/bases/keda.sh_scaledobjects.yaml")}
# Only a manifest has lines that begin so. In a block of another language, or in none, nothing would apply them.
MANIFEST_LINES = ("apiVersion:", "kind:", "spec:", "metadata:")

SPEC = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
VALUES = json.loads((CHART / "values.schema.json").read_text())["properties"]
# Fields of a container and of its pod that pages show without their place.
OF_CONTAINER = {"args", "env", "envFrom", "resources", "volumeMounts"}
OF_POD = {"volumes"}
POD: Body = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "engine"},
    "spec": {"containers": [{"name": "engine", "image": "engine"}]},
}


def patches() -> Iterator[Block]:
    """Yield the patches in the pages' commands."""
    for block in of("sh"):
        for words in commands(block.text):
            if words[:2] == ["kubectl", "patch"]:
                yield Block(block.place, "json", words[words.index("-p") + 1])


PARTS = [
    pytest.param(part, id=block.place)
    for block in (*of("yaml"), *of("json"), *patches())
    for part in yaml.safe_load_all(block.text)
]


def merged(base: Any, part: Any) -> Any:
    """Return a part of a manifest merged into a whole one. Entries of lists are merged by their names."""
    if isinstance(base, dict) and isinstance(part, dict):
        return base | {key: merged(base.get(key), value) for key, value in part.items()}
    if isinstance(base, list) and isinstance(part, list) and all("name" in entry for entry in (*base, *part)):
        entries = {entry["name"]: entry for entry in base}
        return list((entries | {entry["name"]: merged(entries.get(entry["name"]), entry) for entry in part}).values())
    return part


def whole(part: Body, name: str) -> Body | None:
    """Return the object that a block is or is a part of; None if it is none."""
    if "kind" in part:
        return part
    if part.keys() <= SPEC["properties"].keys():
        part = {"spec": part}
    if part.keys() == {"spec"} and part["spec"].keys() <= SPEC["properties"].keys():
        return merged(manifest("", name), part)
    if part.keys() <= OF_CONTAINER | OF_POD:
        container = {"name": "engine"} | {key: part[key] for key in part.keys() & OF_CONTAINER}
        part = {"spec": {"containers": [container]} | {key: part[key] for key in part.keys() & OF_POD}}
    if part.keys() <= {"metadata", "spec"} and "containers" in part.get("spec", {"containers": []}):
        return merged(POD, part)
    return None


class Pages:
    """Applies the pages' blocks in a namespace whose operator permits nothing but what a page tells to permit: `gpu.mps`."""

    def __init__(self, deployments: Deployments, folder: Path) -> None:
        self.deployments = deployments
        self.values = folder / "values.yaml"

    def fault(self, part: Body) -> str:
        """Return who refuses a block, and why; empty if it applies."""
        name = f"block-{uuid.uuid4().hex[:6]}"
        body = whole(part, name)
        if body is not None:
            return self._apply(body, name)
        if part.keys() <= VALUES.keys():
            self.values.write_text(to_text(part), encoding="utf-8")
            try:
                rendered_chart(f"--values={self.values}")
            except subprocess.CalledProcessError as error:
                return f"Helm: {error.stderr}"
            return ""
        return f"no manifest, no part of one and no values of the chart: {', '.join(part)}"

    def _apply(self, body: Body, name: str) -> str:
        if body["kind"] in PARSED_ONLY:
            return ""
        ours = body["kind"] == "DisaggDeployment"
        metadata = body["metadata"] | {"namespace": self.deployments.namespace} | ({"name": name} if ours else {})
        arguments = ["--server-side", "--validate=strict", *([] if ours else ["--dry-run=server"]), "-f", "-"]
        done = self.deployments.plane.try_kubectl("apply", *arguments, stdin=to_text(body | {"metadata": metadata}))
        if done.returncode or not ours:
            return done.stderr and f"API server: {done.stderr}"
        compatible = until(lambda: self.deployments.condition("Compatible", name), "the operator's answer")
        if compatible["status"] != "True":
            return f"operator: {compatible['message']}"
        settings = (part.get("agents", {}) for part in (body["spec"], body["spec"]["prefill"], body["spec"]["decode"]))
        variables = {entry["name"]: entry["value"] for part in settings for entry in part.get("env", [])}
        faults = environment.read(Settings, variables)[1]
        return f"agent: {faults}" if faults else ""


@pytest.fixture(scope="module")
def pages(plane: ControlPlane, nodes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    namespace = f"pages-{uuid.uuid4().hex[:6]}"
    plane.kubectl("create", "namespace", namespace)
    definitions = [str(binaries.module_folder(name, package) / path) for name, (package, path) in DEFINITIONS.items()]
    for path in definitions:
        plane.kubectl("create", "-f", path)
        plane.kubectl("wait", "--for=condition=Established", "-f", path)
    mps = {"mps_host_directory": "/run/nvidia/mps-pipe"}
    with OperatorProcess(plane, namespace, watch_namespace=namespace, allow="", **mps):
        yield Pages(Deployments(plane, namespace, HTTP_PORT), tmp_path_factory.mktemp("pages"))
        # Before the namespace. Otherwise operators of other tests would see deployments in a namespace that is being deleted.
        plane.kubectl("delete", "dgdep", "--all", "-n", namespace)
    plane.kubectl("delete", "namespace", namespace, "--wait=false")
    for path in definitions:
        plane.kubectl("delete", "-f", path)


@pytest.mark.parametrize("part", PARTS)
def test_a_block_of_a_page_applies(pages: Pages, part: Body) -> None:
    assert pages.fault(part) == ""


def test_every_line_of_a_manifest_is_in_a_block_that_is_applied() -> None:
    def lines(page: str, text: str) -> set[tuple[str, str]]:
        return {(page, line.strip()) for line in text.splitlines() if line.strip().startswith(MANIFEST_LINES)}

    written = set().union(*(lines(str(path), text) for path, text in text_files() if path.suffix == ".md"))
    applied = set().union(*(lines(block.place.rpartition(":")[0], block.text) for block in of("yaml")))
    assert written - applied == set()
    assert len(PARTS) > 15


def test_the_values_in_the_pages_commands_are_values_of_the_chart() -> None:
    found = [
        (block.place, words)
        for block in of("sh")
        for words in commands(block.text)
        if words[0] == "helm" and words[1] in {"install", "upgrade"} and "--set" in words
    ]
    assert len(found) > 5
    server = "--api-versions=admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy"
    for place, words in found:
        options = [f"--set={words[number + 1]}" for number, word in enumerate(words) if word == "--set"]
        assert rendered_chart(server, *options) != [], place


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("agents: {envs: []}", "API server: .*spec.agents.envs: field not declared"),
        (
            "agents: {env: [{name: LONGSHORE_log_format, value: json}]}",
            "operator: .*LONGSHORE_log_format is no setting",
        ),
        ("agents: {env: [{name: OTEL_EXPORTER_ENDPOINT, value: a}]}", "operator: .*OTEL_EXPORTER_ENDPOINT"),
        ("prefill: {agents: {env: [{name: LONGSHORE_LOG_LEVEL, value: loud}]}}", "agent: .*LONGSHORE_LOG_LEVEL"),
        ("spec: {transfer: {wires: [RDMAA]}}", "API server: .*wires"),
        ("spec: {model: {kvHeads: 3}}", "API server: .*one must divide the other"),
        ("volumeMounts: [{name: a, mountpath: /a}]", "API server: .*mountpath"),
        ("volumeMounts: [{name: a, mountPath: /a}]", 'API server: .*Not found: "a"'),
        ("metadata: {labels: {a: [b]}}", "API server: "),
        ("apiVersion: v1\nkind: ConfigMapp\nmetadata: {name: a}", "API server: .*ConfigMapp"),
        (
            "kind: ScaledObject\napiVersion: keda.sh/v1alpha1\nmetadata: {name: a}\nspec: {}",
            "API server: .*spec.triggers",
        ),
        ("allow: {capability: [IPC_LOCK]}", "Helm: .*capability"),
        ("agentz: {podMonitor: true}", "no manifest.*agentz"),
        ("spec: {agentz: {podMonitor: true}}", "no manifest.*spec"),
    ],
)
def test_a_wrong_block_is_found(pages: Pages, text: str, fault: str) -> None:
    assert re.match(fault, pages.fault(yaml.safe_load(text)), re.DOTALL)
