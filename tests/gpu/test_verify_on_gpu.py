"""Tests `longshore verify` and `longshore bench cluster` with pages in the memory of real GPUs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from longshore_cli.main import main
from longshore_cli.up.fleet import Fleet, members_of, scaled
from longshore_cli.verify.command import _move
from longshore_cli.verify.places import LocalProgram, Place, Programs
from longshore_spec import manifest
from longshore_spec.verify_messages import ROOM_FIRST

pytestmark = pytest.mark.gpu

MANIFEST = """
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {name: verified, namespace: tests}
spec:
  model: {attention: GQA, layers: 8, kvHeads: 8, headDim: 128, dtype: bfloat16}
  prefill: {tensorParallel: 2, pageSize: 16, staging: {bufferSize: 16Mi, lanes: 2}}
  decode: {tensorParallel: 1, pageSize: 64, staging: {poolSize: 256Mi}}
"""
SIZE_BYTES = 16 << 20


@pytest.fixture(scope="module")
def fleet(torch: Any) -> Iterator[Fleet]:
    """An agent for prefill and one for decode, which see all GPUs."""
    pytest.importorskip("nixl")
    config = scaled(manifest.load(MANIFEST).agent_config(), Fraction(1), None)
    with (
        pytest.MonkeyPatch.context() as change,
        tempfile.TemporaryDirectory(prefix="t-") as name,
    ):
        change.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with Fleet(config, members_of(config, (1, 1)), Path(name)) as made:
            yield made


def words(fleet: Fleet, command: str, *more: str) -> list[str]:
    return [*command.split(), "--directory", str(fleet.agents["prefill-0"].directory.parent), *more]


def test_rooms_of_gpu_memory_arrive_staged_and_a_wrong_byte_is_found(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words(fleet, "verify", "--size", str(SIZE_BYTES), "-o", "json"))
    out = capsys.readouterr().out
    assert code == 0, out
    (pair,) = json.loads(out)["pairs"]
    with capsys.disabled():
        sys.stdout.write(f"{pair}\n")
    assert (pair["memory"], pair["way"], pair["room_bytes"]) == ("gpu", "staged", SIZE_BYTES)
    assert pair["wire"] in {"CudaIPC", "NVLink"}
    assert main(words(fleet, "verify", "--flip-byte", "--repeats", "1", "--memory", "gpu")) == 1
    assert "WRONG_BYTES: bytes differ at rank 0, V of layer 7" in capsys.readouterr().out


def test_a_load_of_rooms_of_gpu_memory_and_of_host_memory_is_measured(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    for memory in ("gpu", "host"):
        more = ["--sizes", "1Mi,64Mi", "--concurrency", "1,4", "--seconds", "1", "--memory", memory]
        assert main(words(fleet, "bench cluster", *more)) == 0
        out = capsys.readouterr().out
        with capsys.disabled():
            sys.stdout.write(out)
        assert [line.split()[0] for line in out.splitlines()] == ["memory", *[memory] * 4]


def test_rooms_of_one_agents_engines_go_directly(fleet: Fleet) -> None:
    agent = fleet.agents["prefill-0"]
    command = [sys.executable, "-m", "longshore_lab.test_engine", "--socket", agent.socket_path]
    command += ["--config", str(agent.directory.parent / "config.json")]
    place = Place("node", prefill=True, decode=True, start=lambda: LocalProgram(command), pages=None)
    with Programs() as programs:
        engine = place.engine(programs, SIZE_BYTES, 2, 60, "gpu")
        assert engine.started.memory == "gpu"
        rooms = range(ROOM_FIRST, ROOM_FIRST + 4)
        moved = _move({"node": engine}, ("node", "node"), rooms, SIZE_BYTES, concurrency=2)
        assert sorted((each.room, each.bytes_moved, each.text) for each in moved.rooms) == [
            (room, SIZE_BYTES, "") for room in rooms
        ]
