"""Checks a DisaggDeployment against the CRD as the API server does: nulls, defaults, the schema, then the CEL rules. Pure.

Called by `inspect_manifests`. The CRD is the only source: no rule of it is repeated here.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from longshore_cli.analyze import rules
from longshore_cli.analyze.findings import By, Finding, error

Schema = dict[str, Any]
Body = dict[str, Any]
# The copy that `python -m longshore_operator.reference` makes.
FILE = "disaggdeployments.longshore.dev.yaml"
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "object": ("a mapping", (dict,)),
    "array": ("a list", (list,)),
    "string": ("a text, in quotes if it looks like a number or like yes and no", (str,)),
    "integer": ("a whole number", (int,)),
    "boolean": ("true or false", (bool,)),
}
# Keywords of the schema that this module follows; a test compares them with those of the CRD.
# fmt: off
KEYWORDS = frozenset({
    "type", "required", "properties", "additionalProperties", "items", "enum", "minimum", "maximum", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "maxProperties", "anyOf", "default", "format", "description",
    "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
})
# fmt: on
_SHOWN_CHARACTERS_MAX = 60
# Half of a pair of UTF-16, which escapes such as "\\ud800" make, and which no UTF-8 can hold.
_HALF = re.compile("[\ud800-\udfff]")
_IS_HALF = "it has half a character, such as \\ud800, which is no Unicode: write the character itself"
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
# The API server itself checks an object's metadata, and a CRD says nothing about it.
_METADATA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS, "annotations": _TEXTS},
    "x-kubernetes-preserve-unknown-fields": True,
}


def parse(text: str) -> Body:
    """Return the CRD in `text`, a file of this project."""
    # Imported here, since other commands run without it.
    import yaml  # type: ignore[import-untyped, unused-ignore]

    # The parser in C takes a tenth of the time. Builds of PyYAML without libyaml lack it.
    found: Body = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return found


@functools.cache
def schema() -> Schema:
    """Return the schema of the kind, without its status, which the API server ignores in a manifest."""
    text = resources.files("longshore_cli.analyze").joinpath(FILE).read_text(encoding="utf-8")
    found: Schema = parse(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    properties = {name: entry for name, entry in found["properties"].items() if name != "status"}
    return found | {
        "properties": properties | {"metadata": _METADATA},
        "required": ["metadata", *found.get("required", ())],
    }


def completed(document: Mapping[str, Any]) -> Body:
    """Return the document as the API server stores it: without nulls and status, and with defaults."""
    given = {name: value for name, value in document.items() if name != "status"}
    found: Body = _completed(given, schema())
    return found


def _completed(value: Any, place: Schema) -> Any:
    if isinstance(value, dict) and "properties" in place:
        known = place["properties"]
        found = {name: _completed(entry, known.get(name, {})) for name, entry in value.items() if entry is not None}
        missing = {name: entry["default"] for name, entry in known.items() if "default" in entry and name not in found}
        return found | {name: _completed(entry, known[name]) for name, entry in missing.items()}
    if isinstance(value, list) and "items" in place:
        return [_completed(entry, place["items"]) for entry in value]
    # A document may write a whole number as 1.0.
    return int(value) if place.get("type") == "integer" and isinstance(value, float) and value.is_integer() else value


def check(document: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return all faults for which the API server refuses a document.

    Args:
        before: the object that the document is to change; None for a new one.
    """
    current = None if before is None else completed(before)
    given = {name: value for name, value in document.items() if name != "status"}
    return [*_strict_faults(given, schema(), ""), *_faults(completed(document), schema(), "", current)]


def _strict_faults(value: Any, place: Schema, path: str) -> Iterator[Finding]:
    """Yield the keys that kubectl refuses: those that are given twice, and those that are no field."""
    if isinstance(value, dict):
        for key in getattr(value, "repeated", ()):
            yield _refused(_join(path, key), "it is given more than once: keep one")
        known = place.get("properties", {})
        is_open = not known or place.get("x-kubernetes-preserve-unknown-fields")
        for key in value:
            if not is_open and key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                yield _refused(_join(path, key), f"it is no field: {hint}")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        below = place.get("items", {}) if isinstance(value, list) else _place_of(key, place)
        yield from _strict_faults(entry, below, f"{path}[{key}]" if isinstance(value, list) else _join(path, key))


def _place_of(key: object, place: Schema) -> Schema:
    found: Schema = place.get("properties", {}).get(key) or place.get("additionalProperties") or {}
    return found


