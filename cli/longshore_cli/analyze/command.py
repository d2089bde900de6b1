"""The command `longshore analyze`: reads files, analyzes their DisaggDeployments, and prints what it found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from longshore_cli.analyze.findings import Severity
from longshore_cli.analyze.inspect_manifests import Analysis, Options, counts, inspect
from longshore_cli.analyze.report import as_json, table
from longshore_cli.analyze.sizes import CPU, GPU
from longshore_cli.arguments import whole
from longshore_cli.documents import FILE_BYTES_MAX, Document, Found, read
from longshore_cli.words import plain
from longshore_spec import names
from longshore_wire import crossover
from longshore_wire.errors import ConfigError

_EXIT_FAULTY, _EXIT_UNREADABLE = 1, 2
_STANDARD_INPUT = "-"
_TOKENS = 8192
_TOKENS_MAX = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        required=True,
        metavar="FILE",
        help="manifests, YAML or JSON; - for standard input; give it again for each further file",
    )
    parser.add_argument(
        "--running",
        metavar="FILE",
        help="the running deployment, from `kubectl get dgdep NAME -o yaml`, or -: show what the change restarts",
    )
    parser.add_argument("--tokens", type=_tokens, default=_TOKENS, help=f"tokens of a room ({_TOKENS})")
    parser.add_argument(
        "--device",
        choices=(CPU.lower(), GPU.lower()),
        help="where both roles' pages are (as the manifest says: GPUs only if it asks for them)",
    )
    parser.add_argument("--crossover", type=Path, metavar="FILE", help="the agents' crossover table (the shipped one)")
    parser.add_argument("--strict", action="store_true", help="fail for warnings, too")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="the format (table)")


def run(arguments: argparse.Namespace) -> int:
    """Print the analyses; return 0, 1 if an error (with --strict a warning) was found, 2 if something cannot be read."""
    if [*arguments.file, arguments.running].count(_STANDARD_INPUT) > 1:
        return _complain(["standard input (-) is given more than once: put the others into files"])
    try:
        files = list(dict.fromkeys(arguments.file))
        found = _found(files)
        running = _found([] if arguments.running is None else [arguments.running])
        options = Options(
            tokens=arguments.tokens,
            device=arguments.device.upper() if arguments.device else None,
            table=_table(arguments.crossover),
        )
    except (_UnreadableError, ConfigError) as error:
        return _complain([str(error)])
    analyses = [inspect(each, _of_name(each, running.documents), options) for each in found.documents]
    unreadable = [*found.unreadable, *running.unreadable]
    if not found.documents and not unreadable:
        unreadable.append(
            f"{', '.join(files)}: there is no {names.KIND} to analyze{''.join(f'; {note}' for note in found.notes)}"
        )
    if arguments.running is not None and not unreadable:
        unreadable += _unmatched(found.documents, running.documents, arguments.running)
    if arguments.output == "json":
        print(as_json(analyses, found.notes, unreadable))
    elif analyses:
        print(table(analyses, found.notes))
    _complain(unreadable)
    return _EXIT_UNREADABLE if unreadable else _status(analyses, is_strict=arguments.strict)


class _UnreadableError(Exception):
    """A file cannot be read."""


def _found(files: Iterable[str]) -> Found:
    found = Found()
    for name in files:
        read(_text(name), "standard input" if name == _STANDARD_INPUT else name, found)
    return found


def _text(name: str) -> str:
    try:
        if name == _STANDARD_INPUT:
            data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise _UnreadableError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"{name}: it is not UTF-8: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise _UnreadableError(f"{name}: it has more than {FILE_BYTES_MAX} bytes: split it")
    return text


def _table(path: Path | None) -> crossover.Crossover:
    if path is None:
        shipped = "crossover.json"
        return crossover.read(resources.files("longshore_wire").joinpath(shipped).read_bytes(), shipped)
    try:
        return crossover.read(path.read_bytes(), str(path))
    except OSError as error:
        raise _UnreadableError(f"--crossover {path}: {error.strerror}") from error


def _of_name(document: Document, running: Sequence[Document]) -> Document | None:
    return next((each for each in running if each.name[1] == document.name[1] and _fits(document, each)), None)


def _fits(document: Document, running: Document) -> bool:
    """Whether namespaces fit: a manifest often has none, which kubectl's context gives it."""
    metadata = document.body.get("metadata")
    given = metadata.get("namespace") if isinstance(metadata, dict) else None
    return given is None or running.name[0] == given


def _unmatched(documents: Sequence[Document], running: Sequence[Document], name: str) -> list[str]:
    if any(_of_name(each, running) is not None for each in documents):
        return []
    wanted, there = (", ".join("/".join(each.name) for each in side) or "none" for side in (documents, running))
    return [
        f"--running {name}: it has {there}, and the manifests {wanted}: give the running deployment of the same name"
    ]


def _status(analyses: Sequence[Analysis], *, is_strict: bool) -> int:
    found = counts(tuple(analyses))
    return _EXIT_FAULTY if found[Severity.ERROR] or (is_strict and found[Severity.WARNING]) else 0


def _complain(faults: Sequence[str]) -> int:
    for fault in faults:
        sys.stderr.write(f"longshore analyze: {plain(fault)}\n")
    return _EXIT_UNREADABLE


def _tokens(text: str) -> int:
    found = whole(1)(text)
    if found > _TOKENS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: give at most {_TOKENS_MAX} tokens")
    return found
