"""Tests `longshore bench`: times count only with right bytes and live processes; table, JSON and plot have all numbers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import urllib.request

import pytest
from left_behind import Marked, marked

from longshore_lab.bench import BenchError, add_arguments, report, run
from longshore_lab.bench.pages import SequencePages
from longshore_lab.bench.results import MIB, Report, Series, SizeResult
from longshore_lab.bench.scene import Course
from longshore_wire.layout import KVLayout, ModelShape, Parallel

MODEL = ModelShape.kv(layers=2, kv_heads=4, head_dim=8, element_bytes=2)
# They measure until they are ended.
ENDLESS = {
    "rooms": ["rooms", "--rooms", "4", "--repeats", "1000000"],
    "transfer": ["transfer", "--sizes", "1", "--repeats", "1000000", "--set", "slab_bytes_min=128Ki"],
    "crossover": ["crossover", "--runs", "8192", "--totals", "1024", "--repeats", "1000000"],
}
MEASURING = {"rooms": "4 rooms at once", "transfer": "1 MiB", "crossover": "runs of 8192 bytes"}
# An agent drains for some seconds at most, on idle cores.
END_S = 300
PNG = b"\x89PNG\r\n\x1a\n"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["transfer", *words])


@pytest.fixture
def pools():
    made = [SequencePages(KVLayout(MODEL, Parallel(tp=2, tp_rank=rank), 4), 21, seed=rank) for rank in range(2)]
    yield made
    for pages in made:
        pages.close()


def test_pages_that_were_filled_hold_the_content_and_one_changed_byte_is_found(pools):
    for pages in pools:
        pages.fill(21)
        pages.check(21)
        plane = pages.geometry.planes[-1]
        pages.memory.read(plane.offset + pages.table[2] * plane.page_stride, 1)[0] ^= 1
        with pytest.raises(BenchError, match="token 8 of plane 3"):
            pages.check(21)


def test_bytes_behind_the_last_token_must_stay_as_they_were_wiped(pools):
    pages = pools[1]
    pages.fill(20)
    with pytest.raises(BenchError, match="token 18"):
        pages.check(18)
    pages.wipe(20)
    pages.fill(18)
    pages.check(18)


def result(mib: int, *, slices: bool) -> SizeResult:
    lines = {
        "staged 2→1": Series([0.02, 0.01, 0.03], [0.04, 0.02, 0.03]),
        "transport": Series([0.01], [0.01 * mib / 10]),
        "copy": Series([0.01], [0.01 * mib / 20]),
    }
    if slices:
        lines["slices 2→1"] = lines["transport slices"] = Series([2.0], [2.0])
    return SizeResult(mib * MIB, lines, cores=2)


@pytest.fixture
def small_report() -> Report:
    courses = [Course("staged 2→1", "Staged", 2, 1), Course("slices 2→1", "Slices", 2, 1)]
    sizes = [result(1, slices=True), result(64, slices=False)]
    return Report(courses, sizes, "NIXL", "SharedMemory", 1024, 300, 64, 3)


def test_the_bound_is_what_the_cores_allow_for_a_transport_and_two_plain_copies():
    size = result(10, slices=False)
    gb = 10 * MIB / 1e9
    assert size.bound == pytest.approx(2 / ((0.01 + 2 * 0.005) / gb))
    assert size.rate("staged 2→1") == pytest.approx(gb / 0.02)
    assert size.rate("slices 2→1") is None


def test_the_table_is_aligned_and_shows_what_was_not_measured_as_such(small_report):
    lines = report.table(small_report).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("MiB"))
    rows = lines[start : start + 3]
    assert len({len(row) for row in rows}) == 1
    assert "staged/bound" in rows[0]
    assert rows[2].split()[2] == "-"
    assert "SharedMemory" in lines[1]


def test_the_json_has_every_sample_and_the_plot_is_a_picture(small_report, tmp_path):
    whole = json.loads(report.as_json(small_report))
    assert whole["sizes"][0]["lines"]["staged 2→1"]["seconds"] == [0.02, 0.01, 0.03]
    assert [size["bytes"] for size in whole["sizes"]] == [MIB, 64 * MIB]
    path = tmp_path / "rates.png"
    report.plot(small_report, path)
    assert path.read_bytes().startswith(PNG)


def test_an_unknown_way_is_refused_by_its_name(capsys):
    assert run(arguments("--ways", "staged,teleport")) == 1
    assert "teleport" in capsys.readouterr().err


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_a_small_run_over_real_agents_measures_every_way_with_right_bytes(measured_run):
    sizes = measured_run.numbers["sizes"]
    assert [size["bytes"] for size in sizes] == [MIB, 8 * MIB]
    names = {"staged 2→1", "direct 2→1", "contiguous 1→1", "slices 2→1"}
    names |= {"bare path", "transport", "transport slices", "copy"}
    for size in sizes:
        assert set(size["lines"]) == names
        assert all(line["gb_per_s"] > 0 for line in size["lines"].values())
        assert size["bound_gb_per_s"] > 0
    assert "staged/bare path  staged/bound" in measured_run.said


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_rooms_at_once_are_measured_by_every_way_with_right_bytes(tmp_path, capsys):
    path, picture = tmp_path / "numbers.json", tmp_path / "rooms.png"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    chosen = ["rooms", "--rooms", "1,3", "--repeats", "3", "--json", str(path), "--plot", str(picture)]
    assert run(parser.parse_args(chosen)) == 0
    loads = json.loads(path.read_text())["loads"]
    assert {(load["way"], load["rooms"]) for load in loads} == {
        (way, count) for way in ("staged 2→1", "contiguous 1→1", "slices 2→1") for count in (1, 3)
    }
    assert all(0 < load["p50_s"] <= load["p99_s"] for load in loads)
    # A run lasts from the first `send` to the last end, and so longer than each of its rooms unless the first one ends last.
    beyond = [
        whole_s - max(load["room_s"][3 * number : 3 * number + 3])
        for load in loads
        if load["rooms"] == 3
        for number, whole_s in enumerate(load["whole_s"])
    ]
    assert min(beyond) >= 0 < max(beyond)
    assert "p99 / equal" in capsys.readouterr().out
    assert picture.read_bytes().startswith(PNG)


def test_requests_that_are_no_whole_pages_are_refused(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["rooms", "--tokens", "17"])) == 1
    assert "multiple of the page size, 16" in capsys.readouterr().err


def bench(question: str) -> list[str]:
    return ["-u", "-m", "longshore_cli.main", "bench", *ENDLESS[question]]


def agent_state(run: Marked, name: str) -> dict[str, object]:
    """Return the status of the agent with this name."""
    (path,) = run.directory.glob(f"*/{name}/agent.json")
    found: dict[str, object] = json.loads(path.read_bytes())
    return found


def worker_pid(run: Marked, agent: str) -> int:
    with urllib.request.urlopen(f"{agent_state(run, agent)['http']}/v1/status", timeout=END_S) as answer:
        return int(json.load(answer)["workers"][0]["pid"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "number", "moment", "status"),
    [
        ("transfer", signal.SIGINT, "starting", 130),
        pytest.param("rooms", signal.SIGINT, "4 rooms at once", 130, marks=pytest.mark.rest("benches")),
        pytest.param("transfer", signal.SIGTERM, "1 MiB", 143, marks=pytest.mark.rest("benches")),
    ],
)
def test_an_interrupted_bench_says_so_in_one_line_and_leaves_nothing(
    question: str, number: signal.Signals, moment: str, status: int
) -> None:
    with marked(bench(question)) as run:
        run.read_until(moment)
        if number is signal.SIGINT:
            # As from a terminal: every process of the group gets it.
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        said, _ = run.process.communicate(timeout=END_S)
        assert run.process.returncode == status, said
        assert said == "longshore bench: interrupted; everything that it started has ended\n"
        assert run.left() == []


@pytest.mark.slow
@pytest.mark.rest("benches")
@pytest.mark.parametrize("question", ["rooms", "transfer", "crossover"])
def test_a_killed_agent_ends_a_bench_by_its_name(question: str) -> None:
    with marked(bench(question)) as run:
        run.read_until(MEASURING[question])
        os.kill(int(str(agent_state(run, "decode-0")["pid"])), signal.SIGKILL)
        said, _ = run.process.communicate(timeout=END_S)
        assert run.process.returncode == 1, said
        assert said.startswith("longshore bench: the agent in ")
        assert "/decode-0 ended with -9" in said
        assert "Traceback" not in said
        assert run.left() == []


@pytest.mark.rest("benches")
@pytest.mark.slow
@pytest.mark.parametrize("agent", ["prefill", "decode-1"])
def test_numbers_of_a_bench_whose_worker_was_replaced_are_not_shown(agent: str) -> None:
    with marked(bench("rooms")) as run:
        run.read_until(MEASURING["rooms"])
        os.kill(worker_pid(run, agent), signal.SIGKILL)
        said, _ = run.process.communicate(timeout=END_S)
        assert run.process.returncode == 1, said
        assert said.startswith(f"longshore bench: the worker {agent}")
        assert "p50" not in said
        assert "Traceback" not in said
        assert run.left() == []


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_a_killed_process_of_the_bare_transport_ends_a_bench_by_its_name() -> None:
    with marked(bench("transfer")) as run:
        run.read_until(MEASURING["transfer"])
        (target,) = (line for line in run.processes() if "longshore_lab.rate" in line and "--target" in line)
        os.kill(int(target.split()[0]), signal.SIGKILL)
        said, _ = run.process.communicate(timeout=END_S)
        assert run.process.returncode == 1, said
        assert "longshore bench: longshore_lab.rate ended" in said
        assert run.left() == []
