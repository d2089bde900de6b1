"""The CRD on a real API server: its refusals, its defaults, and kubectl's output."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from controlplane.cluster import ControlPlane
from deployments import CRD, ROOT, to_text
from manifest_cases import BAD, CHANGES, GOOD, POD, broken_limits, changed, named

from longshore_spec.manifest import read

Body = dict[str, Any]


def send(plane: ControlPlane, verb: str, body: Body) -> tuple[int, str]:
    done = plane.try_kubectl(verb, "--dry-run=server", "-f", "-", stdin=to_text(body))
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", GOOD)
def test_what_can_work_is_taken(plane: ControlPlane, name: str) -> None:
    status, text = send(plane, "create", GOOD[name])
    assert (status, text) == (0, "")


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused_before_it_is_stored(plane: ControlPlane, name: str) -> None:
    body, expected = BAD[name]
    status, text = send(plane, "create", body)
    assert status != 0
    assert expected in text
    # The API server answers so where a rule has no answer, beside the fault itself.
    assert "evaluating rule" not in text


def test_every_limit_of_the_schema_is_kept(plane: ControlPlane) -> None:
    """All at once, since kubectl starts slowly, and without its own checks. `longshore analyze` refuses the same manifests."""
    bodies = [body | {"metadata": {"name": f"n{n}"}} for n, body in enumerate(broken_limits().values())]
    listed = {"apiVersion": "v1", "kind": "List", "items": [*bodies, named("good")]}
    done = plane.try_kubectl("create", "--dry-run=server", "--validate=false", "-f", "-", stdin=to_text(listed))
    assert done.returncode != 0
    assert done.stdout == "disaggdeployment.longshore.dev/good created (server dry run)\n"


@pytest.mark.shows("field.model.{attention,layers,kvHeads,headDim,dtype}")
@pytest.mark.parametrize("name", CHANGES)
def test_what_may_not_change_does_not(plane: ControlPlane, namespace: str, name: str) -> None:
    body = changed(agents={"keysRevision": 2})
    body["metadata"]["namespace"] = namespace
    plane.kubectl("create", "-f", "-", stdin=to_text(body))
    paths, expected = CHANGES[name]
    other = changed(**paths)
    other["metadata"]["namespace"] = namespace
    status, text = send(plane, "apply", other)
    assert status != 0
    assert expected in text


def test_layouts_may_change(plane: ControlPlane, namespace: str) -> None:
    body = changed()
    body["metadata"]["namespace"] = namespace
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=to_text(body))
    other = changed(prefill__tensorParallel=2, decode__pageSize=16, agents={"keysRevision": 2})
    other["metadata"]["namespace"] = namespace
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=to_text(other))


def test_a_selector_may_become_empty(plane: ControlPlane, namespace: str) -> None:
    for selector in ({"zone": "a", "gpu": "yes"}, {"zone": "b"}, {}, None):
        body = changed(prefill__nodeSelector=selector)
        body["metadata"]["namespace"] = namespace
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=to_text(body))
        stored = json.loads(plane.kubectl("get", "dgdep", "-n", namespace, "llama", "-o", "json"))["spec"]
        assert stored["prefill"].get("nodeSelector") == selector


def test_the_fields_of_pods_are_stored_as_they_were_given(plane: ControlPlane, namespace: str) -> None:
    body = changed(agents=POD, decode__agents=POD)
    body["metadata"]["namespace"] = namespace
    plane.kubectl("create", "-f", "-", stdin=to_text(body))
    stored = json.loads(plane.kubectl("get", "dgdep", "-n", namespace, "llama", "-o", "json"))["spec"]
    assert stored["decode"]["agents"] == POD
    assert stored["agents"].items() >= POD.items()


@pytest.mark.parametrize("name", ["llama-70b.yaml", "gpu-nodes.yaml"])
def test_the_example_applies_as_it_is(plane: ControlPlane, namespace: str, name: str) -> None:
    plane.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / name))
    stored = json.loads(plane.kubectl("get", "dgdep", "-n", namespace, "llama-70b", "-o", "json"))["spec"]
    assert stored["decode"]["target"] == "Device"


def test_every_default_that_an_agent_has_is_filled_in(plane: ControlPlane, namespace: str) -> None:
    body = changed()
    body["metadata"]["namespace"] = namespace
    plane.kubectl("create", "-f", "-", stdin=to_text(body))
    stored = json.loads(plane.kubectl("get", "dgdep", "-n", namespace, "llama", "-o", "json"))
    assert read({key: stored[key] for key in ("apiVersion", "kind", "metadata", "spec")}) == read(body)
    assert stored["spec"]["transfer"] == {"backend": "NIXL", "staging": "Auto", "chunkTokens": 8192, "wires": []}
    assert stored["spec"]["decode"]["staging"] == {"poolSize": "4Gi"}
    assert stored["spec"]["agents"]["networkPolicy"] is True


def test_explain_describes_every_field(plane: ControlPlane) -> None:
    text = plane.kubectl("explain", "disaggdeployment.spec", "--recursive")
    for field in ("tensorParallel", "bufferSize", "wires", "keysRevision"):
        assert field in text
    assert "ranks that share one replica" in plane.kubectl("explain", "dgdep.spec.prefill.tensorParallel")


def test_no_field_goes_without_a_description_with_its_default() -> None:
    """kubectl shows no default, and of a field that may be a number or text no type."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def bare(place: Body, path: str) -> list[str]:
        text, default = place.get("description", ""), place.get("default", {})
        found = [path] if not text and path not in {"", ".metadata"} else []
        if default not in ({}, []):
            told = str(default).lower() if isinstance(default, bool) else default
            found += [] if text.endswith(f" Default: {told}.") else [path]
        for name, entry in place.get("properties", {}).items():
            found += bare(entry, f"{path}.{name}")
        return found

    assert bare(schema, "") == []


def test_lists_are_found_by_short_name_and_category(plane: ControlPlane, namespace: str) -> None:
    body = changed()
    body["metadata"]["namespace"] = namespace
    plane.kubectl("create", "-f", "-", stdin=to_text(body))
    header = plane.kubectl("get", "dgdep", "-n", namespace).splitlines()[0].split()
    assert header == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "AGENTS", "BACKEND", "AGE"]
    assert "disaggdeployment.longshore.dev/llama" in plane.kubectl("get", "disagg", "-n", namespace, "-o", "name")


def test_the_table_is_as_long_as_promised() -> None:
    assert len(GOOD) + len(BAD) + len(CHANGES) >= 30
