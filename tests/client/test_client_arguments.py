"""Arguments that would never match anything are refused, where waiting for them would never end."""

from __future__ import annotations

import pytest
from fake_agent import FakeAgent
from scene import LAYOUT, client_at

from longshore_client import ArgumentError, connect


def test_a_word_in_place_of_a_half_is_refused_by_every_call_that_takes_one(tmp_path) -> None:
    path = str(tmp_path / "engine.sock")
    with pytest.raises(ArgumentError, match=r"half is 'source': give Half\.SOURCE or Half\.TARGET"):
        connect(path, instance="p", layout=LAYOUT, roles=("source",))
    with FakeAgent(path), client_at(path) as client:
        for call in (client.wait, client.cancel):
            with pytest.raises(ArgumentError, match=r"half is 'source'"):
                call(1, "source")
