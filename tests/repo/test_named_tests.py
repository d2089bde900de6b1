"""Tests that pages only name existing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree_of_files import functions_by_file, text_files

# Each process that reads the tree parses all of it.
pytestmark = pytest.mark.xdist_group("tree")

DEFECTS = Path("docs/design/2026-11-21-defects-of-others.md")
LETTERS = "ABCDEFGHIJKLM"
TEST_FILE = re.compile(r"\btests/[\w/]+\.py\b")
NAMED_TEST = re.compile(r"\b(tests/[\w/]+\.py)::(test_\w+)")


def pages() -> dict[Path, str]:
    return {path: text for path, text in text_files() if path.suffix == ".md"}


def test_every_test_that_a_page_names_exists() -> None:
    functions = functions_by_file()
    missing = {
        f"{path}: {name}" for path, text in pages().items() for name in TEST_FILE.findall(text) if name not in functions
    } | {
        f"{path}: {file}::{test}"
        for path, text in pages().items()
        for file, test in NAMED_TEST.findall(text)
        if test not in functions.get(file, ())
    }
    assert missing == set()


def test_every_test_file_that_ci_names_exists() -> None:
    scripts = {path: text for path, text in text_files() if path.parent == Path(".ci")}
    named = {name for text in scripts.values() for name in TEST_FILE.findall(text)}
    assert Path(".ci/test") in scripts
    assert named
    assert named <= functions_by_file().keys()


def test_each_of_the_thirteen_defects_has_a_reason_and_a_test() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in pages()[DEFECTS].splitlines()
        if line.startswith("| ")
    ]
    found = {row[0]: row for row in rows if row[0] in LETTERS and row[0]}
    assert "".join(found) == LETTERS
    assert [letter for letter, row in found.items() if not (row[1] and row[2] and NAMED_TEST.search(row[3]))] == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert NAMED_TEST.findall("`tests/repo/test_named_tests.py::test_nothing`") == [
        ("tests/repo/test_named_tests.py", "test_nothing")
    ]
    assert "test_nothing" not in functions_by_file()["tests/repo/test_named_tests.py"]
