"""Tests that the code blocks of pages are valid: shell, YAML, JSON, Python, and the commands of this tree in them.

An indented block is YAML if it begins like `key:`, else shell. A fence without a language shows output, in which lines that
begin with `$` are shell.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from markdown_it import MarkdownIt
from tree_of_files import ROOT, text_files

from longshore_spec import manifest
from longshore_wire.errors import ConfigError

LANGUAGES = {"sh", "yaml", "json", "python", "text"}
# What the reader replaces, such as <namespace>. A shell would take it for redirections.
PLACE = re.compile(r"<[a-z][\w ./-]*>")
YAML_START = re.compile(r"[\w./-]+:(?:\s|$)")
# What was typed in output, with the lines that continue it.
TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)
TARGET = re.compile(r"^([a-z0-9-]+):.*## ", re.MULTILINE)


class Block(NamedTuple):
    """A code block: its place as path:line, its language, and its text."""

    place: str
    language: str
    text: str


def blocks_of(path: Path, text: str) -> list[Block]:
    found = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type not in {"fence", "code_block"}:
            continue
        assert token.map is not None
        language, content = token.info.strip(), token.content
        if token.type == "code_block":
            language = "yaml" if YAML_START.match(content) else "sh"
        elif not language:
            commands = [match[1] for match in TYPED.finditer(content)]
            language, content = ("sh", "\n".join(commands)) if commands else ("text", content)
        found.append(Block(f"{path}:{token.map[0] + 1}", "sh" if language == "bash" else language, content))
    return found


BLOCKS = [block for path, text in text_files() if path.suffix == ".md" for block in blocks_of(path, text)]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def shell_fault(text: str) -> str:
    """Return the shell's complaint on `text`, or nothing."""
    done = subprocess.run(["bash", "-n"], input=PLACE.sub("place", text), capture_output=True, text=True, check=False)
    return done.stderr


def commands(text: str) -> list[list[str]]:
    """Return the words of each simple command of a shell block that `shlex` can read."""
    joined = PLACE.sub("place", text).replace("\\\n", " ")
    parts = shlex.shlex(joined, posix=True, punctuation_chars=";|&\n")
    parts.whitespace, parts.whitespace_split = " \t", True
    found: list[list[str]] = [[]]
    for word in parts:
        if set(word) <= set(";|&\n"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def manifests(text: str) -> list[str]:
    return [
        json.dumps(document)
        for document in yaml.safe_load_all(text)
        if isinstance(document, dict) and document.get("kind") == "DisaggDeployment"
    ]


def test_every_block_has_a_language_that_is_checked() -> None:
    assert [f"{block.place}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES] == []
    assert min(len(of("sh")), len(of("yaml")), len(of("python"))) > 3


def test_shell_blocks_parse() -> None:
    assert [(block.place, fault) for block in of("sh") if (fault := shell_fault(block.text))] == []


def test_upgrades_take_the_values_that_came_later() -> None:
    """With --reuse-values alone, Helm gives new templates the values of the old chart."""
    upgrades = [
        (block.place, words)
        for block in (*of("sh"), *of("text"))
        for words in commands("\n".join(TYPED.findall(block.text)) if block.language == "text" else block.text)
        if words[:2] == ["helm", "upgrade"]
    ]
    assert len(upgrades) > 5
    assert [place for place, words in upgrades if "--reset-then-reuse-values" not in words] == []


def test_make_targets_in_shell_blocks_exist() -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = [
        (block.place, word)
        for block in of("sh")
        for words in commands(block.text)
        if words[0] == "make"
        for word in words[1:2]
    ]
    assert len(named) > 10
    assert [(place, word) for place, word in named if word not in targets] == []


def test_files_of_the_tree_in_shell_blocks_exist() -> None:
    folders = ("examples/", "benchmarks/", "charts/", "crds/", "e2e/", "tests/", ".ci/")
    named = [
        (block.place, word)
        for block in of("sh")
        for words in commands(block.text)
        for word in words
        if word.startswith(folders)
    ]
    assert len(named) > 10
    assert [(place, word) for place, word in named if not (ROOT / word).exists()] == []


def test_yaml_blocks_parse_and_deployments_in_them_are_valid() -> None:
    faults = []
    for block in of("yaml"):
        try:
            for text in manifests(block.text):
                manifest.load(text.encode()).agent_config()
        except (yaml.YAMLError, ConfigError) as error:
            faults.append((block.place, str(error)))
    assert faults == []


def test_json_blocks_parse() -> None:
    for block in of("json"):
        json.loads(block.text)


def test_python_blocks_compile() -> None:
    for block in of("python"):
        compile(block.text, block.place, "exec")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("    make test\n", "sh"),
        ("    spec:\n      paused: true\n", "yaml"),
        ("```\nwords of a program\n```\n", "text"),
        ("```\n$ kubectl get dgdep\nNAME\n```\n", "sh"),
        ("1. First:\n\n       make demo\n", "sh"),
        ("Words:\n```yaml\nspec: {}\n```\n    agents: {}\n", "yaml yaml"),
    ],
)
def test_the_language_of_a_block_is_found(text: str, language: str) -> None:
    assert [block.language for block in blocks_of(Path("page.md"), text)] == language.split()


def test_faults_are_found() -> None:
    assert shell_fault("if true; then") != ""
    assert shell_fault("kubectl get pods -n <namespace>\n") == ""
    assert commands("make test && X=1 make \\\n  soak # later\n")[0] == ["make", "test"]
    with pytest.raises(ConfigError):
        manifest.load(manifests("kind: DisaggDeployment\nmetadata: {name: a}\n")[0].encode())
