"""A client whose agent goes away: what a new one hears, what the engine hears, and what calls in flight become."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from scene import DONE, ENDPOINT, FAILED, LAYOUT, RELEASED, client_at, event, told, wait_until

from longshore_client import (
    AgentLost,
    ArgumentError,
    CallTimeout,
    Half,
    Reason,
    core,
    create_region,
    pool_geometry,
)
from longshore_wire.engine_messages import (
    Cancel,
    Hello,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    UnregisterPool,
)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


def test_a_new_agent_hears_of_pools_and_open_halves_exactly_once_and_of_nothing_that_ended(path):
    descriptor, memory = create_region(4096, "pages")
    memory[17] = 99
    agent = FakeAgent(path, epoch=1)
    client = client_at(path)
    client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
    os.close(descriptor)
    client.send(1, [1], 0, 4, last=True)  # done and released
    client.send(2, [2], 0, 4, last=False)  # open, two chunks
    client.send(2, [3], 4, 8, last=True)
    client.send(3, [4], 0, 4, last=True)  # failed, not released
    client.receive(4, ENDPOINT, [5], 0, 4)  # open
    client.receive(5, ENDPOINT, [6], 0, 4)  # cancelled, no answer yet
    client.cancel(5, Half.TARGET)
    for said in [event(DONE, 1), event(RELEASED, 1), event(FAILED, 3, reason=Reason.PEER_LOST)]:
        agent.say(said)
    client.wait(3, Half.SOURCE, timeout_s=WAIT_S)
    assert client.poll() == [event(DONE, 1), event(RELEASED, 1)]
    told_before = told(agent, RegisterPool, Offer, Receive)
    agent.die()
    with FakeAgent(path, epoch=2) as agent:
        wait_until(client, lambda: client.connected and client.epoch == 2)
        assert told(agent, RegisterPool, Offer, Receive, Cancel) == [
            message for message in told_before if isinstance(message, RegisterPool) or message.room in (2, 4)
        ]
        events = [(e.room, e.kind, e.reason) for e in client.poll()]
        assert events == [
            (3, RELEASED, Reason.NONE),
            (5, FAILED, Reason.CANCELLED),
            (5, RELEASED, Reason.NONE),
        ]
        (pool,) = agent.of(RegisterPool)
        with mmap.mmap(agent.descriptors[pool.request][0], 4096) as there:
            assert there[17] == 99
        agent.say(event(DONE, 2))
        assert client.wait(2, Half.SOURCE, timeout_s=WAIT_S).kind is DONE
        client.close()
    memory.close()


def test_a_killed_agent_process_is_replaced_without_the_engine_noticing_but_by_the_epoch(path):
    program = Path(__file__).with_name("fake_agent.py")
    process = subprocess.Popen([sys.executable, program, path, "1"], stdin=subprocess.PIPE)
    try:
        client = client_at(path)
        client.send(2, [2], 0, 4, last=True)
        process.kill()
    finally:
        process.kill()
        process.communicate()
    assert Path(path).exists()
    with FakeAgent(path, epoch=2) as agent, client:
        client.send(3, [3], 0, 4, last=True)
        assert client.epoch == 2
        assert [offer.room for offer in agent.of(Offer)] == [2, 3]


def test_a_call_in_flight_when_the_agent_dies_is_made_again_after_what_came_before(path):
    agent = FakeAgent(path, answer=lambda message: accept_all(message) if message.room == 1 else None)
    client = client_at(path)
    client.send(1, [1], 0, 4, last=True)
    thread = threading.Thread(target=lambda: client.send(2, [2], 0, 4, last=True))
    thread.start()
    agent.expect(lambda: len(agent.of(Offer)) == 2)
    agent.die()
    with FakeAgent(path, epoch=2) as agent:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert [offer.room for offer in agent.of(Offer)] == [1, 2]
        client.close()


def test_a_call_without_an_agent_fails_with_the_way_out_and_leaves_nothing_open(path):
    agent = FakeAgent(path)
    client = client_at(path)
    agent.stop()
    wait_until(client, lambda: not client.connected)
    with pytest.raises(AgentLost, match="make this call again"):
        client.send(2, [2], 0, 4, last=True, timeout_s=0.01)
    assert client.open_count == 0
    with FakeAgent(path, epoch=2) as agent:
        client.send(3, [2], 0, 4, last=True)
        assert [offer.room for offer in agent.of(Offer)] == [3]
        client.close()


def test_a_call_that_an_agent_leaves_unanswered_stays_open_so_that_it_can_be_cancelled(path):
    with FakeAgent(path, answer=lambda m: None if isinstance(m, Offer) else accept_all(m)) as agent:
        client = client_at(path)
        with pytest.raises(CallTimeout, match="cancel the room"):
            client.send(2, [2], 0, 4, last=True, timeout_s=0.01)
        client.cancel(2, Half.SOURCE)
        assert [cancel.room for cancel in agent.of(Cancel)] == [2]
        agent.die()
    with FakeAgent(path, epoch=2) as agent:
        wait_until(client, lambda: client.connected)
        assert agent.of(Offer, Cancel) == []
        wait_until(client, lambda: len(client._core.events) == 2)
        assert [(e.room, e.kind) for e in client.poll()] == [(2, FAILED), (2, RELEASED)]
        client.close()


def test_a_room_that_a_new_agent_refuses_fails_with_its_reason_and_is_released(path):
    agent = FakeAgent(path)
    client = client_at(path)
    client.receive(1, ENDPOINT, [1], 0, 4)
    client.send(2, [1], 0, 4, last=False)
    client.send(2, [2], 4, 8, last=True)
    client.send(3, [1], 0, 4, last=True)
    agent.die()

    def answer(message):
        if isinstance(message, Receive | Offer) and message.room in (1, 2):
            return Refused(message.request, Reason.STALE_EPOCH, "that prefill worker is gone")
        return accept_all(message)

    with FakeAgent(path, epoch=2, answer=answer) as agent:
        wait_until(client, lambda: client.connected)
        wait_until(client, lambda: len(client._core.events) == 4)
        assert [(e.room, e.kind, e.reason) for e in client.poll()] == [
            (1, FAILED, Reason.STALE_EPOCH),
            (1, RELEASED, Reason.NONE),
            (2, FAILED, Reason.STALE_EPOCH),
            (2, RELEASED, Reason.NONE),
        ]
        # A room that the agent has refused once is not offered in part.
        assert [(o.room, o.first_token) for o in agent.of(Offer)] == [(2, 0), (3, 0)]
        assert client.open_count == 1
        client.close()


def test_a_new_agent_that_is_busy_is_told_again_in_the_same_order(path):
    agent = FakeAgent(path)
    client = client_at(path)
    for chunk in range(3):
        client.send(1, [chunk], 4 * chunk, 4 * chunk + 4, last=chunk == 2)
    agent.die()
    turns = []

    def answer(message):
        turns.append(message)
        if isinstance(message, Offer) and len(turns) % 2:
            return Refused(message.request, Reason.BUSY, "later", 1_000_000)
        return accept_all(message)

    with FakeAgent(path, epoch=2, answer=answer) as agent:
        wait_until(client, lambda: client.connected)
        assert [offer.first_token for offer in agent.of(Offer)] == [0, 0, 4, 4, 8, 8]
        client.close()


def test_a_pool_on_its_way_out_when_the_agent_dies_is_free_once_a_new_one_is_there(path):
    descriptor, memory = create_region(4096, "pages")
    agent = FakeAgent(path, answer=lambda m: None if isinstance(m, UnregisterPool) else accept_all(m))
    client = client_at(path)
    client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
    client.send(1, [1], 0, 4, last=True)
    thread = threading.Thread(target=lambda: client.unregister_pool(0))
    thread.start()
    agent.expect(lambda: len(agent.of(UnregisterPool)) == 1)
    agent.die()
    with FakeAgent(path, epoch=2) as agent:
        thread.join(WAIT_S)
        wait_until(client, lambda: client.connected)
        assert agent.of(RegisterPool, Offer, UnregisterPool) == []
        wait_until(client, lambda: len(client._core.events) == 2)
        assert [(e.room, e.kind) for e in client.poll()] == [(1, FAILED), (1, RELEASED)]
        client.close()
    os.close(descriptor)
    memory.close()


def test_bytes_that_are_no_message_end_the_connection_and_the_client_connects_again(path):
    with FakeAgent(path, epoch=1) as agent, client_at(path) as client:
        client.send(1, [1], 0, 4, last=True)
        agent.say_raw(b"\x01\xff\xff\xff")
        agent.expect(lambda: len(agent.of(Hello)) == 2)
        wait_until(client, lambda: client.connected)
        assert [offer.room for offer in agent.of(Offer)] == [1, 1]
        agent.say(event(DONE, 1))
        assert client.wait(1, Half.SOURCE, timeout_s=WAIT_S).kind is DONE


def test_a_client_without_an_agent_tries_ever_less_often_and_sleeps_between(path, monkeypatch):
    monkeypatch.setattr(core, "RECONNECT_WAIT_MAX_S", 0.2)
    agent = FakeAgent(path)
    client = client_at(path)
    turns, waits_s = [], []
    turn = client._connection._turn
    # What the thread will wait for at most is seen before each of its turns.
    client._connection._turn = lambda: (turns.append(1), waits_s.append(client._core._dial_wait_s), turn())
    agent.die()
    wait_until(client, lambda: waits_s[-1:] == [0.2])
    waits = sorted(set(waits_s))
    assert waits[-1] == 0.2
    assert all(later <= 2 * sooner for sooner, later in pairwise(waits))
    assert len(turns) <= 4 * len(waits)
    client.close()


def test_a_forked_child_may_not_use_its_parents_client(path):
    with FakeAgent(path), client_at(path) as client:
        child = os.fork()
        if child == 0:
            try:
                client._check_open("send")
            except ArgumentError:
                client.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.send(1, [1], 0, 4, last=True)


def test_offers_of_many_threads_reach_the_last_of_many_agents_once_each_and_in_order(path):
    agent = FakeAgent(path, epoch=1)
    client = client_at(path)
    stop, sent = threading.Event(), {}

    def work(room):
        chunk = 0
        while not stop.is_set():
            client.send(room, [chunk], 4 * chunk, 4 * chunk + 4, last=False)
            chunk += 1
            sent[room] = chunk

    threads = [threading.Thread(target=work, args=(room,)) for room in range(4)]
    for thread in threads:
        thread.start()
    for epoch in range(2, 6):
        # Some calls are always in flight when the agent dies.
        agent.expect(lambda agent=agent, epoch=epoch: len(agent.of(Offer)) >= 40 * epoch)
        agent.die()
        agent = FakeAgent(path, epoch=epoch)
    wait_until(client, lambda: client.connected and client.epoch == 5)
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    for room in range(4):
        assert [o.first_token for o in agent.of(Offer) if o.room == room] == [4 * c for c in range(sent[room])]
    client.close()
    agent.stop()
