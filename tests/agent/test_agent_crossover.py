"""Tests real agents with crossover tables of these tests: for every chosen mode the bytes are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from agent_fleet import World, over
from agent_world import Agent, Engine, Request, wait_for

from longshore_client import Half
from longshore_wire.crossover import Crossover, Measured, Row, write

WIRES = {"Loopback": "Loopback", "NIXL": "SharedMemory", "Mooncake": "TCP"}
# Runs are 768 bytes between TP2 and TP1, and pages of 24,576 bytes between equal layouts. A token is 6,144 bytes from
# each of two ranks, or 12,288 from one. Short runs are moved in place below 300 kB, else staged; long runs the reverse.
SHORT = Row(768, (30_000, 3_000_000), (0.01, 0.01), (0.001, 0.1))
LONG = Row(24_576, (30_000, 3_000_000), (0.001, 0.1), (0.01, 0.01))
SMALL_TOKENS, LARGE_TOKENS = 10, 300


def table(backend: str) -> bytes:
    """Return a table with the opposite choice for every other wire."""
    swapped = [Row(row.run_bytes, row.total_bytes, row.in_place_s, row.staged_s) for row in (SHORT, LONG)]
    made = Crossover()
    for wire in set(WIRES.values()) | {"RDMA"}:
        made = made.put(Measured(backend, wire, (SHORT, LONG) if wire == WIRES[backend] else tuple(swapped)))
    return write(made)


@dataclass
class Place:
    """A prefill agent, a decode agent that has the table, and engines: two ranks, and one rank as at decode."""

    backend: str
    prefill: Agent
    decode: Agent
    two: Engine
    one: Engine
    target: Engine

    def source(self, name: str) -> Engine:
        engine = getattr(self, name)
        assert isinstance(engine, Engine)
        return engine


@pytest.fixture(scope="module", params=over("NIXL", "Mooncake"))
def place(request, tmp_path_factory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp(f"crossover-{request.param}")
    (directory / "table.json").write_bytes(table(request.param))
    world = World(directory, LONGSHORE_BACKEND=request.param)
    prefill = world.agent("prefill")
    decode = world.agent("decode", LONGSHORE_CROSSOVER_FILE=str(directory / "table.json"))
    starting = {
        "two": world.engine(prefill, "cross-two", 2, roles=[Half.SOURCE]),
        "one": world.engine(prefill, "cross-one", roles=[Half.SOURCE]),
        "target": world.engine(decode, "cross-target", roles=[Half.TARGET]),
    }
    yield Place(request.param, prefill, decode, **{name: engine.result() for name, engine in starting.items()})
    world.close()


def move(source: Engine, target: Engine, tokens: int, prefix: int = 0) -> tuple[set[str], set[str]]:
    """Move one request and compare every byte; return the modes, with reasons, that both halves of its pairs report."""
    each = Request(source, target, tokens, prefix=prefix)
    each.claim()

    def said() -> list[tuple[str, str]]:
        halves = [(source.agent, Half.SOURCE), (target.agent, Half.TARGET)]
        rooms = [agent.room(each.room, half) for agent, half in halves]
        found = [pair for room in rooms if room is not None for pair in room["pairs"] if pair["slabs_total"]]
        if {pair["peer_instance"] for pair in found} != {source.instance, target.instance}:
            return []
        return [(pair["way"], pair["why"]) for pair in found]

    pairs = wait_for(said)
    each.offer()
    each.arrives()
    assert source.intact()
    assert target.intact()
    return {way for way, _ in pairs}, {why for _, why in pairs}


@pytest.mark.shows("agent.crossover_file")
@pytest.mark.parametrize(
    ("source", "tokens", "way"),
    [
        ("two", SMALL_TOKENS, "slices"),
        ("two", LARGE_TOKENS, "staged"),
        ("one", SMALL_TOKENS, "staged"),
        ("one", LARGE_TOKENS, "contiguous"),
    ],
)
def test_the_table_flips_the_way_by_the_length_of_runs_and_the_bytes_for_the_wire_that_was_found(
    place, source, tokens, way
):
    slabs = {half: agent.metric("longshore_slabs_total", way=way) for half, agent in halves(place)}
    claims = place.decode.metric("longshore_claims_total", way=way, why="measured")
    assert move(place.source(source), place.target, tokens) == ({way}, {"measured"})
    assert place.decode.metric("longshore_claims_total", way=way, why="measured") > claims
    moved = [half for half, agent in halves(place) if agent.metric("longshore_slabs_total", way=way) > slabs[half]]
    assert "source" in moved


def halves(place: Place) -> list[tuple[str, Agent]]:
    return [("source", place.prefill), ("target", place.decode)]


def test_what_the_target_has_already_counts_for_the_choice(place):
    assert move(place.two, place.target, LARGE_TOKENS, prefix=LARGE_TOKENS - 7) == ({"slices"}, {"measured"})


def test_the_plan_page_shows_the_same_choice_with_its_numbers(place):
    query = "layers=4&kv_heads=12&head_dim=32&element_bytes=4&prefill_tp=2&prefill_page_size=16&decode_page_size=16"
    wait_for(lambda: place.decode.status()["self_test"])
    for tokens, way in ((SMALL_TOKENS, "Slices"), (LARGE_TOKENS, "Staged")):
        found = place.decode.get(f"/v1/plan?{query}&chunk_tokens={tokens}")
        assert (found["way"], found["backend"], found["wire"]) == (way, place.backend, WIRES[place.backend])
        for pair in found["pairs"]:
            assert (pair["way"], pair["why"]) == (way, "measured")
            assert (pair["staged_s"] < pair["in_place_s"]) == (way == "Staged")
    elsewhere = place.decode.get(f"/v1/plan?{query}&wire=RDMA&chunk_tokens={SMALL_TOKENS}")
    assert (elsewhere["way"], elsewhere["wire"]) == ("Staged", "RDMA")
    unmeasured = place.decode.get(f"/v1/plan?{query}&wire=NVLink&chunk_tokens={SMALL_TOKENS}")
    assert (unmeasured["way"], unmeasured["rule"]) == ("Staged", "whole-pages")
    assert {(pair["why"], pair["staged_s"]) for pair in unmeasured["pairs"]} == {("default", None)}


@pytest.fixture(scope="module")
def overridden(tmp_path_factory) -> Iterator[dict[str, Engine]]:
    """Decode engines of agents whose settings override the table, or that cannot stage; and their sources."""
    directory = tmp_path_factory.mktemp("overridden")
    (directory / "table.json").write_bytes(table("Loopback"))
    world = World(directory, LONGSHORE_CROSSOVER_FILE=str(directory / "table.json"))
    prefill = world.agent("prefill")
    starting = {
        "two": world.engine(prefill, "over-two", 2, roles=[Half.SOURCE]),
        "one": world.engine(prefill, "over-one", roles=[Half.SOURCE]),
    }
    for name, settings in (
        ("always", {"LONGSHORE_STAGING": "Always"}),
        ("never", {"LONGSHORE_STAGING": "Never"}),
        ("no-ring", {"LONGSHORE_RING_BYTES": "0"}),
    ):
        starting[name] = world.engine(world.agent(name, **settings), f"over-{name}", roles=[Half.TARGET])
    yield {name: engine.result() for name, engine in starting.items()}
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "tokens", "way", "why"),
    [
        ("two", "always", SMALL_TOKENS, "staged", "staging"),
        ("one", "always", LARGE_TOKENS, "staged", "staging"),
        ("two", "never", LARGE_TOKENS, "slices", "staging"),
        ("one", "never", SMALL_TOKENS, "contiguous", "staging"),
        ("two", "no-ring", LARGE_TOKENS, "slices", "no_ring"),
        ("one", "no-ring", SMALL_TOKENS, "contiguous", "no_ring"),
    ],
)
def test_what_was_asked_for_or_what_alone_can_work_counts_more_than_the_table(
    overridden, source, target, tokens, way, why
):
    assert move(overridden[source], overridden[target], tokens) == ({way}, {why})


def test_an_agent_with_a_faulty_table_does_not_start_and_names_the_file_and_the_fault(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"version": 1, "measured": [{"backend": "NIXL", "wire": "TCP", "rows": []}]}')
    environment = {"LONGSHORE_RUN_DIRECTORY": str(tmp_path / "run"), "LONGSHORE_CROSSOVER_FILE": str(path)}
    command = [sys.executable, "-m", "longshore_agent.main"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 2
    assert f"{path}: measured[0] (NIXL over TCP): rows" in ended.stderr
