"""A Demand that cuts a claim into slabs which our ring could never hold fails its room, and not the worker."""

from __future__ import annotations

import pytest
from two_writers import FIRST, TOKENS, Scene

from longshore_wire.errors import Reason
from longshore_wire.peer_messages import Demand

TOKEN_BYTES = 2 * 2 * 2 * 32  # layers, K and V, heads of a rank, bytes of a head


@pytest.mark.parametrize("ring_bytes", [TOKENS * TOKEN_BYTES // 2, TOKENS * TOKEN_BYTES])
def test_slabs_that_do_not_fit_twice_into_the_ring_are_malformed(ring_bytes: int) -> None:
    scene = Scene.of(ring_bytes=ring_bytes)
    scene.lost.add(FIRST)
    key = scene.claim(2)
    scene.settle()

    scene.say(FIRST, Demand(scene.target.rooms[key].pairs[FIRST].pair, TOKENS, 1, 1, TOKENS))

    assert scene.ended(2) is Reason.MALFORMED_MESSAGE
    assert "ring" in scene.target.ended[key].text
