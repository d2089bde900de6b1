"""Parses and formats sizes in Kubernetes notation: `64Mi`, `1.5Gi`, `4G`, `1048576`. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

import msgspec

from longshore_wire.errors import LongshoreError, Reason

# Bytes; in a file an integer or a text such as "64Mi". `strict_document` recognises the type by `extra`.
Quantity = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1, extra={"quantity": True})]
QUANTITY_MAX_BYTES = 2**63 - 1

_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"": 1} | {letter: 1000**power for power, letter in enumerate("kMGTPE", 1)}
_SMALL = {letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", 1)}
_FACTORS = _BINARY | _DECIMAL | _SMALL
# The number of digits is limited, so that no text gives a huge number.
_PATTERN = re.compile(r"([0-9]{1,19}(?:\.[0-9]{0,9})?)(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]{0,2}))")


class QuantityError(LongshoreError):
    """A text is not a size; names the valid forms."""

    reason = Reason.UNSUPPORTED


def parse_quantity(value: object) -> int:
    """Return the bytes of `value`: a positive integer, or a text with a number and a suffix.

    Raises:
        QuantityError: it is neither, it has an unknown suffix, or it is not a whole number of bytes from 1 to 2**63 - 1.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = Fraction(value)
    elif isinstance(value, str):
        size = parse_number(value)
    else:
        raise QuantityError(f"{value!r} is not a size: write bytes as a whole number, or a text such as 64Mi")
    if size.denominator != 1 or not 1 <= size <= QUANTITY_MAX_BYTES:
        raise QuantityError(f"{value!r} is not a whole number of bytes from 1 to {QUANTITY_MAX_BYTES}")
    return int(size)


def parse_number(text: str) -> Fraction:
    """Return the number that a quantity of any unit states: `1500m` CPUs are 1.5. Raises QuantityError."""
    match = _PATTERN.fullmatch(text)
    if match is None or (match[2] is None and match[3] not in _FACTORS):
        suffixes = ", ".join(filter(None, _BINARY | _DECIMAL))
        raise QuantityError(f"{text[:40]!r} is not a size: write a number and one of {suffixes}")
    factor = _FACTORS[match[3]] if match[2] is None else Fraction(10) ** int(match[2])
    return Fraction(match[1]) * factor


def format_quantity(size_bytes: int) -> str:
    """Return the shortest exact text with a binary suffix, for example `64Mi`: the inverse of `parse_quantity`."""
    for suffix, factor in sorted(_BINARY.items(), key=lambda entry: -entry[1]):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor}{suffix}"
    return str(size_bytes)
