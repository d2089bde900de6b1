"""Aligns the columns of tables that commands print. Pure; called by `rooms` and by the laboratory."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: frozenset[int] = frozenset()) -> list[str]:
    """Return the rows as lines with aligned columns: to the right, those whose index is in `left` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
