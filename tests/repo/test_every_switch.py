"""Tests that every field, setting, argument, option and value has a test of its effect."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import switch_table as table
import yaml
from tree_of_files import ROOT, file_paths, functions_by_file

import longshore_client
from longshore_agent.settings import Settings as AgentSettings
from longshore_client import ArgumentError, Client, cuda
from longshore_engines.vllm_checks import setting
from longshore_operator import names
from longshore_operator.settings import Settings as OperatorSettings
from longshore_wire.names import ENGINE_SOCKET_VARIABLE, ENVIRONMENT_PREFIX, INSTANCE_PREFIX_VARIABLE

VARIABLE = re.compile(rf"\b{ENVIRONMENT_PREFIX}[A-Z0-9_]*[A-Z0-9]\b")
NAMED = re.compile(r"((?:tests|e2e)/[\w/]+\.py)::(test_\w+)")


def rows(kind: Any) -> set[str]:
    return {row.name for row in dataclasses.fields(kind)}


def fields(place: dict[str, Any], path: str = "") -> Iterator[str]:
    """Return the paths of a schema's leaf fields."""
    inner = place.get("properties") or place.get("items", {}).get("properties")
    if not inner:
        yield path
        return
    for name, entry in inner.items():
        yield from fields(entry, f"{path}.{name}" if path else name)


def resource_fields() -> set[str]:
    text = (ROOT / "crds/disaggdeployments.longshore.dev.yaml").read_text(encoding="utf-8")
    schema = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(fields(schema["properties"]["spec"]))


def client_arguments() -> set[str]:
    """Return the arguments of every public function and method that an engine calls; `close` and properties have none."""
    calls: dict[str, Callable[..., object]] = {
        name: call for name, call in vars(Client).items() if inspect.isfunction(call) and not name.startswith("_")
    }
    named = {name: getattr(longshore_client, name) for name in longshore_client.__all__}
    named |= {name: call for name, call in vars(cuda).items() if getattr(call, "__module__", "") == cuda.__name__}
    calls |= {name: call for name, call in named.items() if inspect.isfunction(call) and not name.startswith("_")}
    return {f"{name}.{argument}" for name, call in calls.items() for argument in inspect.signature(call).parameters} - {
        f"{name}.self" for name in calls
    }


def vllm_options() -> set[str]:
    with pytest.raises(ArgumentError, match="known are") as caught:
        setting({"?": 1})
    return set(str(caught.value).rpartition("known are ")[2].split(", "))


def leaves(value: object, path: str = "") -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, entry in value.items():
        yield from leaves(entry, f"{path}.{name}" if path else name)


def chart_values() -> set[str]:
    return set(leaves(yaml.safe_load((ROOT / "charts/longshore/values.yaml").read_text(encoding="utf-8"))))


SWITCHES: dict[str, tuple[table.Shown, Callable[[], set[str]]]] = {
    "agent settings": (table.AGENT_SETTINGS, lambda: rows(AgentSettings)),
    "operator settings": (table.OPERATOR_SETTINGS, lambda: rows(OperatorSettings)),
    "fields of a DisaggDeployment": (table.RESOURCE_FIELDS, resource_fields),
    "arguments of the client": (table.CLIENT_ARGUMENTS, client_arguments),
    "options of the connector": (table.VLLM_OPTIONS, vllm_options),
    "values of the chart": (table.CHART_VALUES, chart_values),
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_every_switch_has_a_test_that_shows_what_it_changes(kind: str) -> None:
    shown, found = SWITCHES[kind]
    assert dict.fromkeys(found() - set(shown), "missing in tests/repo/switch_table.py") == {}
    assert dict.fromkeys(set(shown) - found(), "there is no such switch any more") == {}
    assert [switch for switch, tests in shown.items() if not tests] == []


@pytest.mark.parametrize("kind", SWITCHES)
def test_every_test_that_the_table_names_exists(kind: str) -> None:
    functions = functions_by_file()
    named = {name for tests in SWITCHES[kind][0].values() for name in tests}
    assert [name for name in named if NAMED.fullmatch(name) is None] == []
    found = {name: NAMED.fullmatch(name) for name in named}
    assert [name for name, match in found.items() if match and match[2] not in functions.get(match[1], ())] == []


def words(switch: str) -> set[str]:
    """Return the spellings of a switch in a test: the field, or the setting that it becomes."""
    last = switch.rpartition(".")[2]
    snake = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", last).lower()
    return {last.lower(), snake}


# Most arguments are positional.
@pytest.mark.parametrize("kind", [kind for kind in SWITCHES if kind != "arguments of the client"])
def test_a_switch_is_spoken_of_where_it_is_shown(kind: str) -> None:
    """Finds test names in the wrong row."""
    silent = {}
    for switch, tests in SWITCHES[kind][0].items():
        texts = [(ROOT / name.partition("::")[0]).read_text(encoding="utf-8").lower() for name in tests]
        if not any(word in text for word in words(switch) for text in texts):
            silent[switch] = tests
    assert silent == {}


def test_every_value_of_the_chart_has_its_own_case() -> None:
    text = (ROOT / "e2e/test_chart_values.py").read_text(encoding="utf-8")
    cases = {
        path for path, tests in table.CHART_VALUES.items() if any("::test_a_value_changes" in name for name in tests)
    }
    assert [path for path in cases if f'"{path}": (' not in text] == []


@pytest.mark.parametrize("name", ["LAYOUTS", "SETTINGS", "PODS"])
def test_every_field_that_names_a_test_of_many_cases_is_one_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "operator"))
    module = importlib.import_module("test_operator_every_field")
    shown_by = {
        "LAYOUTS": "test_engines_of_the_declared_layout_are_taken_in_and_others_refused_by_the_field",
        "SETTINGS": "test_a_field_becomes_the_setting_of_its_agents",
        "PODS": "test_a_field_of_agents_is_seen_in_their_pods",
    }[name]
    # The section as a whole changes the kind of attention.
    cases = {case[0] if case[0] != "model." else "model.attention" for case in getattr(module, name)}
    claimed = {
        path for path, tests in table.RESOURCE_FIELDS.items() if any(found.endswith(f"::{shown_by}") for found in tests)
    }
    assert {path for path in claimed if not any(path.startswith(case) for case in cases)} == set()


def test_every_variable_that_a_program_or_a_page_names_is_a_setting() -> None:
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for kind in (AgentSettings, OperatorSettings) for name in rows(kind)}
    # The operator's output for engines; tests/engines/test_engine_config_map.py passes it to its readers.
    known |= {INSTANCE_PREFIX_VARIABLE, *(value for name, value in vars(names).items() if name.endswith("_VARIABLE"))}
    known.add(ENGINE_SOCKET_VARIABLE)
    unknown = [
        (str(path), name)
        for path in file_paths()
        if path.suffix in {".json", ".md", ".py", ".yaml"} and path.parts[0] not in {"CHANGELOG.md", "tests"}
        for name in sorted(set(VARIABLE.findall((ROOT / path).read_text(encoding="utf-8"))) - known)
    ]
    assert unknown == []


def test_a_switch_without_an_entry_and_a_test_that_does_not_exist_are_found() -> None:
    assert "decode.staging.poolSize" in resource_fields()
    assert "receive.digest" in client_arguments()
    assert vllm_options() == {"socket", "transfer_limit_s", "connect_limit_s", "pages"}
    assert {"image.tag", "settings", "test.limitSeconds"} <= chart_values()
    assert "test_nothing" not in functions_by_file()["tests/repo/test_every_switch.py"]
