"""Rooms over a network that loses, repeats, delays and reorders: judged by memory and by posts per piece."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from simulated_cluster import MS, Chaos, Cluster

from longshore_wire.crossover import Crossover, Measured, Row
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import ModelShape, Parallel
from longshore_wire.peer_messages import RoomKey
from longshore_wire.plan import Way
from longshore_wire.target_session import TargetSession

MODEL = ModelShape(layers=3, kv_heads=12, head_dim=1, element_bytes=4)
SHAPES = [(2, 1, 1, 1), (1, 4, 1, 1), (4, 1, 1, 1), (2, 3, 1, 1), (3, 2, 2, 3), (24, 2, 1, 1), (1, 24, 3, 1)]


def _drive(cluster: Cluster, rooms: dict[int, tuple[int, int]], chooser: random.Random) -> None:
    """Start every room: claims and chunks in any order."""
    for room, (first, total) in rooms.items():
        cluster.at(
            chooser.randrange(300 * MS), lambda room=room, first=first, total=total: cluster.claim(room, first, total)
        )
        cuts = sorted({0, total, *(chooser.randrange(total + 1) for _ in range(2))})
        delay_ns = chooser.randrange(300 * MS)
        for start, end in pairwise(cuts):
            cluster.at(
                delay_ns,
                lambda room=room, start=start, end=end, total=total: cluster.offer(room, start, end, last=end == total),
            )
            delay_ns += chooser.randrange(50 * MS) + 1


def _at_rest(cluster: Cluster) -> bool:
    nodes = [*cluster.sources.values(), *cluster.targets.values()]
    return not any(node.core.rooms for node in nodes if node.alive)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_room_is_delivered_exactly_once_however_messages_are_lost_repeated_and_reordered(
    seed: int, shape: tuple[int, int, int, int]
) -> None:
    ptp, dtp, ppp, dpp = shape
    chaos = Chaos(loss=0.15, repeat=0.15, delay_ns=40 * MS) if seed % 3 else Chaos()
    cluster = Cluster(seed, MODEL, Parallel(tp=ptp, pp=ppp), Parallel(tp=dtp, pp=dpp), chaos)
    chooser = random.Random(seed)
    rooms = {2**63 + n: (chooser.choice([0, 0, 4, 7]), chooser.randrange(8, 300)) for n in range(5)}
    rooms[2**64 - 1] = (60, 60)
    _drive(cluster, rooms, chooser)
    started_ns = 400 * MS

    cluster.run(lambda: cluster.now_ns > started_ns and _at_rest(cluster))

    for room, (_, total) in rooms.items():
        assert cluster.outcomes(room, Half.TARGET) == [Reason.NONE] * len(cluster.targets)
        assert cluster.outcomes(room, Half.SOURCE) == [Reason.NONE] * len(cluster.sources)
        assert cluster.delivered(room, total)
    assert max(cluster.posts.values()) == 1
    assert cluster.writes_into_freed == 0
    for node in cluster.targets.values():
        assert isinstance(node.core, TargetSession)
        assert node.core.granter.ring.used_bytes == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("half", [Half.SOURCE, Half.TARGET])
def test_a_cancelled_room_fails_on_both_sides_with_one_reason_and_its_memory_comes_back(seed: int, half: Half) -> None:
    cluster = Cluster(seed, MODEL, Parallel(tp=2), Parallel(tp=3), Chaos(loss=0.1, repeat=0.1, delay_ns=30 * MS))
    chooser = random.Random(seed)
    rooms = dict.fromkeys(range(1, 5), (0, 200))
    _drive(cluster, rooms, chooser)
    key = RoomKey("P", 1, 0)

    def cancel() -> None:
        nodes = cluster.sources if half is Half.SOURCE else cluster.targets
        nodes[0].core.cancel(key, Reason.CANCELLED, "the client went away", cluster.now_ns)
        cluster.flush(nodes[0])

    cluster.at(700 * MS, lambda: None)
    cluster.at(320 * MS, cancel)
    cluster.run(lambda: cluster.now_ns > 800 * MS and _at_rest_but_siblings(cluster, key))

    for room in (2, 3, 4):
        assert cluster.outcomes(room, Half.TARGET) == [Reason.NONE] * 3
        assert cluster.delivered(room, 200)
    for told in (Half.SOURCE, Half.TARGET):
        assert set(cluster.outcomes(1, told)) <= {Reason.CANCELLED, Reason.NONE}
    assert max(cluster.posts.values()) == 1
    assert cluster.writes_into_freed == 0


def _at_rest_but_siblings(cluster: Cluster, key: RoomKey) -> bool:
    nodes = [*cluster.sources.values(), *cluster.targets.values()]
    return all(not set(node.core.rooms) - {key} for node in nodes) and not any(
        node.core.rooms[key].failed and not node.core.rooms[key].released for node in nodes if key in node.core.rooms
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("half", [Half.SOURCE, Half.TARGET])
def test_rooms_of_a_killed_worker_fail_on_both_sides_and_new_rooms_work_with_its_next_life(
    seed: int, half: Half
) -> None:
    cluster = Cluster(seed, MODEL, Parallel(tp=2), Parallel(tp=1), Chaos(delay_ns=20 * MS))
    chooser = random.Random(seed)
    _drive(cluster, dict.fromkeys(range(1, 5), (0, 250)), chooser)

    def kill() -> None:
        cluster.restart((cluster.sources if half is Half.SOURCE else cluster.targets)[0])

    cluster.at(250 * MS, kill)
    cluster.run(lambda: cluster.now_ns > 30_000 * MS)
    cluster.claim(99, 3, 120)
    cluster.offer(99, 0, 120, last=True)
    cluster.run(lambda: all(outcome is not None for outcome in cluster.outcomes(99, Half.TARGET)))

    assert cluster.delivered(99, 120)
    for node in cluster.targets.values():
        for key, reason in node.outcomes.items():
            # These engines do not offer again what the last life had: a later chunk alone leaves a gap.
            assert reason in (Reason.NONE, Reason.PEER_LOST, Reason.TOKENS_MISSING)
            if reason is Reason.NONE and key.room != 99:
                assert cluster.delivered(key.room, 250)
        assert isinstance(node.core, TargetSession)
        assert node.core.granter.ring.held_bytes == 0
    assert cluster.writes_into_freed == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pause_ns", [50 * MS, 2_000 * MS])
def test_rooms_that_an_engine_offers_again_to_the_next_life_of_its_worker_fail_there_too(
    seed: int, pause_ns: int
) -> None:
    cluster = Cluster(
        seed, MODEL, Parallel(tp=1), Parallel(tp=2), Chaos(loss=0.1, delay_ns=20 * MS, write_ns=1_000 * MS)
    )
    _drive(cluster, dict.fromkeys(range(1, 5), (0, 250)), random.Random(seed))
    cluster.run(lambda: cluster.now_ns > 450 * MS)
    dead = cluster.sources[0]
    lost = [key for key in dead.core.rooms if not dead.outcomes.get(key)]
    assert lost

    dead.alive = False
    cluster.run(lambda now_ns=cluster.now_ns: cluster.now_ns > now_ns + pause_ns)
    cluster.restart(dead)
    for key in lost:
        cluster.offer(key.room, 0, 250, last=True)
    cluster.run(lambda now_ns=cluster.now_ns: cluster.now_ns > now_ns + 10_000 * MS)

    source = cluster.sources[0]
    assert {source.outcomes.get(key) for key in lost} == {Reason.PEER_LOST}
    assert not any(node.core.rooms for node in [source, *cluster.targets.values()])
    assert not any(peer.untold for node in cluster.targets.values() for peer in node.core.peers.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_claim_that_names_the_next_life_of_a_source_is_served_before_the_last_one_was_missed(seed: int) -> None:
    cluster = Cluster(seed, MODEL, Parallel(tp=2), Parallel(tp=1), Chaos())
    cluster.claim(1, 0, 50)
    cluster.offer(1, 0, 50, last=True)
    cluster.run(lambda: cluster.now_ns > 500 * MS and _at_rest(cluster))
    cluster.restart(cluster.sources[0])
    cluster.claim(2, 0, 50)
    cluster.offer(2, 0, 50, last=True)

    cluster.run(lambda now_ns=cluster.now_ns: cluster.now_ns > now_ns + 8_000 * MS)

    assert cluster.outcomes(2, Half.TARGET) == [Reason.NONE]
    assert cluster.delivered(2, 50)


@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_what_a_source_that_is_gone_for_good_might_have_written_is_free_once_nobody_listens_there(way: Way) -> None:
    cluster = Cluster(5, MODEL, Parallel(tp=2), Parallel(tp=1), Chaos(write_ns=500 * MS), force_way=way)
    _drive(cluster, dict.fromkeys(range(1, 5), (0, 250)), random.Random(5))

    def kill() -> None:
        cluster.sources[0].alive = False

    cluster.at(300 * MS, kill)
    cluster.run(lambda: cluster.now_ns > 20_000 * MS)

    target = cluster.targets[0].core
    assert isinstance(target, TargetSession)
    assert set(cluster.targets[0].outcomes.values()) == {Reason.PEER_LOST}
    assert (target.granter.ring.held_bytes, target.granter.ring.used_bytes, target.rooms) == (0, 0, {})
    assert all(cluster.targets[0].released.values())
    assert cluster.writes_into_freed == 0


def test_pages_written_in_place_arrive_exactly_once_and_need_no_ring() -> None:
    cluster = Cluster(
        3, MODEL, Parallel(tp=2), Parallel(tp=3), Chaos(loss=0.2, repeat=0.2), ring_bytes=256, force_way=Way.SLICES
    )
    _drive(cluster, dict.fromkeys(range(1, 4), (0, 100)), random.Random(3))

    cluster.run(lambda: cluster.now_ns > 700 * MS and _at_rest(cluster))

    assert all(cluster.delivered(room, 100) for room in (1, 2, 3))
    assert max(cluster.posts.values()) == 1


@pytest.mark.parametrize("seed", range(6))
def test_ways_that_a_table_chooses_for_a_wire_whose_name_may_get_lost_deliver_exactly_once_and_never_change(
    seed: int,
) -> None:
    # In place is cheaper up to some 6 kB, so that large rooms and small ones go different ways over a known wire.
    row = Row(64, (2_000, 20_000), (0.01, 0.01), (0.001, 0.1))
    table = Crossover(measured=(Measured("Loopback", "sim", (row,)),))
    chaos = Chaos(loss=0.3, repeat=0.2, delay_ns=40 * MS)
    cluster = Cluster(seed, MODEL, Parallel(tp=2), Parallel(tp=3), chaos, crossover=table, wire="sim")
    rooms = {room: (room % 2 * 7, 10 + 50 * (room % 3)) for room in range(1, 9)}
    _drive(cluster, rooms, random.Random(seed))

    cluster.run(lambda: cluster.now_ns > 700 * MS and _at_rest(cluster))

    assert all(cluster.delivered(room, total) for room, (_, total) in rooms.items())
    assert max(cluster.posts.values()) == 1
    assert all(len(ways) == 1 for ways in cluster.ways.values())
    assert set.union(*cluster.ways.values()) == {Way.STAGED, Way.SLICES}


def test_halves_that_state_different_totals_fail_on_both_sides() -> None:
    cluster = Cluster(1, MODEL, Parallel(tp=2), Parallel(tp=1), Chaos())
    cluster.claim(1, 0, 50)
    cluster.offer(1, 0, 49, last=True)

    cluster.run(lambda: _at_rest(cluster) and cluster.now_ns > 100 * MS)

    assert cluster.outcomes(1, Half.TARGET) == [Reason.TOTAL_MISMATCH]
    assert cluster.outcomes(1, Half.SOURCE) == [Reason.TOTAL_MISMATCH] * 2
