"""Parses and formats values of settings: `64Mi`, `2.5`, `true`, `NIXL`, `TCP,RDMA`.

Used by `settings` only. Knows types, units and ranges, but no setting by name. Each fault is a ValueError
that names the valid values; `settings` adds the variable's name.
"""

from __future__ import annotations

import math
import re
from enum import Enum, IntEnum, StrEnum
from types import NoneType, UnionType
from typing import Any, get_args

from longshore_agent.transports.wire import Wire
from longshore_spec.quantity import QuantityError, format_quantity, parse_quantity

_WHOLE = re.compile(r"-?[0-9]{1,18}")
# Variables that Kubernetes injects for a Service whose name begins with `longshore`. No user has set them.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# Units of time, as settings' names have them.
_UNITS_NS = {"s": 10**9, "ms": 10**6}
# The text of an optional choice that is not set.
_NOTHING = "Auto"


class LogLevel(StrEnum):
    """The log level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


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
    if kind == tuple[Wire, ...]:
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
    """Return (text, value) of each member of an Enum, an optional Enum, or a tuple of wires."""
    if isinstance(kind, UnionType):
        (enumeration,) = (part for part in get_args(kind) if part is not NoneType)
        return [(_NOTHING, None), *_members(enumeration)]
    if kind == tuple[Wire, ...]:
        # An unknown wire cannot be allowed.
        return [(wire.value, wire) for wire in Wire if wire is not Wire.UNKNOWN]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [(format_value(member, ""), member) for member in kind]
    return []


def is_service_link(variable: str) -> bool:
    """Whether Kubernetes made this variable of a Service."""
    return _SERVICE_LINK.fullmatch(variable) is not None


def bind_faults(name: str, host: str) -> dict[str, str]:
    """Return, by variable, why an agent cannot listen at `host`; empty if no fault is known without the network."""
    if ":" not in host:
        return {}
    return {name: f"{host} is an IPv6 address, and agents reach each other over IPv4 only: give the pod's IPv4 address"}
