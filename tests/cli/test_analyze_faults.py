"""Tests that `longshore analyze` refuses the manifests that the CRD refuses, rule by rule, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_cases import BAD, CHANGES, GOOD, Body, broken_limits, changed, crd, places

from longshore_cli.analyze import definition
from longshore_cli.analyze.findings import Severity
from longshore_cli.analyze.inspect_manifests import Options, inspect
from longshore_cli.documents import Document
from longshore_wire.crossover import WHOLE_PAGES

ROOT = Path(__file__).parents[2]
OPTIONS = Options(tokens=8192, device=None, table=WHOLE_PAGES)
EXAMPLES = [
    path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "kind: DisaggDeployment" in path.read_text()
]


def errors(body: Body, before: Body | None = None) -> list[str]:
    running = None if before is None else Document("running", before)
    found = inspect(Document("new", body), running, OPTIONS).findings
    return [f"{each.path}: {each.message}" for each in found if each.severity is Severity.ERROR]


RULES = {(path, rule["rule"]) for path, place in places(crd()) for rule in place.get("x-kubernetes-validations", ())}
PREPARED = changed(agents={"keysRevision": 2})


@pytest.mark.parametrize("name", GOOD)
def test_a_manifest_that_the_api_server_accepts_has_no_error(name: str) -> None:
    assert errors(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_a_manifest_that_the_api_server_refuses_has_an_error(name: str) -> None:
    body, expected = BAD[name]
    found = errors(body)
    # The words of schemas are ours, and those of rules the CRD's.
    path = expected.partition(": ")[0] if expected.startswith("spec.") else ""
    assert found, name
    assert path.partition("[")[0] in " ".join(found)
    if any(expected in " ".join(rule["message"].split()) for _, place in places(crd()) for rule in rules_of(place)):
        assert any(expected in each for each in found)


@pytest.mark.parametrize("name", [5, False, 1.5])
def test_a_name_that_yaml_reads_as_no_text_is_refused_by_its_field(name: object) -> None:
    (found,) = errors(changed() | {"metadata": {"name": name, "labels": {"app": "llama"}}})
    assert found.startswith(f"metadata.name: {name} is given: write a text, in quotes")


@pytest.mark.parametrize("metadata", [{"name": None}, {"labels": {}}, {}, None])
def test_a_name_that_is_null_or_missing_is_told_as_missing(metadata: object) -> None:
    (found,) = errors(changed() | {"metadata": metadata})
    assert re.match(r"metadata(\.name)?: it is missing, and required: add it", found)
    (found,) = errors({name: value for name, value in changed().items() if name != "metadata"})
    assert found.startswith("metadata: it is missing")


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"name": "a\ud800"}, "metadata.name"),
        ({"name": "a", "annotations": {"b": "\udfff"}}, "metadata.annotations.b"),
        ({"name": "a", "labels": {"\udc00": "b"}}, r"metadata.labels.'\udc00'"),
    ],
)
def test_half_a_character_is_refused_by_its_field(metadata: object, path: str) -> None:
    (found,) = errors(changed() | {"metadata": metadata})
    assert found.startswith(f"{path}: it has half a character")


def test_a_label_that_yaml_reads_as_no_text_is_refused_by_its_field() -> None:
    (found,) = errors(changed() | {"metadata": {"name": "llama", "labels": {"zone": 7}, "generation": 3}})
    assert found.startswith("metadata.labels.zone: 7 is given")


def rules_of(place: Body) -> list[Body]:
    found: list[Body] = place.get("x-kubernetes-validations", [])
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_the_api_server_refuses_has_an_error(name: str) -> None:
    paths, expected = CHANGES[name]
    assert any(expected in each for each in errors(changed(**paths), PREPARED))
    assert errors(PREPARED, PREPARED) == []


def test_every_rule_of_the_crd_is_broken_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set()
    ask = definition._broken_rules

    def record(value: Any, place: Body, path: str, before: Any) -> Iterator[Any]:
        # Each rule alone, so that it is known which one is broken.
        for rule in rules_of(place):
            found = list(ask(value, {"x-kubernetes-validations": [rule]}, path, before))
            if found:
                broken.add((re.sub(r"\[\d+\]", "[]", f".{path}" if path else ""), rule["rule"]))
            yield from found

    monkeypatch.setattr(definition, "_broken_rules", record)
    for body, _ in BAD.values():
        definition.check(body)
    for paths, _ in CHANGES.values():
        definition.check(changed(**paths), PREPARED)
    assert sorted(RULES - broken) == []


def test_every_keyword_of_the_crd_is_one_that_is_checked() -> None:
    assert {key for _, place in places(crd()) for key in place} <= definition.KEYWORDS


@pytest.mark.slow
def test_every_limit_of_the_schema_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rules of CEL have the tests above, and take nearly all of the time.
    monkeypatch.setattr(definition, "_broken_rules", lambda *_arguments: ())
    limits = broken_limits()
    silent = [
        (path, keyword)
        for (path, keyword), body in limits.items()
        if not any(fault.path == shown(path) for fault in definition.check(body))
    ]
    assert silent == []
    assert len(limits) > 300


def shown(path: str) -> str:
    """Return the path of the first entry of each list and mapping, as faults have it."""
    return path.replace("[]", "[0]").replace("*", "key").removeprefix(".")


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_examples_have_no_error(path: Path) -> None:
    for body in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if body["kind"] == "DisaggDeployment":
            assert errors(body) == []


def test_nulls_are_left_out_and_defaults_filled_in_as_the_api_server_does() -> None:
    found = definition.completed(changed(prefill__instances=1, transfer={"backend": None}, agents={"image": None}))
    assert "image" not in found["spec"]["agents"]
    assert found["spec"]["transfer"]["backend"] == "NIXL"
    assert found["spec"]["decode"]["staging"] == {"poolSize": "4Gi"}


def test_unknown_fields_are_found_besides_other_faults() -> None:
    body = changed(prefill__tensorParallell=4, decode__tensorParallel=0)
    assert [fault.partition(":")[0] for fault in errors(body)] == [
        "spec.prefill.tensorParallell",
        "spec.decode.tensorParallel",
    ]
