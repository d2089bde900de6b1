"""Tests writes that never end, with real agents: only the end of the writer's worker frees decode's quarantined memory."""

from __future__ import annotations

import json

import pytest
from agent_fleet import World, over
from agent_world import Request, is_worker, wait_for, wait_for_none

from longshore_client import Half, Reason, RoomEventKind


@pytest.mark.shows("agent.write_timeout_s")
@pytest.mark.parametrize("way", over("Staged", "Contiguous"))
def test_a_writer_whose_writes_never_end_is_replaced_with_the_reason_and_its_rooms_are_released(tmp_path, way):
    broken = tmp_path / "broken"
    rule = {"kind": "hold", "count": None, "when": str(broken), "until": str(tmp_path / "never")}
    world = World(
        tmp_path,
        LONGSHORE_WRITE_TIMEOUT_S="4",
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_RETRY_MS="50",
        LONGSHORE_FORCE_WAY=way,
        LONGSHORE_LANE_COUNT="2",
    )
    try:
        prefill = world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=json.dumps([rule]))
        decode = world.agent("decode")
        starting = (
            world.engine(prefill, "stuck", roles=[Half.SOURCE]),
            world.engine(decode, "calm", roles=[Half.TARGET]),
        )
        stuck, calm = (engine.result() for engine in starting)
        client, epoch, pid = stuck.client, stuck.client.epoch, prefill.worker("stuck")["pid"]
        broken.touch()
        each = Request(stuck, calm, 90)
        each.offer()
        each.claim()
        if way != "Staged":
            # Only an engine knows how long it waits for pages that are written in place.
            wait_for(lambda: prefill.worker("stuck")["lanes"][0]["busy"], what="a write")
            calm.client.cancel(each.room, Half.TARGET)
        end = calm.client.wait(each.room, Half.TARGET, "stuck")
        assert end.reason is (Reason.TRANSFER_FAILED if way == "Staged" else Reason.CANCELLED), end
        shown = wait_for(lambda: (found := prefill.worker("stuck")) and found["error"] and found, what="the reason")
        assert "has not ended" in shown["error"]
        assert "rank 0 of calm" in shown["error"]
        assert shown["pid"] == pid
        broken.unlink()

        wait_for(lambda: client.connected and client.epoch != epoch, what="the next worker")
        assert not is_worker(pid)
        assert prefill.metric("longshore_worker_replacements_total") == 1
        # Its end proves that no process writes this room's memory any more.
        calm.client.wait(each.room, Half.TARGET, "stuck", [RoomEventKind.RELEASED])
        calm.accept(each.target_pages)
        stuck.free += each.source_pages
        after = Request(stuck, calm, 200)
        after.claim()
        after.offer()
        after.arrives()
        assert calm.intact()
        wait_for_none(lambda: [left for agent in (prefill, decode) for left in agent.leftovers()])
    finally:
        world.close()
