"""How a client reaches its agent, and the errors when it does not: real sockets, a double of the agent."""

from __future__ import annotations

import threading

import pytest
from fake_agent import WAIT_S, FakeAgent
from scene import client_at

from longshore_client import CodecError, ConnectError, HelloRefused, Reason
from longshore_wire.engine_messages import Hello, Refused, Welcome


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


def test_a_refused_engine_gets_the_agents_reason_at_once(path):
    refusal = Refused(0, Reason.LAYOUT_MISMATCH, "model.layers is 2 here and 3 in the deployment")
    with (
        FakeAgent(path, greet=lambda hello: refusal) as agent,
        pytest.raises(HelloRefused, match="3 in the deployment") as caught,
    ):
        client_at(path)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert len(agent.of(Hello)) == 1


def test_a_busy_agent_is_asked_again(path):
    answers = [Refused(0, Reason.BUSY, "starting", 1_000_000), Refused(0, Reason.SHUTTING_DOWN, "restarting")]

    def greet(hello):
        return answers.pop(0) if answers else Welcome(1, 9, "demo", 10**9)

    with FakeAgent(path, greet=greet), client_at(path) as client:
        assert client.epoch == 9


def test_no_agent_is_named_with_its_path(path):
    with pytest.raises(ConnectError, match=r"engine\.sock"):
        client_at(path, timeout_s=0.05)


def test_an_agent_that_comes_later_is_found(path):
    found = []
    thread = threading.Thread(target=lambda: found.append(client_at(path)))
    thread.start()
    with FakeAgent(path, epoch=3):
        thread.join(WAIT_S)
        assert found[0].epoch == 3
        found[0].close()


def test_an_agent_that_speaks_another_protocol_is_a_typed_error(path):
    with FakeAgent(path, greet=lambda hello: b"\x63junk"), pytest.raises(CodecError, match="version 99"):
        client_at(path)


def test_an_engine_that_is_turned_away_until_its_time_is_over_is_told_by_whom_and_why(path):
    refusal = Refused(0, Reason.BUSY, "prefill-0 rank 0 is registered", 1_000_000)
    with FakeAgent(path, greet=lambda hello: refusal) as agent:
        with pytest.raises(HelloRefused, match="prefill-0 rank 0 is registered") as caught:
            client_at(path, timeout_s=0.3)
        assert caught.value.reason is Reason.BUSY
        assert len(agent.of(Hello)) > 1


def test_a_refusal_of_an_agent_that_is_gone_is_not_the_reason(path):
    refusal = Refused(0, Reason.SHUTTING_DOWN, "the agent stops")
    agent = FakeAgent(path, greet=lambda hello: refusal)
    found = []

    def catch():
        try:
            client_at(path, timeout_s=3)
        except ConnectError as error:
            found.append(str(error))

    thread = threading.Thread(target=catch)
    thread.start()
    agent.expect(lambda: len(agent.of(Hello)) == 2)
    agent.die()
    thread.join(WAIT_S)
    assert len(found) == 1 and "refused" in found[0]
