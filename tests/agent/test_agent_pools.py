"""Tests an engine with two pools, such as two caches of one model: a room and its bytes belong to one of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Engine, poisoned, room_ids

from longshore_client import Half, RoomEventKind
from longshore_lab.test_engine.pages import content

TOKENS = 200


@pytest.fixture
def engines(tmp_path) -> Iterator[tuple[Engine, Engine]]:
    world = World(tmp_path)
    try:
        agent = world.agent("agent")
        starting = [world.engine(agent, name) for name in ("from", "to")]
        yield tuple(engine.result() for engine in starting)
    finally:
        world.close()


@pytest.mark.shows(
    "argument.send.pool",
    "argument.receive.pool",
    "argument.wait.pool",
    "argument.register_pool.pool",
    "argument.unregister_pool.pool",
)
def test_a_room_moves_pages_of_the_pool_that_it_names_and_of_no_other(engines: tuple[Engine, Engine]) -> None:
    source, target = (engine.ranks[0] for engine in engines)
    pages = list(range(-(-TOKENS // source.layout.page_size)))
    seconds = [poisoned(rank.layout, len(pages), f"second-{rank is source}") for rank in (source, target)]
    for rank, second in zip((source, target), seconds, strict=True):
        rank.client.register_pool(1, second.geometry, second.memory.regions)
    room, data = next(room_ids), [content(seed, TOKENS, source.layout) for seed in (1, 2)]
    # The same number for both: rooms of two pools are different rooms.
    for pool, (near, far) in enumerate([(source, target), tuple(seconds)]):
        near.put(near.planes, pages, data[pool], 0, TOKENS)
        far.put(far.expected, pages, data[pool], 0, TOKENS)
        source.client.send(room, pages, 0, TOKENS, last=True, pool=pool)
    endpoint = source.client.endpoint(EVENT_LIMIT_S)
    target.client.receive(room, endpoint, pages, 0, TOKENS, pool=1)
    assert target.client.wait(room, Half.TARGET, pool=1, timeout_s=EVENT_LIMIT_S).kind is RoomEventKind.DONE
    assert seconds[1].intact()
    assert not np.array_equal(target.planes, target.expected)
    target.client.receive(room, endpoint, pages, 0, TOKENS)
    assert target.client.wait(room, Half.TARGET, timeout_s=EVENT_LIMIT_S).kind is RoomEventKind.DONE
    assert target.intact()
    for rank in (source, target):
        rank.client.unregister_pool(1, timeout_s=EVENT_LIMIT_S)
        rank.expected[:] = rank.planes
    for second in seconds:
        second.close()
