"""Reads settings from environment variables: `64Mi`, `2.5`, `true`, `NIXL`, `TCP,RDMA`. Of the agent and the operator. Pure.

A program has a table of its settings: a dataclass, each field of which has the variable `LONGSHORE_` and the field's name in
capitals. This module knows types and units, but no setting by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from enum import Enum, IntEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from longshore_spec.quantity import QuantityError, format_quantity, parse_quantity
from longshore_wire.errors import ConfigError
from longshore_wire.names import ENGINE_PREFIX, ENVIRONMENT_PREFIX

T = TypeVar("T")

_WHOLE = re.compile(r"-?[0-9]{1,18}")
# Kubernetes injects these for each Service into pods of its namespace, all with the Service's name before them.
_SERVICE_HOST = "_SERVICE_HOST"
_OF_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# Units of time, as settings' names have them.
_UNITS_NS = {"s": 10**9, "ms": 10**6}
# The text of an optional choice that is not set.
_NOTHING = "Auto"


def variable(name: str) -> str:
    """Return the environment variable of the setting `name`."""
    return ENVIRONMENT_PREFIX + name.upper()


def from_json(text: str, kind: type[T]) -> T:
    """Return the object that the text of a setting has in JSON; one without fields for an empty text.

    Raises:
        ConfigError: the text is no JSON, or not of this kind.
    """
    try:
        return msgspec.json.decode(text or "{}", type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError([str(error)]) from error


def read(table: type[Any], env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what variables set of a table, and what is wrong with others.

    Args:
        table: a dataclass. Metadata `low` and `high` of a field, if it has both, bound its value.
        env: all variables; those of other programs, of engines and of Kubernetes's Services are ignored.
    Returns:
        values by field, without those whose variable is absent or empty; faults by variable, also of one that is no setting.
    """
    rows = {variable(row.name): row for row in dataclasses.fields(table)}
    hints = get_type_hints(table)
    values: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for name in sorted(name for name in env if name.startswith(ENVIRONMENT_PREFIX)):
        row = rows.get(name)
        if row is None:
            # A shell or pod in which engines also run has theirs.
            if not _is_of_service(name, env) and not name.startswith(ENGINE_PREFIX):
                nearest = difflib.get_close_matches(name, rows, n=1, cutoff=0.0)[0]
                faults[name] = f"there is no such setting; the nearest is {nearest}"
        elif text := env[name].strip():
            try:
                value = parse_value(text, hints[row.name], unit_of(row.name))
                check_range(value, unit_of(row.name), row.metadata.get("low"), row.metadata.get("high"))
                values[row.name] = value
            except ValueError as error:
                faults[name] = str(error)
    return values, faults


def _is_of_service(name: str, env: Mapping[str, str]) -> bool:
    """Whether Kubernetes made this variable of a Service, of which it then made more."""
    services = (other.removesuffix(_SERVICE_HOST) for other in env if other.endswith(_SERVICE_HOST))
    return any(
        name.startswith(service) and _OF_SERVICE.fullmatch(name.removeprefix(service)) is not None
        for service in services
    )


class Nanoseconds:
    """A time of the settings in nanoseconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unit_ns = _UNITS_NS[unit_of(name)]

    def __get__(self, settings: object, owner: type | None = None) -> int:
        value: float = getattr(settings, self._name)
        return round(value * self._unit_ns)


def unit_of(name: str) -> str:
    """Return the unit of a setting, which is a part of its name: bytes, s or ms; empty: none that its text depends on."""
    return next((part for part in name.split("_") if part == "bytes" or part in _UNITS_NS), "")


def in_nanoseconds(name: str, value: Any) -> tuple[str, Any]:
    """Return name and value of a time in nanoseconds; those of another setting unchanged."""
    unit = unit_of(name)
    if unit not in _UNITS_NS:
        return name, value
    return f"{name.removesuffix(unit)}ns", round(value * _UNITS_NS[unit])


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` states, which may be 0, unlike a quantity in a manifest. Raises ValueError."""
    if text == "0":
        return 0
    try:
        return parse_quantity(text)
    except QuantityError as error:
        raise ValueError(str(error)) from error


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` with the largest binary suffix that keeps it exact: `64Mi`, `1000`."""
    return format_quantity(size_bytes) if size_bytes else "0"


def parse_value(text: str, kind: object, unit: str) -> object:
    """Parse `text` for a setting of type `kind`. Raises ValueError."""
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise ValueError(f"{text!r} is neither true nor false")
        return _TRUTHS[text.lower()]
    if kind is int:
        return parse_bytes(text) if unit == "bytes" else _parse_whole(text)
    if kind is float:
        return _parse_number(text)
    if kind is str:
        return text
    if get_origin(kind) is tuple:
        parts = (part.strip() for part in text.split(","))
        return tuple(dict.fromkeys(_parse_choice(part, kind) for part in parts if part))
    return _parse_choice(text, kind)


def format_value(value: object, unit: str) -> str:
    """Return the text of `value` for the environment: the inverse of `parse_value`."""
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(format_value(part, unit) for part in value)
    if isinstance(value, IntEnum):
        return value.name.capitalize()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int) and unit == "bytes":
        return format_bytes(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def shown(value: object) -> str:
    """Return `value` as messages on it have it."""
    return str(value.value if isinstance(value, Enum) else value) or "empty"


def choices(kind: object) -> list[str]:
    """Return the texts of all values of type `kind`; empty if they cannot be listed."""
    if kind is bool:
        return ["true", "false"]
    return [text for text, _ in _members(kind)]


def check_range(value: object, unit: str, low: float | None, high: float | None) -> None:
    """Raise ValueError if `value` is not within [low, high]. None means no bound."""
    if low is None or high is None:
        return
    assert isinstance(value, int | float), value
    if not low <= value <= high:
        raise ValueError(
            f"{format_value(value, unit)} is out of range: give {format_value(low, unit)} to {format_value(high, unit)}"
        )


def _parse_whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    return value


def _parse_choice(text: str, kind: object) -> object:
    for name, member in _members(kind):
        if name.lower() == text.lower():
            return member
    raise ValueError(f"{text!r} is none of {', '.join(choices(kind))}")


def _members(kind: object) -> list[tuple[str, object]]:
    """Return (text, value) of each member of an Enum, an optional Enum, or a tuple of members of an Enum."""
    if isinstance(kind, UnionType):
        (enumeration,) = (part for part in get_args(kind) if part is not NoneType)
        return [(_NOTHING, None), *_members(enumeration)]
    if get_origin(kind) is tuple:
        enumeration, _ = get_args(kind)
        return [(member.value, member) for member in enumeration]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [(format_value(member, ""), member) for member in kind]
    return []
