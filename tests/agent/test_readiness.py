"""Tests an agent's readiness checks, and the pages that show them."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest
from status_scene import PASSED, RULES, Source, agent, worker

from longshore_agent.settings import Settings
from longshore_agent.status import snapshot as structs
from longshore_agent.status.app import create_app
from longshore_agent.status.checks import Rules, liveness, readiness
from longshore_wire.names import Wire


def asked(state: structs.AgentSnapshot, path: str) -> httpx.Response:
    """Return the answer of an agent in this state."""
    source = Source()
    source.state = state

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(source, RULES))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            return await client.get(path)

    return asyncio.run(ask())


def reasons(state: structs.AgentSnapshot, rules: Rules = RULES) -> list[str]:
    return [check.reason for check in readiness(state, rules).checks if not check.ok]


def shown(state: structs.AgentSnapshot) -> list[str]:
    """Return the lines of the readiness gauge."""
    return [line for line in asked(state, "/metrics").text.splitlines() if line.startswith("longshore_ready")]


def test_metrics_show_the_verdict_of_readyz_once() -> None:
    assert shown(agent(worker(), worker("d/1"))) == ['longshore_ready{worker="supervisor"} 1']
    assert shown(agent(worker(), draining=True)) == ['longshore_ready{worker="supervisor"} 0']
    assert shown(agent()) == ['longshore_ready{worker="supervisor"} 0']


def test_an_agent_whose_self_test_moved_its_bytes_is_ready_without_engines() -> None:
    answer = asked(agent(worker()), "/readyz")
    assert answer.status_code == 200
    assert answer.json()["ok"] is True
    assert {check["reason"] for check in answer.json()["checks"]} == {
        "LoopTurns", "Accepting", "SelfTestPassed", "WorkersReady",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (agent(), "SelfTestPending"),
        (agent(worker(self_test=msgspec.structs.replace(PASSED, bytes_moved=1000))), "SelfTestTooSmall"),
        (agent(worker(self_test=msgspec.structs.replace(PASSED, error="refused"))), "SelfTestFailed"),
        (agent(worker(self_test=msgspec.structs.replace(PASSED, backend="Loopback"))), "OtherBackend"),
        (agent(worker(), worker("d/1", state=structs.WorkerState.FAILED, error="no memory")), "WorkerFailed"),
        (agent(worker(), worker("d/1", state=structs.WorkerState.STARTING, error="it hung")), "WorkerFailed"),
        (agent(worker(), dying=("the worker of d rank 0 has died 3 times within a minute",)), "WorkersDying"),
        (agent(dying=("the worker of d rank 0 has died 3 times within a minute",), self_test=PASSED), "WorkersDying"),
        (agent(worker(), worker("d/1", state=structs.WorkerState.STARTING, state_age_s=61)), "WorkerStarting"),
        (agent(worker(), worker("d/1", silent_s=11)), "WorkerSilent"),
        (agent(worker(), draining=True), "Draining"),
        (agent(worker(), loop_age_s=31), "LoopHangs"),
    ],
)
def test_readyz_answers_503_with_the_reason(state: structs.AgentSnapshot, reason: str) -> None:
    answer = asked(state, "/readyz")
    assert answer.status_code == 503
    failed = [check for check in answer.json()["checks"] if not check["ok"]]
    assert [check["reason"] for check in failed] == [reason]
    assert asked(state, "/v1/status").json()["unready"] == [f"{reason}: {failed[0]['message']}"]


@pytest.mark.parametrize("seconds", [61.0, 75.5])
def test_why_an_agent_is_not_ready_is_said_in_the_same_words_while_nothing_happens(seconds: float) -> None:
    late = (worker("d/1", silent_s=seconds), worker("d/2", state=structs.WorkerState.STARTING, state_age_s=seconds))
    state = agent(worker(), *late, loop_age_s=seconds)
    assert asked(state, "/v1/status").json()["unready"] == [
        "LoopHangs: the supervisor's loop has not turned for more than 30 s",
        "WorkerSilent: worker d/1 has not answered for more than 10 s; worker d/2 is starting for more than 60 s",
    ]


def test_a_ready_agent_has_nothing_that_keeps_it_from_being_ready() -> None:
    assert asked(agent(worker()), "/v1/status").json()["unready"] == []


@pytest.mark.parametrize("wire", ["SharedMemory", "Loopback", "RDMA", "Unknown"])
@pytest.mark.parametrize("allowed", [(Wire.TCP,), (Wire.CUDA_IPC, Wire.NVLINK), (Wire.RDMA,)])
def test_the_wire_of_a_self_test_inside_one_host_says_nothing_of_other_hosts(
    wire: str, allowed: tuple[Wire, ...]
) -> None:
    rules = Rules.of(Settings(wires=allowed))
    state = agent(worker(self_test=msgspec.structs.replace(PASSED, wire=wire)))
    assert reasons(state, rules) == []
    (shown,) = [check.message for check in readiness(state, rules).checks if check.name == "SelfTest"]
    assert f"over {wire} inside this host" in shown
    assert all(other.value in shown for other in allowed)


def test_a_self_test_over_tcp_shows_that_no_allowed_wire_is_there_unless_only_gpus_have_it() -> None:
    over_tcp = agent(worker(self_test=msgspec.structs.replace(PASSED, wire="TCP")))
    rules = Rules.of(Settings(wires=(Wire.RDMA,)))
    assert reasons(over_tcp, rules) == ["WireNotAllowed"]
    (shown,) = [check.message for check in readiness(over_tcp, rules).checks if not check.ok]
    assert all(word in shown for word in ("TCP", "RDMA", "transfer.wires", "add TCP"))
    for wires in ((), (Wire.RDMA, Wire.TCP), (Wire.RDMA, Wire.CUDA_IPC), (Wire.NVLINK,)):
        assert reasons(over_tcp, Rules.of(Settings(wires=wires))) == []


def test_the_self_test_of_a_worker_that_has_gone_still_counts() -> None:
    assert reasons(agent(self_test=PASSED)) == []


def test_a_worker_that_starts_again_has_its_time_before_the_agent_is_unready() -> None:
    assert reasons(agent(worker(), worker("d/1", state=structs.WorkerState.STARTING, state_age_s=59))) == []


def test_dead_workers_do_not_end_the_supervisor_but_a_loop_that_hangs_does() -> None:
    failed = agent(worker(state=structs.WorkerState.FAILED))
    assert liveness(failed).ok
    assert asked(failed, "/healthz").status_code == 200
    assert asked(agent(worker(), loop_age_s=1000), "/healthz").status_code == 503
