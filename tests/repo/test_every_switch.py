"""Tests that every field, setting, argument, option and value has a test of its effect.

A test names what it shows in its marker: `@pytest.mark.shows("agent.ring_bytes", "field.{prefill,decode}.pageSize")`. It
observes the effect, not only that the value was read. A switch whose value passes through several programs has a test for
each: one for what the operator makes of a field of the resource, say, and one for what an agent does with the resulting
setting.

The markers are read from the source, because some tests cannot be imported here: they need an engine or a GPU.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tree_of_files import ROOT, Module, file_paths, modules

import longshore_client
from longshore_agent.settings import Settings as AgentSettings
from longshore_cli.analyze.definition import parse
from longshore_client import ArgumentError, Client, cuda
from longshore_engines.vllm_checks import setting
from longshore_operator import names
from longshore_operator.settings import Settings as OperatorSettings
from longshore_wire.names import ENGINE_SOCKET_VARIABLE, ENVIRONMENT_PREFIX, INSTANCE_PREFIX_VARIABLE

# Each process that reads the tree parses all of it.
pytestmark = pytest.mark.xdist_group("tree")

VARIABLE = re.compile(rf"\b{ENVIRONMENT_PREFIX}[A-Z0-9_]*[A-Z0-9]\b")
MARKER = "pytest.mark.shows"

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    schema = parse(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
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


# The first word of a name in a marker -> what the rest of the name is one of.
SWITCHES: dict[str, Callable[[], set[str]]] = {
    # Fields of Settings. Their variables are LONGSHORE_ and the name in capitals.
    "agent": lambda: rows(AgentSettings),
    "operator": lambda: rows(OperatorSettings),
    # Fields of a DisaggDeployment, below `spec`.
    "field": resource_fields,
    # Arguments of public calls of `longshore_client`, of its Client and of `longshore_client.cuda`.
    "argument": client_arguments,
    # Keys of vLLM's `kv_connector_extra_config`.
    "option": vllm_options,
    # Values of the chart.
    "value": chart_values,
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """One switch, with its kind, and a test that shows its effect."""

    switch: str
    test: str
    module: Module


def own_tests(module: Module) -> Iterator[Function]:
    """Return the tests of a file. Only files that pytest collects have any."""
    if module.path.parts[0] in {"tests", "e2e"} and module.path.name.startswith("test_"):
        found = (node for node in module.nodes if isinstance(node, Function))
        yield from (node for node in found if node.name.startswith("test_"))


def markers(test: Function) -> list[ast.Call]:
    calls = [node for node in test.decorator_list if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == MARKER]


def alternatives(name: str) -> Iterator[str]:
    """Return the names that braces stand for, as in a shell: `a.b` and `a.c` for `a.{b,c}`."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ("".join(chosen) for chosen in itertools.product(*parts))


