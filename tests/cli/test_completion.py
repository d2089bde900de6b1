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
from longshore_cli.verify.command import add_bench_arguments

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
# As bash does on the tab key, for each line of standard input.
BASH = """
source <(longshore completion bash)
complete -p longshore
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9
    _python_argcomplete longshore 2>/dev/null
    printf '= %s\\n' "$COMP_LINE"
    printf '%s\\n' "${COMPREPLY[@]}"
done
"""
# `_describe` is what zsh shows: name, then the array of completions.
ZSH = """
autoload -Uz compinit && compinit -u -D
source <(longshore completion zsh)
print -r -- "${_comps[longshore]} longshore"
_describe() { print -rl -- "${(@P)2}" }
while IFS= read -r line; do
    words=(longshore) BUFFER=$line CURSOR=${#line}
    print -r -- "= $line"
    _python_argcomplete
done
"""
CASES = {
    "longshore r": {"rooms"},
    "longshore ": {*COMMANDS, "up", "keys", "rooms", "trace", "completion"},
    "longshore --v": {"--version"},
    "longshore trace ": {"room"},
    "longshore rooms --en": {"--ended"},
    "longshore rooms --ended ": {"true", "false"},
    "longshore status --di": {"--directory"},
    "longshore d": {"demo", "dump"},
    "longshore dump --op": {"--operator-namespace"},
    "longshore status --wa": {"--wait", "--watch"},
    "longshore check --wa": {"--wait"},
    "longshore trace room 1 --di": {"--directory"},
    "longshore rooms --directory ma": {"manifest.yaml"},
    "longshore up -f ma": {"manifest.yaml"},
}


def completed(shell: list[str], directory: Path) -> dict[str, set[str]]:
    """Return what a shell with the script of completion offers for each line of CASES."""
    (directory / "manifest.yaml").touch()
    # The programs of this environment are first on the path.
    environment = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": str(directory)}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    lines = "".join(f"{line}\n" for line in CASES)
    done = subprocess.run(
        shell, cwd=directory, env=environment, input=lines, check=True, capture_output=True, text=True
    )
    registered, _, rest = done.stdout.partition("\n")
    assert registered.endswith("_python_argcomplete longshore")
    found = {}
    for part in f"\n{rest}".split("\n= ")[1:]:
        line, *words = part.split("\n")
        found[line] = {word.strip() for word in words if word}
    return found


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    found = completed(["bash", "--norc", "-c", BASH], tmp_path)
    assert found.pop("longshore ") >= CASES["longshore "]
    assert found == {line: words for line, words in CASES.items() if line != "longshore "}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_the_same_with_descriptions(tmp_path: Path) -> None:
    found = completed(["zsh", "-f", "-c", ZSH], tmp_path)
    assert found["longshore r"] == {"rooms:list the rooms of running agents"}
    named = {line: {word.partition(":")[0] for word in words} for line, words in found.items()}
    assert named.pop("longshore ") >= CASES["longshore "]
    assert named == {line: words for line, words in CASES.items() if line != "longshore "}


def test_kubectl_gets_the_same_with_descriptions_and_its_directive(tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    for line, expected in CASES.items():
        words = [*shlex.split(line)[1:], *([""] if line.endswith(" ") else [])]
        program = str(PROGRAMS / "kubectl_complete-longshore")
        done = subprocess.run([program, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        *found, directive = done.stdout.splitlines()
        assert {each.partition("\t")[0] for each in found} >= expected
        assert directive == ":4"
        if line == "longshore r":
            assert found == ["rooms\tlist the rooms of running agents"]


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
    assert capsys.readouterr().err == (
        "longshore completion: argcomplete cannot be imported: "
        "pip install 'longshore-kv[cli]', or '.[cli]' in a checkout\n"
    )


def accepted(line: str) -> None:
    _, name, *words = shlex.split(line.partition(" | longshore ")[2] or line, comments=True)
    if [name, *words[:1]] == ["bench", "cluster"]:
        parser = argparse.ArgumentParser()
        add_bench_arguments(parser)
        parser.parse_args(words[1:])
    elif name in COMMANDS:
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
