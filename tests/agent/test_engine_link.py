"""Tests the agent's end of the engine link: framing, descriptors, identity of engines, and handover of connections."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from scene import left_open, open_descriptors

from longshore_agent.control import engine_link
from longshore_agent.control.engine_link import EngineLink, EngineListener, PeerProcess, read_message
from longshore_agent.control.node_link import AdoptEngine, NodeLink
from longshore_agent.errors import EngineClosedError, EngineStuckError, ListenError
from longshore_client import KVLayout, ModelShape, Parallel, pool_geometry
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    TO_AGENT,
    TO_ENGINE,
    Accepted,
    Half,
    Hello,
    RegisterPool,
    Renew,
)
from longshore_wire.errors import CodecError

LAYOUT = KVLayout(ModelShape.kv(2, 4, 8, 2), Parallel(), 4)
HELLO = Hello(1, "prefill-0", LAYOUT, "cpu", (Half.SOURCE,))
REGISTER = RegisterPool(1, 0, pool_geometry(LAYOUT, 2))
WAIT_MS = 20_000

ENGINE_THAT_FORKS = """
import os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(sys.argv[1])
child = os.fork()
if child == 0:
    os.read(0, 1)  # holds the socket until the test closes the pipe
    os._exit(0)
print(child, flush=True)
os.read(0, 1)
"""


@pytest.fixture
def pair():
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = EngineLink(agent)
    yield engine, link
    engine.close()
    link.close()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


def send_with(engine, data, descriptors):
    engine.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def dial(path):
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine.connect(path)
    return engine


# -- framing -------------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_with_their_descriptors_which_children_do_not_inherit(pair):
    engine, link = pair
    assert link.receive() == []
    engine.send(TO_AGENT.encode(HELLO))
    with Path("/dev/null").open() as one, Path("/dev/zero").open() as two:
        send_with(engine, TO_AGENT.encode(REGISTER), [one.fileno(), two.fileno()])
    engine.send(TO_AGENT.encode(Renew()))
    messages = link.receive()
    assert [message for message, _ in messages] == [HELLO, REGISTER, Renew()]
    (null, zero) = messages[1][1]
    assert os.read(zero, 3) == bytes(3)
    assert os.read(null, 3) == b""
    assert not os.get_inheritable(null)
    os.close(null)
    os.close(zero)


def test_what_came_before_the_end_is_returned_before_the_end_is_reported(pair):
    engine, link = pair
    engine.send(TO_AGENT.encode(Renew()))
    engine.close()
    assert link.receive() == [(Renew(), [])]
    with pytest.raises(EngineClosedError):
        link.receive()
    with pytest.raises(EngineClosedError):
        link.send(Accepted(1))


@pytest.mark.parametrize(
    "data",
    [b"\x01", b"\x02\x90", b"\x01\xc1", TO_AGENT.encode(HELLO)[:-1], TO_ENGINE.encode(Accepted(1)), os.urandom(500)],
    ids=["short", "other version", "no msgpack", "cut", "other direction", "noise"],
)
def test_bytes_that_are_no_message_are_a_typed_error_and_leave_no_descriptor(pair, data):
    engine, link = pair
    before = open_descriptors()
    with Path("/dev/null").open() as one:
        send_with(engine, TO_AGENT.encode(REGISTER), [one.fileno()])
        send_with(engine, data, [one.fileno()])
    with pytest.raises(CodecError):
        link.receive()
    assert not left_open(before)


def test_a_message_above_the_limit_is_a_typed_error(pair):
    engine, link = pair
    engine.send(bytes(ENGINE_MESSAGE_BYTES_MAX + 1))
    with pytest.raises(CodecError, match="cut"):
        link.receive()


def test_descriptors_beside_anything_but_a_pool_are_refused_and_closed(pair):
    engine, link = pair
    before = open_descriptors()
    with Path("/dev/null").open() as one:
        send_with(engine, TO_AGENT.encode(Renew()), [one.fileno()])
    with pytest.raises(CodecError, match="Renew"):
        link.receive()
    assert not left_open(before)


def test_more_descriptors_than_there_is_room_for_are_refused_and_those_that_came_are_closed(pair, monkeypatch):
    engine, link = pair
    monkeypatch.setattr(engine_link, "_CONTROL_BYTES", socket.CMSG_SPACE(2 * 4))
    before = open_descriptors()
    with Path("/dev/null").open() as one:
        send_with(engine, TO_AGENT.encode(REGISTER), [one.fileno()] * 9)
    with pytest.raises(CodecError, match="cut"):
        link.receive()
    assert not left_open(before)


def test_a_pool_of_as_many_regions_as_the_kernel_passes_arrives_whole(pair):
    engine, link = pair
    with Path("/dev/null").open() as one:
        send_with(engine, TO_AGENT.encode(REGISTER), [one.fileno()] * engine_link.DESCRIPTORS_MAX)
    ((_, descriptors),) = link.receive()
    assert len(descriptors) == engine_link.DESCRIPTORS_MAX
    engine_link.close_all(descriptors)


def test_an_engine_that_does_not_read_fills_a_bounded_outbox_and_loses_nothing_when_it_reads(pair, monkeypatch):
    engine, link = pair
    monkeypatch.setattr(engine_link, "OUTBOX_MESSAGES_MAX", 5)
    sent = 0
    while link.outbox_count < 5:
        link.send(Accepted(sent))
        sent += 1
    with pytest.raises(EngineStuckError, match="5 messages"):
        link.send(Accepted(sent))
    assert link.outbox_count == 5
    engine.setblocking(False)
    got = []
    while len(got) < sent:
        try:
            got.append(TO_ENGINE.decode(engine.recv(ENGINE_MESSAGE_BYTES_MAX)).request)
        except BlockingIOError:
            link.flush()
    assert got == list(range(sent))
    assert link.flush()


def test_one_engine_cannot_keep_the_agent_to_itself(pair):
    engine, link = pair
    for _ in range(engine_link.RECEIVE_BATCH_MAX + 3):
        engine.send(TO_AGENT.encode(Renew()))
    assert len(link.receive()) == engine_link.RECEIVE_BATCH_MAX
    assert len(link.receive()) == 3


# -- identity of engines -------------------------------------------------------------------------------------------


def test_the_peer_is_the_process_that_connected(path):
    listener = EngineListener(path)
    engine = dial(path)
    link = EngineLink(listener.accept())
    assert link.peer[:3] == (os.getpid(), os.getuid(), os.getgid())
    assert link.pidfd is not None
    assert not select.select([link.pidfd], [], [], 0)[0]
    engine.close()
    link.close()
    link.close()
    listener.close()


def test_an_engine_whose_pid_is_not_known_here_is_not_called_by_a_number():
    assert PeerProcess(77, 1, 1).shown == "the engine with PID 77"
    assert PeerProcess(0, 1, 1).shown == "the engine in another pod"


@pytest.mark.parametrize("newer_kernel", [True, False], ids=["SO_PEERPIDFD", "pidfd_open"])
def test_the_death_of_an_engine_is_seen_though_its_forked_child_holds_the_socket(path, newer_kernel, monkeypatch):
    if not newer_kernel:
        monkeypatch.setattr(engine_link, "SO_PEERPIDFD", 9999)
    listener = EngineListener(path)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE_THAT_FORKS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(engine.stdout.readline())
    link = EngineLink(listener.accept())
    assert link.peer.pid == engine.pid
    engine.kill()
    assert select.select([link.pidfd], [], [], WAIT_MS / 1000)[0]
    os.kill(child, 0)  # the child lives, and the socket is open
    assert link.receive() == []
    engine.stdin.close()
    engine.stdout.close()
    engine.wait()
    link.close()
    listener.close()


def test_an_engine_that_died_before_it_was_served_is_a_typed_error(path, monkeypatch):
    monkeypatch.setattr(engine_link, "SO_PEERPIDFD", 9999)
    listener = EngineListener(path)
    source = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    subprocess.run([sys.executable, "-c", source, path], check=True)
    before = open_descriptors()
    with pytest.raises(EngineClosedError, match="died before"):
        EngineLink(listener.accept())
    assert not left_open(before)
    listener.close()


# -- the listener --------------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_and_group_and_is_removed_at_the_end(path):
    listener = EngineListener(path)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o660
    assert listener.accept() is None
    listener.close()
    listener.close()
    assert not Path(path).exists()


def test_a_socket_that_a_killed_agent_left_is_replaced(path):
    source = (
        "import os, signal, sys; from longshore_agent.control.engine_link import EngineListener;"
        "EngineListener(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", source, path], check=False).returncode == -signal.SIGKILL
    assert Path(path).exists()
    listener = EngineListener(path)
    dial(path).close()
    assert listener.accept() is not None
    listener.close()


def test_a_socket_on_which_an_agent_answers_is_left_alone(path):
    listener = EngineListener(path)
    with pytest.raises(ListenError, match="answers"):
        EngineListener(path)
    assert listener.accept() is not None  # the probe
    dial(path).close()
    assert listener.accept() is not None
    listener.close()


def test_a_path_that_is_no_socket_and_one_that_cannot_be_made_are_typed_errors(path, tmp_path):
    Path(path).write_text("precious")
    before = open_descriptors()
    with pytest.raises(ListenError, match="no socket"):
        EngineListener(path)
    assert Path(path).read_text() == "precious"
    with pytest.raises(ListenError, match="missing"):
        EngineListener(str(tmp_path / "missing" / "engine.sock"))
    with pytest.raises(ListenError, match="too long"):
        EngineListener(str(tmp_path / ("x" * 120)))
    assert not left_open(before)


def test_a_closing_agent_does_not_remove_the_socket_of_its_successor(path):
    old = EngineListener(path)
    Path(path).unlink()
    new = EngineListener(path)
    old.close()
    dial(path).close()
    assert new.accept() is not None
    new.close()


# -- handing on ----------------------------------------------------------------------------------------------------


def test_a_connection_travels_to_another_process_and_keeps_its_peer(path):
    listener = EngineListener(path)
    engine = dial(path)
    accepted = listener.accept()
    assert read_message(accepted) is None
    engine.send(TO_AGENT.encode(HELLO))
    hello = TO_AGENT.decode(read_message(accepted))
    assert hello == HELLO
    supervisor, worker = map(NodeLink, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    assert worker.receive() == []
    supervisor.send(AdoptEngine(hello), accepted.fileno())
    accepted.close()
    ((message, descriptor),) = worker.receive()
    assert message == AdoptEngine(HELLO)
    link = EngineLink(socket.socket(fileno=descriptor))
    assert link.peer.pid == os.getpid()
    engine.send(TO_AGENT.encode(Renew()))
    assert link.receive() == [(Renew(), [])]
    link.send(Accepted(3))
    assert TO_ENGINE.decode(engine.recv(ENGINE_MESSAGE_BYTES_MAX)) == Accepted(3)
    supervisor.close()
    worker.close()
    link.close()
    # Only the worker still had the connection open, so its end closes it.
    assert engine.recv(ENGINE_MESSAGE_BYTES_MAX) == b""
    engine.close()
    listener.close()


def test_a_first_message_may_not_bring_descriptors_or_be_missing(path):
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = open_descriptors()
    with Path("/dev/null").open() as one:
        send_with(engine, TO_AGENT.encode(HELLO), [one.fileno()])
    with pytest.raises(CodecError, match="first message"):
        read_message(agent)
    assert not left_open(before)
    engine.close()
    with pytest.raises(EngineClosedError):
        read_message(agent)
    agent.close()
