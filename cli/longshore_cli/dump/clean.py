"""Removes from an API server's objects what may be secret. Pure. Called by `bundle`.

An object keeps the names of its variables, annotations and arguments' places, so that a reader sees that there was a value.
Secrets are never read, so nothing here knows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from longshore_spec import names
from longshore_spec.pod_settings import LIBRARY_VARIABLES
from longshore_wire.names import ENVIRONMENT_PREFIX

REMOVED = "(removed)"
# Our own settings name files of secrets, and hold none. OpenTelemetry's hold headers, and addresses with passwords.
_SHOWN_VARIABLES = frozenset(name for name in LIBRARY_VARIABLES if not name.startswith("OTEL_"))
# Keys whose values are programs' arguments, headers of probes, parameters of volumes, or addresses with a password.
_HIDDEN_KEYS = frozenset({"args", "command", "httpHeaders", "options", "repository", "volumeAttributes"})
# Who wrote which field: long, and of no use.
_LEFT_OUT_KEYS = frozenset({"managedFields"})
# A shorter value, such as a deployment's name, may stand elsewhere for another reason.
_SECRET_CHARACTERS_MIN = 16


def cleaned(body: Any, removed: set[str]) -> Any:
    """Return a copy of an object without what may be secret. Add the texts that were removed to `removed`."""
    if isinstance(body, list):
        return [cleaned(each, removed) for each in body]
    if not isinstance(body, dict):
        return body
    made = {}
    for key, value in body.items():
        if key in _HIDDEN_KEYS:
            made[key] = _hidden(value, removed)
        elif key == "annotations" and isinstance(value, dict):
            made[key] = {name: each if _is_ours(name) else REMOVED for name, each in value.items()}
        elif key == "env" and isinstance(value, list):
            made[key] = [_variable(each, removed) for each in value]
        elif key == "terminated" and isinstance(value, dict):
            # Its message may be the end of the container's log.
            made[key] = {name: each for name, each in value.items() if name != "message"}
        elif key not in _LEFT_OUT_KEYS:
            made[key] = cleaned(value, removed)
    return made


def node(body: dict[str, Any]) -> dict[str, Any]:
    """Return what of a node decides where agents run."""
    parts = {
        "metadata": ("name", "labels", "creationTimestamp"),
        "spec": ("taints", "unschedulable"),
        "status": ("conditions", "allocatable", "capacity", "nodeInfo"),
    }
    return {part: {key: body[part][key] for key in keys if key in body.get(part, {})} for part, keys in parts.items()}


def masked(text: str, removed: Iterable[str]) -> str:
    """Return a text, such as a log or JSON, without the texts that were removed elsewhere and are long enough for a secret."""
    for each in sorted(removed, key=len, reverse=True):
        if len(each) >= _SECRET_CHARACTERS_MIN:
            text = text.replace(each, REMOVED).replace(json.dumps(each)[1:-1], REMOVED)
    return text


def _is_ours(annotation: str) -> bool:
    return annotation.startswith(f"{names.API_GROUP}/")


def _variable(entry: Any, removed: set[str]) -> Any:
    if not isinstance(entry, dict) or "value" not in entry:
        return entry
    name = str(entry.get("name", ""))
    if name in _SHOWN_VARIABLES or name.startswith(ENVIRONMENT_PREFIX):
        return entry
    return entry | {"value": _hidden(entry["value"], removed)}


def _hidden(value: Any, removed: set[str]) -> Any:
    """Return a value with `REMOVED` for each text in it."""
    if isinstance(value, list):
        return [_hidden(each, removed) for each in value]
    if isinstance(value, dict):
        return {name: _hidden(each, removed) for name, each in value.items()}
    removed.add(str(value))
    return REMOVED
