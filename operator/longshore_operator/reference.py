"""`python -m longshore_operator.reference`, in the tree's root: writes the pages and copies that are made from tables.

A test holds what is written to what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from longshore_operator import metrics, reasons, settings

CRD = Path("crds/disaggdeployments.longshore.dev.yaml")
CHART_COPY = Path("charts/longshore/files/disaggdeployments.longshore.dev.yaml")
_MADE = "<!-- Made by `python -m longshore_operator.reference`; do not edit. -->\n"

Schema = dict[str, Any]


def pages(definition: str) -> dict[Path, str]:
    """Return every file that is made, by its path below the root.

    Args:
        definition: the text of the CRD.
    """
    folder = Path("docs/reference")
    return {
        CHART_COPY: definition,
        folder / "disaggdeployment.md": _fields_page(definition),
        folder / "conditions.md": _page(
            "Conditions and their reasons",
            "What `kubectl describe` shows of a DisaggDeployment. Every reason that the operator gives is here.",
            reasons.reference(),
        ),
        folder / "operator.md": _page(
            "The operator's settings and metrics",
            "Environment variables of the operator; the chart sets them from its values. An unknown `LONGSHORE_` variable is an error.",
            f"{settings.reference()}\n\n## Metrics\n\n{metrics.reference()}\n",
        ),
    }


def _page(title: str, lead: str, text: str) -> str:
    return f"{_MADE}# {title}\n\n{lead}\n\n{text.rstrip()}\n"


def _fields_page(definition: str) -> str:
    schema = yaml.safe_load(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = []
    for part in ("spec", "status"):
        parts += [f"## {part}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        parts += list(_rows(schema["properties"][part], part))
        parts.append("")
    parts += ["## What is refused before it is stored", ""]
    parts += [f"- {message}" for message in dict.fromkeys(_messages(schema))]
    lead = "The fields of a DisaggDeployment, as `kubectl explain dgdep --recursive` shows them. Fields in bold are required."
    return _page("DisaggDeployment", lead, "\n".join(parts))


def _rows(schema: Schema, path: str) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, entry in schema.get("properties", {}).items():
        shown = f"**`{path}.{name}`**" if name in required and path.startswith("spec") else f"`{path}.{name}`"
        default = entry.get("default")
        text = (
            ""
            if default is None or default in ({}, [])
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        yield f"| {shown} | {_type(entry)} | {text} | {entry['description']} |"
        yield from _rows(entry, f"{path}.{name}")
        if entry.get("items", {}).get("properties"):
            yield from _rows(entry["items"], f"{path}.{name}[]")


def _type(entry: Schema) -> str:
    if "enum" in entry:
        return " \\| ".join(str(value) for value in entry["enum"])
    if entry.get("x-kubernetes-int-or-string"):
        return "size"
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
