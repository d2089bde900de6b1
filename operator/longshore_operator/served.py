"""What the served CRD has, so that an operator of another release leaves out what it lacks. Pure.

`watches` reads the schema that the API server publishes; `decide` and `reconcile` use it. The API server refuses the whole
of a server-side apply that has a field that the CRD lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longshore_spec import names

_KEEPS_ALL = "x-kubernetes-preserve-unknown-fields"

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """The published schema of a deployment's status; empty: not known, so that all fields count as served."""

    status: Schema = field(default_factory=dict)

    @classmethod
    def of(cls, document: Schema) -> Served:
        """Return it from an OpenAPI document of our group and version; unknown if the document does not have the kind."""
        for schema in (document.get("components") or {}).get("schemas", {}).values():
            kinds = {entry.get("kind") for entry in schema.get("x-kubernetes-group-version-kind") or ()}
            if names.KIND in kinds:
                return cls((schema.get("properties") or {}).get("status") or {})
        return cls()

    def part(self, status: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return what the CRD has of a status, and the paths of the rest."""
        if not self.status:
            return dict(status), ()
        lost: list[str] = []
        return _part(status, self.status, "status", lost), tuple(lost)


def _part(value: Any, schema: Schema, path: str, lost: list[str]) -> Any:
    if isinstance(value, list) and "items" in schema:
        types = ((schema["items"].get("properties") or {}).get("type") or {}).get("enum")
        kept = []
        for entry in value:
            if types is not None and entry.get("type") not in types:
                lost.append(f"{path}[{entry.get('type')}]")
            else:
                kept.append(_part(entry, schema["items"], f"{path}[]", lost))
        return kept
    fields = schema.get("properties")
    if not isinstance(value, Mapping) or fields is None or schema.get(_KEEPS_ALL):
        return value
    lost += [f"{path}.{key}" for key in value if key not in fields]
    return {key: _part(entry, fields[key], f"{path}.{key}", lost) for key, entry in value.items() if key in fields}
