"""Tests a killed writer's data: it lands when its target reads its sockets, and the memory is free only after that."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from agent_world import wait_for
from transport_peer import TCP_ALONE, PeerProcess

from longshore_agent.transports import create
from longshore_agent.transports.drain import Drain, Unread, unread_of

REGION_BYTES = 4 << 20
POISON = 0xA5


# Mooncake's threads read by themselves, and a writer stores into shared memory itself.
def test_what_a_killed_writer_had_sent_lands_and_its_end_is_not_taken_for_proof_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    transport = create("NIXL", "target")
    writer = PeerProcess("NIXL", "writer", {"UCX_TLS": TCP_ALONE})
    try:
        region = np.full(REGION_BYTES, POISON, dtype=np.uint8)
        transport.register(region.ctypes.data, REGION_BYTES)
        writer.ask("register", length=REGION_BYTES, fill=1)
        transport.connect(writer.metadata())
        to_here = writer.ask("connect", metadata=transport.metadata().hex())
        wanted = {"peer": to_here, "region": 0, "target": region.ctypes.data, "notice": ""}
        writer.tell("post", length=64, **wanted)
        wait_for(lambda: transport.notices() == [] and region[63] == 1)
        assert writer.answer() == "done"
        writer.tell("post", length=REGION_BYTES, **wanted)
        wait_for(lambda: any(each.waiting_bytes for each in unread_of("127.0.0.1").values()))
        writer.signal(signal.SIGKILL)
        landed = int((region == 1).sum())
        drain, now_ns = Drain("127.0.0.1", 0), 0
        for now_ns in range(0, 15 * 10**8, 10**8):
            # No data was read yet.
            assert not drain.is_over(now_ns)
        wait_for(lambda: transport.notices() == [] and drain.is_over(now_ns + time.monotonic_ns()))
        after = region.copy()
        assert int((after == 1).sum()) > landed
        for _ in range(100):
            transport.notices()
        assert np.array_equal(region, after)
    finally:
        writer.close()
        transport.close()


def test_a_connection_is_drained_when_nothing_waits_when_it_is_gone_and_when_its_sender_must_live() -> None:
    seen: dict[int, Unread] = {}

    def drained(*later: dict[int, Unread]) -> list[bool]:
        """Return for each poll whether all data has been read. The first poll is immediate, the others are late."""
        seen.clear()
        seen.update({1: Unread(5, 5)})
        drain = Drain("10.0.0.1", 0, lambda _: dict(seen))
        found = [drain.is_over(0)]
        for index, each in enumerate(later):
            seen.clear()
            seen.update(each)
            found.append(drain.is_over((index + 1) * 10**9))
        return found

    assert drained({1: Unread(5, 5)}, {1: Unread(1, 9)}, {1: Unread(0, 9)}) == [False, False, False, True]
    assert drained({}) == [False, True]
    # A later connection of a live process is not one of the dead process.
    assert drained({2: Unread(5, 5)}) == [False, True]
    assert drained({1: Unread(5, 100 << 20)}, {1: Unread(5, 200 << 20)}) == [False, False, True]
    # A connection that the library no longer reads counts as given up; one that it reads slowly does not.
    assert drained(*[{1: Unread(5, 5)}] * 200).index(True) == 101
    assert not any(drained(*({1: Unread(1000 - read, 1000)} for read in range(200))))
