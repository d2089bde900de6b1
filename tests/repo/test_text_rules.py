"""Words that must not be in the tree: unowned TODOs, paths of one machine, hosts that packages are fetched from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree_of_files import file_paths, text_files

# This file names what it bans; the licence is not ours to word.
EXEMPT = {Path("tests/repo/test_text_rules.py"), Path("LICENSE")}

UNOWNED_TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+|opt/ls)(?![\w-])")
# A host of packages or images is the user's choice, and differs where there is no way out to the public ones.
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|anaconda\.org|ghcr\.io|quay\.io|docker\.io"
    r"|nvcr\.io|gcr\.io|pkg\.dev|registry\.k8s\.io|registry\.\w+\.\w+|proxy\.golang\.org|artifactory\.\w+)\b",
)
GENERATED_FOLDERS = {"__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def places(pattern: re.Pattern[str]) -> list[str]:
    """Where the pattern is found in the tree, with what it found."""
    return [
        f"{path}:{number}: {match.group()}"
        for path, text in text_files()
        if path not in EXEMPT
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def test_every_todo_names_its_issue() -> None:
    # The rule itself is written down in CONTRIBUTING, where the word stands for all of its kind.
    assert [place for place in places(UNOWNED_TODO) if not place.startswith("CONTRIBUTING.md:")] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_file_names_a_host_of_packages_or_images() -> None:
    assert places(REGISTRY_HOST) == []


def test_nothing_generated_is_in_the_tree() -> None:
    assert [str(path) for path in file_paths() if GENERATED_FOLDERS & set(path.parts)] == []


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        (UNOWNED_TODO, "# TODO: later", True),
        (UNOWNED_TODO, "# TODO(#12): later", False),
        (MACHINE_PATH, "see /root/x", True),
        (MACHINE_PATH, "'/work'", True),
        (MACHINE_PATH, "net/work, /v1/rooms, /workers, $HOME/root", False),
        (REGISTRY_HOST, "https://ghcr.io/a", True),
        (REGISTRY_HOST, "registry of rooms", False),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str, *, is_found: bool) -> None:
    assert bool(pattern.search(text)) is is_found
