"""The command `longshore status`: reads deployments and their agents twice, and prints facts and rates."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from longshore_cli import agents, waiting
from longshore_cli.arguments import ArgumentsError, seconds
from longshore_cli.cluster import MissingError
from longshore_cli.lifetime import InterruptedBySignal, interrupts_raised
from longshore_cli.status import live, shown
from longshore_cli.status.facts import Deployment
from longshore_cli.status.reading import Reader
from longshore_cli.words import as_json
from longshore_spec import distribution, names
from longshore_wire.errors import LongshoreError, Reason

if TYPE_CHECKING:
    from rich.console import RenderableType

# Agents answer within milliseconds, and rates over a shorter time are those of single slabs.
_INTERVAL_MIN_S = 0.1


class NoRichError(LongshoreError):
    """The library that draws trees is not installed."""

    reason = Reason.INTERNAL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    agents.add_arguments(parser, what="show the tree of this DisaggDeployment (a line for each of the namespace)")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="list the deployments of all namespaces")
    parser.add_argument("--all", action="store_true", help="show each healthy agent and pair, however many there are")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again, until Ctrl-C")
    waiting.add_argument(parser, "each deployment is Ready and each agent answers")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two reads, which rates cover (1)"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="the format (table)")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; return 0 if all is Ready and answers, 1 if not, 0 after an interrupted --watch.

    Raises:
        ArgumentsError: the arguments contradict each other.
        LongshoreError: the cluster or its deployment cannot be read.
    """
    if arguments.wait and arguments.watch:
        raise ArgumentsError("--watch shows it until Ctrl-C, also when all is well: leave out --watch, or --wait")
    try:
        with interrupts_raised(), ExitStack() as stack:
            show = _printer(arguments)
            reader = Reader(arguments, stack)
            if arguments.watch and arguments.output == "table" and sys.stdout.isatty():
                live.draw(lambda: _drawn(arguments, reader.read()), arguments.interval)
            until_s = time.monotonic() + arguments.wait
            # Rates need two reads.
            waiting.until_well(reader.read, lambda _: "", until_s, arguments.interval)
            while True:
                time.sleep(arguments.interval)
                trouble = _trouble if arguments.wait else (lambda _: "")
                found = waiting.until_well(reader.read, trouble, until_s, arguments.interval)
                show(found)
                if not arguments.watch:
                    return int(not all(each.well for each in found))
    except InterruptedBySignal as signal:
        return 0 if arguments.watch else signal.status


def _trouble(found: Sequence[Deployment]) -> str:
    """Return why --wait goes on; empty: all is well. Raises MissingError: it could wait for nothing."""
    if not found:
        raise MissingError(f"there is no {names.KIND} to wait for: apply one, or give -n NAMESPACE or -A")
    return next((f"{each.full_name}: {each.worst or 'it is not Ready'}" for each in found if not each.well), "")


def _interval(text: str) -> float:
    found = seconds(text)
    if found < _INTERVAL_MIN_S:
        raise argparse.ArgumentTypeError(f"{text}: give seconds from {_INTERVAL_MIN_S:g} on")
    return found


def _printer(arguments: argparse.Namespace) -> Callable[[list[Deployment]], None]:
    """Return what prints one snapshot. Raises NoRichError."""
    if arguments.output == "json":
        return lambda found: print(_json(found, indent=0 if arguments.watch else 2), flush=True)
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise NoRichError(
            f"{error.name} cannot be imported: give -o json, or {distribution.to_install('cli')}"
        ) from error

    def show(found: list[Deployment]) -> None:
        # Lines of a table are not cut or folded for a file or a pipe.
        if _is_tree(arguments) or sys.stdout.isatty():
            Console(highlight=False).print(_drawn(arguments, found))
        else:
            print(shown.table(found, with_namespace=arguments.all_namespaces))
        if arguments.watch:
            print(flush=True)

    return show


def _drawn(arguments: argparse.Namespace, found: Sequence[Deployment]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if _is_tree(arguments):
        return Group(*(shown.tree(each, every=arguments.all) for each in found))
    table = shown.table(found, with_namespace=arguments.all_namespaces)
    return Text(table, no_wrap=True, overflow="ellipsis")


def _is_tree(arguments: argparse.Namespace) -> bool:
    return bool(arguments.deployment or arguments.agent or arguments.directory)


def _json(found: Sequence[Deployment], *, indent: int) -> str:
    return as_json({"deployments": found}, indent)
