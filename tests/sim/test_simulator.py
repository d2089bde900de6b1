"""Every run of the simulator must pass its checks, mix by mix, and repeat exactly."""

from __future__ import annotations

import dataclasses

import pytest
from sim_engine import Client
from sim_mixes import MIXES
from sim_run import Outcome, Run, play
from sim_scenarios import scenario
from sim_world import MS
from simulate import SEEDS, is_deep

from longshore_wire.layout import ModelShape, TargetMemory

RUN = list(MIXES)
QUICK_SEEDS = 1
# (prefill TP and PP, decode TP and PP): more ranks than a drawn scenario has.
WIDE = [((3, 2), (2, 3)), ((24, 1), (2, 1)), ((1, 3), (24, 1)), ((4, 1), (12, 1))]


def _held(mix: str, seed: int) -> Outcome:
    found = play(scenario(mix, seed), deep=is_deep(seed))
    assert not found.fault, f"make sim SEED='{mix}:{seed}'\n{found.fault}\n{found.where}"
    return found


@pytest.mark.parametrize("mix", RUN)
def test_under_this_mix_of_faults_every_room_ends_and_no_byte_is_wrong(mix: str) -> None:
    done = 0
    for seed in range(QUICK_SEEDS):
        done += _held(mix, seed).counts["target done"]
    assert done


@pytest.mark.rest("simulator")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mix", RUN)
def test_under_this_mix_of_faults_many_rooms_end_and_no_byte_is_wrong(mix: str) -> None:
    for seed in range(QUICK_SEEDS, SEEDS):
        _held(mix, seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.rest("simulator"))])
@pytest.mark.parametrize(("prefill", "decode"), WIDE)
def test_rooms_of_many_ranks_are_delivered_exactly_once_however_messages_are_lost(
    prefill: tuple[int, int], decode: tuple[int, int], seed: int
) -> None:
    drawn = scenario("loss", seed)
    replicas = tuple(
        dataclasses.replace(each, dp=1, dp_rank=0, tp=side[0], pp=side[1], host=int(each.prefill))
        for each, side in ((each, prefill if each.prefill else decode) for each in drawn.replicas)
        if each.dp_rank == 0
    )
    sources, targets = ([at for at, each in enumerate(replicas) if each.prefill is side] for side in (True, False))
    rooms = tuple(
        dataclasses.replace(
            room, prefill=sources[room.number % len(sources)], decode=targets[room.number % len(targets)], skew_ns=0
        )
        for room in drawn.rooms[:12]
    )
    model = ModelShape.kv(layers=3, kv_heads=12, head_dim=1, element_bytes=4)
    settings = {**drawn.settings, "ring_bytes": 1 << 16, "force_way": None}

    found = play(dataclasses.replace(drawn, model=model, replicas=replicas, rooms=rooms, settings=settings))

    assert not found.fault, found.where
    ranks = prefill[0] * prefill[1] + decode[0] * decode[1]
    assert found.counts["source done"] + found.counts["target done"] == len(rooms) * ranks


def test_one_run_has_rooms_in_both_memories_of_a_decode_rank_at_once_and_a_worker_of_either_dies_alone() -> None:
    shared, alone = set(), set()
    for seed in range(4):
        run = Run(scenario("host memory and dying workers", seed))
        ranks = [
            [client for client in place.lives[0].clients if client.key.rank == rank]
            for place in run.places
            for rank in range(place.spec.tp * place.spec.pp if place.spec.host_page_size else 0)
        ]
        assert all({client.layout.page_size for client in rank} > {1} for rank in ranks)

        def look(run: Run = run, ranks: list[list[Client]] = ranks) -> None:
            for device, host in ranks:
                if all(client.served and len(client.core.ledger) for client in (device, host)):
                    shared.add(run.scenario.seed)
                alone.update(other.key.memory for one, other in ((device, host), (host, device)) if _dead(one, other))
            run.world.at(MS, look)

        run.world.at(0, look)
        run.play(deep=False)

    assert shared
    assert alone == set(TargetMemory)


def _dead(one: Client, other: Client) -> bool:
    """Whether a worker has died while that of the other memory serves open rooms."""
    return one.worker is None and one.core.welcome is not None and other.served and bool(len(other.core.ledger))


@pytest.mark.parametrize("mix", ["calm", "stopped processes"])
def test_a_scenario_is_played_the_same_way_each_time(mix: str) -> None:
    first, second = (play(scenario(mix, 3), trace=True) for _ in range(2))
    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_there_are_at_least_twenty_four_mixes_of_faults() -> None:
    assert len(MIXES) >= 24
