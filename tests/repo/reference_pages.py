"""Makes the reference pages of the command line and of the agent's HTTP: `python tests/repo/reference_pages.py`, from `make reference`.

The command line's page comes from the parsers that `--help` shows, the HTTP page from the agent's OpenAPI description. A test
compares both with the files in the tree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import longshore_agent.main
import longshore_cli.main
import longshore_operator.main
from longshore_agent.status.app import create_app
from longshore_agent.status.server import OPEN_PATHS, REQUESTS_MAX
from longshore_spec import findings

ROOT = Path(__file__).parents[2]
FOLDER = Path("docs/reference")
RUNBOOKS = Path("docs/runbooks.md")
FINDINGS_MARK = "<!-- Made by `make reference` from `longshore_spec.findings`; do not edit below. -->\n"
MADE = "<!-- Made by `make reference`; do not edit. -->\n"

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

Program = Callable[[Sequence[str]], int]
PROGRAMS: dict[str, Program] = {
    "longshore": longshore_cli.main.main,
    "longshore-agent": longshore_agent.main.main,
    "longshore-operator": longshore_operator.main.main,
}
# Exit statuses that all commands have, from the docstrings of their functions.
LEAD = (
    "The installed programs and their arguments, as `--help` shows them. Each command ends with 0, with 1 if it failed, and with "
    "2 for invalid arguments or an invalid file. In a tree after `make install` they are in `.venv/bin/`. `kubectl longshore` "
    "is `longshore`, if `kubectl-longshore` is on the PATH. "
    "[Settings](settings.md) are those of the agent's environment, [operator](operator.md) has those of the operator."
)


def pages() -> dict[Path, str]:
    """Return each page by its path below the root."""
    return {
        FOLDER / "cli.md": cli_page(),
        FOLDER / "http.md": http_page(),
        FOLDER / "models.md": models_page(),
        RUNBOOKS: runbooks_page(),
    }


MODELS_LEAD = (
    "The families of models that tests with real engines have moved between engines of unequal size, with tiny models of random "
    "weights. A row is written when its test passes; what is not here was not compared. What the agents alone move, without an "
    "engine, is in the [status](../../README.md#status); what the connectors refuse, on the pages of [vLLM](../how-to/vllm.md#refusals) "
    "and [SGLang](../how-to/sglang.md)."
)


def models_page() -> str:
    """Return the page of the families that tests have moved; see e2e/families.py."""
    rows = json.loads((ROOT / "e2e" / "families.json").read_text(encoding="utf-8"))
    lines = [
        "# Models",
        MADE,
        MODELS_LEAD,
        "",
        "| engine | family | what moves | what the test shows | prefill → decode | where | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{ENGINES[row['engine']]} {row['release']}", row["family"], row["moves"], row["shows"]]
        lines.append("| " + " | ".join([*cells, ", ".join(row["sizes"]), row["on"], row["date"]]) + " |")
    return "\n".join(lines) + "\n"


def runbooks_page() -> str:
    """Return the runbooks with the sections of all findings below their mark."""
    text = (ROOT / RUNBOOKS).read_text(encoding="utf-8")
    head, mark, _ = text.partition(FINDINGS_MARK)
    assert mark, f"{RUNBOOKS} has no line {FINDINGS_MARK!r}"
    return f"{head}{mark}\n{findings.reference()}\n"


# ---------------------------------------------------------------- the command line


def helped(run: Program, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser whose help a program shows for `words` and `--help`."""
    shown: list[argparse.ArgumentParser] = []
    instead = mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser, *_: shown.append(parser))
    with instead, contextlib.suppress(SystemExit):
        run([*words, "--help"])
    return shown[0]


