"""Tests a client against a fake agent with real sockets, descriptors and threads."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from scene import DONE, ENDPOINT, LAYOUT, client_at, event, left_open, open_descriptors, wait_until

from longshore_client import (
    ArgumentError,
    ClientClosed,
    ConnectError,
    Half,
    PoolRefused,
    Reason,
    connection,
    create_region,
    pool_geometry,
)
from longshore_client.connection import AgentSocket
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    Accepted,
    Hello,
    Offer,
    Receive,
    Refused,
    RegisterPool,
)
from longshore_wire.layout import TargetMemory

# As root it becomes another user, like a pod's process; its groups are the arguments.
OTHER_USER = f"""
import os, sys
import longshore_client as ls
layout = ls.KVLayout(ls.ModelShape.kv(2, 4, 8, 2), ls.Parallel(tp=2, tp_rank=0), 4)
if os.geteuid() == 0:
    os.setgroups([int(group) for group in sys.argv[2:]])
    os.setgid(65534)
    os.setuid(65534)
try:
    ls.connect(sys.argv[1], instance="prefill-0", layout=layout, timeout_s={100 * WAIT_S}).close()
    print("welcome", end="")
except ls.LongshoreError as error:
    print(type(error).__name__, error.reason.name, error)
"""


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


@pytest.mark.shows("argument.connect.path")
def test_a_client_is_welcomed_and_knows_its_worker(path):
    with FakeAgent(path, epoch=42) as agent, client_at(path, roles=[Half.SOURCE]) as client:
        assert (client.epoch, client.deployment, client.connected) == (42, "demo", True)
        [hello] = agent.of(Hello)
        assert hello == Hello(
            ENGINE_PROTOCOL_VERSION,
            "prefill-0",
            LAYOUT,
            "cpu",
            (Half.SOURCE,),
            hello.engine,
            os.getpid(),
            host=os.uname().nodename,
        )
        # No other engine has this name.
        assert hello.engine


@pytest.mark.shows("argument.connect.path")
def test_without_a_path_the_environment_names_the_socket_and_else_it_is_that_of_an_agent_without_deployment(
    path, monkeypatch
):
    monkeypatch.setenv("LONGSHORE_ENGINE_SOCKET", path)
    with FakeAgent(path, epoch=42), client_at(None) as client:
        assert client.epoch == 42
    monkeypatch.setenv("LONGSHORE_ENGINE_SOCKET", "")
    with pytest.raises(ArgumentError, match="LONGSHORE_ENGINE_SOCKET"):
        client_at(None)
    monkeypatch.delenv("LONGSHORE_ENGINE_SOCKET")
    with pytest.raises(ConnectError, match=r"/run/longshore/agent\.sock"):
        client_at(None, timeout_s=0)


@pytest.fixture
def place():
    """Yield the path of a socket that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield f"{folder}/engine.sock"


