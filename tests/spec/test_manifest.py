"""Tests the manifest that users write: valid content, and the message of each fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longshore_spec import manifest
from longshore_spec.agent_config import Backend, Dtype, dump, load
from longshore_spec.quantity import parse_quantity
from longshore_wire.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
EXAMPLE = (FOLDER / "llama-70b.yaml").read_text(encoding="utf-8")
EXAMPLES = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml") if "kind: DisaggDeployment\n" in path.read_text()
)
DEFINITION = (ROOT / "crds" / "disaggdeployments.longshore.dev.yaml").read_text(encoding="utf-8")


def faults_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        manifest.load(text).agent_config()
    return list(caught.value.faults)


def test_the_example_becomes_the_config_that_its_agents_read() -> None:
    found = manifest.load(EXAMPLE)
    config = found.agent_config()
    assert (config.deployment.namespace, config.deployment.name) == ("default", "llama-70b")
    assert (config.model.layers, config.model.dtype) == (80, Dtype.BFLOAT16)
    assert (config.prefill.tensor_parallel, config.decode.tensor_parallel) == (4, 1)
    assert (config.prefill.instances, config.decode.instances) == (2, 4)
    assert config.transfer.backend is Backend.NIXL
    assert found.spec.prefill.node_selector == {"longshore.dev/role": "prefill"}
    assert load(dump(config)) == config


def test_what_the_api_server_adds_is_no_fault() -> None:
    text = EXAMPLE.replace("  name: llama-70b\n", "  name: llama-70b\n  namespace: team\n  uid: 1-2\n  generation: 3\n")
    found = manifest.load(text + "status: {observedGeneration: 3}\n")
    assert found.deployment.namespace == "team"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("kind: DisaggDeployment", "kind: Deployment", "kind: 'Deployment' is unknown here"),
        ("v1alpha1", "v2", "apiVersion: 'longshore.dev/v2' is unknown here"),
        ("  name: llama-70b\n", "  name: Llama\n", "metadata.name:"),
        ("tensorParallel: 4", "tensorParallell: 4", "spec.prefill.tensorParallell: unknown key; did you mean"),
        ("poolSize: 4Gi", "poolSize: 4GG", "spec.decode.staging.poolSize:"),
        ("backend: NIXL", "backend: NCCL", "spec.transfer.backend:"),
        ("tensorParallel: 4", "tensorParallel: 5", "spec.prefill: "),
        ("poolSize: 4Gi", "poolSize: 128Mi", "spec.decode.staging.poolSize: 134217728 bytes hold less than two slabs"),
        (
            "backend: NIXL, staging: Auto, chunkTokens: 8192}",
            "backend: Mooncake}\n  agents: {hostNetwork: true}",
            "spec.agents.hostNetwork: true opens the data ports of Mooncake",
        ),
        ("spec:", "specs:", "specs: unknown key; there are apiVersion, kind, metadata, spec, status"),
    ],
)
def test_each_fault_names_its_path(old: str, new: str, fault: str) -> None:
    assert old in EXAMPLE
    assert any(found.startswith(fault) for found in faults_of(EXAMPLE.replace(old, new, 1))), faults_of(
        EXAMPLE.replace(old, new, 1)
    )


@pytest.mark.shows("field.agents.allowOpenDataPath")
@pytest.mark.parametrize("backend", ["NIXL", "Mooncake"])
@pytest.mark.parametrize("agents", ["hostNetwork: true", "networkPolicy: false"])
def test_data_ports_that_others_reach_are_taken_where_the_manifest_accepts_it(backend: str, agents: str) -> None:
    asked = EXAMPLE.replace("backend: NIXL", f"backend: {backend}") + "  agents: {%s%s}\n"
    (fault,) = faults_of(asked % (agents, ""))
    assert fault.startswith(f"spec.agents.{agents} opens the data ports of {backend}")
    assert "NIXL" in fault and fault.endswith("agents.allowOpenDataPath")
    config = manifest.load(asked % (agents, ", allowOpenDataPath: true")).agent_config()
    assert config.control.allow_open_data_path


@pytest.mark.shows("field.agents.networkPolicy")
def test_what_keeps_others_from_data_ports_is_told_to_the_agents() -> None:
    assert manifest.load(EXAMPLE).agent_config().control.network_policy is True
    alone = EXAMPLE.replace("chunkTokens: 8192", "wires: [CudaIPC, NVLink]") + "  agents: {networkPolicy: false}\n"
    assert manifest.load(alone).agent_config().control.network_policy is False


def test_all_faults_come_at_once() -> None:
    text = EXAMPLE.replace("lanes: 4", "lanes: 0").replace("layers: 80", "layers: none").replace("kind: D", "kind: d")
    assert len(faults_of(text)) == 3


def test_a_file_with_several_documents_is_told_as_such() -> None:
    assert faults_of(EXAMPLE + "---\n" + EXAMPLE) == [
        f"(document): a second document begins at line {EXAMPLE.count(chr(10)) + 1}: give one a file"
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_has_sizes_that_a_cluster_takes_too(name: str) -> None:
    """`longshore up` accepts smaller buffers than the CRD. An example must be valid for both."""
    spec = manifest.load((FOLDER / name).read_bytes()).spec
    sizes = {"bufferSize": spec.prefill.staging.buffer_size, "poolSize": spec.decode.staging.pool_size}
    limits = dict(re.findall(r"(\w+Size) must be from (\w+) to", DEFINITION))
    assert {field: size for field, size in sizes.items() if size < parse_quantity(limits[field])} == {}