def _faults(value: Any, place: Schema, path: str, before: Any) -> list[Finding]:
    """Return the faults of a value and of all in it."""
    found = list(_own_faults(value, place, path))
    for key, entry, inner in _entries(value, place):
        below = f"{path}{key}" if key.startswith("[") else _join(path, key)
        found += _faults(entry, inner, below, _at(before, key))
    # As for the API server, rules are for values that fit the schema.
    return found or list(_broken_rules(value, place, path, before))


def _entries(value: Any, place: Schema) -> Iterator[tuple[str, Any, Schema]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key, entry, _place_of(key, place)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield f"[{number}]", entry, place.get("items", {})


def _at(before: Any, key: str) -> Any:
    return before.get(key) if isinstance(before, dict) else None


def _own_faults(value: Any, place: Schema, path: str) -> Iterator[Finding]:
    if (fault := _type_fault(value, place)) is not None:
        yield _refused(path, fault)
    elif isinstance(value, dict):
        yield from _mapping_faults(value, place, path)
    elif isinstance(value, list):
        yield from _list_faults(value, place, path)
    elif (fault := _scalar_fault(value, place)) is not None:
        yield _refused(path, fault)


def _type_fault(value: Any, place: Schema) -> str | None:
    if place.get("x-kubernetes-int-or-string"):
        is_right, name = isinstance(value, (int, str)) and not isinstance(value, bool), "a whole number or a text"
    elif "type" in place:
        name, types = _TYPES[place["type"]]
        is_right = isinstance(value, types) and (place["type"] == "boolean" or not isinstance(value, bool))
    else:
        return None
    return None if is_right else f"{_shown(value)} is given: write {name}"


def _mapping_faults(value: Body, place: Schema, path: str) -> Iterator[Finding]:
    for key in value:
        if _HALF.search(str(key)):
            yield _refused(_join(path, ascii(key)), _IS_HALF)
    for name in place.get("required", ()):
        if name not in value:
            yield _refused(_join(path, name), "it is missing, and required: add it")
    if len(value) > place.get("maxProperties", len(value)):
        yield _refused(path, f"it has {len(value)} entries: give at most {place['maxProperties']}")


def _list_faults(value: list[Any], place: Schema, path: str) -> Iterator[Finding]:
    if len(value) < place.get("minItems", 0):
        yield _refused(path, f"it has {len(value)} entries: give at least {place['minItems']}")
    if len(value) > place.get("maxItems", len(value)):
        yield _refused(path, f"it has {len(value)} entries: give at most {place['maxItems']}")
    kind = place.get("x-kubernetes-list-type")
    keys = place.get("x-kubernetes-list-map-keys", ())
    if kind == "map":
        names = [tuple(entry.get(key) for key in keys) for entry in value if isinstance(entry, dict)]
    else:
        names = [(str(entry),) for entry in value] if kind == "set" else []
    for name, count in Counter(names).items():
        if count > 1:
            yield _refused(path, f"{', '.join(map(str, name))} is listed {count} times: keep one")


def _scalar_fault(value: Any, place: Schema) -> str | None:
    if isinstance(value, str) and _HALF.search(value):
        return _IS_HALF
    allowed = place.get("enum")
    if allowed is not None and value not in allowed:
        return f"{_shown(value)} is not possible: use one of {', '.join(map(str, allowed))}"
    low, high = place.get("minimum"), place.get("maximum")
    if isinstance(value, int) and ((low is not None and value < low) or (high is not None and value > high)):
        return f"{value} is out of range: give {low} to {high}"
    if not isinstance(value, str):
        return None
    if len(value) < place.get("minLength", 0):
        return f"it is empty: give at least {place['minLength']} characters, or leave it out"
    if len(value) > place.get("maxLength", len(value)):
        return f"it has {len(value)} characters: give at most {place['maxLength']}"
    pattern = place.get("pattern")
    if pattern is not None and not _pattern(pattern).search(value):
        return f"{_shown(value)} does not match {pattern}: {place.get('description', 'change it')}"
    return None


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    # In the API server, $ matches at the end of the text alone.
    return re.compile(text.removesuffix("$") + r"\Z" if text.endswith("$") else text)


def _broken_rules(value: Any, place: Schema, path: str, before: Any) -> Iterator[Finding]:
    for rule in place.get("x-kubernetes-validations", ()):
        text = rule["rule"]
        if before is None and "oldSelf" in text:
            continue
        try:
            is_broken, message = rules.broken(text, value, before), " ".join(rule["message"].split())
        except ValueError as failure:
            is_broken, message = True, f"the rule `{text}` has no answer ({failure}): give the fields that it reads"
        if is_broken:
            yield _refused(f"{path}{rule.get('fieldPath', '')}".removeprefix("."), message)


def _refused(path: str, message: str) -> Finding:
    return error(By.API_SERVER, path or "(document)", message)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[: _SHOWN_CHARACTERS_MAX - 3]}..."
