"""The command `longshore dump`: parses arguments, and writes what can be read of a cluster into one file."""

from __future__ import annotations

import argparse
import datetime as dt
from pathlib import Path

from longshore_cli import cluster
from longshore_cli.arguments import ArgumentsError, new_file
from longshore_cli.cluster import Cluster
from longshore_cli.dump import bundle, reading
from longshore_cli.operator_deployments import NAMESPACE
from longshore_cli.words import count
from longshore_spec import distribution

_ABOUT = """\
status.json and check.json are the output of `longshore status -o json` and of `longshore check -o json`. Below namespaces/ are the
deployments, the operator's objects for them, pods of agents and of engines with the label longshore.dev/inject, events about
these, and for each agent the end of its log (previous-log.txt: before its last restart) and its pages. A kind without objects
has no file.

Left out: Secrets, keys and tokens. Removed: values of variables (but not of the settings of agents, operator, UCX, NIXL and
Mooncake), values of annotations (but not of longshore.dev/), arguments of containers, headers of probes, parameters of volumes.
Other texts that equal a removed value of 16 characters or more are removed wherever they stand. Nobody knows what a program
writes into its log: look through the files before you send them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument(
        "deployment", metavar="NAME", nargs="?", default="", help="only this DisaggDeployment (all of the namespace)"
    )
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="the deployments of all namespaces")
    cluster.add_arguments(parser)
    parser.add_argument(
        "--operator-namespace", metavar="NS", default=NAMESPACE, help=f"where the chart is installed ({NAMESPACE})"
    )
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE",
        help="the file (longshore-dump-<date and time>.tar.gz in the current folder)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Write the file, also if parts cannot be read; return 0.

    Raises:
        ArgumentsError: the arguments contradict each other, or the file cannot be written.
        ClusterError: the API server does not answer, or has no such deployment.
    """
    if arguments.all_namespaces and (arguments.deployment or arguments.namespace):
        raise ArgumentsError("-A takes all namespaces: leave out NAME and -n, or -A")
    now = dt.datetime.now(dt.UTC)
    path = arguments.output or Path(f"longshore-dump-{now:%Y%m%d-%H%M%S}.tar.gz")
    with Cluster.connect(arguments) as found:
        where = "" if arguments.all_namespaces else found.namespace
        subject = f"DisaggDeployment {arguments.deployment}" if arguments.deployment else "all DisaggDeployments"
        place = f"of namespace {where}" if where else "of all namespaces"
        release = distribution.installed_version()
        head = f"Made by `longshore dump` {release} at {now:%Y-%m-%d %H:%M:%S} UTC, of {subject} {place}.\n\n{_ABOUT}"
        removed: set[str] = set()
        counts = bundle.write(path, head, reading.parts(found, arguments, where, removed), removed)
    print(f"wrote {path}: {count(counts.written, 'file')}, without Secrets, keys and tokens")
    if counts.missing:
        print(f"{count(counts.missing, 'part')} could not be read: {bundle.INDEX} in it says why")
    return 0
