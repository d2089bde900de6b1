"""Tests which modules an import loads in a new interpreter: few for engines, and the standard library stays intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tree_of_files import PACKAGES, ROOT

LOADED_BY = """
import json, sys
before = set(sys.modules)
import {name}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run_python(code: str, **environment: str) -> str:
    paths = os.pathsep.join([*(str(folder.parent) for folder in PACKAGES.values()), environment.pop("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def foreign_packages_loaded_by(name: str) -> set[str]:
    loaded = json.loads(run_python(LOADED_BY.format(name=name)))
    # msgspec loads typing_extensions if it is installed, and works without it.
    return {module.partition(".")[0] for module in loaded} - set(sys.stdlib_module_names) - {"typing_extensions"}


def test_importing_the_client_loads_wire_and_msgspec_alone() -> None:
    assert foreign_packages_loaded_by("longshore_client") == {"longshore_client", "longshore_wire", "msgspec"}


@pytest.mark.parametrize(
    ("package", "loaded"),
    [("longshore_wire", {"longshore_wire"}), ("longshore_spec", {"longshore_spec", "longshore_wire"})],
)
def test_importing_every_module_of_wire_or_spec_loads_msgspec_alone(package: str, loaded: set[str]) -> None:
    names = [f"{package}.{path.stem}" for path in PACKAGES[package].glob("*.py") if path.stem != "__init__"]
    assert foreign_packages_loaded_by(", ".join(names)) == loaded | {"msgspec"}


def test_importing_a_worker_loads_no_tensor_library() -> None:
    loaded = foreign_packages_loaded_by("longshore_agent.worker.main")
    assert "longshore_agent" in loaded
    assert not loaded & {"torch", "triton", "opentelemetry"}


def test_importing_a_worker_loads_no_event_loop() -> None:
    assert run_python("import longshore_agent.worker.main, sys; print('asyncio' in sys.modules)") == "False\n"


def test_importing_the_operator_loads_no_tensor_library_and_no_transport() -> None:
    loaded = foreign_packages_loaded_by("longshore_operator.main")
    assert {"kopf", "kubernetes", "longshore_operator"} <= loaded
    assert not loaded & {"torch", "triton", "numpy", "nixl", "mooncake", "zmq"}


def test_the_standard_librarys_operator_is_found_from_the_trees_root() -> None:
    code = "import operator; print(operator.itemgetter(1)('ab'), operator.__file__)"
    for environment in ({}, {"PYTHONPATH": str(ROOT)}):
        answer, _, place = run_python(code, **environment).strip().partition(" ")
        assert answer == "b"
        assert not Path(place).is_relative_to(ROOT)


def test_the_folders_around_the_packages_are_no_packages() -> None:
    assert [str(folder) for folder in PACKAGES.values() if (folder.parent / "__init__.py").exists()] == []


def test_every_wall_between_packages_holds() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