def parsers(name: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield a program's parser and those of its commands, each with the words that lead to it."""
    waiting: list[list[str]] = [[]]
    while waiting:
        words = waiting.pop(0)
        parser = helped(PROGRAMS[name], words)
        yield words, parser
        waiting = [[*words, command] for command, _ in subcommands(parser)] + waiting


def subcommands(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the names of a parser's commands with their help."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [(choice.dest, choice.help or "") for action in found for choice in action._choices_actions]


def cli_page() -> str:
    parts = ["# Command line", "", LEAD, ""]
    for name in PROGRAMS:
        for words, parser in parsers(name):
            parts += _command(" ".join([name, *words]), parser, level=2 + len(words))
    return MADE + "\n".join(parts).rstrip() + "\n"


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    options = [action for action in actions if action.option_strings]
    positions = [action for action in actions if not action.option_strings]
    required = [_words(action) for action in options if action.required]
    usage = [name, *required, *(["[options]"] if len(options) > len(required) else []), *(_words(p) for p in positions)]
    parts = [f"{'#' * level} {name}", "", f"`{' '.join(usage)}`", ""]
    for text in (parser.description, parser.epilog):
        parts += [" ".join(text.split()), ""] if text else []
    commands = subcommands(parser)
    if commands:
        parts += [
            "| command | purpose |",
            "|---|---|",
            *(f"| `{name} {word}` | {text} |" for word, text in commands),
            "",
        ]
    listed = [action for action in [*positions, *options] if not isinstance(action, argparse._SubParsersAction)]
    if listed:
        formatter = parser._get_formatter()
        rows = [f"| `{_escaped(_words(action))}` | {_escaped(_help(action, formatter))} |" for action in listed]
        parts += ["| argument | meaning |", "|---|---|", *rows, ""]
    return parts


def _words(action: argparse.Action) -> str:
    """Return an argument as a user writes it."""
    given = action.metavar if action.metavar is not None else "|".join(map(str, action.choices or ()))
    shown = " ".join(given) if isinstance(given, tuple) else given
    if not action.option_strings:
        return shown or action.dest.upper()
    takes = action.nargs != 0
    return ", ".join(action.option_strings) + (f" {shown or action.dest.upper()}" if takes else "")


def _help(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    return formatter._expand_help(action) if action.help else ""


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------- HTTP


class _NoSource:
    """A source that is never asked: the page needs the description alone."""

    def snapshot(self, room: int | None = None) -> Any:
        raise AssertionError(room)


def http_page() -> str:
    description = create_app(_NoSource()).openapi()
    schemas = description["components"]["schemas"]
    open_paths = " and ".join(f"`{path}`" for path in sorted(OPEN_PATHS))
    lead = (
        f"An agent serves these pages at `LONGSHORE_HTTP_PORT` ([settings](settings.md)); all are read by GET. "
        f"With `LONGSHORE_HTTP_TOKEN_FILE` all paths but {open_paths} need `Authorization: Bearer <token>`. "
        "`/openapi.json` describes the same for programs."
    )
    parts = [
        "# HTTP of the agent",
        "",
        lead,
        "",
        "## Errors of every path",
        "",
        "An error's body is an [ErrorBody](#errorbody) with one of these reasons.",
        "",
        "| status | reason | cause | what to do |",
        "|---|---|---|---|",
        "| 401 | `Unauthorized` | The token is missing or wrong. | Send the token of the agent's file. |",
        "| 404 | `UnknownPath` | No page has this path. | Use a path of the message. |",
        "| 404 | `UnknownRoom` | No worker of this agent knows the room. | Ask the agents of both sides; a worker forgets ended rooms. |",
        "| 404 | `UnknownInstance` | No engine instance of this name is registered here. | Use a name of `/v1/bootstrap`. |",
        "| 405 | `MethodNotAllowed` | The method is not GET. | Use GET. |",
        "| 422 | `BadRequest` | A parameter is invalid; `faults` names each. | Correct the parameters. |",
        "| 422 | `LayoutMismatch` | The two layouts cannot exchange pages. | Change the fields of the message. |",
        "| 503 | `LoopHangs` | The supervisor does not answer. | Liveness fails too, so the kubelet restarts the agent. |",
        "| 503 | `ShuttingDown` | The agent ends. | Ask the next agent. |",
        f"| 503 | `Busy` | More than {REQUESTS_MAX} requests are open. | Repeat the request later. |",
        "",
        "## Paths",
        "",
    ]
    for path, methods in description["paths"].items():
        parts += _path(path, methods["get"])
    parts += ["## Bodies", "", "They are JSON objects.", ""]
    for name in sorted(_reached(schemas, description["paths"])):
        parts += _schema(name, schemas[name])
    return MADE + "\n".join(parts).rstrip() + "\n"


def _path(path: str, operation: dict[str, Any]) -> list[str]:
    parts = [f"### GET {path}", "", _escaped(operation["description"]), ""]
    parameters = operation.get("parameters", ())
    if parameters:
        parts += ["| parameter | in | type | default | meaning |", "|---|---|---|---|---|"]
        for parameter in parameters:
            schema = parameter["schema"]
            name = f"**`{parameter['name']}`**" if parameter["required"] else f"`{parameter['name']}`"
            default = "" if schema.get("default") is None else f"`{schema['default']}`"
            text = _escaped(parameter.get("description", schema.get("description", "")))
            parts.append(
                f"| {name} | {parameter['in']} | {_type(schema)} | {default if default != '``' else ''} | {text} |"
            )
        parts.append("")
    parts += ["| status | body |", "|---|---|"]
    for status, answer in sorted(operation["responses"].items()):
        for kind, body in answer.get("content", {}).items():
            shown = _type(body["schema"]) if body.get("schema") else f"`{kind}`"
            parts.append(f"| {status} | {shown} |")
    return [*parts, ""]


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    parts = [f"### {name}", ""]
    if schema.get("description"):
        parts += [_summary(schema["description"]), ""]
    if "enum" in schema:
        return [*parts, _type(schema), ""]
    required, meanings = set(schema.get("required", ())), _attributes(schema.get("description", ""))
    columns = ["field", "type", "default", *(["meaning"] if meanings else [])]
    parts += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for field, entry in schema.get("properties", {}).items():
        default = "" if field in required else json.dumps(entry.get("default"))
        cells = [f"`{field}`", _type(entry), "" if default in {"", '""'} else f"`{default}`"]
        parts.append(f"| {' | '.join([*cells, *([meanings.get(field, '')] if meanings else [])])} |")
    return [*parts, ""]


def _summary(text: str) -> str:
    """Return a docstring without its list of attributes."""
    return _escaped(text.partition("\n\n")[0])


def _attributes(text: str) -> dict[str, str]:
    """Return the meanings of the fields that a docstring lists."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.partition("Attributes:\n")[2].splitlines():
        start = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif line.startswith("     "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: _escaped(meaning) for name, meaning in found.items()}


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(entry) for entry in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items") or {}]
        return f"list of {' and '.join(dict.fromkeys(_type(entry) for entry in items))}"
    if kind == "object" and schema.get("additionalProperties"):
        return f"object of {_type(schema['additionalProperties'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    return f"{kind}, {low} to {high}" if kind == "integer" and high is not None else kind


def _reached(schemas: dict[str, Any], paths: dict[str, Any]) -> set[str]:
    """Return the names of the bodies that paths answer, and of those inside them."""
    found: set[str] = set()
    waiting = list(_references(paths))
    while waiting:
        name = waiting.pop()
        if name not in found and name in schemas:
            found.add(name)
            waiting += _references(schemas[name])
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rpartition("/")[2]
        for entry in value.values():
            yield from _references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _references(entry)


if __name__ == "__main__":
    for target, text in pages().items():
        (ROOT / target).write_text(text, encoding="utf-8")
