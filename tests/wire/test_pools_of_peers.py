"""Tests that a target's pools are checked with its claims: once for each description, and again after a change."""

from __future__ import annotations

import msgspec
import pytest
from core_outputs import effects_of, messages_of

from longshore_client.memory import pool_geometry
from longshore_wire.effects import PeerId, SessionConfig, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel, PoolGeometry
from longshore_wire.peer_messages import Abort, Attach, Claim, PairKey, PoolInfo, RegionInfo, RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
SOUND = pool_geometry(LAYOUT, 64)
PEER = PeerId("D", 0, 0)


class Scene:
    """A prefill rank to which a decode rank attaches."""

    def __init__(self) -> None:
        self.session = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
        self.session.describe(b"", None, {})
        self._generation = 0

    def attach(self, geometry: PoolGeometry, address: int = 1 << 21) -> None:
        pools = (PoolInfo(0, geometry, (address,) * len(geometry.region_bytes)),)
        ring = RegionInfo(4096, 1 << 20)
        said = Attach(2, "d", "D", 9, LAYOUT, "Loopback", b"", ring, pools, 1 << 20)
        self._generation += 1
        self.session.receive(PEER, msgspec.structs.replace(said, generation=self._generation), 0)

    def claim(self, room: int) -> list[Reason]:
        """Claim 64 offered tokens in place; return the reason of a refusal."""
        self.session.offer(room, [(0, 0, 64)], last=True, now_ns=0)
        pages = b"".join(number.to_bytes(4, "little") for number in range(4))
        pair = PairKey(RoomKey("P", room), 0, 0, 7, 9, "D")
        self.session.receive(PEER, Claim(pair, 0, 64, Way.CONTIGUOUS, 0, 4, pages, serial=room), 0)
        refused = [message.reason for _, message in messages_of(self.session) if isinstance(message, Abort)]
        writes = [effect for effect in effects_of(self.session) if isinstance(effect, StartWrite)]
        assert bool(writes) is not bool(refused)
        return refused


def test_a_pool_is_looked_through_for_its_first_claim_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[PoolGeometry] = []
    check = PoolGeometry.check

    def counted(geometry: PoolGeometry, layout: KVLayout) -> None:
        looked.append(geometry)
        check(geometry, layout)

    monkeypatch.setattr(PoolGeometry, "check", counted)
    scene = Scene()
    scene.attach(SOUND)
    assert [scene.claim(room) for room in (1, 2, 3)] == [[], [], []]
    assert len(looked) == 1


def test_a_pool_that_is_described_anew_is_looked_through_again() -> None:
    scene = Scene()
    scene.attach(SOUND)
    assert scene.claim(1) == []
    scene.attach(msgspec.structs.replace(SOUND, planes=SOUND.planes[:1]))
    assert scene.claim(2) == [Reason.LAYOUT_MISMATCH]
    assert scene.claim(3) == [Reason.LAYOUT_MISMATCH], "a wrong one is never taken for a sound one"
    scene.attach(SOUND, address=-1)
    assert scene.claim(4) == [Reason.MALFORMED_MESSAGE]
    scene.attach(SOUND)
    assert scene.claim(5) == []
