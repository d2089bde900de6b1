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

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_FACTORS = _BINARY | _DECIMAL
# The number of digits is limited, so that no text gives a huge number.
_PATTERN = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?([A-Za-z]{0,2})")


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
        size = _parse_text(value)
    else:
        raise QuantityError(f"{value!r} is not a size: write bytes as a whole number, or a text such as 64Mi")
    if size.denominator != 1 or not 1 <= size <= QUANTITY_MAX_BYTES:
        raise QuantityError(f"{value!r} is not a whole number of bytes from 1 to {QUANTITY_MAX_BYTES}")
    return int(size)


def _parse_text(text: str) -> Fraction:
    match = _PATTERN.fullmatch(text)
    if match is None or match[3] not in _FACTORS:
        raise QuantityError(
            f"{text[:40]!r} is not a size: write a number and one of {', '.join(filter(None, _FACTORS))}"
        )
    return Fraction(f"{match[1]}.{match[2] or 0}") * _FACTORS[match[3]]


def format_quantity(size_bytes: int) -> str:
    """Return the shortest exact text with a binary suffix, for example `64Mi`: the inverse of `parse_quantity`."""
    for suffix, factor in sorted(_BINARY.items(), key=lambda entry: -entry[1]):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor}{suffix}"
    return str(size_bytes)
