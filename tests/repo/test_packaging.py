"""Tests that pyproject.toml, the lock file, the changelog and the folders agree."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from tree_of_files import PACKAGES, ROOT, Module, file_paths, modules, modules_of, project, text_files

# Each process that reads the tree parses all of it.
pytestmark = pytest.mark.xdist_group("tree")

# Distributions whose import packages have another name.
DISTRIBUTION_OF = {
    "celpy": "cel-python",
    "markdown_it": "markdown-it-py",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "websocket": "websocket-client",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Extras of each package beyond the base dependency: its own, and for the agent its transports. Connectors run inside their
# engine, which provides torch.
EXTRAS_OF = {
    "longshore_wire": [],
    "longshore_spec": [],
    "longshore_client": [],
    "longshore_engines": ["vllm", "sglang"],
    "longshore_agent": ["agent", "nixl", "mooncake", "otel"],
    "longshore_operator": ["operator"],
    "longshore_cli": ["cli"],
    "longshore_lab": ["lab"],
}
# The agent's config file is YAML. Agent and operator, which read and write it, require the parser; engines do not.
BROUGHT_BY_THE_CALLER = {("spec/longshore_spec/strict_document.py", "pyyaml")}
BROUGHT_BY_THE_ENGINE = {
    ("engines/longshore_engines/vllm.py", "torch"),
    ("engines/longshore_engines/sglang_prefill.py", "torch"),
    ("engines/longshore_engines/sglang_bootstrap.py", "pyzmq"),
    ("engines/longshore_engines/sglang_bootstrap.py", "aiohttp"),
}
# They require another torch than the tree; e2e/vllm and e2e/sglang have separate locks.
UNPINNED_EXTRAS = {"vllm", "sglang"}
EXTRAS = {
    "agent",
    "operator",
    "cli",
    "lab",
    "fuzz",
    "docs",
    "nixl",
    "otel",
    "mooncake",
    "mooncake-cuda12",
    "mooncake-cuda13",
    "vllm",
    "sglang",
    "dev",
}


def pinned_names() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0] for line in lines if line and not line.startswith("#")}


def required_names() -> set[str]:
    metadata = project()["project"]
    requirements = [*metadata["dependencies"], *project()["build-system"]["requires"]]
    for name, extra in metadata["optional-dependencies"].items():
        requirements += extra if name not in UNPINNED_EXTRAS else []
    return names_of(requirements)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0] for requirement in requirements}


def foreign_imports(module: Module) -> Iterator[str]:
    """Return the distributions that a module imports from, without ours and the standard library."""
    for node in module.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in PACKAGES and top not in sys.stdlib_module_names:
                yield DISTRIBUTION_OF.get(top, top)


@pytest.mark.parametrize("package", EXTRAS_OF)
def test_a_package_imports_only_what_it_asks_for(package: str) -> None:
    metadata = project()["project"]
    allowed = names_of(metadata["dependencies"])
    for extra in EXTRAS_OF[package]:
        allowed |= names_of(metadata["optional-dependencies"][extra])
    found = {(str(module.path), name) for module in modules_of(package) for name in foreign_imports(module)}
    assert {
        (path, name) for path, name in found - BROUGHT_BY_THE_CALLER - BROUGHT_BY_THE_ENGINE if name not in allowed
    } == set()


def test_tests_import_only_what_an_installed_tree_has() -> None:
    neighbours = {module.path.stem for module in modules() if module.is_test or module.path.parts[0] == "benchmarks"}
    found = {(str(m.path), name) for m in modules() if m.is_test for name in foreign_imports(m)}
    assert {(path, name) for path, name in found if name not in required_names() | neighbours} == set()


def test_the_packages_that_are_listed_are_those_that_exist() -> None:
    listed = project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {ROOT / folder for folder in listed} == set(PACKAGES.values())
    assert [name for name, folder in PACKAGES.items() if not (folder / "__init__.py").is_file()] == []


def test_types_and_import_walls_are_checked_for_every_package_and_types_for_programs_beside_them_too() -> None:
    tool = project()["tool"]
    programs = {ROOT / "benchmarks", ROOT / "tests" / "soak"}
    assert {ROOT / folder for folder in tool["mypy"]["files"]} == {*PACKAGES.values(), *programs}
    assert set(tool["importlinter"]["root_packages"]) == PACKAGES.keys()


def test_every_folder_of_a_package_is_a_package() -> None:
    folders = {path.parent for path in file_paths() if path.suffix == ".py"}
    inside = [folder for folder in folders if any((ROOT / folder).is_relative_to(p) for p in PACKAGES.values())]
    assert [str(folder) for folder in inside if not (ROOT / folder / "__init__.py").is_file()] == []


def test_no_folder_of_tests_is_a_package_and_no_two_tests_share_a_name() -> None:
    tests = [path for path in file_paths() if path.parts[0] == "tests" and path.suffix == ".py"]
    assert [str(path) for path in tests if path.name == "__init__.py"] == []
    # pytest distinguishes conftest files by their folders.
    names = [path.name for path in tests if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_an_engine_that_installs_longshore_gets_msgspec_and_nothing_else() -> None:
    assert [re.split(r"[<>=]", name)[0] for name in project()["project"]["dependencies"]] == ["msgspec"]


def test_the_extras_are_those_of_the_design() -> None:
    assert project()["project"]["optional-dependencies"].keys() == EXTRAS


def test_the_lock_file_pins_everything_that_is_asked_for() -> None:
    assert required_names() - pinned_names() == set()


def test_the_lock_file_names_versions_and_no_places() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pin = re.compile(r"[a-z0-9-]+==[0-9][\w.+!]*( ; [^/@]+)?")
    assert [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)] == []


def test_the_changelog_speaks_of_this_version() -> None:
    version = project()["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", dict(text_files())[Path("CHANGELOG.md")], re.MULTILINE)


def test_the_licence_is_apache_2() -> None:
    licence = dict(text_files())[Path("LICENSE")]
    assert project()["project"]["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_a_wheel_has_the_files_that_are_no_modules() -> None:
    packaged = {Path(file.distribution_path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    shipped = {path for path in file_paths() if any((ROOT / path).is_relative_to(p) for p in PACKAGES.values())}
    assert Path("longshore_agent/status/web_page.html") in packaged
    assert {str(path) for path in shipped if Path(*path.parts[1:]) not in packaged} == set()
