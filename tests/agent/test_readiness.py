"""Tests an agent's readiness checks, and the pages that show them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from status_scene import PASSED, RULES, Source, agent, room, worker

from longshore_agent import self_test
from longshore_agent.settings import Settings
from longshore_agent.status.app import create_app
from longshore_agent.status.findings import Judge, Rules, findings, liveness, readiness
from longshore_agent.status.snapshot import AgentSnapshot
from longshore_spec import status as structs
from longshore_spec.findings import KINDS
from longshore_wire.names import TEST_INSTANCE_PREFIX, Wire


def asked(state: AgentSnapshot, path: str) -> httpx.Response:
    """Return the answer of an agent in this state."""
    source = Source()
    source.state = state

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(source, RULES))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            return await client.get(path)

    return asyncio.run(ask())


def reasons(state: AgentSnapshot, rules: Rules = RULES) -> list[str]:
    return [check.reason for check in readiness(state, rules).checks if not check.ok]


def shown(state: AgentSnapshot) -> list[str]:
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
def test_readyz_answers_503_with_the_reason(state: AgentSnapshot, reason: str) -> None:
    answer = asked(state, "/readyz")
    assert answer.status_code == 503
    failed = [check for check in answer.json()["checks"] if not check["ok"]]
    assert [check["reason"] for check in failed] == [reason]
    (finding,) = asked(state, "/v1/status").json()["findings"]
    assert (finding["code"], finding["severity"], finding["text"]) == (reason, "critical", failed[0]["message"])


@pytest.mark.parametrize("seconds", [61.0, 75.5])
def test_why_an_agent_is_not_ready_is_said_in_the_same_words_while_nothing_happens(seconds: float) -> None:
    late = (worker("d/1", silent_s=seconds), worker("d/2", state=structs.WorkerState.STARTING, state_age_s=seconds))
    state = agent(worker(), *late, loop_age_s=seconds)
    assert [f"{finding['code']}: {finding['text']}" for finding in asked(state, "/v1/status").json()["findings"]] == [
        "LoopHangs: the supervisor's loop has not turned for more than 30 s",
        "WorkerSilent: worker d/1 has not answered for more than 10 s",
        "WorkerStarting: worker d/2 is starting for more than 60 s",
    ]


def test_a_ready_agent_has_nothing_that_keeps_it_from_being_ready() -> None:
    assert asked(agent(worker()), "/v1/status").json()["findings"] == []


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


GPU = "GPU-11111111-1111-1111-1111-111111111111"
RING = structs.RingStatus(capacity_bytes=100, used_bytes=0, held_bytes=11, rounds=1)
OLD = msgspec.structs.replace(room(9), age_s=61.0)
LOCKED = structs.NodeFacts(memlock_bytes=1000, descriptors=1 << 20, infiniband=("uverbs0",))
STRICT = msgspec.structs.replace(RULES, mps=True, staging_bytes=2000)


def peer(**changes: Any) -> structs.PeerStatus:
    fields: dict[str, Any] = {
        "instance": "p",
        "dp_rank": 0,
        "rank": 0,
        "state": "attached",
        "wire": "RDMA",
        "epoch": "1",
    }
    return structs.PeerStatus(**fields | changes)


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        ("DigestsDiffer", agent(worker(mismatches=2, mismatch="layer 3")), "d/0: 2 slabs with differing digests: layer 3"),
        ("EngineRefused", agent(worker(), refused=("engine p/0/0 is refused: pages",)), "engine p/0/0 is refused: pages"),
        ("FewDescriptors", agent(worker(), node_facts=structs.NodeFacts(descriptors=1024)), "may open 1024 files"),
        ("GpuNotShared", agent(worker(device=GPU, mps=False)), f"its GPU {GPU} is not shared"),
        ("GpuSharingUnknown", agent(worker(device=GPU)), "the driver does not tell"),
        ("LowMemlock", agent(worker(), node_facts=LOCKED), "may lock 1000 bytes, and one rank's staging has 2000"),
        ("NoPeerAccess", agent(worker(device=GPU, mps=True, peer_access=False)), f"the memory of its GPU {GPU}"),
        ("PeerLost", agent(worker(peers=(peer(state="lost", error="was silent"),))), "d/0: p/0/0 is lost: was silent"),
        ("PeerRefused", agent(worker(peers=(peer(state="refused", error="pages"),))), "d/0: p/0/0 is refused: pages"),
        ("PeerWireNotAllowed", agent(worker(peers=(peer(error="over TCP"),))), "worker d/0 to p/0/0: over TCP"),
        ("QuarantineHigh", agent(worker(ring=RING)), "more than 10% of its ring"),
        ("RoomOld", agent(worker(rooms=(room(8), OLD))), "room 9 of p is open for more than 60 s"),
        ("WireUnknown", agent(worker(peers=(peer(wire="Unknown"),))), "the wire is not known"),
        ("WorkersRestarted", agent(worker(), restarts_lately=3), "3 workers were restarted in the last 15 minutes"),
    ],
)  # fmt: skip
def test_what_fails_or_slows_rooms_is_a_finding_and_leaves_the_agent_ready(
    code: str, state: AgentSnapshot, text: str
) -> None:
    (finding,) = findings(state, STRICT)
    assert (finding.code, text in finding.text) == (code, True), finding
    assert (finding.severity, finding.way_out, finding.link) == (
        KINDS[code].severity,
        KINDS[code].remedy,
        KINDS[code].link,
    )
    assert readiness(state, STRICT).ok
    about_agent = code in ("EngineRefused", "FewDescriptors", "LowMemlock", "WorkersRestarted")
    assert finding.worker == ("" if about_agent else "d/0")
    # What `longshore verify` leaves behind is no fault of an engine.
    tested = agent(*(worker(f"{TEST_INSTANCE_PREFIX}1/0/0", peers=w.peers, rooms=w.rooms) for w in state.workers))
    assert findings(tested, RULES) == ()


def test_each_finding_of_the_table_is_reached_by_a_test_of_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [code for code in KINDS if f'"{code}"' not in text] == []


def test_findings_come_with_the_worst_first_and_say_since_when_they_hold() -> None:
    now = iter([100.0, 110.0, 120.0, 130.0])
    judge = Judge(RULES, lambda: next(now))
    one = agent(worker(mismatches=1, mismatch="m"), restarts_lately=1, self_test=PASSED, draining=True)
    assert [(f.code, f.since_unix_s) for f in judge.findings(one)] == [
        ("Draining", 100.0), ("DigestsDiffer", 100.0), ("WorkersRestarted", 100.0),
    ]  # fmt: skip
    # The text changes with the count: it is another observation.
    more = agent(worker(mismatches=2, mismatch="m"), self_test=PASSED, draining=True)
    assert [(f.code, f.since_unix_s) for f in judge.findings(more)] == [("Draining", 100.0), ("DigestsDiffer", 110.0)]
    assert judge.findings(agent(worker())) == ()
    assert [f.since_unix_s for f in judge.findings(one)] == [130.0] * 3


def test_a_killed_process_names_the_memory_of_the_container_as_the_way_out() -> None:
    facts = structs.NodeFacts(descriptors=1 << 20, memory_limit_bytes=1 << 30)
    failed = msgspec.structs.replace(PASSED, error="the self-test ended with -9 and said nothing")
    state = agent(worker(self_test=failed), dying=("a/0 ended with -9",), node_facts=facts)
    assert ["its limit is 1024 MiB: raise the memory" in finding.way_out for finding in findings(state, RULES)] == [
        True
    ] * 2
    (other,) = findings(agent(worker(), dying=("a/0 ended with -11",), node_facts=facts), RULES)
    assert other.way_out == KINDS["WorkersDying"].remedy


def test_findings_are_counted_by_worker_and_code() -> None:
    state = agent(worker(peers=(peer(state="lost"), peer(rank=1, state="lost"))), draining=True)
    lines = [
        line
        for line in asked(state, "/metrics").text.splitlines()
        if line.startswith("longshore_findings{") and not line.endswith(" 0")
    ]
    assert lines == [
        'longshore_findings{worker="supervisor",code="Draining"} 1', 'longshore_findings{worker="d/0",code="PeerLost"} 2',
    ]  # fmt: skip


def test_the_receiver_of_a_self_test_ends_quietly_with_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends while it starts ends its self-test, too."""
    closed: list[bool] = []
    transport = SimpleNamespace(register=lambda *_: None, metadata=bytes, close=lambda: closed.append(True))
    monkeypatch.setattr(self_test, "_transport", lambda *_: transport)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        self_test._receive(Settings(self_test_bytes=64), theirs, ())
    assert closed == [True]
