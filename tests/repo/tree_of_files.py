"""Lists the tree's files for the tests in this folder: those that git tracks or would add."""

from __future__ import annotations

import ast
import gc
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "longshore_wire": ROOT / "wire" / "longshore_wire",
    "longshore_spec": ROOT / "spec" / "longshore_spec",
    "longshore_client": ROOT / "client" / "longshore_client",
    "longshore_engines": ROOT / "engines" / "longshore_engines",
    "longshore_agent": ROOT / "agent" / "longshore_agent",
    "longshore_operator": ROOT / "operator" / "longshore_operator",
    "longshore_cli": ROOT / "cli" / "longshore_cli",
    "longshore_lab": ROOT / "lab" / "longshore_lab",
}


@dataclass(frozen=True)
class Module:
    """One Python file: its path below the root, its text, its syntax tree, and all nodes of that."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        # Nodes live as long as the process. Visiting them again and again, the collector took most of the time.
        gc.disable()
        try:
            return ast.parse(self.text, filename=str(self.path))
        finally:
            gc.freeze()
            gc.enable()

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def is_test(self) -> bool:
        return self.path.parts[0] == "tests"

    def at(self, node: ast.AST) -> str:
        """Return a node's place as path:line, which editors understand."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@cache
def file_paths() -> tuple[Path, ...]:
    """Return the sorted paths of all files of the tree below the root, without those that .gitignore names."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = {Path(name) for name in listing.split("\0") if name}
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


@cache
def modules() -> tuple[Module, ...]:
    """Return all Python files of the tree."""
    return tuple(
        Module(path, (ROOT / path).read_text(encoding="utf-8")) for path in file_paths() if path.suffix == ".py"
    )


def modules_of(package: str) -> list[Module]:
    """Return the modules of one import package."""
    folder = PACKAGES[package].relative_to(ROOT)
    return [module for module in modules() if module.path.is_relative_to(folder)]


@cache
def functions_by_file() -> dict[str, frozenset[str]]:
    """Return the names of all functions of each Python file, by its path."""
    return {
        module.path.as_posix(): frozenset(
            node.name for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        for module in modules()
    }


@cache
def text_files() -> tuple[tuple[Path, str], ...]:
    """Yield path and text of every text file of the tree."""
    found = []
    for path in file_paths():
        try:
            found.append((path, (ROOT / path).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a picture
    return tuple(found)


@cache
def project() -> dict[str, Any]:
    """Return the parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
