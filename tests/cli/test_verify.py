"""Tests `longshore verify` and `longshore bench cluster` with real agents as `longshore up` runs them, and real test engines."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from agent_world import wait_for, wait_for_none
from left_behind import marked

from longshore_cli.main import main
from longshore_cli.status_pages import HTTP_TIMEOUT_S
from longshore_cli.up.fleet import Fleet, members_of, scaled
from longshore_cli.verify import places
from longshore_cli.verify.command import _move
from longshore_cli.verify.places import LocalProgram, Place, Programs, VerifyError
from longshore_spec import manifest
from longshore_spec.agent_config import dump
from longshore_spec.verify_messages import ROOM_FIRST
from longshore_wire.names import TEST_INSTANCE_PREFIX, TEST_RING_BYTES_MAX, room_name

MANIFEST = """
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {name: verified, namespace: tests}
spec:
  model: {attention: GQA, layers: 2, kvHeads: 4, headDim: 32, dtype: float32}
  prefill: {tensorParallel: 2, pageSize: 16, staging: {bufferSize: 1Mi, lanes: 1}}
  decode: {tensorParallel: 1, pageSize: 8, staging: {poolSize: 96Mi}}
  transfer: {backend: Loopback, staging: Always}
"""
SHORT = "{attention: GQA, layers: 2, kvHeads: 4, headDim: 32, dtype: float32}"
CACHES = """
    caches:
    - {name: kv, layers: 2, dtype: float32, planes: [{heads: 4, width: 32}, {heads: 4, width: 32}]}
    - {name: index, layers: 3, unit: Page, dtype: uint8, planes: [{heads: 1, width: 132}]}
    - {name: conv, layers: 5, unit: Slot, dtype: bfloat16, planes: [{heads: 2, width: 64, rows: 3}, {heads: 4, width: 64, rows: 3}]}
    - {name: ssm, layers: 5, unit: Slot, dtype: float32, planes: [{heads: 4, width: 256}]}"""
pytestmark = pytest.mark.slow


@contextmanager
def started(text: str, decode_count: int) -> Iterator[Fleet]:
    """Yield agents for one prefill instance and so many of decode."""
    config = scaled(manifest.load(text).agent_config(), Fraction(1), None)
    # Paths of sockets are short.
    with (
        tempfile.TemporaryDirectory(prefix="t-") as name,
        Fleet(config, members_of(config, (1, decode_count)), Path(name)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Agents for one prefill instance and two of decode."""
    with started(MANIFEST, 2) as made:
        yield made


def directory(fleet: Fleet) -> Path:
    return fleet.agents["prefill-0"].directory.parent


def words(fleet: Fleet, *more: str, command: str = "verify") -> list[str]:
    return [*command.split(), "--directory", str(directory(fleet)), *more]


def left(fleet: Fleet) -> list[str]:
    """Return the test instances' workers that there still are."""
    statuses = [agent.status() for agent in fleet.agents.values() if agent.running]
    return [worker["worker"] for status in statuses for worker in status["workers"]]


def test_every_pair_moves_its_bytes_with_way_and_wire_and_nothing_is_left(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(fleet, "--size", "256Ki", "-o", "json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["prefill"], each["decode"]) for each in found["pairs"]] == [
        ("prefill-0", "decode-0"),
        ("prefill-0", "decode-1"),
    ]
    for each in found["pairs"]:
        assert (each["way"], each["wire"], each["verdict"]) == ("staged", "Loopback", "ok")
        assert each["room_bytes"] == 256 << 10
        assert each["bytes_per_second"] > 0
    wait_for_none(lambda: left(fleet))


def test_the_memory_of_the_pages_is_shown_and_chosen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as change:
        change.setattr(places, "_MODULE", "pretended_gpu_engine")
        change.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        assert main(words(fleet, "--size", "64Ki", "--repeats", "1")) == 0
        assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:4]] == ["memory"] + 2 * ["gpu->host"]
        assert main(words(fleet, "--size", "64Ki", "--repeats", "1", "--memory", "host", "-o", "json")) == 0
        assert [each["memory"] for each in json.loads(capsys.readouterr().out)["pairs"]] == ["host", "host"]
        more = ["--sizes", "64Ki", "--concurrency", "1", "--seconds", "0"]
        assert main(words(fleet, *more, command="bench cluster")) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[0] == "gpu->host"


