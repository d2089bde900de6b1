"""Tests agents as processes of this machine: they start, report counters, use every lane, and end with their parent."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from agent_world import wait_for
from left_behind import marked

from longshore_cli.lifetime import PartEndedError, interrupts_raised, parts_watched
from longshore_cli.local_agents import LocalAgent, LocalAgentError, make_keys
from longshore_cli.main import main
from longshore_cli.metrics_page import MetricsPage
from longshore_client import Client, Half, RoomEventKind, connect, create_region, pool_geometry
from longshore_wire.layout import KVLayout, ModelShape, Parallel

SHAPE = ModelShape.kv(8, 8, 64, 4)
LIMIT_S = 120.0
ROOMS_MAX = 8
# Loads no large library, starts an agent and prints its PID.
PARENT = """
import sys, pathlib
from longshore_cli.lifetime import PartEndedError, parts_watched
from longshore_cli.local_agents import LocalAgent
agent = LocalAgent({"backend": "Loopback"}, pathlib.Path(sys.argv[1]))
agent.start()
agent.wait_ready()
print("agent", agent.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


def engine(agent: LocalAgent, instance: str, page_size: int, half: Half, tokens: int) -> tuple[Client, np.ndarray]:
    """A registered rank, and its pages as [planes, tokens, row]."""
    layout = KVLayout(SHAPE, Parallel(), page_size)
    geometry = pool_geometry(layout, tokens // page_size)
    descriptor, memory = create_region(geometry.region_bytes[0], "kv")
    client = connect(agent.socket_path, instance=instance, layout=layout, roles=(half,), timeout_s=LIMIT_S)
    client.register_pool(0, geometry, [descriptor])
    os.close(descriptor)
    assert isinstance(memory, mmap.mmap)
    return client, np.frombuffer(memory, np.float32).reshape(16, -1, 512)[:, :tokens]


def lanes_of(page: MetricsPage) -> dict[str, float]:
    """Return the bytes that each lane has written."""
    return page.by("lane", "longshore_lane_bytes_total", worker="P/0/0")


@pytest.mark.slow
@pytest.mark.rest("benches")
def test_every_lane_writes_at_least_a_tenth_of_a_single_pair_s_bytes(directory: Path) -> None:
    tokens = 4096
    common = {"ring_bytes": "32Mi", "lane_bytes": "1Mi", "slab_bytes_min": "256Ki", "staging": "Always"}
    with LocalAgent(common, directory / "p") as near, LocalAgent(common, directory / "d") as far:
        # Unequal page sizes, so that one pair of ranks is distributed over the lanes.
        prefill, source = engine(near, "P", 16, Half.SOURCE, tokens)
        decode, target = engine(far, "D", 32, Half.TARGET, tokens)
        with prefill, decode:
            source[:] = np.random.default_rng(1).random(source.shape, dtype=np.float32)
            assert source.nbytes == 128 << 20

            def moved(room: int) -> MetricsPage:
                """Move a room; return the metrics after it."""
                decode.receive(room, prefill.endpoint(LIMIT_S), list(range(tokens // 32)), 0, tokens)
                prefill.send(room, list(range(tokens // 16)), 0, tokens, last=True)
                assert decode.wait(room, Half.TARGET, timeout_s=LIMIT_S).kind is RoomEventKind.DONE
                assert prefill.wait(room, Half.SOURCE, timeout_s=LIMIT_S).kind is RoomEventKind.DONE
                # A page shows a worker that does not answer in time as it last was.
                return wait_for(lambda: room * source.nbytes == sum(lanes_of(page := near.metrics()).values()) and page)

            # A lane's thread may get no processor during one room on a busy machine.
            for room in range(1, ROOMS_MAX + 1):
                page = moved(room)
                lanes = lanes_of(page)
                if min(lanes.values()) >= 0.1 * room * source.nbytes:
                    break
            status = near.status()
        assert np.array_equal(source, target)
    assert sorted(lanes) == ["0", "1", "2", "3"]
    assert min(lanes.values()) >= 0.1 * room * source.nbytes, lanes
    assert page.total("longshore_slabs_total", way="staged", half="source") > 100
    assert [worker["worker"] for worker in status["workers"]] == ["P/0/0"]
    assert not (directory / "p" / "agent.sock").exists()


@pytest.mark.slow
def test_an_agent_ends_when_the_process_that_started_it_is_killed(directory: Path) -> None:
    with marked(["-c", PARENT, str(directory / "a")]) as run:
        agent_pid = int(run.read_until("agent").split()[1])
        agent = os.pidfd_open(agent_pid)
        run.process.send_signal(signal.SIGKILL)
        assert select.select([agent], [], [], LIMIT_S)[0], "the agent lives on"
        os.close(agent)
        assert not (directory / "a" / "agent.sock").exists()


def test_an_agent_that_cannot_start_says_why(directory: Path) -> None:
    agent = LocalAgent({"backend": "Pigeon"}, directory)
    with pytest.raises(LocalAgentError, match="LONGSHORE_BACKEND"):
        agent.__enter__()


@pytest.mark.slow
def test_an_agent_that_was_killed_is_told_by_its_place_and_how_it_ended(directory: Path) -> None:
    with LocalAgent({"backend": "Loopback"}, directory / "decode-0") as agent:
        os.kill(agent.pid, signal.SIGKILL)
        # The kernel reports the end before a request for a page could fail.
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(LocalAgentError, match=r"^the agent in \S+/decode-0 ended with -9:\n"):
            agent.status()


class LockOfOtherWaiter:
    """The lock of a `Popen` that another thread holds: it has reaped the child, and stores the status as it lets go."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self._process.returncode = -signal.SIGKILL
        return blocking

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


@pytest.mark.slow
def test_an_agent_that_another_thread_is_reaping_is_named_with_how_it_ended(directory: Path) -> None:
    def lose(agent: LocalAgent) -> None:
        process = agent._process
        assert process is not None
        with interrupts_raised(), parts_watched() as watch:
            agent.watched_by(watch)
            with watch._lock:
                os.kill(agent.pid, signal.SIGKILL)
                os.waitpid(agent.pid, 0)
                process._waitpid_lock = LockOfOtherWaiter(process)  # type: ignore[attr-defined]
            threading.Event().wait()

    with (
        LocalAgent({"backend": "Loopback"}, directory / "decode-0") as agent,
        pytest.raises(PartEndedError, match=r"^the agent in \S+/decode-0 ended with -9"),
    ):
        lose(agent)


@pytest.mark.slow
def test_an_agent_that_was_killed_may_be_started_again_in_its_place(directory: Path) -> None:
    with LocalAgent({"backend": "Loopback"}, directory / "decode-0") as agent:
        first = agent.pid
        agent.kill()
        assert not agent.running
        agent.start()
        agent.wait_ready()
        assert agent.status()["node"] == ""
        assert (agent.pid != first) and agent.running


def test_a_directory_with_a_path_too_long_for_a_socket_is_refused(directory: Path) -> None:
    with pytest.raises(LocalAgentError, match="shorter path"):
        LocalAgent({}, directory / ("x" * 100))


def test_keys_are_made_once_readable_by_their_owner_only(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = directory / "keys"
    assert main(["keys", str(keys)]) == 0
    made = (keys / "curve.json").read_bytes()
    assert len(json.loads(made)["server_secret"]) == 40
    assert (keys / "curve.json").stat().st_mode & 0o777 == 0o600
    assert main(["keys", str(keys)]) == 1
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(LocalAgentError, match="is there already"):
        make_keys(keys)
    assert (keys / "curve.json").read_bytes() == made


def test_a_metrics_page_is_summed_by_name_and_label() -> None:
    page = MetricsPage(
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{worker="x/0/0",way="staged"} 3\na_total{worker="x/0/1",way="staged"} 4.5\n'
        'a_total{worker="x/0/1",way="slices"} 1e3\nb{text="a \\"quoted, {x} 7\\""} 2\nplain 7\n'
    )
    assert page.total("a_total") == 1007.5
    assert page.total("a_total", way="staged") == 7.5
    assert page.by("worker", "a_total") == {"x/0/0": 3, "x/0/1": 1004.5}
    assert page.by("text", "b") == {'a "quoted, {x} 7"': 2}
    assert page.total("plain") == 7
    assert page.total("missing") == 0


def test_a_part_that_was_waited_for_first_is_named_with_how_it_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def lose() -> None:
        with interrupts_raised(), parts_watched() as watch:
            watch.add(child.pid, "the part", status=lambda: child.returncode)
            # The watching thread has no child to wait for.
            with watch._lock:
                child.kill()
                child.wait()
            threading.Event().wait()

    with pytest.raises(PartEndedError, match=r"^the part ended with -9$"):
        lose()


def test_a_signal_that_interrupts_no_wait_is_sent_again() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lost: list[object] = []

    def lose() -> None:
        with interrupts_raised(), parts_watched() as watch:
            handler = signal.getsignal(signal.SIGUSR1)

            def lose_once(number: int, frame: FrameType | None) -> None:
                lost.append(number)
                signal.signal(signal.SIGUSR1, handler)

            signal.signal(signal.SIGUSR1, lose_once)
            watch.add(child.pid, "the part")
            child.kill()
            threading.Event().wait(LIMIT_S)
            lost.append("the wait was not interrupted")

    with pytest.raises(PartEndedError, match=r"^the part ended with -9$"):
        lose()
    child.wait()
    assert lost == [signal.SIGUSR1]
