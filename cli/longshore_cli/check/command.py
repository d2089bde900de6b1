"""The command `longshore check`: parses arguments, reads the cluster, prints what the checks say."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from longshore_cli import cluster, waiting
from longshore_cli.arguments import ArgumentsError
from longshore_cli.check import after, before, reading
from longshore_cli.check.before import Subject
from longshore_cli.check.lines import Line, as_json, error, failed, table
from longshore_cli.cluster import Cluster, ClusterError
from longshore_cli.documents import Found, read
from longshore_cli.operator_deployments import NAMESPACE
from longshore_spec import distribution, manifest, names
from longshore_wire.errors import ConfigError

# Between two checks with --wait. One of 1,000 agents takes seconds.
_WAIT_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument("deployment", metavar="NAME", nargs="?", default="", help="check only this DisaggDeployment")
    parser.add_argument("--pre", action="store_true", help="check whether Longshore can be installed")
    parser.add_argument("-f", "--file", type=Path, help="with --pre: manifests of the DisaggDeployments to come")
    parser.add_argument(
        "--mode",
        choices=("cluster", "namespaced"),
        default="cluster",
        help="with --pre: the chart's value mode (cluster)",
    )
    parser.add_argument(
        "--operator-namespace", metavar="NS", default=NAMESPACE,
        help=f"where the chart is, or is to be, installed ({NAMESPACE})",
    )  # fmt: skip
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="check the deployments of all namespaces")
    cluster.add_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="fail on warnings, too")
    waiting.add_argument(parser, "nothing fails")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="the format (table)")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; return 1 if one has an error. Raises ArgumentsError."""
    _check(arguments)
    files = None if arguments.file is None else _documents(arguments.file)
    try:
        with Cluster.connect(arguments) as found:
            lines = _before(found, files, arguments) if arguments.pre else _waited(found, arguments)
    except ClusterError as fault:
        lines = [error("cluster", "connection", str(fault), "correct what the message names", before.PAGE)]
    if arguments.output == "json":
        print(as_json(lines))
    else:
        print(table(lines, sys.stdout.encoding or "ascii"))
    return int(failed(lines, strict=arguments.strict))


def _check(arguments: argparse.Namespace) -> None:
    if arguments.pre and (arguments.deployment or arguments.all_namespaces):
        raise ArgumentsError("--pre checks manifests or a namespace: leave out NAME and -A, or --pre")
    if arguments.pre and arguments.wait:
        raise ArgumentsError("--pre checks what does not change by itself: leave out --wait, or --pre")
    if arguments.file and not arguments.pre:
        raise ArgumentsError("-f is for manifests that are not applied yet: give --pre, or leave it out")
    if arguments.all_namespaces and (arguments.deployment or arguments.namespace):
        raise ArgumentsError("-A checks all namespaces: leave out NAME and -n, or -A")


def _documents(path: Path) -> list[Subject]:
    """Return the DisaggDeployments of a file; an empty namespace stands for that of the arguments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ArgumentsError(f"-f {path}: {getattr(fault, 'strerror', None) or fault}") from fault
    found = Found()
    read(text, str(path), found)
    subjects = [_subject(each.body) for each in found.documents]
    if found.unreadable:
        subjects.append(Subject("", "manifest", None, tuple(found.unreadable)))
    if not subjects:
        raise ArgumentsError(f"-f {path} has no {names.KIND}: name a file with one")
    return subjects


def _subject(document: dict[str, Any]) -> Subject:
    metadata = document.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    namespace, name = str(named.get("namespace") or ""), str(named.get("name") or "manifest")
    try:
        found = manifest.read(document)
        found.agent_config()
        return Subject(namespace, name, found.spec)
    except ConfigError as fault:
        return Subject(namespace, name, None, tuple(fault.faults))


def _before(found: Cluster, files: list[Subject] | None, arguments: argparse.Namespace) -> list[Line]:
    given = None
    if files is not None:
        given = [one._replace(namespace=arguments.namespace or one.namespace or found.namespace) for one in files]
    answers = reading.before_installation(
        found, given, arguments.mode, arguments.operator_namespace, distribution.installed_version()
    )
    return before.lines(answers)


def _waited(found: Cluster, arguments: argparse.Namespace) -> list[Line]:
    def trouble(lines: list[Line]) -> str:
        bad = (f"{line.section}: {line.message}" for line in lines if failed([line], strict=arguments.strict))
        return next(bad, "")

    until_s = time.monotonic() + arguments.wait
    return waiting.until_well(lambda: _after(found, arguments), trouble, until_s, _WAIT_EVERY_S)


def _after(found: Cluster, arguments: argparse.Namespace) -> list[Line]:
    where = "" if arguments.all_namespaces else found.namespace
    answers = reading.after_installation(found, arguments.deployment, where, arguments.operator_namespace)
    return after.lines(answers, where, distribution.installed_version())