def named(marker: ast.Call) -> list[str]:
    return [node.value for node in marker.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def shown_in(module: Module) -> Iterator[Shown]:
    for test in own_tests(module):
        for name in (name for marker in markers(test) for name in named(marker)):
            yield from (Shown(switch, test.name, module) for switch in alternatives(name))


def unread_markers(module: Module) -> Iterator[str]:
    """Return the places of markers that `shown_in` does not read, or not as a whole."""
    read = {
        marker.func
        for test in own_tests(module)
        for marker in markers(test)
        if 0 < len(named(marker)) == len(marker.args) + len(marker.keywords)
    }
    uses = [node for node in module.nodes if isinstance(node, ast.Attribute) and node.attr == "shows"]
    return (module.at(node) for node in uses if ast.unparse(node) == MARKER and node not in read)


@cache
def marked() -> tuple[Module, ...]:
    return tuple(module for module in modules() if MARKER in module.text)


@cache
def shown() -> tuple[Shown, ...]:
    return tuple(found for module in marked() for found in shown_in(module))


def shown_of(kind: str) -> dict[str, list[Shown]]:
    """Return the switches of one kind, without its name, and what shows their effect."""
    found: dict[str, list[Shown]] = {}
    for one in shown():
        if one.switch.startswith(f"{kind}."):
            found.setdefault(one.switch.removeprefix(f"{kind}."), []).append(one)
    return found


def unknown_names(found: Iterable[Shown]) -> list[str]:
    """Return what the markers name that does not exist, or no longer."""
    known = {f"{kind}.{name}" for kind, switches in SWITCHES.items() for name in switches()}
    return [f"{one.module.path}::{one.test}: {one.switch}" for one in found if one.switch not in known]


@pytest.mark.parametrize("kind", SWITCHES)
def test_every_switch_has_a_test_that_shows_what_it_changes(kind: str) -> None:
    assert {
        f'no test has the marker {MARKER}("{kind}.{name}")' for name in SWITCHES[kind]() - shown_of(kind).keys()
    } == set()


def test_every_marker_names_switches_that_exist() -> None:
    assert unknown_names(shown()) == []


def test_every_marker_is_on_a_test_and_names_its_switches_as_text() -> None:
    assert [place for module in marked() for place in unread_markers(module)] == []


@cache
def without_markers(module: Module) -> str:
    """Return a test file's text without what its markers say."""
    lines = module.text.splitlines()
    for marker in (marker for test in own_tests(module) for marker in markers(test)):
        for number in range(marker.lineno - 1, marker.end_lineno or marker.lineno):
            lines[number] = ""
    return "\n".join(lines)


def words(switch: str) -> set[str]:
    """Return the spellings of a switch in a test: the field, or the setting that it becomes."""
    last = switch.rpartition(".")[2]
    snake = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", last).lower()
    return {last.lower(), snake}


def silent(found: dict[str, list[Shown]]) -> dict[str, list[str]]:
    """Return the switches of which none of the files speaks in which they are shown, with the tests that show them."""
    return {
        switch: [one.test for one in ones]
        for switch, ones in found.items()
        if not any(word in without_markers(one.module).lower() for word in words(switch) for one in ones)
    }


# Most arguments are positional.
@pytest.mark.parametrize("kind", [kind for kind in SWITCHES if kind != "argument"])
def test_a_switch_is_spoken_of_where_it_is_shown(kind: str) -> None:
    """Finds markers at the wrong test."""
    assert silent(shown_of(kind)) == {}


def parametrised_with(module: Module, cases: str) -> set[str]:
    """Return the tests that are parametrised with a table of cases."""
    return {
        test.name
        for test in own_tests(module)
        for decorator in test.decorator_list
        if any(isinstance(node, ast.Name) and node.id == cases for node in ast.walk(decorator))
    }


def claimed(kind: str, path: str, cases: str) -> set[str]:
    """Return the switches that a test of many cases shows by its marker."""
    (module,) = (module for module in marked() if module.path == Path(path))
    tests = parametrised_with(module, cases)
    return {
        switch for switch, ones in shown_of(kind).items() for one in ones if one.module == module and one.test in tests
    }


def test_every_value_of_the_chart_has_its_own_case() -> None:
    path = "e2e/test_chart_values.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    found = claimed("value", path, "VALUES")
    assert found
    assert [value for value in found if f'"{value}": (' not in text] == []


@pytest.mark.parametrize("name", ["LAYOUTS", "SETTINGS", "PODS"])
def test_every_field_that_names_a_test_of_many_cases_is_one_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "operator"))
    module = importlib.import_module("test_operator_every_field")
    # The section as a whole changes the kind of attention.
    cases = {case[0] if case[0] != "model." else "model.attention" for case in getattr(module, name)}
    found = claimed("field", "tests/operator/test_operator_every_field.py", name)
    assert found
    assert {path for path in found if not any(path.startswith(case) for case in cases)} == set()


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


def test_the_finders_find_switches_and_markers() -> None:
    assert "decode.staging.poolSize" in resource_fields()
    assert "receive.digest" in client_arguments()
    limits = {"transfer_limit_s", "connect_limit_s", "recompute_after_s"}
    assert vllm_options() == {"socket", "pages", "allow_untested_version", *limits}
    assert {"image.tag", "settings", "test.limitSeconds"} <= chart_values()
    assert [*alternatives("field.{,decode.}agents.{labels,env.name}")] == [
        "field.agents.labels",
        "field.agents.env.name",
        "field.decode.agents.labels",
        "field.decode.agents.env.name",
    ]


def test_a_marker_of_an_unknown_name_or_at_a_wrong_place_is_found() -> None:
    text = f"""
@{MARKER}("agent.ring_bytes", "agent.rings")
@{MARKER}("switch.mode", "field.{{decode,encode}}.target")
@pytest.mark.parametrize("case", CASES)
async def test_it(case): ...

@{MARKER}("agent.node", NAMES)
def test_names(): ...

@{MARKER}("agent.node")
def not_a_test(): pytest.param(1, marks={MARKER}("agent.node"))
"""
    bad = Module(Path("tests/test_bad.py"), text)
    found = list(shown_in(bad))
    assert [one.switch for one in found if one.test == "test_it"][:2] == ["agent.ring_bytes", "agent.rings"]
    place = "tests/test_bad.py::test_it: "
    assert unknown_names(found) == [f"{place}agent.rings", f"{place}switch.mode", f"{place}field.encode.target"]
    assert list(unread_markers(bad)) == [f"tests/test_bad.py:{line}" for line in (7, 10, 11)]
    # A marker does not speak for its own test.
    assert silent({"ring_bytes": [found[0]]}) == {"ring_bytes": ["test_it"]}
    assert parametrised_with(bad, "CASES") == {"test_it"}
