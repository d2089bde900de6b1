"""Tests that the reference page of faults equals the table, and that every row of the table has a test."""

from __future__ import annotations

import importlib
from pathlib import Path

from fault_judge import CARRIED
from fault_table import DAMAGES, LOOPBACK, PASSES, SCENES, STAGES, UNHELD, WRONGS, reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"
# Importing them fills CARRIED, whether or not their tests run.
CARRIERS = (
    "test_agent_drain",
    "test_digests",
    "test_faults_at_every_stage",
    "test_faults_of_requests",
    "test_faults_over_transports",
)


def test_the_reference_page_is_what_the_table_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make reference`"


def test_every_row_is_carried_by_exactly_one_test_for_each_transport() -> None:
    for name in CARRIERS:
        importlib.import_module(name)
    wanted = {(scene.name, transport) for scene in SCENES for transport in scene.transports}
    wanted |= {(row.name, LOOPBACK) for row in (*WRONGS, *DAMAGES, *PASSES)}
    assert {key: len(tests) for key, tests in CARRIED.items()} == dict.fromkeys(wanted, 1)


def test_every_scene_has_a_row_for_every_stage_and_none_is_left_out_over_the_loopback() -> None:
    assert set(UNHELD) < set(STAGES)
    for scene in SCENES:
        assert [row.stage for row in scene.rows] == list(STAGES)
        assert scene.rows_over(LOOPBACK) == scene.rows
    assert {(scene.fault, scene.side) for scene in SCENES} == {
        (scene.fault, side) for scene in SCENES for side in ("prefill", "decode")
    }


def test_both_engines_that_live_are_told_the_same_reason() -> None:
    for scene in SCENES:
        for row in scene.rows:
            reasons = {word.split()[-1] for word in (row.prefill, row.decode) if word.startswith(("FAILED", "refused"))}
            assert len(reasons) <= 1, (scene.name, row)
