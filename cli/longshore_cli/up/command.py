"""The command `longshore up`: starts the agents, shows them until it is interrupted, and ends them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

from longshore_cli.arguments import BACKENDS, seconds
from longshore_cli.lifetime import InterruptedBySignal, descendants_ended, interrupts_raised
from longshore_cli.local_agents import LocalAgentError
from longshore_cli.up.fleet import Fleet, Member, members_of, scaled
from longshore_cli.up.view import Looker, shown, watch
from longshore_cli.words import plain, plain_lines
from longshore_spec import manifest
from longshore_wire.errors import ConfigError

_EXIT_BAD_MANIFEST = 2
# On one machine. A manifest with more agents is meant for a cluster.
AGENTS_MAX = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument("-f", "--file", type=Path, required=True, help="the DisaggDeployment, YAML or JSON")
    parser.add_argument(
        "--scale", type=_scale, default=Fraction(1), help="factor for all staging sizes, for example 0.01 or 1/64 (1)"
    )
    parser.add_argument(
        "--instances",
        type=_instances,
        default=None,
        metavar="P:D",
        help="prefill and decode agents, one for each instance's node (what the manifest says, or 1:1)",
    )
    parser.add_argument("--directory", type=Path, help="directory of sockets, keys and logs (a new one in /tmp)")
    parser.add_argument("--backend", choices=BACKENDS, help="transport, instead of the manifest's")
    parser.add_argument("--seconds", type=seconds, default=0.0, help="end after this time (0: when interrupted)")


def run(arguments: argparse.Namespace) -> int:
    """Run the agents; return 0 after an orderly end, 1 if an agent failed, 2 for an invalid manifest."""
    try:
        found = manifest.load(arguments.file.read_bytes())
        config = scaled(found.agent_config(), arguments.scale, arguments.backend)
        members = members_of(config, arguments.instances)
        if len(members) > AGENTS_MAX:
            raise ConfigError([f"{len(members)} agents: at most {AGENTS_MAX} run on one machine; use --instances P:D"])
    except OSError as error:
        return _complain([f"{arguments.file}: {error.strerror}"])
    except ConfigError as error:
        return _complain([f"{arguments.file}: {fault}" for fault in error.faults])
    with interrupts_raised(), descendants_ended():
        try:
            with _directory(arguments.directory, config.deployment.name) as name:
                return _serve(Fleet(config, members, Path(name)), members, arguments.seconds)
        except LocalAgentError as error:
            sys.stderr.write(f"longshore up: {plain_lines(str(error))}\n")
            return 1
        except InterruptedBySignal:
            print("all agents have ended")
            return 0


def _serve(fleet: Fleet, members: list[Member], limit_s: float) -> int:
    with fleet:
        print(shown(fleet, members), flush=True)
        watch(Looker(fleet), time.monotonic() + limit_s if limit_s else None)
    print("all agents have ended")
    return 0


class _directory:  # noqa: N801 - reads as the context manager that it is
    """The directory of a fleet: the user's, which is kept, or a temporary one, which is removed."""

    def __init__(self, chosen: Path | None, deployment: str) -> None:
        self._temporary = None if chosen else tempfile.TemporaryDirectory(prefix=f"longshore-{deployment}-")
        self._chosen = chosen

    def __enter__(self) -> str:
        if self._temporary is not None:
            return self._temporary.name
        assert self._chosen is not None
        try:
            self._chosen.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalAgentError(
                f"--directory {self._chosen}: {error.strerror}: name one that can be created"
            ) from error
        return str(self._chosen.resolve())

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _complain(faults: list[str]) -> int:
    for fault in faults:
        sys.stderr.write(f"longshore up: {plain(fault)}\n")
    return _EXIT_BAD_MANIFEST


def _scale(text: str) -> Fraction:
    try:
        factor = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor: write 0.01 or 1/64") from error
    if not 0 < factor <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no factor between 0 and 1")
    return factor


def _instances(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) + int(decode)):
        raise argparse.ArgumentTypeError(f"{text!r}: write prefill and decode agents as 2:4")
    return int(prefill), int(decode)
