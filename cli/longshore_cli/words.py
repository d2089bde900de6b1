"""Words of all commands' outputs: numbers with their nouns, and texts that others have written. Pure."""

from __future__ import annotations

import json

import msgspec

_BINARY_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def binary(size_bytes: int) -> str:
    """Return a size in the units of manifests, whose sizes are powers of two."""
    for factor, unit in _BINARY_UNITS:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} bytes"


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Return a text in one line, without characters that a terminal obeys."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def as_json(found: object, indent: int = 2) -> str:
    """Return structs and other values as JSON in ASCII, which a terminal shows as it is; an indent of 0 gives one line."""
    return json.dumps(msgspec.to_builtins(found), indent=indent or None)


def plain_lines(text: str) -> str:
    """Return a text of several lines, such as the end of a log, without characters that a terminal obeys."""
    return "\n".join(map(plain, text.split("\n")))
