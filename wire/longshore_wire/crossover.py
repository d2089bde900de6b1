"""The crossover table: measured seconds of staged transfers and of those in place, for each backend and wire. Pure.

`ways` chooses by it. `longshore bench crossover` writes the file; callers pass its bytes to `read`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from longshore_wire.errors import ConfigError
from longshore_wire.names import WIDER_WIRES

VERSION = 1
# A table takes a few KiB. The limit is far above any number of backends and wires.
FILE_BYTES_MAX = 1 << 20
_NUMBERS = re.compile(r"\[\s+([-+.,e0-9\s]+?)\s+\]")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements with one run length.

    Attributes:
        run_bytes: length of one run, which is contiguous on both sides.
        total_bytes: sizes of whole transfers, ascending.
        staged_s, in_place_s: seconds for each size, gathered and scattered, and run by run.
    """

    run_bytes: int
    total_bytes: tuple[int, ...]
    staged_s: tuple[float, ...]
    in_place_s: tuple[float, ...]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one backend over one wire. `rows` ascend by run length; `machine` and `date` are their origin."""

    backend: str
    wire: str
    rows: tuple[Row, ...]
    machine: str = ""
    date: str = ""

    def seconds(self, run_bytes: float, total_bytes: int) -> tuple[float, float]:
        """Return the seconds of (staged, in place), interpolated on logarithms; run lengths are clamped to the table.

        Above the largest total both grow with the bytes. Below the smallest they are constant: transfers have a fixed cost.
        """
        place, total = math.log(run_bytes), math.log(max(total_bytes, 1))
        rows = self.rows
        upper = min(max(bisect_right([row.run_bytes for row in rows], run_bytes), 1), len(rows) - 1)
        chosen = rows[max(upper - 1, 0) : upper + 1]
        found = []
        for times in (_staged, _in_place):
            values = [_at(total, row.total_bytes, times(row)) for row in chosen]
            found.append(math.exp(_between(place, [math.log(row.run_bytes) for row in chosen], values)))
        return found[0], found[1]


class Default(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule without measurements: pairs are written in place if their runs have at least these lengths.

    Attributes:
        contiguous_run_bytes_min: for whole pages; shorter ones are staged.
        slices_run_bytes_min: for parts of pages; shorter ones are staged. None stages all of them.
    """

    name: str
    contiguous_run_bytes_min: int = 0
    slices_run_bytes_min: int | None = None


class Crossover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    version: int = VERSION
    default: Default = Default("whole-pages")
    measured: tuple[Measured, ...] = ()

    def entry(self, backend: str, wire: str) -> Measured | None:
        """Return the entry of a backend and wire, or of the wider wire that includes it (see names.WIDER_WIRES)."""
        measured = {found.wire: found for found in self.measured if found.backend == backend}
        return measured.get(wire) or measured.get(WIDER_WIRES.get(wire, ""))

    def needs_wire(self, backend: str) -> bool:
        """Whether a choice for this backend depends on the wire."""
        return any(found.backend == backend for found in self.measured)

    def put(self, entry: Measured) -> Crossover:
        """Return this table with `entry`, which replaces one of the same backend and wire."""
        key = (entry.backend, entry.wire)
        kept = [found for found in self.measured if (found.backend, found.wire) != key]
        ordered = sorted([*kept, entry], key=lambda found: (found.backend, found.wire))
        return msgspec.structs.replace(self, measured=tuple(ordered))


# A table with only the default.
WHOLE_PAGES = Crossover()


def read(data: bytes, name: str) -> Crossover:
    """Parse the table in `data`, a JSON document. Errors call it `name`.

    Raises:
        ConfigError: it is no table, has another version, or its numbers are invalid; with all faults.
    """
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError([f"{name}: {len(data)} bytes: a crossover table has at most {FILE_BYTES_MAX}"])
    try:
        table = msgspec.json.decode(data, type=Crossover)
    except msgspec.DecodeError as error:
        raise ConfigError([f"{name}: {error}"]) from error
    faults = [f"{name}: {fault}" for fault in _faults(table)]
    if faults:
        raise ConfigError(faults)
    return table


def write(table: Crossover) -> bytes:
    """Return `table` as JSON for `read`, with each list of numbers on one line."""
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode()
    return _NUMBERS.sub(lambda found: f"[{', '.join(found[1].split())}]".replace(",,", ","), text).encode() + b"\n"


def _faults(table: Crossover) -> list[str]:
    if table.version != VERSION:
        return [f"version is {table.version}: this program reads {VERSION}"]
    faults = []
    seen: set[tuple[str, str]] = set()
    for number, entry in enumerate(table.measured):
        place = f"measured[{number}] ({entry.backend} over {entry.wire})"
        if (entry.backend, entry.wire) in seen:
            faults.append(f"{place}: is there twice")
        seen.add((entry.backend, entry.wire))
        if not entry.rows or not _grows([row.run_bytes for row in entry.rows]):
            faults.append(f"{place}: rows: give at least one, by growing run_bytes above 0")
        for row in entry.rows:
            where = f"{place}: run_bytes {row.run_bytes}"
            if not row.total_bytes or not _grows(row.total_bytes):
                faults.append(f"{where}: total_bytes: give at least one, growing, above 0")
            for key, times in (("staged_s", row.staged_s), ("in_place_s", row.in_place_s)):
                if len(times) != len(row.total_bytes) or not all(0 < each < math.inf for each in times):
                    faults.append(f"{where}: {key}: give a time above 0 for each of {len(row.total_bytes)} totals")
    return faults


def _grows(values: Sequence[int]) -> bool:
    return values[0] > 0 and all(one < other for one, other in pairwise(values))


def _staged(row: Row) -> tuple[float, ...]:
    return row.staged_s


def _in_place(row: Row) -> tuple[float, ...]:
    return row.in_place_s


def _at(total: float, totals: Sequence[int], times: Sequence[float]) -> float:
    """Return log(seconds) at `total`, a logarithm of bytes."""
    value = _between(total, [math.log(each) for each in totals], [math.log(each) for each in times])
    return value + max(0.0, total - math.log(totals[-1]))


def _between(place: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at `place`, interpolated linearly between its neighbours and clamped at the ends."""
    upper = bisect_right(places, place)
    if upper == 0:
        return values[0]
    if upper == len(places):
        return values[-1]
    share = (place - places[upper - 1]) / (places[upper] - places[upper - 1])
    return values[upper - 1] + share * (values[upper] - values[upper - 1])