def told_engine(path, *groups):
    """Return the error that an engine of another user gets immediately, without waiting for its timeout."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, path, *map(str, groups)],
        check=False,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
    )
    return done.stdout + done.stderr


def test_an_engine_that_may_not_use_the_socket_is_told_so_at_once_with_the_way_out(place):
    with FakeAgent(place):
        Path(place).chmod(0)
        said = told_engine(place)
    assert "NotPermitted AUTHENTICATION" in said
    assert f"{place} is for user {os.getuid()}" in said and "supplementalGroups: [10001]" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be in another group")
def test_an_engine_in_the_group_of_the_socket_is_welcomed_and_another_is_not(place):
    with FakeAgent(place):
        os.chown(place, 10001, 10001)
        assert told_engine(place, 10001) == "welcome"
        assert "group 10001 (mode 0660), and this process has user 65534, groups 5, 65534" in told_engine(place, 5)
        Path(place).parent.chmod(0o700)
        assert "is not accessible to this process" in told_engine(place, 10001)


@pytest.mark.parametrize("kind", ["file", "folder", "loop", "below a file", "stream", "datagram"])
def test_a_path_where_no_agent_can_answer_fails_at_once(path, kind):
    if kind == "file":
        Path(path).write_text("no socket")
    elif kind == "folder":
        Path(path).mkdir()
    elif kind == "loop":
        Path(path).symlink_to(path)
    elif kind == "below a file":
        Path(path).write_text("no folder")
        path += "/engine.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM) as other:
        if kind in ("stream", "datagram"):
            other.bind(path)
        if kind == "stream":
            other.listen()
        begin_s = time.monotonic()
        with pytest.raises(ConnectError, match="is no socket of an agent") as raised:
            client_at(path)
    assert path in str(raised.value) and "give the path of the engine socket" in str(raised.value)
    assert time.monotonic() - begin_s < WAIT_S


def test_a_path_that_is_too_long_for_a_socket_is_refused(path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"path has 108 bytes: .* at most 107"):
        client_at("/" + 107 * "a")
    monkeypatch.setenv("LONGSHORE_ENGINE_SOCKET", "/" + 200 * "a")
    with pytest.raises(ArgumentError, match="LONGSHORE_ENGINE_SOCKET has 201 bytes"):
        client_at(None)


def test_while_a_client_waits_for_its_agent_it_warns_what_for(path, monkeypatch, caplog):
    monkeypatch.setattr(connection, "WAIT_LOG_S", 0.01)
    with pytest.raises(ConnectError, match="No such file"):
        client_at(path, timeout_s=0.1)
    assert caplog.messages and all(path in text and "No such file" in text for text in caplog.messages)
    assert "s more" in caplog.messages[0]


def test_an_agent_that_has_the_connection_and_does_not_answer_is_told_from_one_that_is_absent(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(ConnectError, match="may still start a worker for it: give a longer timeout_s"):
            client_at(path, timeout_s=0.5)


def test_nothing_is_left_open_after_a_client_and_after_a_failed_connect(path):
    before, thread_count = open_descriptors(), threading.active_count()
    with pytest.raises(ConnectError):
        client_at(path, timeout_s=0.05)
    with FakeAgent(path), client_at(path) as client:
        descriptor, memory = create_region(4096, "pages")
        client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
        client.close()
        os.close(descriptor)
        memory.close()
    assert not left_open(before)
    assert threading.active_count() <= thread_count


@pytest.mark.shows("argument.register_pool.regions")
def test_the_regions_of_a_pool_arrive_and_are_the_same_memory(path):
    descriptors, memories = zip(*(create_region(8192, f"pages-{n}") for n in range(3)), strict=True)
    geometry = msgspec.structs.replace(pool_geometry(LAYOUT, 2), region_bytes=(8192,) * 3)
    with FakeAgent(path) as agent, client_at(path) as client:
        client.register_pool(4, geometry, descriptors)
        (message,) = agent.of(RegisterPool)
        assert (message.cache, message.geometry) == (4, geometry)
        for number, descriptor in enumerate(agent.descriptors[message.request]):
            with mmap.mmap(descriptor, 8192) as there:
                memories[number][100] = 50 + number
                assert there[100] == 50 + number
                there[200] = 60 + number
                assert memories[number][200] == 60 + number
    for descriptor, memory in zip(descriptors, memories, strict=True):
        os.close(descriptor)
        memory.close()


def test_a_pool_that_cannot_be_mapped_is_a_typed_error_and_its_descriptors_are_closed(path):
    def answer(message):
        return Refused(message.request, Reason.UNSUPPORTED, "plane 3 ends behind region 0")

    descriptor, memory = create_region(4096, "pages")
    with FakeAgent(path, answer=answer) as agent, client_at(path) as client:
        with pytest.raises(PoolRefused, match="plane 3") as caught:
            client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
        assert caught.value.reason is Reason.UNSUPPORTED
        before = open_descriptors()
        with pytest.raises(PoolRefused):
            client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
        agent.expect(lambda: len(agent.descriptors) == 2)
        assert left_open(before, expected=1) == 1  # the agent's
        with pytest.raises(ArgumentError, match="not open"):
            client.register_pool(0, pool_geometry(LAYOUT, 2), [10_000])
        with pytest.raises(ArgumentError, match="2 regions for 1"):
            client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor, descriptor])
    os.close(descriptor)
    memory.close()


def test_a_list_of_128k_pages_passes_default_buffers_while_the_agent_reads_nothing_at_first(path):
    pages = list(range(131_072))
    with FakeAgent(path) as agent, client_at(path) as client:
        agent.read_nothing()
        thread = threading.Thread(target=lambda: client.receive(1, ENDPOINT, pages, 0, 4 * 131_072))
        thread.start()
        # The socket takes fewer than the 16 parts. The rest waits in the client, without blocking.
        wait_until(client, lambda: client._core.outbox)
        assert client.poll() == []
        agent.read_on()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert b"".join(c.caches[0].pages for c in agent.of(Receive)) == b"".join(
            page.to_bytes(4, "little") for page in pages
        )
        client.send(1, pages, 0, 4 * 131_072, last=True)
        assert len(agent.of(Offer)) == 16


def test_close_ends_waits_and_calls_in_other_threads(path):
    errors = []

    def catch(call):
        try:
            call()
        except ClientClosed as error:
            errors.append(error)

    with FakeAgent(path, answer=lambda message: None) as agent:
        client = client_at(path)
        calls = [
            lambda: client.wait(7, Half.SOURCE),
            lambda: client.endpoint(WAIT_S),
            lambda: client.send(7, [1], 0, 4, last=True),
        ]
        threads = [threading.Thread(target=catch, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        agent.expect(lambda: len(agent.of(Offer)) == 1)
        client.close()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(errors) == 3
        agent.expect(lambda: agent.gone_count == 1)
        for call in calls:
            with pytest.raises(ClientClosed):
                call()
        with pytest.raises(ClientClosed):
            client.poll()
        client.close()


@pytest.mark.shows("argument.poll.timeout_s")
def test_poll_waits_for_an_event_and_ends_when_the_client_is_closed(path):
    with FakeAgent(path) as agent, client_at(path) as client:
        client.send(7, [1], 0, 4, last=True)
        agent.say(event(DONE))
        assert [each.kind for each in client.poll(WAIT_S)] == [DONE]
        assert client.poll(0.001) == []
        closing = threading.Timer(0.05, client.close)
        closing.start()
        with pytest.raises(ClientClosed):
            client.poll(WAIT_S)
        closing.join()


@pytest.fixture
def readers(monkeypatch):
    """Return a list to which each thread that gets messages from a socket is added."""
    found = []
    receive = AgentSocket.receive

    def recorded(connected):
        messages = receive(connected)
        found.extend([threading.current_thread()] * len(messages))
        return messages

    monkeypatch.setattr(AgentSocket, "receive", recorded)
    return found


def in_threads(*calls):
    """Start a thread for each call; return a function that waits for them and returns their results in order."""
    results = {}
    threads = [
        threading.Thread(target=lambda index=index, call=call: results.update({index: call()}))
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()

    def join():
        for thread in threads:
            thread.join(WAIT_S)
        return [results[index] for index in range(len(calls))]

    return join


def is_read_by_a_caller(client):
    return client._links[TargetMemory.DEVICE]._is_lent


def test_a_thread_that_waits_reads_the_message_itself_and_otherwise_the_connections_thread_does(path, readers):
    with FakeAgent(path) as agent, client_at(path) as client:
        for room in (1, 2):
            client.send(room, [1], 0, 4, last=True)
        readers.clear()
        wait = in_threads(lambda: (client.wait(1, Half.SOURCE, timeout_s=WAIT_S).room, threading.current_thread()))
        wait_until(client, lambda: is_read_by_a_caller(client))
        agent.say(event(DONE, 1))
        [(room, waited)] = wait()
        assert (room, readers) == (1, [waited])
        agent.say(event(DONE, 2))
        wait_until(client, lambda: len(readers) == 2)
        assert readers[1].name == "longshore-link"
        assert [each.room for each in client.poll()] == [2]


def test_threads_that_wait_at_once_each_get_their_own_event_and_answer(path):
    def answer(message):
        return None if isinstance(message, Offer) and message.room >= 10 else accept_all(message)

    with FakeAgent(path, answer=answer) as agent, client_at(path) as client:
        rooms = range(1, 9)
        for room in rooms:
            client.send(room, [1], 0, 4, last=True)
        waits = [lambda room=room: client.wait(room, Half.SOURCE, timeout_s=WAIT_S).room for room in rooms]
        sends = [lambda room=room: client.send(room, [1], 0, 4, last=True) for room in (10, 11)]
        results = in_threads(*waits, *sends)
        wait_until(client, lambda: is_read_by_a_caller(client))
        agent.expect(lambda: len(agent.of(Offer)) == 10)
        offers = agent.of(Offer)[-2:]
        for room in reversed(rooms):
            agent.say(event(DONE, room))
        for offer in offers:
            agent.say(Accepted(offer.request))
        assert results() == [*rooms, None, None]
        assert not is_read_by_a_caller(client)


def test_a_wait_may_have_the_longest_timeout(path):
    with FakeAgent(path) as agent, client_at(path) as client:
        client.send(1, [1], 0, 4, last=True, timeout_s=threading.TIMEOUT_MAX)
        wait = in_threads(lambda: client.wait(1, Half.SOURCE, timeout_s=threading.TIMEOUT_MAX).room)
        wait_until(client, lambda: is_read_by_a_caller(client))
        agent.say(event(DONE, 1))
        assert wait() == [1]


def test_the_main_thread_reads_no_socket_since_signal_handlers_run_there(path, readers):
    with FakeAgent(path) as agent, client_at(path) as client:
        for room in range(1, 50):
            client.send(room, [1], 0, 4, last=True)
            agent.say(event(DONE, room))
            assert client.wait(room, Half.SOURCE, timeout_s=WAIT_S).room == room
    assert {thread.name for thread in readers} == {"longshore-link"}


def test_a_wait_goes_on_when_its_agent_is_replaced(path):
    with FakeAgent(path, epoch=1) as first, client_at(path) as client:
        client.send(1, [1], 0, 4, last=True)
        result = in_threads(lambda: client.wait(1, Half.SOURCE, timeout_s=10 * WAIT_S).room)
        wait_until(client, lambda: is_read_by_a_caller(client))
        first.stop()
        with FakeAgent(path, epoch=2) as second:
            wait_until(client, lambda: client.epoch == 2 and client.connected)
            second.say(event(DONE, 1))
            assert result() == [1]


def test_a_killed_agent_process_is_replaced_and_the_next_one_gets_the_descriptors_too(path):
    program = Path(__file__).with_name("fake_agent.py")
    process = subprocess.Popen([sys.executable, program, path, "1"], stdin=subprocess.PIPE)
    descriptor, memory = create_region(4096, "pages")
    memory[17] = 99
    try:
        client = client_at(path)
        client.register_pool(0, pool_geometry(LAYOUT, 2), [descriptor])
        os.close(descriptor)
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
        (pool,) = agent.of(RegisterPool)
        with mmap.mmap(agent.descriptors[pool.request][0], 4096) as there:
            assert there[17] == 99
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


def test_a_client_without_an_agent_sleeps_between_its_tries(path, monkeypatch):
    agent, dials, turns = FakeAgent(path), [], []
    dial = AgentSocket.dial
    with client_at(path) as client:
        monkeypatch.setattr(AgentSocket, "dial", lambda path: (dials.append(path), dial(path))[1])
        turn = client._links[TargetMemory.DEVICE]._turn
        client._links[TargetMemory.DEVICE]._turn = lambda: (turns.append(1), turn())
        agent.die()
        wait_until(client, lambda: len(dials) >= 4)
        assert len(turns) <= 4 * len(dials)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_forked_child_may_not_use_its_parents_client(path, *, is_held):
    """Another thread of the parent may hold the client's lock at the fork. Nobody frees it in the child."""
    with FakeAgent(path), client_at(path) as client:
        calls = (
            lambda: client.send(1, [1], 0, 4, last=True),
            lambda: client.poll(WAIT_S),
            lambda: client.wait(1, Half.SOURCE, timeout_s=WAIT_S),
            lambda: client.endpoint(WAIT_S),
            lambda: client.open_count,
        )
        child = fork_while_held(client) if is_held else os.fork()
        if child == 0:
            # Ends a child that hangs.
            signal.alarm(int(WAIT_S))
            refused_count = 0
            for call in calls:
                try:
                    call()
                except ArgumentError:
                    refused_count += 1
            client.close()
            os._exit(refused_count)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        client.send(1, [1], 0, 4, last=True)


