"""Words of all commands' outputs: numbers with their nouns, and texts that others have written. Pure."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Return a text in one line, without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else " " for each in text)
