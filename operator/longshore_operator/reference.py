"""Generates the reference pages and copies from tables: `python -m longshore_operator.reference` in the tree's root.

A test compares the files in the tree with its output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from longshore_operator import metrics, settings
from longshore_spec import condition_reasons
from longshore_spec.definition import ANNOTATION, digest
from longshore_spec.pod_settings import AGENT_VARIABLES, LIBRARY_VARIABLES

CRD = Path("crds/disaggdeployments.longshore.dev.yaml")
CHART_COPY = Path("charts/longshore/files/disaggdeployments.longshore.dev.yaml")
# Read by `longshore analyze`.
COMMAND_COPY = Path("cli/longshore_cli/analyze/disaggdeployments.longshore.dev.yaml")
_MADE = "<!-- Made by `python -m longshore_operator.reference`; do not edit. -->\n"

_BOTH = {"prefill", "decode"}
_ROLES = "<role>"
# Ends descriptions of fields with a default, which `kubectl explain` does not show otherwise.
_DEFAULT = " Default: "

Schema = dict[str, Any]


def pages(definition: str) -> dict[Path, str]:
    """Return every generated file by its path below the root.

    Args:
        definition: the text of the CRD.
    """
    folder, spec = Path("docs/reference"), yaml.safe_load(definition)["spec"]
    return {
        CRD: (stamped := _stamped(definition, spec)),
        CHART_COPY: stamped,
        COMMAND_COPY: stamped,
        folder / "disaggdeployment.md": _fields_page(spec),
        folder / "conditions.md": _page(
            "Conditions and their reasons",
            "`kubectl describe` shows these conditions of a DisaggDeployment. Every reason that the operator gives is here.",
            condition_reasons.reference(),
        ),
        folder / "operator.md": _page(
            "The operator's settings and metrics",
            "Environment variables of the operator. The chart sets them from its values. An unknown `LONGSHORE_` variable is an error.",
            f"{settings.reference()}\n\n{_variables()}\n\n## Metrics\n\n{metrics.reference()}\n",
        ),
    }


def _variables() -> str:
    """Return the variables that every author may give agents."""
    listed = {
        "Settings of the agent, see [settings](settings.md)": AGENT_VARIABLES,
        "Libraries, see their own pages": LIBRARY_VARIABLES,
    }
    rows = [f"{title}: {', '.join(f'`{name}`' for name in names)}." for title, names in listed.items()]
    lead = "`agents.env` of a deployment takes these. Others of libraries need the chart's value `allow.variables`."
    return "\n\n".join(["## Variables of agents", lead, *rows])


def _stamped(definition: str, spec: Schema) -> str:
    """Return the CRD with the digest of its content in its annotation."""
    found = digest(spec)
    return re.sub(rf"^( +{re.escape(ANNOTATION)}: ).*$", rf'\g<1>"{found}"', definition, count=1, flags=re.MULTILINE)


def _page(title: str, lead: str, text: str) -> str:
    return f"{_MADE}# {title}\n\n{lead}\n\n{text.rstrip()}\n"


def _fields_page(spec: Schema) -> str:
    schema = spec["versions"][0]["schema"]["openAPIV3Schema"]
    parts = []
    for part in ("spec", "status"):
        is_spec = part == "spec"
        columns = ("field", "type", "default", "meaning") if is_spec else ("field", "type", "meaning")
        parts += [f"## {part}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        parts += list(_rows(schema["properties"][part], "", is_spec=is_spec))
        parts.append("")
    parts += ["## Refusals of the API server", ""]
    parts += [f"- {message}" for message in dict.fromkeys(_messages(schema))]
    lead = (
        "The fields of a DisaggDeployment, as `kubectl explain dgdep --recursive` shows them. Fields in bold are required. "
        f"`{_ROLES}` stands for prefill and decode."
    )
    return _page("DisaggDeployment", lead, "\n".join(parts))


def _rows(schema: Schema, path: str, *, is_spec: bool) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, entry in _shared(schema).items():
        shown = f"**`{path}{name}`**" if is_spec and name in required else f"`{path}{name}`"
        default = entry.get("default")
        text = (
            ""
            if default is None or default in ({}, [])
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        given = f" {text} |" if is_spec else ""
        yield f"| {shown} | {_type(entry)} |{given} {entry['description'].partition(_DEFAULT)[0]} |"
        if f"{path}{name}" == f"{_ROLES}.agents":
            # The same as in `agents`, where they are listed.
            continue
        yield from _rows(entry, f"{path}{name}.", is_spec=is_spec)
        if entry.get("items", {}).get("properties"):
            yield from _rows(entry["items"], f"{path}{name}[].", is_spec=is_spec)


def _shared(schema: Schema) -> dict[str, Schema]:
    """Return the properties of `schema`. Those that prefill and decode share come once, under a common entry."""
    found: dict[str, Schema] = dict(schema.get("properties", {}))
    if not found.keys() >= _BOTH:
        return found
    prefill, decode = (found[role]["properties"] for role in ("prefill", "decode"))
    alike = {name: entry for name, entry in prefill.items() if decode.get(name) == entry}
    both: Schema = {"properties": alike, "type": "object", "description": "The fields that both roles have."}
    both["required"] = [name for name in found["prefill"].get("required", ()) if name in alike]
    ordered: dict[str, Schema] = {}
    for name, entry in found.items():
        if name == "prefill":
            ordered[_ROLES] = both
        own = {key: value for key, value in entry.get("properties", {}).items() if key not in alike}
        ordered[name] = {**entry, "properties": own} if name in _BOTH else entry
    return ordered


def _type(entry: Schema) -> str:
    if "enum" in entry:
        return " \\| ".join(str(value) for value in entry["enum"])
    if entry.get("x-kubernetes-int-or-string"):
        return "integer or percentage" if isinstance(entry.get("default"), int) else "size"
    kind = str(entry.get("type", ""))
    low, high = entry.get("minimum"), entry.get("maximum")
    if kind == "integer" and high is not None:
        return f"integer, {low} to {high}"
    if kind == "array":
        return f"list of {_type(entry['items'])}"
    return kind


def _messages(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield " ".join(rule["message"].split())
    for entry in schema.get("properties", {}).values():
        yield from _messages(entry)


def main() -> int:
    """Write every file; return the exit status."""
    if not CRD.is_file():
        sys.stderr.write(f"{CRD} is not here: run this in the root of the tree\n")
        return 1
    for path, text in pages(CRD.read_text(encoding="utf-8")).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
