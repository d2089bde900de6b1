"""Tests that the programs with JSON answers print only JSON lines on stdout, even if a transport's library prints to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from longshore_lab import bare_path, rate
from longshore_spec.status import SelfTest
from longshore_wire.layout import ModelShape

# Every interpreter imports it at its start, so that the programs' children print, too. UCX prints like this on a busy
# machine, from C, without Python's buffers.
LOUD = """
import os
from longshore_agent import transports
honest = transports.create
def loud(*words):
    os.write(1, b"UCX  WARN  the clock is unstable\\n")
    return honest(*words)
transports.create = loud
"""
SCENE = bare_path.Scene("Loopback", ModelShape.kv(layers=2, kv_heads=2, head_dim=64, element_bytes=2), 16, 64, 2, 1)
PROGRAMS = {
    "self-test": (["longshore_agent.self_test"], None, SelfTest, lambda test: test.bytes_moved == 1 << 20),
    "rate": (
        ["longshore_lab.rate", "--backend", "Loopback", "--bytes-max", "65536"],
        rate.Request("write", 65536),
        rate.Answer,
        lambda answer: answer.equal,
    ),
    "bare path": (
        ["longshore_lab.bare_path", "--scene", msgspec.json.encode(SCENE).decode()],
        bare_path.Request(64),
        bare_path.Answer,
        lambda answer: answer.equal,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_library_prints_is_no_part_of_an_answer_and_is_seen_among_the_messages(
    name: str, tmp_path: Path
) -> None:
    command, request, kind, moved = PROGRAMS[name]
    (tmp_path / "sitecustomize.py").write_text(LOUD)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        input=msgspec.json.encode(request) + b"\n" if request is not None else b"",
        env={
            "LONGSHORE_BACKEND": "Loopback",
            "PYTHONPATH": ":".join([str(tmp_path), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert moved(msgspec.json.decode(done.stdout, type=kind))
    assert b"the clock is unstable" in done.stderr


def test_self_tests_of_several_agents_at_once_log_no_error() -> None:
    environment = os.environ | {"LONGSHORE_BACKEND": "NIXL", "LONGSHORE_BIND_HOST": "127.0.0.1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "longshore_agent.self_test"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    assert [errors for _, errors in said if "ERROR" in errors] == []
