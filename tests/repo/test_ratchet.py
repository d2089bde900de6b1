"""Tests what the ratchet takes for growth, against which counts, and that it counts what runs."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tree_of_files import ROOT

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests/agent")]

import ratchet
import ratchet_agents

AGENTS = "room of real agents: system calls"


def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Have the ratchet's file hold counts of this interpreter and processor, with changes."""
    file = tmp_path / "ratchet.json"
    file.write_text(json.dumps({**ratchet.identity(), **changes, "counts": {"a room": 1000, AGENTS: 20}}))
    monkeypatch.setattr(ratchet, "FILE", file)
    monkeypatch.setattr(sys, "argv", ["ratchet"])


@pytest.mark.parametrize(
    ("room", "calls", "status"), [(1000, 20, 0), (1029, 29, 0), (500, 5, 0), (1050, 20, 1), (1000, 31, 1)]
)
def test_a_count_that_grew_fails_and_is_named(
    room: int,
    calls: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    recorded(tmp_path, monkeypatch)
    monkeypatch.setattr(ratchet, "count", lambda *_: [{"a room": room, AGENTS: calls}])
    assert ratchet.main() == status
    named = [line for line in capsys.readouterr().out.splitlines() if "takes more than before" in line]
    assert [("a room takes" in line, AGENTS in line) for line in named] == (
        [(room > 1030, calls > 30)] if status else []
    )


def test_on_another_processor_the_parent_commit_is_counted_and_a_raised_number_allows_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, monkeypatch, processor="another")
    tree = tmp_path / "parent"
    (tree / ratchet.SCENES).parent.mkdir(parents=True)
    (tree / ratchet.SCENES).touch()
    old = tree / ratchet.FILE_IN_TREE
    old.write_text(json.dumps({"counts": {"a room": 800, AGENTS: 20}}))
    monkeypatch.setattr(ratchet, "parent", lambda: "0123456789abcdef")
    monkeypatch.setattr(ratchet, "tree_of", lambda _: nullcontext(tree))
    for room, status in ((2560, 0), (2600, 1)):
        monkeypatch.setattr(
            ratchet, "count", lambda *_, room=room: [{"a room": room, AGENTS: 20}, {"a room": 2000, AGENTS: 20}]
        )
        assert ratchet.main() == status


@pytest.mark.parametrize(("again", "status"), [(1000, 0), (1050, 1), (1100, 1)])
def test_a_scene_that_takes_more_is_counted_again(
    again: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, monkeypatch)
    monkeypatch.setattr(ratchet, "SHARES", (("a room",),))
    monkeypatch.setattr(ratchet, "count", lambda *_: [{"a room": 1050, AGENTS: 20}])
    monkeypatch.setattr(ratchet, "count_scenes", lambda root, names: {name: again for name in names if root == ROOT})
    assert ratchet.main() == status


@pytest.mark.parametrize("wild", [1, 9_000, 40_000])
def test_system_calls_of_one_wild_run_change_no_count(wild: int) -> None:
    assert ratchet_agents.of_one_room([18_000, wild, 17_000], [36_000, 35_000, wild], 30) == pytest.approx(600, abs=40)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_callgrind_counts_each_part_between_marks() -> None:
    code = "import os\nfor n in (1000, 2000, 4000):\n os.getpgrp()\n for _ in range(n): pass\nos.getpgrp()"
    _, totals = ratchet.callgrind(ROOT, "-c", code)
    # Before the first mark, the three loops, and the end.
    assert len(totals) == 5
    loop = totals[2] - totals[1]
    assert totals[3] - totals[2] == pytest.approx(2 * loop, rel=0.02)
