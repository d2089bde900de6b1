"""Tests the demo and the benchmarks with KV on simulated GPUs: modes, texts and numbers.

Only the GPU memory is simulated, by host memory; agents, engines, transfers and comparisons are real. `tests/gpu` has the
same tests with GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from left_behind import marked

PREAMBLE = """
import sys
from longshore_lab import devices
from longshore_lab.engine import device_memory
class Copy:
    def __init__(self, length_bytes, source, target): pass
    def seconds(self, length_bytes): return length_bytes / 1e9
device_memory.PlainCopy = Copy
devices.gpu_names = lambda: ("Pretended GPU",) * 2
devices.place = lambda names: devices.Placement(("cpu",), ("cpu",))
devices.describe = lambda placement: "KV in the memory of pretended GPUs"
from longshore_cli.main import main
sys.exit(main(sys.argv[1:]))
"""
WAYS = ["staged 2→1", "staged 1→1", "direct 2→1", "direct 1→1"]

pytestmark = [pytest.mark.slow, pytest.mark.rest("benches")]


def said_by(*words: str) -> str:
    with marked(["-c", PREAMBLE, *words, "--devices", "cuda:0,cuda:1"]) as run:
        said = run.read_rest()
        assert run.process.returncode == 0, said
        assert run.left() == []
    return said


def test_the_demo_moves_kv_staged_and_directly_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    said = said_by("demo", "--quick", "--json", str(found))
    whole = json.loads(found.read_bytes())
    assert whole["options"] == {"backends": ["NIXL"], "seed": 0, "quick": True, "devices": ["cuda:0", "cuda:1"]}
    (pair,) = whole["pairs"]
    staged, direct, host = pair["transfers"]
    assert (staged["way"], direct["way"], host["way"]) == ("staged", "direct", "host")
    for near in (direct, host):
        assert near["counts"]["writes"] == near["counts"]["slabs"] > 0
        assert near["payload_bytes"] == staged["payload_bytes"] > 30e6
        assert near["wires"] == []
    assert pair["tokens_compared"] == 24
    assert [one["name"] for one in whole["requests"]] == ["hybrid 2 -> 1", "MLA 4 -> 1"]
    for request in whole["requests"]:
        staged, direct = request["transfers"]
        assert (staged["way"], direct["way"], direct["wires"]) == ("staged", "direct", [])
        assert direct["payload_bytes"] == staged["payload_bytes"] > 10e6
    assert "starting 2 agents" in said
    assert "Left out on GPUs: contiguous and slices" in said
    assert "Everything is equal" in said


def test_rooms_are_measured_beside_the_same_way_between_equal_layouts(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    said = said_by("bench", "rooms", "--rooms", "1,2", "--repeats", "1", "--json", str(numbers))
    found = json.loads(numbers.read_text())
    assert {(load["way"], load["rooms"]) for load in found["loads"]} == {
        (way, count) for way in WAYS for count in (1, 2)
    }
    assert found["devices"] == {"prefill": ["cpu"], "decode": ["cpu"]}
    equal = [line.split() for line in said.splitlines() if " 1→1 " in line]
    assert len(equal) == 4
    assert all(row[-2:] == ["1.00", "1.00"] for row in equal)


def test_one_request_is_measured_by_the_ways_of_gpus_beside_a_plain_copy(tmp_path: Path) -> None:
    numbers, picture, timeline = tmp_path / "numbers.json", tmp_path / "rates.png", tmp_path / "trace.json"
    ways = ["staged 2→1", "direct 1→1"]
    words = [
        "--ways",
        "staged,direct-equal",
        "--sizes",
        "1",
        "--repeats",
        "1",
        "--json",
        str(numbers),
        "--plot",
        str(picture),
        "--trace",
        str(timeline),
    ]
    said = said_by("bench", "transfer", *words)
    (size,) = json.loads(numbers.read_text())["sizes"]
    assert list(size["lines"]) == [*ways, "copy"]
    assert size["lines"]["copy"]["gb_per_s"] == pytest.approx(1.0)
    assert "bound_gb_per_s" not in size
    lines = said.splitlines()
    header, row = lines[lines.index("GB/s") + 1 :][:2]
    assert header.split()[-4:] == ["staged", "2→1/copy", "direct", "1→1/copy"]
    assert row.count("%") == 2
    assert "left out on GPUs: contiguous and slices" in said
    assert picture.stat().st_size > 1000
    assert {event["cat"] for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "X"} == {
        "gather",
        "wire",
        "scatter",
    }


def test_the_crossover_of_gpus_is_between_staged_and_direct(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    words = ["--runs", "512", "--totals", "64", "--repeats", "1", "--json", str(numbers)]
    said = said_by("bench", "crossover", *words)
    (point,) = json.loads(numbers.read_text())["points"]
    assert set(point) == {"run_bytes", "total_bytes", "staged_s", "direct_s", "ratio"}
    assert "direct/staged" in said
