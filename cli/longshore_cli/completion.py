"""Completes the command's words in bash, zsh and kubectl, by the parser's own declarations.

`main` calls it for `longshore completion SHELL`, and on each press of the tab key, when the shell's script runs `longshore`
with the variable _ARGCOMPLETE. kubectl runs the program `kubectl_complete-longshore`. All of it needs the extra `cli`.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys

from longshore_spec import distribution

# The shell's script sets it.
ASKED = "_ARGCOMPLETE"
SHELLS = ("bash", "zsh")
_EXIT_NOT_INSTALLED = 2
# Of kubectl: complete no files besides these words; and write no space behind them.
_NO_FILES, _NO_SPACE = 4, 2
# Of kubectl: ignore this answer, because the library is not installed.
_ERROR = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script of a shell; return 2 if the library is not installed."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        print(
            f"longshore completion: argcomplete cannot be imported: {distribution.to_install('cli')}", file=sys.stderr
        )
        return _EXIT_NOT_INSTALLED
    # One text serves both shells.
    print(shellcode(["longshore"], True, arguments.shell))
    return 0


def offer(parser: argparse.ArgumentParser) -> None:
    """Print the completions that the shell asks for, and end the process."""
    try:
        import argcomplete
    except ImportError:
        os._exit(1)
    argcomplete.autocomplete(parser, always_complete_options=False)


def for_kubectl(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Return the completions of the last word, in the form of kubectl: a line each, then a line with directives.

    Args:
        words: those behind `kubectl longshore`; the last one, which may be empty, is to be completed.
    """
    try:
        from argcomplete.finders import CompletionFinder
    except ImportError:
        return f":{_ERROR}"
    *before, last = words or [""]
    line = f"{shlex.join(['longshore', *before])} {last}"
    os.environ |= {ASKED: "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_DFS": "\t"}
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line.encode()))}
    said = io.StringIO()
    finder = CompletionFinder()
    finder(parser, always_complete_options=False, exit_method=lambda _: None, output_stream=said, append_space=False)
    found = [text for text in said.getvalue().split("\n") if text]
    is_open = len(found) == 1 and found[0].partition("\t")[0].endswith(("/", "="))
    return "\n".join([*found, f":{_NO_FILES | (_NO_SPACE if is_open else 0)}"])
