"""Renders the demo's results as a table and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from longshore_cli.aligned import aligned
from longshore_lab.demo.counts import PairResult, Result, Transfer

_HEADINGS = (
    "pair",
    "backend",
    "way",
    "rooms",
    "slabs",
    "writes",
    "pieces",
    "MB",
    "seconds",
    "GB/s",
    "vs slices",
    "wire",
)
_LEFT = {"pair", "backend", "way", "wire"}


def rendered(results: Sequence[Result]) -> str:
    """Return the table, one line a pair or request, transport and way. `vs slices` is the speedup over the same rooms slice by slice."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for result in results:
        slices_s = [transfer.median_s for transfer in result.transfers if transfer.way == "slices"]
        rows += [_row(result, one, max(slices_s) / one.median_s if slices_s else None) for one in result.transfers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = aligned(rows, frozenset(index for index, heading in enumerate(_HEADINGS) if heading in _LEFT))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def encoded(pairs: Sequence[PairResult], requests: Sequence[Result], options: dict[str, object]) -> bytes:
    """Return the results as JSON."""
    found = {"options": options, "pairs": [_plain(one) for one in pairs], "requests": [_plain(one) for one in requests]}
    return msgspec.json.format(msgspec.json.encode(found))


def _plain(result: Result) -> dict[str, object]:
    transfers = [dataclasses.asdict(one) | {"gigabytes_per_s": one.rate} for one in result.transfers]
    return dataclasses.asdict(result) | {"transfers": transfers}


def _row(result: Result, transfer: Transfer, speed: float | None) -> tuple[str, ...]:
    counts = transfer.counts
    return (
        result.name,
        result.backend,
        transfer.way,
        str(transfer.rooms),
        f"{counts.slabs:,}",
        f"{counts.writes:,}",
        f"{counts.pieces:,}",
        f"{transfer.payload_bytes / 1e6:.1f}",
        f"{transfer.median_s:.3f}",
        f"{transfer.rate:.2f}",
        "-" if speed is None else f"{speed:.1f}x",
        ", ".join(transfer.wires) or "none",
    )
