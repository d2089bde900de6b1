"""Runs the `longshore` command: parses the arguments and calls the named subcommand."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from longshore_cli import analyze, check, completion, dump, examples, laboratory, model, rooms, status, up, verify
from longshore_cli.arguments import EXIT_INVALID, ArgumentsError
from longshore_cli.lifetime import SIGNAL_STATUS
from longshore_cli.local_agents import make_keys
from longshore_cli.words import plain_lines
from longshore_spec import distribution
from longshore_wire.errors import LongshoreError

# Modules of the programs that a command starts, and the extras that bring them. A plain installation, which is for engines,
# lacks them.
_NEEDED = {
    "up": (("fastapi", "numpy", "uvicorn", "zmq"), ("agent", "cli", "nixl")),
    "keys": (("zmq",), ("cli",)),
}

_Given = TypeVar("_Given")


class _Command(NamedTuple):
    """A command: its name, its line in the help, and functions that declare its arguments and run it."""

    name: str
    shown: str
    declare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog=_program(), description="Moves the KV cache of language models between GPUs of unequal layouts."
    )
    parser.add_argument("--version", action="version", version=f"longshore {distribution.installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, shown in laboratory.COMMANDS.items():
        # The laboratory declares its own arguments, `--help` included.
        commands.add_parser(name, help=shown, add_help=False)
    for command in _commands():
        one = commands.add_parser(command.name, help=command.shown)
        command.declare(one)
        one.set_defaults(run=command.run)
    for name, each in commands.choices.items():
        examples.add(each, name)
    return parser


def _commands() -> tuple[_Command, ...]:
    """Return all commands but those of the laboratory."""
    return (
        _Command("up", "run the agents that a DisaggDeployment asks for on this machine", up.add_arguments, up.run),
        _Command("keys", "make the CURVE keys of a deployment's control protocol", _declare_keys, _keys),
        _Command(
            "analyze",
            "check manifests without a cluster: faults, plan, sizes, and what a change restarts",
            analyze.add_arguments,
            analyze.run,
        ),
        _Command("model", "print spec.model from a model's config.json", model.add_arguments, model.run),
        _Command(
            "check",
            "check a cluster before an installation (--pre), or what runs after it",
            check.add_arguments,
            check.run,
        ),
        _Command(
            "status",
            "show deployments and agents: engines, pairs, rates now, and what is wrong",
            status.add_arguments,
            status.run,
        ),
        _Command(
            "dump",
            "write what support needs to know of a cluster into one file, without secrets",
            dump.add_arguments,
            dump.run,
        ),
        _Command(
            "verify",
            "move test bytes between every pair of a deployment's agents, and compare",
            verify.add_verify_arguments,
            verify.verify,
        ),
        _Command("rooms", "list the rooms of running agents", rooms.add_rooms_arguments, rooms.show_rooms),
        _Command(
            "trace",
            "show where the time of one room went, across all its processes",
            rooms.add_trace_arguments,
            rooms.trace,
        ),
        _Command(
            "completion",
            "print the script that completes this command's words in a shell",
            completion.add_arguments,
            completion.run,
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 1 if it failed, 2 for invalid arguments, as of a shell after a signal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding lacks a character shows `?`.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNAL_STATUS + signal.SIGPIPE
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT
    return code


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    if completion.ASKED in os.environ:
        completion.offer(parser)
    chosen, words = parser.parse_known_args(arguments)
    if chosen.command == "bench" and words[:1] == ["cluster"]:
        # It measures agents that run elsewhere, so it does without the laboratory.
        return _ended("bench cluster", _bench_cluster, words[1:])
    if chosen.command in laboratory.COMMANDS:
        return laboratory.run(chosen.command, words, _program())
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    modules, extras = _NEEDED.get(chosen.command, ((), ()))
    if modules and (fault := distribution.lacking(modules, *extras)):
        print(f"longshore {chosen.command}: {fault}", file=sys.stderr)
        return EXIT_INVALID
    return _ended(chosen.command, chosen.run, chosen)


def _ended(command: str, run: Callable[[_Given], int], given: _Given) -> int:
    """Run a command; return its exit status. Complain about its errors."""
    try:
        return run(given)
    except LongshoreError as error:
        sys.stderr.write(f"longshore {command}: {plain_lines(str(error))}\n")
        return EXIT_INVALID if isinstance(error, ArgumentsError) else 1
    except ModuleNotFoundError as error:
        # Each command imports what it alone needs when it needs it.
        sys.stderr.write(f"longshore {command}: {error.name} cannot be imported: {distribution.to_install('cli')}\n")
        return 1


def complete_for_kubectl() -> int:
    """Print completions of `kubectl longshore`: the program `kubectl_complete-longshore`, which kubectl runs."""
    print(completion.for_kubectl(make_parser(), sys.argv[1:]))
    return 0


def _program() -> str:
    """Return the command as its user has typed it. kubectl runs the program `kubectl-longshore`."""
    return "kubectl longshore" if Path(sys.argv[0]).name == "kubectl-longshore" else "longshore"


def _bench_cluster(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{_program()} bench cluster")
    verify.add_bench_arguments(parser)
    examples.add(parser, "bench cluster")
    return verify.bench(parser.parse_args(words))


def _declare_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where `curve.json` is written")


def _keys(arguments: argparse.Namespace) -> int:
    make_keys(arguments.directory)
    directory = arguments.directory.resolve()
    print(f"keys are in {directory}: give agents LONGSHORE_KEYS_DIRECTORY={directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
