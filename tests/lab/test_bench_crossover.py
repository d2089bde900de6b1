"""Tests `longshore bench crossover`: it writes the file from which agents choose, and keeps its other measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from longshore_lab.bench import add_arguments, run
from longshore_lab.bench.crossover import Point, Report, as_json, plot, table
from longshore_wire.crossover import WHOLE_PAGES as EMPTY
from longshore_wire.crossover import Measured, Row, read, write

PNG = b"\x89PNG\r\n\x1a\n"
OTHER = Measured("Mooncake", "RDMA", (Row(512, (1024,), (1.0,), (2.0,)),), "elsewhere", "2026-01-01")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["crossover", *words])


@pytest.fixture
def small_report() -> Report:
    points = [
        Point(512, 1 << 16, [0.004, 0.0031234, 0.005], [0.003, 0.002, 0.004]),
        Point(512, 1 << 20, [0.01], [0.03]),
        Point(1 << 15, 1 << 20, [0.01], [0.005]),
    ]
    return Report("NIXL", "TCP", 3, points)


def test_the_file_has_the_fastest_times_of_every_point_and_names_machine_and_date(small_report):
    entry = small_report.entry()
    assert entry.rows == (
        Row(512, (1 << 16, 1 << 20), (0.00312, 0.01), (0.002, 0.03)),
        Row(1 << 15, (1 << 20,), (0.01,), (0.005,)),
    )
    assert "cores" in entry.machine
    assert len(entry.date) == 10
    assert read(write(EMPTY.put(OTHER).put(entry)), "it").measured == (OTHER, entry)


def test_table_json_and_picture_say_which_way_is_cheaper(small_report, tmp_path):
    lines = table(small_report).splitlines()
    assert [line.split()[-1] for line in lines[-3:]] == ["place", "staged", "place"]
    assert len({len(line) for line in lines[-4:]}) == 1
    assert [point["ratio"] for point in json.loads(as_json(small_report))["points"]] == pytest.approx(
        [0.64, 3, 0.5], 0.01
    )
    plot(small_report, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs", "700"], "--runs names 700"),
        (["--totals", "3"], "--totals"),
        (["--runs", "32768", "--totals", "64"], "--totals"),
    ],
)
def test_sizes_that_no_pages_have_are_refused(words, message, capsys):
    assert run(arguments(*words)) == 1
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_table_is_refused_before_anything_is_measured_and_is_left_as_it_was(tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text("{}}")
    assert run(arguments("--write", str(path))) == 1
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == "{}}"


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_a_small_run_over_real_agents_writes_a_table_beside_what_was_there(tmp_path, capsys):
    path, numbers = tmp_path / "table.json", tmp_path / "numbers.json"
    path.write_bytes(write(EMPTY.put(OTHER)))
    words = ["--runs", "512,8192", "--totals", "64,512", "--repeats", "1", "--backend", "Loopback"]
    assert run(arguments(*words, "--write", str(path), "--json", str(numbers))) == 0
    found = read(path.read_bytes(), "it")
    assert found.entry("Mooncake", "RDMA") == OTHER
    entry = found.entry("Loopback", "Loopback")
    assert entry is not None
    assert [(row.run_bytes, row.total_bytes) for row in entry.rows] == [(512, (1 << 16, 1 << 19)), (8192, (1 << 19,))]
    assert json.loads(numbers.read_text())["bytes_equal"] is True
    assert "cheaper" in capsys.readouterr().out


def test_the_table_that_ships_is_one_and_says_where_it_was_measured():
    text = Path(__file__).parents[2] / "wire/longshore_wire/crossover.json"
    shipped = read(text.read_bytes(), text.name)
    assert shipped.entry("NIXL", "SharedMemory") is not None
    assert shipped.entry("Mooncake", "TCP") is not None
    assert all(entry.machine and entry.date for entry in shipped.measured)
    assert write(shipped) == text.read_bytes()