def fork_while_held(client):
    """Fork while another thread holds the client's lock."""
    held, forked = threading.Event(), threading.Event()

    def hold():
        with client._changed:
            held.set()
            forked.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(WAIT_S)
    child = os.fork()
    if child:
        forked.set()
        holder.join(WAIT_S)
    return child


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

    threads = [threading.Thread(target=work, args=(room,)) for room in range(8)]
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
    offers = agent.of(Offer)
    assert len({offer.request for offer in offers}) == len(offers)
    for room in range(8):
        assert [o.caches[0].first_token for o in offers if o.room == room] == [4 * c for c in range(sent[room])]
    client.close()
    agent.stop()


def test_an_engine_that_the_next_agent_refuses_says_so_at_once_in_its_log(path, caplog):
    """It goes on trying: the deployment may be changed back, and its rooms are those of the last agent."""
    with FakeAgent(path, epoch=1) as first, client_at(path, roles=[Half.SOURCE]) as client:
        first.stop()
        text = "prefill.pageSize is 8 at the engine and 16 in the deployment"
        with FakeAgent(path, greet=lambda _: Refused(0, Reason.LAYOUT_MISMATCH, text)) as second:
            second.expect(lambda: len(second.of(Hello)) >= 3)
        assert [record.name for record in caplog.records if text in record.message] == ["longshore.client"]
        with FakeAgent(path, epoch=3):
            wait_until(client, lambda: client.epoch == 3)
