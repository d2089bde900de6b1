"""Tests ranks of one agent: they copy into each other's pages, also if all other pairs must stage, and only they do."""

from __future__ import annotations

import pytest

from longshore_client.memory import pool_geometry
from longshore_wire import claims
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import Attach, Claim, PairKey, PoolInfo, RegionInfo, RoomKey
from longshore_wire.plan import plan
from longshore_wire.target import TargetSession
from longshore_wire.ways import Staging, Way

HEADS = ModelShape.kv(2, 4, 16, 2)
LATENT = ModelShape.latent(2, 16, 2)


def claimed_way(agent: str, near: Staging | None, model: ModelShape = HEADS) -> Way:
    """Return the mode of the only pair, for a GPU worker of agent `here`, which must stage to other agents."""
    layout = KVLayout(model, Parallel(), 16)
    config = SessionConfig(
        "d", "D", 9, layout, ring_bytes=1 << 20, staging=Staging.ALWAYS, neighbour_staging=near, agent="here"
    )
    session = TargetSession(config, now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 20), {})
    endpoint = Endpoint("P", layout, (RankAddress(0, "h:1", 7),), agent)
    key = RoomKey("P", 1)
    session.claim(Wanted(key, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    return session.rooms[key].pairs[PeerId("P", 0, 0), 0].way


@pytest.mark.parametrize("near", [Staging.AUTO, Staging.NEVER])
def test_a_pair_of_one_agent_is_direct_and_a_pair_of_two_is_staged(near: Staging) -> None:
    assert claimed_way("here", near) is Way.DIRECT
    assert claimed_way("there", near) is Way.STAGED


@pytest.mark.parametrize("near", [Staging.ALWAYS, None])
def test_who_asks_for_staging_everywhere_gets_it_among_neighbours_too(near: Staging | None) -> None:
    assert claimed_way("here", near) is Way.STAGED


def test_a_latent_is_copied_directly_between_neighbours_and_staged_where_that_is_asked_for() -> None:
    assert claimed_way("here", Staging.AUTO, LATENT) is Way.DIRECT
    assert claimed_way("here", Staging.ALWAYS, LATENT) is Way.STAGED


def cut(way: Way, **settings: int) -> list[int]:
    """Return the tokens of each slab of one pair's claim of 1,000 tokens (of 256 bytes each)."""
    layout = KVLayout(HEADS, Parallel(), 16)
    config = SessionConfig("d", "P", 7, layout, lane_count=2, slab_bytes_max=1 << 15, slab_bytes_min=1024, **settings)
    pool = PoolInfo(0, pool_geometry(layout, 64), (4096,))
    attach = Attach(2, "d", "D", 9, layout, "Loopback", b"", RegionInfo(0, 1 << 20), (pool,), 1 << 15)
    pair = PairKey(RoomKey("P", 1), 0, 0, 7, 9, "D")
    claim = Claim(pair, 0, 1000, way, page_count=63)
    grid = claims.grid(config, attach, claim, claims.route((plan(layout, layout),), 0, 0, 0), {})
    return [end - first for first, end in map(grid.tokens, range(grid.count))]


def test_slabs_of_a_direct_pair_are_as_large_as_it_may_be_told_and_others_stay_as_they_are() -> None:
    token_bytes = 2 * 2 * 4 * 32
    assert cut(Way.DIRECT, direct_slab_bytes=1 << 20) == [1000]
    whole_pages = (1 << 18) // token_bytes
    assert cut(Way.DIRECT, direct_slab_bytes=1 << 18)[0] == whole_pages
    assert cut(Way.SLICES, direct_slab_bytes=1 << 20) == cut(Way.SLICES) == cut(Way.DIRECT)
    assert len(cut(Way.DIRECT)) > 4
