"""Tests silent connections and exhausted descriptors: the agent still answers probes and admits engines."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import trustme
from agent_fleet import World, over
from agent_world import EVENT_LIMIT_S, Agent, Engine, Request, wait_for
from status_scene import RULES, Source

from longshore_agent.status import server as http_server
from longshore_agent.status.app import create_app
from longshore_agent.status.server import CONNECTIONS_MAX, REQUESTS_MAX, StatusServer, serve
from longshore_agent.status.snapshot import AgentSnapshot
from longshore_client import Half, Reason, RoomEventKind

# More than an agent accepts, and more than common limits on descriptors.
IDLE_COUNT = 2000
ALLOWED_COUNT = 1024
ANSWER_LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """This process holds the other ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def opened(directory: Path, backend: str) -> Iterator[World]:
    """Make a world whose agents move bytes by `backend`."""
    world = World(directory, LONGSHORE_BACKEND=backend)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path / "agent")
    yield started
    started.stop()


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), ANSWER_LIMIT_S)) for _ in range(count)]


def allow(pid: int, count: int) -> None:
    """Forbid a running process to open descriptors of this number or above. It keeps existing ones."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def allow_more(pid: int, count: int) -> int:
    """Permit a running process this many more descriptors; return its limit before."""
    before = allowed(pid)
    held = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in held)
    allow(pid, next(itertools.islice(free, count, None)))
    return before


def allowed(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


@contextlib.contextmanager
def none_left(pid: int, but: int = 0) -> Iterator[None]:
    """Permit a running process no further descriptor except `but` ones."""
    enough = allow_more(pid, but)
    try:
        yield
    finally:
        # If the process has ended, the test itself fails.
        with contextlib.suppress(ProcessLookupError):
            allow(pid, enough)


def descriptor_count() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def port_of(agent: Agent) -> int:
    return int(agent.http.rpartition(":")[2])


def moved(prefill: Engine, decode: Engine) -> None:
    """Move one room and compare its bytes."""
    request = Request(prefill, decode, 100)
    request.claim()
    request.offer()
    request.arrives()


# -- a whole agent -----------------------------------------------------------------------------------------------------


def test_probes_and_engines_are_served_while_more_connections_are_open_than_descriptors_are_allowed(lone):
    port = port_of(lone)
    allow(lone.process.pid, ALLOWED_COUNT)
    with idle_connections(port, IDLE_COUNT):
        for _ in range(20):
            assert lone.ask("/healthz")[0] == 200
        engine = Engine(lone, "engine")
        wait_for(lambda: lone.ask("/readyz")[0] == 200, what="readiness")
        worker = lone.worker("engine")
        engine.close()
    assert worker is not None
    assert worker["state"] == "ready"


def test_an_engine_that_comes_while_no_descriptor_is_left_is_served_when_there_is_one_again(lone):
    supervisor = lone.process.pid
    assert lone.get("/healthz")["ok"]
    enough = allowed(supervisor)
    with ThreadPoolExecutor(1) as starting:
        # Below all of its descriptors, so that it cannot reopen one that it closes now.
        allow(supervisor, 3)
        coming = starting.submit(Engine, lone, "engine")
        ended = wait_for(
            lambda: "no connection can be accepted now" in lone.log() or (lone.process.poll() is not None and "ended")
        )
        allow(supervisor, enough)
        assert ended is True, lone.log()
        engine = coming.result()
    assert lone.worker("engine")["state"] == "ready"
    assert lone.metric("longshore_starved_accepts_total") >= 1
    engine.close()


def test_an_engine_whose_worker_cannot_be_started_is_told_to_try_again_and_comes_in_then(lone):
    supervisor = lone.process.pid
    assert lone.get("/healthz")["ok"]
    with ThreadPoolExecutor(1) as starting:
        # One for its connection, none for its worker.
        enough = allow_more(supervisor, 1)
        coming = starting.submit(Engine, lone, "engine")
        ended = wait_for(
            lambda: "no worker can be started now" in lone.log() or (lone.process.poll() is not None and "ended")
        )
        allow(supervisor, enough)
        assert ended is True, lone.log()
        engine = coming.result()
    assert lone.worker("engine")["state"] == "ready"
    engine.close()


def test_an_agent_and_its_workers_may_open_as_many_descriptors_as_the_hard_limit_says(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A program, since forks have the limits of the process that they are forked from.
    agent = Agent(tmp_path / "agent", ["prlimit", f"--nofile={ALLOWED_COUNT}:{hard}"])
    try:
        engine = Engine(agent, "engine")
        limits = [allowed(pid) for pid in (agent.process.pid, agent.worker("engine")["pid"])]
        engine.close()
    finally:
        agent.stop()
    assert limits == [hard, hard]


@pytest.mark.parametrize("backend", over("NIXL", "Mooncake", "Loopback"))
def test_a_room_of_a_worker_that_has_no_descriptor_left_fails_by_name_and_the_next_one_arrives(tmp_path, backend):
    with opened(tmp_path, backend) as world:
        source, target = world.agent("source"), world.agent("target")
        starting = [world.engine(source, "prefill"), world.engine(target, "decode")]
        prefill, decode = [engine.result() for engine in starting]
        before = target.worker("decode")
        with none_left(before["pid"]):
            first = Request(prefill, decode, 100)
            first.offer()
            first.claim()
            end = decode.client.wait(first.room, Half.TARGET, "prefill", timeout_s=EVENT_LIMIT_S)
            during = target.worker("decode")
        assert end.reason is Reason.TRANSFER_FAILED
        assert "cannot dial prefill rank 0: Too many open files" in end.text
        # Its ports listen whether or not it can open descriptors.
        assert (during["pid"], during["data_ports"]) == (before["pid"], before["data_ports"])
        second = Request(prefill, decode, 100)
        second.claim()
        second.offer()
        second.arrives()
        assert target.worker("decode")["pid"] == before["pid"]


def test_a_worker_whose_library_gave_its_data_port_up_is_replaced_and_the_next_one_serves(tmp_path):
    with opened(tmp_path, "NIXL") as world:
        source, target = world.agent("source"), world.agent("target")
        starting = [world.engine(source, "prefill"), world.engine(target, "decode")]
        prefill, decode = [engine.result() for engine in starting]
        # A data port admits no host before a peer has attached.
        moved(prefill, decode)
        before = target.worker("decode")
        ports = [(each["address"], each["port"]) for each in before["data_ports"]]
        assert ports
        with none_left(before["pid"]), contextlib.ExitStack() as stack:
            for address in ports:
                # UCX closes a listening socket when it cannot accept, and this connection with it.
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(socket.create_connection(address, ANSWER_LIMIT_S))
            wait_for(lambda: (now := target.worker("decode")) and now["pid"] not in (None, before["pid"]))
        wait_for(lambda: (now := target.worker("decode")) and now["state"] == "ready")
        assert "has closed" in target.log()
        moved(prefill, decode)


# Not NIXL: UCX closes a listening socket when it cannot accept, and the worker is replaced.
def test_a_worker_that_a_peer_attaches_to_while_it_has_no_descriptor_left_lives_and_serves_it_later(tmp_path):
    with opened(tmp_path, "Mooncake") as world:
        source, target = world.agent("source"), world.agent("target")
        starting = [world.engine(source, "prefill"), world.engine(target, "decode")]
        prefill, decode = [engine.result() for engine in starting]
        worker = source.worker("prefill")["pid"]
        # One for the connection of the Attach, none for the transport.
        with none_left(worker, but=1):
            first = Request(prefill, decode, 100)
            first.claim()
            wait_for(lambda: target.worker("decode")["peers"])
            first.offer()
            assert source.worker("prefill")["pid"] == worker
        assert {end.kind for end in first.ends()} <= {RoomEventKind.DONE, RoomEventKind.FAILED}
        second = Request(prefill, decode, 100)
        second.claim()
        second.offer()
        second.arrives()
        assert source.worker("prefill")["pid"] == worker


# -- its HTTP server alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[StatusServer]:
    server = serve(create_app(Source(), RULES), "127.0.0.1", 0)
    yield server
    server.stop()


def ask(port: int, path: str) -> int:
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=ANSWER_LIMIT_S).status_code


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has kept an idle connection open."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_connections_beyond_the_limit_end_the_oldest_that_asks_nothing(served):
    with (
        socket.create_connection(("127.0.0.1", served.port), ANSWER_LIMIT_S) as first,
        idle_connections(served.port, CONNECTIONS_MAX) as others,
    ):
        assert first.recv(1) == b""
        assert ask(served.port, "/healthz") == 200
        assert is_open(others[-1])


def test_a_connection_that_asks_nothing_is_ended_after_its_time(served, monkeypatch):
    monkeypatch.setattr(http_server, "EXCHANGE_LIMIT_S", 0.05)
    with idle_connections(served.port, 3) as idle:
        idle[1].sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        for connection in idle:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_connection_that_is_answered_is_kept_for_more_questions(served):
    with httpx.Client(base_url=f"http://127.0.0.1:{served.port}", trust_env=False, timeout=ANSWER_LIMIT_S) as client:
        answers = [client.get("/healthz") for _ in range(3)]
        ports = {answer.extensions["network_stream"].get_extra_info("client_addr") for answer in answers}
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert len(ports) == 1


class SlowSource(Source):
    """A supervisor that delays its first answers until a test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.asked_count = itertools.count(1)
        self.all_ask = threading.Event()

    def snapshot(self, room: int | None = None) -> AgentSnapshot:
        number = next(self.asked_count)
        if number == REQUESTS_MAX:
            self.all_ask.set()
        assert number > REQUESTS_MAX or self.answers.wait(ANSWER_LIMIT_S)
        return super().snapshot(room)


