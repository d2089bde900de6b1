"""Tests the reference engine and the benchmarks with pages on GPUs: bytes and tokens are right, faults are detected."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longshore_wire.layout import KVLayout, ModelShape, Parallel

pytestmark = pytest.mark.gpu

# Time for the whole demo, with loading and compiling.
COMMAND_LIMIT_S = 240
SHAPE = ModelShape.kv(layers=2, kv_heads=4, head_dim=8, element_bytes=2)


@pytest.fixture(scope="module")
def devices(torch: Any) -> list[str]:
    pytest.importorskip("nixl")
    return [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]


def run_command(devices: list[str], numbers: Path, *words: str) -> dict[str, Any]:
    """Run `longshore`; return its output."""
    command = [sys.executable, "-m", "longshore_cli.main", *words]
    done = subprocess.run(
        [*command, "--devices", ",".join(devices), "--json", str(numbers)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(numbers.read_text(encoding="utf-8"))
    return found


def test_an_engine_with_its_pages_on_a_gpu_gives_the_tokens_and_bytes_of_one_on_the_cpu(devices: list[str]) -> None:
    from longshore_lab.engine.config import ModelConfig, RankOptions
    from longshore_lab.engine.rank import EngineRank

    draw = random.Random(3)
    prompt = [draw.randrange(ModelConfig().vocabulary) for _ in range(137)]
    found = []
    for mine in ((), (devices[-1],)):
        engine = EngineRank(RankOptions(page_count=16, shuffle_seed=5, devices=mine))
        pages = engine.allocator.allocate(9)
        steps = [engine.prefill(prompt, pages, 0, 60), engine.prefill(prompt, pages, 60, 137)]
        found.append((steps, engine.pool.digest_tokens(pages, 0, 137), engine.pool.dump_tokens(pages, 3, 130).tolist()))
        engine.pool.zero(pages, 0, 137)
        assert not engine.pool.dump_tokens(pages, 0, 137).any()
        assert engine.pool.planes.is_cuda == bool(mine)
        engine.close()
    assert found[0] == found[1]


def test_a_benchmark_finds_one_wrong_byte_on_a_gpu(devices: list[str]) -> None:
    from longshore_lab.bench import BenchError
    from longshore_lab.bench.pages import open_pages

    pages = open_pages(KVLayout(SHAPE, Parallel(tp=2, tp_rank=1), 4), 21, 5, devices[-1])
    pages.fill(21)
    pages.check(21)
    plane = pages.geometry.planes[-1]
    place = plane.offset + pages.table[2] * plane.page_stride
    pages.memory.write(place, bytes([pages.memory.read(place, 1)[0] ^ 1]))
    with pytest.raises(BenchError, match="token 8 of plane 3"):
        pages.check(21)
    pages.close()


def test_rooms_between_gpus_are_staged_and_direct_with_right_bytes(devices: list[str], tmp_path: Path) -> None:
    found = run_command(devices, tmp_path / "rooms.json", "bench", "rooms", "--rooms", "1,3", "--repeats", "1")
    ways = ("staged 2→1", "staged 1→1", "direct 2→1", "direct 1→1")
    assert {(load["way"], load["rooms"]) for load in found["loads"]} == {(way, n) for way in ways for n in (1, 3)}
    assert found["devices"] == {"prefill": devices[:1], "decode": devices[-1:]}


@pytest.mark.slow
def test_the_demo_holds_kv_on_gpus_and_every_byte_and_token_is_equal(devices: list[str], tmp_path: Path) -> None:
    found = run_command(devices, tmp_path / "demo.json", "demo", "--quick", "--pairs", "4:1")
    (pair,) = found["pairs"]
    assert [transfer["way"] for transfer in pair["transfers"]] == ["staged", "direct", "host"]
    assert all(transfer["counts"]["writes"] > 0 for transfer in pair["transfers"])
    assert pair["tokens_compared"] == 3 * 8
    assert pair["bytes_compared"] == (911 - 37) * 2 * 6 * 12 * 64 * 4
    assert found["options"]["devices"] == devices
    for request in found["requests"]:
        assert [transfer["way"] for transfer in request["transfers"]] == ["staged", "direct"]
        assert all(transfer["counts"]["writes"] > 0 for transfer in request["transfers"])
