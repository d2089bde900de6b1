"""Tests completion of the command's words, in real shells and in kubectl's form, and the examples of its help."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longshore_cli import main as command
from longshore_cli.examples import EXAMPLES
from longshore_cli.laboratory import COMMANDS, _parts
from longshore_cli.main import make_parser

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
# As bash does on the tab key. The program's own directory is first on the path.
BASH = """
source <(longshore completion bash)
read -r -a COMP_WORDS <<<"$COMP_LINE"
COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete longshore 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
complete -p longshore
"""
# `_describe` is what zsh shows: name, then the array of completions.
ZSH = """
autoload -Uz compinit && compinit -u -D
source <(longshore completion zsh)
print -r -- "registered: ${_comps[longshore]}"
_describe() { print -rl -- "${(@P)2}" }
words=(longshore) BUFFER=$COMP_LINE CURSOR=${#COMP_LINE}
_python_argcomplete
"""


def ran(shell: list[str], line: str, directory: Path | None = None) -> list[str]:
    environment = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "COMP_LINE": line, "HOME": str(directory or ROOT)}
    done = subprocess.run(
        shell, cwd=directory, env=environment, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return [word.strip() for word in done.stdout.splitlines()]


CASES = {
    "longshore r": {"rooms"},
    "longshore ": {*COMMANDS, "up", "keys", "rooms", "trace", "completion"},
    "longshore --v": {"--version"},
    "longshore trace ": {"room"},
    "longshore rooms --en": {"--ended"},
    "longshore rooms --ended ": {"true", "false"},
    "longshore up -f ma": {"manifest.yaml"},
}


@pytest.mark.parametrize("line", CASES)
def test_bash_completes_commands_options_choices_and_files(line: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    *words, registered = ran(["bash", "--norc", "-c", BASH], line, tmp_path)
    found = {word for word in words if word}
    assert found >= CASES[line]
    # Others may add commands and directories; a choice that was begun leaves no other.
    assert found == CASES[line] or line == "longshore "
    assert registered.endswith("_python_argcomplete longshore")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize("line", CASES)
def test_zsh_completes_the_same(line: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    registered, *words = ran(["zsh", "-f", "-c", ZSH], line, tmp_path)
    assert registered == "registered: _python_argcomplete"
    assert {word.partition(":")[0] for word in words if word} >= CASES[line]


@pytest.mark.parametrize("line", CASES)
def test_kubectl_gets_the_same_with_descriptions_and_its_directive(line: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    words = [*shlex.split(line)[1:], *([""] if line.endswith(" ") else [])]
    program = str(PROGRAMS / "kubectl_complete-longshore")
    done = subprocess.run([program, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
    *found, directive = done.stdout.splitlines()
    assert {each.partition("\t")[0] for each in found} >= CASES[line]
    assert directive == ":4"
    if line == "longshore r":
        assert "rooms\tlist the rooms of running agents" in found


def test_help_names_the_program_that_was_called(tmp_path: Path) -> None:
    for program, named in (("kubectl-longshore", "kubectl longshore"), ("longshore", "longshore")):
        for words in ([], ["rooms"], ["demo"]):
            done = subprocess.run(
                [str(PROGRAMS / program), *words, "--help"], check=True, capture_output=True, text=True
            )
            assert " ".join([f"usage: {named}", *words]) in done.stdout
        assert f"  {named} demo --quick" in done.stdout


def test_completion_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert command.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == ("longshore completion: argcomplete cannot be imported: install longshore[cli]\n")


def accepted(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    if name in COMMANDS:
        parser = argparse.ArgumentParser()
        _parts(name)[0](parser)
        parser.parse_args(words)
    else:
        make_parser().parse_args([name, *words])


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_in_the_help_is_one_that_the_command_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in EXAMPLES[name]:
        if line.startswith("longshore "):
            accepted(line)
            assert (
                not (path := next((word for word in line.split() if word.endswith(".yaml")), ""))
                or Path(path).is_file()
            )
