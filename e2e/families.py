"""Records which families of models the tests with real engines move, for docs/reference/models.md. A plug-in of pytest.

A test with the mark `family` is a row. `E2E_RECORD=1 make e2e-vllm VLLM_TESTS='-m family'` and the same with SGLang write
those that pass into families.json; `make reference` writes the page.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).with_name("families.json")
RECORD_VARIABLE = "E2E_RECORD"
# What tests of several families show. Engines on CPUs that round differently answer one prompt differently, also alone.
TOKENS_EQUAL = "tokens equal those of one engine alone, and differ if what moved is zeroed"
BYTES_EQUAL = "each byte is equal, and tokens differ if what moved is zeroed"
TOKENS_AND_BYTES = "tokens equal those of one engine alone, and each byte is equal"
_KEYS = ("engine", "family", "moves", "shows", "on", "release")
_SIZES = re.compile(r"([tp]p\d+)-(?:decode-)?([tp]p\d+)", re.IGNORECASE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        "family(name, moves, shows, sizes): a test that moves a family of models between engines; sizes are of the parameters' "
        "ids, if they are not given",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record a row that has passed."""
    report: Any = yield
    # A parameter's comes after that of the function.
    mark = next(reversed([*item.iter_markers("family")]), None)
    if mark is not None and os.environ.get(RECORD_VARIABLE) and report.when == "call" and report.passed:
        name, moves, shows, *given = mark.args
        sizes = given or [" → ".join(pair).upper() for pair in _SIZES.findall(item.name)]
        _add(item.path.parent.name, name, shows, moves, sizes)
    return report


def _add(engine: str, name: str, shows: str, moves: str, sizes: list[str]) -> None:
    where = "GPUs" if os.environ.get(f"E2E_{engine.upper()}_DEVICES") else "CPUs"
    row = {"engine": engine, "family": name, "moves": moves, "shows": shows, "on": where, "release": _release(engine)}
    row["date"] = dt.datetime.now(tz=dt.UTC).date().isoformat()
    rows, known = [], set()
    for each in recorded():
        # The same test of another day gives way.
        if any(each[key] != row[key] for key in _KEYS):
            rows.append(each)
        elif all(each[key] == value for key, value in row.items()):
            known.update(each["sizes"])
    rows.append(row | {"sizes": sorted({*known, *sizes}, reverse=True)})
    rows.sort(key=lambda each: [each[key] for key in _KEYS])
    RECORDED.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded() -> list[dict[str, Any]]:
    """Return the rows."""
    rows: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else []
    return rows


def _release(engine: str) -> str:
    """Return the release of the engine under test, from its environment's packages."""
    found = Path(os.environ[f"E2E_{engine.upper()}_VENV"]).glob(f"lib/python3*/site-packages/{engine}-*.dist-info")
    return next(found).name.removesuffix(".dist-info").partition("-")[2].partition("+")[0]
