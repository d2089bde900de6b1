"""Tests the test engine's program: its answers without an agent, and its end with its input or after silence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longshore_spec import manifest
from longshore_spec.agent_config import dump

# The program with another limit of silence.
SOON = """
import sys
import longshore_lab.test_engine.__main__ as program
program.IDLE_LIMIT_S = float(sys.argv.pop(1))
sys.exit(program.main())
"""
CONFIG = manifest.load("""
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {name: small}
spec:
  model: {attention: GQA, layers: 2, kvHeads: 2, headDim: 32, dtype: bfloat16}
  prefill: {tensorParallel: 2, pageSize: 16, nodeSelector: {a: b}}
  decode: {tensorParallel: 1, pageSize: 16, nodeSelector: {a: b}}
""").agent_config()
LIMIT_S = 120


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[float], subprocess.Popen[bytes]]]:
    """Starts the program with a limit of silence, beside a socket that is not there."""
    running: list[subprocess.Popen[bytes]] = []
    (tmp_path / "agent.json").write_text(dump(CONFIG))

    def start(idle_s: float) -> subprocess.Popen[bytes]:
        arguments = [str(idle_s), "--config", str(tmp_path / "agent.json"), "--socket", str(tmp_path / "none")]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", SOON, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
            )
        )
        return running[-1]

    with ExitStack() as stack:
        yield start
        for process in running:
            stack.enter_context(process)
            process.kill()


def test_it_ends_after_silence(program) -> None:
    assert program(0.1).wait(LIMIT_S) == 0


def test_it_answers_each_request_until_its_input_ends(tmp_path: Path, program) -> None:
    process = program(10 * LIMIT_S)

    def answer(line: bytes) -> str:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        return process.stdout.readline().decode()

    start = b'{"type":"start","run":"1","prefill":true,"decode":false,"room_bytes":1,"room_count":1,"limit_s":1%b}'
    assert "MALFORMED_MESSAGE" in answer(b'\n\n{"type":"none"}')
    assert f"no agent listens at {tmp_path}/none" in answer(start % b"")
    assert "UNKNOWN_VERSION" in answer(start % b',"version":9')
    process.stdin.close()
    assert process.wait(LIMIT_S) == 0


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "longshore_lab.test_engine", "--config", str(tmp_path / "no.json")],
        check=False,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert f"{tmp_path}/no.json" in done.stderr.decode()
