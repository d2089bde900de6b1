"""Tests that the pages of the command line and of HTTP are those of the programs, and that commands in other pages fit them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from reference_pages import PROGRAMS, ROOT, http_page, pages, parsers
from test_code_blocks import commands, of
from tree_of_files import project, text_files

from longshore_wire.errors import Reason


def reasons(text: str) -> set[str]:
    """Return the reasons of error bodies in a module: first arguments of `ErrorBody`, and results of `_absence`."""
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node.args[0] for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "ErrorBody"]
    ends = [
        end
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name == "_absence"
        for end in ast.walk(node)
        if isinstance(end, ast.Return)
    ]
    found = [part for node in [*calls, *ends] for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {part.value for part in found if isinstance(part.value, str)}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_a_page_is_what_the_programs_say(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == pages()[path], "run make reference"


def test_every_installed_program_is_in_the_page() -> None:
    scripts = project()["project"]["scripts"].keys()
    # kubectl's names of `longshore` and of its completion.
    assert PROGRAMS.keys() | {"kubectl-longshore", "kubectl_complete-longshore"} == scripts


def test_every_reason_of_an_error_has_its_cause_and_remedy() -> None:
    texts = dict(text_files())
    files = [texts[Path("agent/longshore_agent/status") / name] for name in ("app.py", "server.py")]
    said = {reason for text in files for reason in reasons(text)}
    rows = [line.split("|")[1:-1] for line in http_page().splitlines() if re.match(r"\| [45]\d\d \| `\w+`", line)]
    assert len(said) > 8
    assert {row[1].strip().strip("`") for row in rows} == said
    assert all(cell.strip() for row in rows for cell in row)


def test_commands_in_pages_have_arguments_that_their_programs_know() -> None:
    known = {
        (program, *words): {option for action in parser._actions for option in action.option_strings}
        for program in PROGRAMS
        for words, parser in parsers(program)
    }
    checked, faults = 0, []
    for block in of("sh"):
        for words in commands(block.text):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if not words or Path(words[0]).name not in PROGRAMS:
                continue
            path = (Path(words[0]).name, *words[1:])
            while path not in known:
                path = path[:-1]
            checked += 1
            options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            faults += [(block.place, " ".join(path), option) for option in options - known[path]]
            has_command = len(path) > 1 or path[0] != "longshore" or "--version" in words
            faults += [] if has_command else [(block.place, "no such command", " ".join(words))]
    assert checked > 5
    assert faults == []


def test_every_reason_of_wire_has_its_number_cause_and_remedy() -> None:
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.match(r"\| \d", line)]
    assert [(row[0], row[1].strip("`")) for row in rows] == [(str(reason.value), reason.name) for reason in Reason]
    assert all(cell for row in rows for cell in row)


def test_every_family_that_a_test_moves_is_recorded_and_no_other() -> None:
    marks = {
        (path.parent.name, *(ast.literal_eval(argument) for argument in node.args[:2]))
        for path in (ROOT / "e2e").glob("*/test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.family"
    }
    rows = json.loads((ROOT / "e2e" / "families.json").read_text(encoding="utf-8"))
    assert {(row["engine"], row["family"], row["moves"]) for row in rows} == marks