def test_probes_are_answered_while_as_many_requests_wait_as_are_allowed():
    source = SlowSource()
    server = serve(create_app(source, RULES), "127.0.0.1", 0)
    with ThreadPoolExecutor(REQUESTS_MAX) as asking:
        waiting = [asking.submit(ask, server.port, "/v1/status") for _ in range(REQUESTS_MAX)]
        try:
            assert source.all_ask.wait(ANSWER_LIMIT_S)
            assert ask(server.port, "/metrics") == 503
            assert ask(server.port, "/healthz") == 200
        finally:
            source.answers.set()
    assert {request.result() for request in waiting} == {200}
    server.stop()


def test_connections_that_begin_no_tls_do_not_keep_probes_out(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    server = serve(create_app(Source(), RULES), "127.0.0.1", 0, certificate_file=str(certificate), key_file=str(key))
    before = descriptor_count()
    with idle_connections(server.port, IDLE_COUNT):
        answer = httpx.get(
            f"https://127.0.0.1:{server.port}/healthz", verify=trust, trust_env=False, timeout=ANSWER_LIMIT_S
        )
        held_count = descriptor_count() - before - IDLE_COUNT
    server.stop()
    assert answer.status_code == 200
    # The loop removes closed ones in its next turns.
    assert held_count <= CONNECTIONS_MAX + http_server.ACCEPTS_PER_TURN_MAX
