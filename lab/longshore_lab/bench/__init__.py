"""Benchmarks that users run on their own machines: `longshore bench`. A time counts only if all bytes are right.

Called by the command line. `transfer` moves the KV of one request through real agents, by every way, and measures the
bare transport in the same run; `rooms` moves many requests concurrently; `crossover` finds the sizes from which pages are
faster written in place than staged. `cluster`, which measures running agents, is the command line's own and only listed.
"""

from __future__ import annotations

import argparse
import sys

from longshore_cli import verify
from longshore_cli.lifetime import InterruptedBySignal, descendants_ended, interrupts_raised
from longshore_lab.bench.errors import BenchError
from longshore_wire.errors import LongshoreError

__all__ = ["BenchError", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    from longshore_lab.bench import crossover, rooms, transfer

    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    transfer.add_arguments(
        questions.add_parser(
            "transfer", help="how fast one request's KV moves, by every way", description=transfer.__doc__
        )
    )
    rooms.add_arguments(
        questions.add_parser(
            "rooms", help="how long requests take when many move concurrently", description=rooms.__doc__
        )
    )
    crossover.add_arguments(
        questions.add_parser(
            "crossover", help="from which sizes on pages are faster written in place", description=crossover.__doc__
        )
    )
    verify.add_bench_arguments(questions.add_parser("cluster", help="how fast the agents of a running deployment are"))


def run(arguments: argparse.Namespace) -> int:
    """Measure; return 0 if every byte was right and no part died, 128 and its number after a signal, else 1."""
    try:
        with interrupts_raised(), descendants_ended():
            return _measured(arguments)
    except InterruptedBySignal as error:
        sys.stderr.write("longshore bench: interrupted; everything that it started has ended\n")
        return error.status
    except (BenchError, LongshoreError) as error:
        sys.stderr.write(f"longshore bench: {error}\n")
        return 1


def _measured(arguments: argparse.Namespace) -> int:
    from longshore_lab.bench import crossover, rooms, transfer

    parts = {"transfer": transfer.run, "rooms": rooms.run, "crossover": crossover.run}
    return parts[arguments.question](arguments)
