"""Renders the rooms of several agents as a table or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longshore_cli import words
from longshore_cli.aligned import aligned

_HEADER = ["room", "instance", "half", "state", "age s", "bytes", "reason", "agent", "worker"]
_LEFT = frozenset({1, 2, 3, 6, 7, 8})


def table(pages: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return one line for each half of a room. An ended room's age and bytes are not kept."""
    rows = [_HEADER, *(_row(url, entry) for url, entries in pages for entry in entries)]
    return "\n".join(aligned(rows, _LEFT)) if len(rows) > 1 else "no rooms"


def as_json(pages: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return the entries of `/v1/rooms`, each with its agent's address."""
    found = [{"agent": url, **entry} for url, entries in pages for entry in entries]
    return words.as_json(found)


def _row(url: str, entry: Mapping[str, Any]) -> list[str]:
    room = entry["room"]
    kept = not entry["ended"]
    return [
        room["room"],
        room["instance"],
        room["half"],
        room["state"],
        f"{room['age_s']:.1f}" if kept else "-",
        str(room["bytes_moved"]) if kept else "-",
        room["reason"] or "-",
        url,
        entry["worker"],
    ]
