"""Tests that the CRD, the config file's types and the agent's table of settings have the same defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longshore_agent.settings import Settings
from longshore_cli.analyze.definition import parse
from longshore_spec.manifest import read

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = ROOT / "crds/disaggdeployments.longshore.dev.yaml"
NEEDED: dict[str, Any] = {
    "model": {"attention": "GQA", "layers": 4, "kvHeads": 8, "headDim": 64, "dtype": "float16"},
    "prefill": {"tensorParallel": 4, "pageSize": 16},
    "decode": {"tensorParallel": 1, "pageSize": 16},
}


def filled(schema: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with the defaults that an API server adds."""
    whole = dict(given)
    for name, place in schema.get("properties", {}).items():
        if name not in whole and "default" in place:
            whole[name] = place["default"]
        if isinstance(whole.get(name), dict):
            whole[name] = filled(place, whole[name])
    return whole


def deployment(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "longshore.dev/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": "llama", "namespace": "ns"},
        "spec": spec,
    }


def test_what_an_api_server_fills_in_is_what_the_types_fill_in_and_the_settings_are_their_defaults() -> None:
    schema = parse(DEFINITION.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = filled(schema["properties"]["spec"], NEEDED)
    assert spec["prefill"]["staging"] == {"bufferSize": "64Mi", "lanes": 4}
    left_out, filled_in = read(deployment(NEEDED)), read(deployment(spec))
    assert filled_in == left_out
    made, table = Settings.from_config(filled_in.agent_config()), Settings()
    named_by_the_deployment = {"deployment", "run_directory", "keys_directory", "http_port", "network_policy"}
    differing = {
        name for name in Settings.__dataclass_fields__ if getattr(made, name) != getattr(table, name)
    } - named_by_the_deployment
    assert differing == set()
