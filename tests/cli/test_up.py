"""Tests `longshore up`: a manifest's agents run on this machine, admit only its engines, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
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
SHAPE = ModelShape(4, 4, 32, 4)
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


@pytest.mark.slow
def test_engines_of_the_manifest_exchange_a_request_and_the_end_leaves_nothing(
    manifest: Path, stack: ExitStack
) -> None:
    up = stack.enter_context(marked(["-u", "-m", "longshore_cli.main", "up", "-f", str(manifest), "--scale", "1/64"]))
    sockets = re.findall(r"engines (\S+/agent\.sock)", up.read_until("Ctrl-C"))
    near = [
        rank(stack, sockets[0], "p", KVLayout(SHAPE, Parallel(tp=2, tp_rank=index), 16), Half.SOURCE)
        for index in range(2)
    ]
    target, memory = rank(stack, sockets[1], "d", KVLayout(SHAPE, Parallel(), 8), Half.TARGET)
    for number, (_, pages) in enumerate(near):
        pages[:] = bytes([7 + number]) * len(pages)
    target.receive(1, near[0][0].endpoint(LIMIT_S), [0, 1, 2, 3], 0, 32)
    for client, _ in near:
        client.send(1, [5, 2], 0, 32, last=True)
    assert target.wait(1, Half.TARGET, "p", timeout_s=LIMIT_S).kind is RoomEventKind.DONE
    # Half of the pages are written: each rank writes two heads of every token.
    moved = bytes(memory)
    assert moved.count(7) == moved.count(8) == len(moved) // 4
    up.read_until("decode-0: engines d (1), peers 2, rooms 0 open, 1 done, 0 failed")

    other = KVLayout(SHAPE, Parallel(tp=4), 16)
    with pytest.raises(HelloRefused, match="tensorParallel"):
        connect(sockets[0], instance="q", layout=other, roles=(Half.SOURCE,), timeout_s=LIMIT_S)

    up.process.send_signal(signal.SIGINT)
    assert up.read_rest().endswith("all agents have ended\n")
    assert up.process.returncode == 0
    assert up.left() == []


def test_a_wrong_manifest_is_told_by_every_path_and_nothing_starts(manifest: Path, capsys) -> None:
    manifest.write_text(MANIFEST.replace("layers: 4", "layers: x").replace("tensorParallel: 2", "tensorParallel: 3"))
    assert main(["up", "-f", str(manifest)]) == 2
    said = capsys.readouterr().err
    assert "spec.model.layers" in said
    assert main(["up", "-f", str(manifest.parent / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
