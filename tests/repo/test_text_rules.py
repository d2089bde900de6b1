"""Tests that the tree has no TODO without an issue, no path of one machine, no host of packages,
no dead link, and no other project's name for the distribution.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree_of_files import ROOT, file_paths, project, text_files

from longshore_spec import distribution

# This file names the banned words. The licence's text must not change.
EXEMPT = {Path("tests/repo/test_text_rules.py"), Path("LICENSE")}

UNOWNED_TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+|opt/ls)(?![\w-])")
# Users choose the hosts of packages and images, because some networks cannot reach the public ones.
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|anaconda\.org|ghcr\.io|quay\.io|docker\.io"
    r"|nvcr\.io|gcr\.io|pkg\.dev|registry\.k8s\.io|registry\.\w+\.\w+|proxy\.golang\.org|artifactory\.\w+)\b",
)
# `longshore` with extras, or as an operand of pip: on the package index that is another project.
OTHER_DISTRIBUTION = re.compile(
    r"(?<![\w.-])longshore\\?\[[a-z]|pypi/longshore(?![\w-])|\bpip3? install [^`#,\n]*(?<![\w./-])longshore(?![\w-])"
)
# The target of a link between Markdown files, and its section.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
# The same in a program's text, which users read beside the repository.
PRINTED_LINK = re.compile(r"\"(docs/[\w./-]+\.md)(?:#([\w-]+))?")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GENERATED_FOLDERS = {"__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def places(pattern: re.Pattern[str]) -> list[str]:
    """Return the places in the tree that match the pattern, with the matches."""
    return [
        f"{path}:{number}: {match.group()}"
        for path, text in text_files()
        if path not in EXEMPT
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def test_every_todo_names_its_issue() -> None:
    # CONTRIBUTING states the rule with such a word as an example.
    assert [place for place in places(UNOWNED_TODO) if not place.startswith("CONTRIBUTING.md:")] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_file_names_a_host_of_packages_or_images() -> None:
    assert places(REGISTRY_HOST) == []


def test_the_distribution_has_its_own_name_everywhere() -> None:
    assert project()["project"]["name"] == distribution.NAME
    assert places(OTHER_DISTRIBUTION) == []


def sections(text: str) -> set[str]:
    """Return the names by which links reach the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_to_files_and_sections_that_exist() -> None:
    dead = []
    for path, text in text_files():
        for target, section in LINK.findall(text) if path.suffix == ".md" else ():
            file = (ROOT / path.parent / target) if target else ROOT / path
            known = file.exists() and (not section or section in sections(file.read_text(encoding="utf-8")))
            dead += [] if known else [f"{path}: {target}#{section}"]
    assert dead == []


def test_the_index_has_each_page_once() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = [target for target, _ in LINK.findall(text) if target and not target.startswith("..")]
    pages = {
        str(path.relative_to("docs")) for path, _ in text_files() if path.parts[0] == "docs" and path.suffix == ".md"
    }
    assert set(listed) == pages - {"README.md"}
    assert [target for target in set(listed) if listed.count(target) > 1] == []


def test_links_that_the_command_prints_lead_to_files_and_sections_that_exist() -> None:
    # Links of a page whose path is a constant of the module are joined to it.
    joined = re.compile(r"f\"\{(\w+)\}#([\w-]+)\"")
    found = []
    for path, text in text_files():
        if path.parts[:3] != ("cli", "longshore_cli", "check"):
            continue
        named = dict(re.findall(r"^(\w+) = \"(docs/[^\"#]+)\"", text, re.MULTILINE))
        found += PRINTED_LINK.findall(text)
        found += [(named[name], section) for name, section in joined.findall(text) if name in named]
    dead = [
        link
        for link in found
        if not (ROOT / link[0]).exists() or (link[1] and link[1] not in sections((ROOT / link[0]).read_text()))
    ]
    assert len(found) > 30 and dead == []


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
        (OTHER_DISTRIBUTION, "pip install 'longshore[cli]'", True),
        (OTHER_DISTRIBUTION, "uv pip install --no-deps longshore", True),
        (OTHER_DISTRIBUTION, "install longshore[agent,otel]", True),
        (OTHER_DISTRIBUTION, "pkg:pypi/longshore@0.1.0", True),
        (OTHER_DISTRIBUTION, "pip install 'longshore-kv[cli]', then helm install longshore charts/longshore", False),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str, *, is_found: bool) -> None:
    assert bool(pattern.search(text)) is is_found
