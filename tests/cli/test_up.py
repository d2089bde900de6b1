"""Tests `longshore up`: a manifest's agents run on this machine, admit only its engines, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_world import wait_for
from left_behind import marked

from longshore_cli.main import main
from longshore_client import Client, Half, HelloRefused, RoomEventKind, connect, create_region, pool_geometry
from longshore_wire.layout import KVLayout, ModelShape, Parallel

MANIFEST = """
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {name: small, namespace: tests}
spec:
  model: {attention: GQA, layers: 4, kvHeads: 4, headDim: 32, dtype: float32}
  prefill: {instances: 1, tensorParallel: 2, pageSize: 16, staging: {bufferSize: 64Mi}}
  decode: {instances: 1, tensorParallel: 1, pageSize: 8, staging: {poolSize: 1Gi}, nodeSelector: {a: b}}
  transfer: {backend: Loopback}
"""
SHAPE = ModelShape.kv(4, 4, 32, 4)
LIMIT_S = 120.0


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rank(stack: ExitStack, socket: str, instance: str, layout: KVLayout, half: Half) -> tuple[Client, memoryview]:
    geometry = pool_geometry(layout, 8)
    descriptor, memory = create_region(geometry.region_bytes[0], "up-test")
    stack.callback(os.close, descriptor)
    client = stack.enter_context(connect(socket, instance=instance, layout=layout, roles=(half,), timeout_s=LIMIT_S))
    client.register_pool(0, geometry, [descriptor])
    return client, memoryview(memory)


def moved(stack: ExitStack, prefill: str, decode: str) -> memoryview:
    """Register engines at two sockets and move room 1 between them; return decode's pages."""
    near = [
        rank(stack, prefill, "p", KVLayout(SHAPE, Parallel(tp=2, tp_rank=index), 16), Half.SOURCE) for index in range(2)
    ]
    target, memory = rank(stack, decode, "d", KVLayout(SHAPE, Parallel(), 8), Half.TARGET)
    for number, (_, pages) in enumerate(near):
        pages[:] = bytes([7 + number]) * len(pages)
    target.receive(1, near[0][0].endpoint(LIMIT_S), [0, 1, 2, 3], 0, 32)
    for client, _ in near:
        client.send(1, [5, 2], 0, 32, last=True)
    assert target.wait(1, Half.TARGET, "p", timeout_s=LIMIT_S).kind is RoomEventKind.DONE
    return memory


@pytest.mark.slow
def test_engines_of_the_manifest_exchange_a_request_and_the_end_leaves_nothing(
    manifest: Path, stack: ExitStack
) -> None:
    up = stack.enter_context(marked(["-u", "-m", "longshore_cli.main", "up", "-f", str(manifest), "--scale", "1/64"]))
    sockets = re.findall(r"engines (\S+/agent\.sock)", up.read_until("Ctrl-C"))
    memory = moved(stack, *sockets)
    # Half of the pages are written: each rank writes two heads of every token.
    found = bytes(memory)
    assert found.count(7) == found.count(8) == len(found) // 4
    up.read_until("decode-0: engines d (1), peers 2, rooms 0 open, 1 done, 0 failed")

    other = KVLayout(SHAPE, Parallel(tp=4), 16)
    with pytest.raises(HelloRefused, match="tensorParallel"):
        connect(sockets[0], instance="q", layout=other, roles=(Half.SOURCE,), timeout_s=LIMIT_S)

    up.process.send_signal(signal.SIGINT)
    assert up.read_rest().endswith("all agents have ended\n")
    assert up.process.returncode == 0
    assert up.left() == []


@pytest.mark.slow
def test_status_rooms_and_trace_find_the_agents_by_their_directory(
    manifest: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    # Paths of sockets are short.
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="t-"))
    words = ["up", "-f", str(manifest), "--scale", "1/64", "--directory", directory]
    up = stack.enter_context(marked(["-u", "-m", "longshore_cli.main", *words]))
    up.read_until("Ctrl-C")
    moved(stack, *(f"{directory}/{member}/agent.sock" for member in ("prefill-0", "decode-0")))
    given = ["--directory", directory]

    def status() -> tuple[int, dict[str, Any]]:
        code = main(["status", *given, "--interval", "0.1", "-o", "json"])
        (found,) = json.loads(capsys.readouterr().out)["deployments"]
        return code, found

    code, found = status()
    assert (code, found["ready"], found["namespace"], found["name"]) == (0, "True", "tests", "small")
    assert [agent["name"] for agent in found["agents"]] == ["decode-0", "prefill-0"]
    assert main(["status", *given, "--interval", "0.1"]) == 0
    assert "worker p/0/1: ready" in capsys.readouterr().out

    def halves() -> bool:
        assert main(["rooms", *given, "--ended", "true", "-o", "json"]) == 0
        entries = json.loads(capsys.readouterr().out)
        return sorted((entry["agent"], entry["room"]["half"]) for entry in entries) == [
            ("decode-0", "target"),
            *[("prefill-0", "source")] * 2,
        ]

    wait_for(halves, what="both halves of the room")
    assert main(["trace", "room", "1", *given]) == 0
    assert "all times are of one clock" in capsys.readouterr().out

    keys = (Path(directory) / "keys" / "curve.json").read_bytes()
    assert main(words) == 1
    assert f"another `longshore up` (PID {up.process.pid}) runs in {directory}" in capsys.readouterr().err
    up.process.send_signal(signal.SIGINT)
    up.read_rest()
    # The next one in this directory has the same keys.
    again = stack.enter_context(marked(["-u", "-m", "longshore_cli.main", *words]))
    again.read_until("Ctrl-C")
    assert (Path(directory) / "keys" / "curve.json").read_bytes() == keys
    again.process.send_signal(signal.SIGINT)
    again.read_rest()
    code, found = status()
    assert (code, [agent["name"] for agent in found["agents"]]) == (1, ["decode-0", "prefill-0"])
    assert found["worst"].startswith(f"agent on decode-0 is silent: no agent runs in {directory}/decode-0: ")
    assert main(["rooms", *given]) == 1
    assert capsys.readouterr().err.count("start it by `longshore up`") == 2


def test_no_text_of_a_manifest_controls_the_terminal(manifest: Path, capsys) -> None:
    manifest.write_text(MANIFEST + '"k\\e[2J\\nx\\u202e": 1\n')
    assert main(["up", "-f", str(manifest)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "k [2J x : unknown key" in line and line.isprintable()


def test_a_wrong_manifest_is_told_by_every_path_and_nothing_starts(manifest: Path, capsys) -> None:
    manifest.write_text(MANIFEST.replace("layers: 4", "layers: x").replace("tensorParallel: 2", "tensorParallel: 3"))
    assert main(["up", "-f", str(manifest)]) == 2
    said = capsys.readouterr().err
    assert "spec.model.layers" in said
    assert main(["up", "-f", str(manifest.parent / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
