"""A room with several readers: one that has no memory for it holds up itself alone, and nothing is sent twice to the others."""

from __future__ import annotations

import pytest
from simulated_cluster import MS, Chaos, Cluster

from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import ModelShape, Parallel
from longshore_wire.target_session import TargetSession

MODEL = ModelShape(layers=3, kv_heads=12, head_dim=1, element_bytes=4)


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_without_memory_holds_up_its_own_slabs_and_nothing_is_sent_again_to_another(seed: int) -> None:
    cluster = Cluster(seed, MODEL, Parallel(tp=1), Parallel(tp=3), Chaos(delay_ns=20 * MS, repeat=0.1))
    full = cluster.targets[1].core
    assert isinstance(full, TargetSession)
    ring = full.granter.ring
    taken = ring.allocate(ring.capacity_bytes)
    assert taken is not None
    rooms = range(1, 7)
    for room in rooms:
        cluster.claim(room, 0, 250)
        cluster.offer(room, 0, 250, last=True)
    cluster.run(lambda: cluster.now_ns > 8_000 * MS)

    # The others have everything, sent once; the full one's slabs were not even begun.
    assert [cluster.outcomes(room, Half.TARGET) for room in rooms] == [[Reason.NONE, None, Reason.NONE]] * len(rooms)
    assert max(cluster.posts.values()) == 1
    assert {pair.target_rank for pair, _ in cluster.posts} == {0, 2}
    before = len(cluster.posts)

    ring.free(taken)
    cluster.run(lambda: all(cluster.outcomes(room, Half.SOURCE) == [Reason.NONE] for room in rooms))

    assert all(cluster.delivered(room, 250) for room in rooms)
    assert max(cluster.posts.values()) == 1
    assert 3 * before == 2 * len(cluster.posts)
    assert cluster.writes_into_freed == 0
