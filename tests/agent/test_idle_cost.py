"""Tests the cost of idle agents: workers with engines, attached peers and unclaimed offers."""

from __future__ import annotations

import time

import pytest
from agent_fleet import Fleet, over
from agent_world import Request, cpu_s, wait_for, wakes

from longshore_client import WaitTimeout
from longshore_wire.engine_messages import Half

QUIET_S = 4.0
# One heartbeat a second for each peer wakes the control thread and ZeroMQ's; each peer answers. A polling worker wakes
# hundreds of times. The time of a wake-up depends on the machine: 0.1 to 5 ms were measured.
WAKES_A_SECOND_MAX = 40
# On the machine on which `fixed_work_s` takes REFERENCE_S, and so much more on a slower one.
CORE_SHARE_MAX = 0.01
REFERENCE_S = 0.015
# A busy host's stolen time counts as the worker's time, so the lowest of several windows is the worker's own.
WINDOWS_MAX = 5


def fixed_work_s() -> float:
    """Return the processor seconds that a fixed piece of work takes now, here."""
    begun_s = time.thread_time()
    sum(number * number for number in range(200_000))
    return time.thread_time() - begun_s


@pytest.fixture(scope="module", params=over("NIXL", "Mooncake", "Loopback"))
def fleet(request, fleet_of) -> Fleet:
    return fleet_of(request.param)


def test_an_idle_worker_uses_less_than_a_hundredth_of_a_core_with_peers_and_open_offers(fleet):
    for source, target in ((fleet.two, fleet.one), (fleet.one, fleet.two), (fleet.two, fleet.three)):
        each = Request(source, target, 100)
        each.claim()
        each.offer()
        each.arrives()
    offers = [Request(fleet.two, fleet.same, 50) for _ in range(5)]
    for each in offers:
        each.offer()
    wait_for(lambda: fleet.prefill.metric("longshore_peers", state="attached") > 0)
    workers = {worker["worker"]: worker["pid"] for agent in fleet.agents for worker in agent.status()["workers"]}
    assert len(workers) == 8
    assert fleet.prefill.worker("two")["rooms_open"] == 5
    lowest: dict[str, float] = {}
    share_max = CORE_SHARE_MAX
    for _ in range(WINDOWS_MAX):
        begun_s = time.monotonic()
        before = {name: (wakes(pid), cpu_s(pid)) for name, pid in workers.items()}
        # No engine claims, so the offers stay open.
        with pytest.raises(WaitTimeout):
            fleet.two.client.wait(offers[0].room, Half.SOURCE, timeout_s=QUIET_S)
        after = {name: (wakes(pid), cpu_s(pid)) for name, pid in workers.items()}
        # This process may wake up late.
        window_s = time.monotonic() - begun_s
        woken = {name: (after[name][0] - before[name][0]) / window_s for name in workers}
        assert {name: count for name, count in woken.items() if count > WAKES_A_SECOND_MAX} == {}
        for name in workers:
            lowest[name] = min(lowest.get(name, 1.0), (after[name][1] - before[name][1]) / window_s)
        share_max = max(share_max, CORE_SHARE_MAX * fixed_work_s() / REFERENCE_S)
        if max(lowest.values()) <= share_max:
            break
    assert {name: share for name, share in lowest.items() if share > share_max} == {}
    for each in offers:
        each.claim()
    for each in offers:
        each.arrives()
    assert fleet.same.intact()