def test_gpus_that_are_wanted_and_missing_are_named(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(fleet, "--memory", "gpu")) == 1
    out = capsys.readouterr().out
    assert "prefill-0 -> decode-1: UNSUPPORTED: prefill-0: the agent's pod sees no GPU: set agents.gpuAccess" in out
    assert out.splitlines()[-1] == "0 of 2 pairs moved every byte right; 2 untested"
    assert left(fleet) == []


def test_a_wrong_byte_is_found_in_its_pair_alone(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(fleet, "--size", "64Ki", "--flip-byte", "--repeats", "1")) == 1
    out = capsys.readouterr().out
    assert "prefill-0 -> decode-0: WRONG_BYTES: bytes differ at rank 0, V of layer 1, page 2 of 4 of the room" in out
    assert out.splitlines()[-1] == "1 of 2 pairs moved every byte right; 1 failed"


def test_all_caches_that_a_deployment_declares_are_moved_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    # Opaque pages have one size.
    with started(MANIFEST.replace(SHORT, CACHES).replace("pageSize: 8", "pageSize: 16"), 1) as fleet:
        assert main(words(fleet, "--size", "256Ki", "-o", "json")) == 0
        (pair,) = json.loads(capsys.readouterr().out)["pairs"]
        # KV and index keys of pages of 16 tokens, and the states.
        page_bytes = 16 * (2 * 2 * 4 * 32 * 4 + 3 * 132)
        state_bytes = 5 * (6 * 64 * 3 * 2 + 4 * 256 * 4)
        assert pair["room_bytes"] == state_bytes + -(-((256 << 10) - state_bytes) // page_bytes) * page_bytes
        assert main(words(fleet, "--size", "64Ki", "--flip-byte", "--repeats", "1")) == 1
        assert (
            "WRONG_BYTES: bytes differ at rank 0, cache 'ssm', layer 4, page 0 of 1 of the room"
            in capsys.readouterr().out
        )


def test_an_agent_that_is_away_and_one_that_refuses_are_named(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    replace = msgspec.structs.replace
    other = replace(fleet.config, prefill=replace(fleet.config.prefill, tensor_parallel=4))
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        (Path(name) / "config.json").write_text(dump(other))
        (Path(name) / "prefill-0").symlink_to(directory(fleet) / "prefill-0")
        # Its agent was killed.
        (Path(name) / "decode-0").mkdir()
        (Path(name) / "decode-0" / "agent.json").write_bytes((directory(fleet) / "decode-0/agent.json").read_bytes())
        (Path(name) / "decode-1").mkdir()
        assert main(["verify", "--directory", name]) == 1
    out = capsys.readouterr().out
    assert out.startswith("plan: 4 pairs of ranks, staged (transfer.staging: Always)\n")
    assert "prefill.tensorParallel is 4 at the engine and 2 in the deployment" in out
    assert f"; decode-0: no agent listens at {name}/decode-0/agent.sock: No such file" in out
    assert f"; decode-1: no agent runs in {name}/decode-1" in out
    assert out.splitlines()[-1] == "0 of 2 pairs moved every byte right; 2 untested"


def test_a_test_that_does_not_fit_into_memory_is_refused_before_it_starts(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(fleet, "--sizes", "1Ti", command="bench cluster")) == 1
    assert "MiB of memory are left beside the agent: give smaller sizes" in capsys.readouterr().err
    # Workers of the tests before may still end.
    wait_for_none(lambda: left(fleet))


def test_an_agent_of_both_roles_is_tested_by_one_engine_which_empty_lines_keep_alive(fleet: Fleet) -> None:
    agent = fleet.agents["prefill-0"]
    command = [sys.executable, "-m", "longshore_lab.test_engine", "--socket", agent.socket_path]
    command += ["--config", str(directory(fleet) / "config.json")]
    place = Place("node", prefill=True, decode=True, start=lambda: LocalProgram(command), pages=None)
    with Programs() as programs:
        engine = place.engine(programs, 64 << 10, 2, 60)
        engine.stay()
        rooms = range(ROOM_FIRST, ROOM_FIRST + 3)
        moved = _move({"node": engine}, ("node", "node"), rooms, 64 << 10, concurrency=2)
        assert sorted((each.room, each.bytes_moved, each.text) for each in moved.rooms) == [
            (room, 64 << 10, "") for room in rooms
        ]
        # A number is used once, and the test engine goes on after a refusal.
        with pytest.raises(VerifyError, match=room_name(ROOM_FIRST)):
            _move({"node": engine}, ("node", "node"), rooms, 64 << 10)
        assert _move({"node": engine}, ("node", "node"), [ROOM_FIRST + 3], 64 << 10).rooms[0].reason == ""
    wait_for_none(lambda: left(fleet))


def test_a_load_of_each_size_and_concurrency_is_measured(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--sizes", "64Ki,256Ki", "--concurrency", "1,3", "--seconds", "0", "-o", "json"]
    assert main(words(fleet, *more, command="bench cluster")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["room_bytes"] >> 10, each["concurrency"]) for each in found] == [(64, 1), (64, 3), (256, 1), (256, 3)]
    for each in found:
        assert (each["pairs"], each["failed"]) == (1, 0)
        assert each["rooms"] >= 2 * each["concurrency"]
        assert 0 < each["p50_s"] <= each["p99_s"]
        assert each["bytes_per_second"] > 0


def test_an_interrupt_ends_test_engines_that_hang_at_their_start(fleet: Fleet) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="t-") as name,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent,
    ):
        (Path(name) / "config.json").write_text(dump(fleet.config))
        silent.bind(f"{name}/agent.sock")
        silent.listen()
        for member in ("prefill-0", "decode-0"):
            (Path(name) / member).mkdir()
            (Path(name) / member / "agent.json").write_bytes((directory(fleet) / member / "agent.json").read_bytes())
            (Path(name) / member / "agent.sock").symlink_to(f"{name}/agent.sock")
        with marked(["-m", "longshore_cli.main", "verify", "--directory", name, "--timeout", "600"]) as run:
            # Each test engine connects once to look, and then once for each rank.
            lines = [silent.accept()[0] for _ in range(2 + fleet.config.prefill.tensor_parallel + 1)]
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(HTTP_TIMEOUT_S) == 128 + signal.SIGINT
            wait_for_none(run.processes)
            for line in lines:
                line.close()


@pytest.mark.parametrize("ended", [pytest.param(signal.SIGINT, marks=pytest.mark.rest("benches")), signal.SIGKILL])
def test_a_command_that_is_killed_leaves_neither_processes_nor_instances(fleet: Fleet, ended: signal.Signals) -> None:
    # More rooms than it can move before it is killed.
    more = ["--repeats", "255", "--size", "4Mi"]
    with marked(["-m", "longshore_cli.main", *words(fleet, *more)]) as run:

        def busy() -> dict | None:
            workers = fleet.agents["decode-0"].status()["workers"]
            return next((worker for worker in workers if worker["rooms_ended"] > 2), None)

        worker = wait_for(busy, what="rooms of a test instance")
        assert worker["worker"].startswith(f"{TEST_INSTANCE_PREFIX}decode-")
        # Less than the deployment's, so that a test does not take the memory of the agent's pod.
        assert worker["ring"]["capacity_bytes"] == TEST_RING_BYTES_MAX
        os.kill(run.process.pid, ended)
        assert run.process.wait() == (128 + ended if ended == signal.SIGINT else -ended)
        wait_for_none(run.processes)
        wait_for_none(lambda: left(fleet))
