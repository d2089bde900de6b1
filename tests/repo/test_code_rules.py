"""Tests the rules of CONTRIBUTING that a linter cannot check: sizes of functions, names, docstrings, banned calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tree_of_files import Module, modules, modules_of

from longshore_spec.log_lines import FIELDS

# Each process that reads the tree parses all of it.
pytestmark = pytest.mark.xdist_group("tree")

FUNCTION_LINES_MAX = 70
BANNED_MODULE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# They execute code from data.
BANNED_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_BUILTINS = {"eval", "exec"}
# Names as written at the call. NIXL's `deserialize_descs` uses pickle, and so does torch.load.
BANNED_CALLS = {"torch.load", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
BANNED_METHODS = {"deserialize_descs", "get_serialized_descs"}
BANNED_CALLS_IN_TESTS = {"time.sleep", "sleep", "asyncio.sleep"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def written_name(node: ast.expr) -> str:
    """A call's target as it is written, such as `torch.load`."""
    if isinstance(node, ast.Attribute):
        return f"{written_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_calls(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
            yield f"{module.at(node)}: {node.attr}"
        if not isinstance(node, ast.Call):
            continue
        name = written_name(node.func)
        if name in BANNED_CALLS | BANNED_BUILTINS or (module.is_test and name in BANNED_CALLS_IN_TESTS):
            yield f"{module.at(node)}: {name}"
        for keyword in node.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield f"{module.at(node)}: shell="


def banned_imports(module: Module) -> Iterator[str]:
    for node in module.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in BANNED_IMPORTS or name == "multiprocessing.reduction":
                yield f"{module.at(node)}: {name}"


def undocumented(module: Module) -> Iterator[str]:
    """Public functions, classes and methods of public classes without a docstring."""

    def walk(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                yield f"{module.at(node)}: {node.name}"
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body)

    yield from walk(module.tree.body)


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{module.at(node)} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in modules()
        for node in module.nodes
        if isinstance(node, Function)
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX} == {}


def test_no_module_is_named_after_nothing_in_particular() -> None:
    names = {part: module.path for module in modules() for part in (*module.path.parts[:-1], module.path.stem)}
    assert {str(names[name]) for name in names.keys() & BANNED_MODULE_NAMES} == set()


def test_every_module_begins_with_what_it_is() -> None:
    assert [str(module.path) for module in modules() if not ast.get_docstring(module.tree)] == []


@pytest.mark.parametrize("package", ["longshore_wire", "longshore_spec", "longshore_client", "longshore_engines"])
def test_everything_public_that_others_build_on_has_a_docstring(package: str) -> None:
    assert [place for module in modules_of(package) for place in undocumented(module)] == []


def test_nothing_imports_what_runs_code_from_data() -> None:
    assert [place for module in modules() for place in banned_imports(module)] == []


def test_nothing_calls_what_is_banned() -> None:
    assert [place for module in modules() for place in banned_calls(module)] == []


LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def unknown_log_fields(module: Module) -> Iterator[str]:
    """Return the fields of log lines that no formatter writes: in `extra={}`, or in the `fields = {}` that is passed."""
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    calls = [call for call in calls if written_name(call.func).rpartition(".")[2] in LOGGING]
    given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "extra"]
    if any(isinstance(value, ast.Name) for value in given):
        assigned = [node for node in module.nodes if isinstance(node, ast.Assign)]
        given += [node.value for node in assigned if any(written_name(target) == "fields" for target in node.targets)]
    for value in given:
        if isinstance(value, ast.Dict):
            names = [key.value if isinstance(key, ast.Constant) else "" for key in value.keys]
            yield from (f"{module.at(value)}: {name}" for name in names if name not in FIELDS)
        elif (
            written_name(value) != "fields"
            and written_name(getattr(value, "func", value)).rpartition(".")[2] != "about"
        ):
            yield f"{module.at(value)}: {ast.unparse(value)}"


def test_every_field_of_a_log_line_is_one_that_formatters_write() -> None:
    packages = ("longshore_agent", "longshore_operator")
    assert [
        place for package in packages for module in modules_of(package) for place in unknown_log_fields(module)
    ] == []
    text = 'fields = {"rom": 1}\nlog.info("x", extra={"room": 1, "pier": 2})\nlog.info("x", extra=fields)\nlog.info("x", extra=y)\n'
    bad = Module(modules()[0].path, text)
    assert sorted(place.rpartition(": ")[2] for place in unknown_log_fields(bad)) == ["pier", "rom", "y"]


def test_the_rules_see_what_they_ban() -> None:
    text = "import pickle\nimport time\ntorch.load(f)\nx.deserialize_descs(b)\neval(s)\nrun(s, shell=True)\ntime.sleep(1)\n"
    bad = Module(modules()[0].path.__class__("tests/bad.py"), text)
    assert [place.partition(": ")[2] for place in banned_imports(bad)] == ["pickle"]
    found = sorted(place.partition(": ")[2] for place in banned_calls(bad))
    assert found == ["deserialize_descs", "eval", "shell=", "time.sleep", "torch.load"]
