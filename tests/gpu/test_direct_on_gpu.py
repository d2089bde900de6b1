"""Tests DIRECT on real GPUs: the kernel against its reference, also between two GPUs, and engines of one agent."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpu_world import START_LIMIT_S, EngineProcess, GPUAgent, agent_status, writes_by_way
from page_shapes import Shape

from longshore_agent.kernels.device_grid import Tuning
from longshore_wire.layout import PageOrder

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 8, "kv_heads": 8, "page_size": 16, "page_count": 160}
ROOMS = itertools.count(2**63 + 1)
LET_GO_S = 2.0
PAIRS = {
    "to four times as many heads": (Shape(heads=1), Shape(), 1),
    "NHD to HND in smaller pages": (Shape(), Shape(order=PageOrder.HND, page_size=4, page_count=40), 3),
    "pages of 16 to pages of 17": (Shape(), Shape(page_size=17), 4),
    "rows of 7 bytes": (Shape(head_dim=7, element_bytes=1, page_size=3), Shape(head_dim=7, element_bytes=1), 2),
    "a region a layer to planes of a page beside each other": (Shape(split=True), Shape(interleaved=True), 4),
    "large pages": (Shape(page_size=64, layers=2), Shape(page_size=256, page_count=3, layers=2), 2),
}


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available() or importlib.util.find_spec("triton") is None:
        pytest.skip("needs a CUDA device and Triton")
    return found


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tuning", [None, Tuning(65536, 8, programs_max=7)], ids=["default", "few programs"])
def test_a_gpu_writes_pages_of_another_layout_and_nothing_beside_them(
    name: str, tuning: Tuning | None, torch: Any
) -> None:
    import copy_checks

    near, far, heads = PAIRS[name]
    layers, last = range(near.layers), min(near.page_size * 3, far.page_size * 3)
    requests = [
        ((0, last), layers, 0, layers, 0, heads),
        ((1, last - 1), layers, near.heads - heads, layers, far.heads - heads, heads),
        ((5000, 5001), range(1), 0, range(1, 2), 0, heads),
    ]
    for target in {"cuda:0", f"cuda:{torch.cuda.device_count() - 1}"}:
        assert copy_checks.check_direct(near, far, requests, ("cuda:0", target), tuning) > 0


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_launch_bound_to_its_shape_writes_all_slabs_of_that_shape(name: str, staged: bool, torch: Any) -> None:
    import copy_checks

    near, far, heads = PAIRS[name]
    for target in {"cuda:0", f"cuda:{torch.cuda.device_count() - 1}"}:
        bound, slabs = copy_checks.check_bound(near, far, heads, ("cuda:0", target), staged=staged)
        assert 0 < bound < slabs


@pytest.fixture
def agent(torch: Any) -> Iterator[GPUAgent]:
    pytest.importorskip("nixl")
    with GPUAgent(
        LONGSHORE_RING_BYTES="24Mi", LONGSHORE_LANE_BYTES="2Mi", LONGSHORE_SLAB_BYTES_MIN="64Ki"
    ) as started_agent:
        yield started_agent


def started(
    stack: ExitStack, agent: GPUAgent, instance: str, role: str, tp: int, device: int, **changes: Any
) -> list[EngineProcess]:
    ranks = [stack.enter_context(EngineProcess()) for _ in range(tp)]
    for number, rank in enumerate(ranks):
        rank.begin("allocate", device=device, tp=tp, rank=number, **SHAPE | changes)
    for rank in ranks:
        rank.result()
    together(ranks, "register", socket=agent.socket, instance=instance, role=role)
    return ranks


def together(ranks: list[EngineProcess], command: str, **arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(command, **arguments)
    return [rank.result() for rank in ranks]


def writes(agent: GPUAgent, way: str) -> float:
    return writes_by_way(agent).get(way, 0.0)


def move(
    prefill: list[EngineProcess], decode: list[EngineProcess], tokens: int, seed: int, far: list[int], **claim: Any
) -> None:
    """Move one room; its bytes must be complete when DONE is reported."""
    room, endpoint = next(ROOMS), prefill[0].ask("endpoint")
    near = [(7 * page + seed) % 160 for page in range(-(-tokens // 16))]
    together(prefill, "fill", seed=seed, tokens=tokens, pages=near)
    together(decode, "receive", room=room, endpoint=endpoint, pages=far, tokens=tokens, **claim)
    together(prefill, "send", room=room, pages=near, tokens=tokens, chunk=256)
    for kind, text, _ in together(decode, "wait", room=room, half="TARGET", instance="prefill"):
        assert kind == "DONE", text
    for kind, text, _ in together(prefill, "wait", room=room, half="SOURCE", instance="prefill"):
        assert kind == "DONE", text


@pytest.mark.parametrize("caches", [{}, {"latent": True, "index": True}], ids=["heads", "latents and index keys"])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2)])
def test_engines_of_one_agent_exchange_pages_without_staging_and_every_byte_is_there_when_told(
    source_tp: int, target_tp: int, caches: dict[str, bool], agent: GPUAgent, torch: Any
) -> None:
    with ExitStack() as stack:
        prefill = started(stack, agent, "prefill", "SOURCE", source_tp, 0, **caches)
        decode = started(stack, agent, "decode", "TARGET", target_tp, torch.cuda.device_count() - 1, **caches)
        moved = []
        for index, tokens in enumerate((700, 1, 257)):
            far = [50 * index + page for page in range(-(-tokens // 16))]
            move(prefill, decode, tokens, index + 1, far, digest=bool(caches))
            moved.append((index + 1, tokens, far))
            assert together(decode, "differences", sequences=moved) == [0] * target_tp
        for seed in range(4, 30):
            # Poisoned pages are reused, so that bytes of an earlier room would be detected.
            move(prefill, decode, 700, seed, moved[0][2])
            moved[0] = (seed, 700, moved[0][2])
            assert together(decode, "differences", sequences=moved) == [0] * target_tp
        assert writes(agent, "direct") > 0
        assert writes(agent, "staged") == 0
        together([*prefill, *decode], "unregister")


def test_memory_of_an_engine_is_free_at_once_for_who_unregisters_or_dies(agent: GPUAgent, torch: Any) -> None:
    torch.cuda.init()
    device = torch.cuda.device_count() - 1

    def held_bytes() -> int:
        return before - int(torch.cuda.mem_get_info(device)[0])

    with ExitStack() as stack:
        prefill = started(stack, agent, "prefill", "SOURCE", 1, 0)
        for instance, kill in (("unregistered", False), ("killed", True), ("killed", True)):
            before = int(torch.cuda.mem_get_info(device)[0])
            # Some gigabytes, so that they are visible besides contexts and staging.
            (decode,) = started(stack, agent, instance, "TARGET", 1, device, page_count=32768)
            pool_bytes = 32768 * 16 * 8 * 2 * 8 * 256
            assert held_bytes() > pool_bytes
            move(prefill, [decode], 300, 7, list(range(19)))
            assert decode.ask("differences", sequences=[(7, 300, list(range(19)))]) == 0
            if not kill:
                # No process has it mapped when the answer arrives, so the engine may free it immediately.
                decode.ask("unregister")
                decode.ask("free")
                assert held_bytes() < pool_bytes // 2
            decode.kill()
            end_s = time.monotonic() + LET_GO_S
            while held_bytes() > pool_bytes // 2:
                assert time.monotonic() < end_s, f"{held_bytes()} bytes are still held"
        assert writes(agent, "direct") > 0


def test_a_room_to_pages_of_another_size_waits_for_its_kernel_and_others_go_on(agent: GPUAgent, torch: Any) -> None:
    device = torch.cuda.device_count() - 1
    with ExitStack() as stack:
        prefill = started(stack, agent, "prefill", "SOURCE", 1, 0)
        like = started(stack, agent, "like", "TARGET", 1, device)
        unlike = started(stack, agent, "unlike", "TARGET", 1, device, page_size=48, page_count=64)
        move(prefill, like, 700, 1, list(range(44)))
        room, endpoint = next(ROOMS), prefill[0].ask("endpoint")
        near = list(range(100, 144))
        prefill[0].ask("fill", seed=2, tokens=700, pages=near)
        unlike[0].ask("receive", room=room, endpoint=endpoint, pages=list(range(15)), tokens=700)
        prefill[0].ask("send", room=room, pages=near, tokens=700, chunk=256)
        other, far = next(ROOMS), list(range(50, 94))
        like[0].ask("receive", room=other, endpoint=endpoint, pages=far, tokens=700)
        prefill[0].ask("send", room=other, pages=near, tokens=700, chunk=256)
        ends_s = []
        for number, rank in ((other, like[0]), (room, unlike[0])):
            kind, text, end_s = rank.ask("wait", room=number, half="TARGET", instance="prefill")
            assert kind == "DONE", text
            ends_s.append(end_s)
        assert unlike[0].ask("differences", sequences=[(2, 700, list(range(15)))]) == 0
        assert like[0].ask("differences", sequences=[(1, 700, list(range(44))), (2, 700, far)]) == 0
        assert writes(agent, "staged") == 0


# While the file `hang` exists, direct copies wait behind a kernel that spins for at least half a minute.
SPINNING = """
import sys
from pathlib import Path

place = Path(__file__).parent

def play():
    from longshore_agent.kernels.copier import Slab
    from longshore_agent.kernels.device_copier import DeviceCopier

    submit = DeviceCopier.submit

    def spun(self, copy):
        direct = not isinstance(copy.source, Slab) and not isinstance(copy.target, Slab)
        if direct and (place / "hang").exists():
            import torch

            with self._directs.entered():
                torch.cuda._sleep(1 << 36)
            (place / "hang").rename(place / "hangs")
        return submit(self, copy)

    DeviceCopier.submit = spun

if "longshore_agent.worker.main" in sys.orig_argv:
    play()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: Any) -> Path:
    (tmp_path / "sitecustomize.py").write_text(SPINNING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def begin_to_hang(place: Path, prefill: EngineProcess, decode: EngineProcess) -> int:
    """Begin a room whose first copy never ends; return it when the device spins."""
    room = next(ROOMS)
    decode.ask("receive", room=room, endpoint=prefill.ask("endpoint"), pages=list(range(44)), tokens=700)
    (place / "hang").touch()
    prefill.ask("send", room=room, pages=list(range(44)), tokens=700, chunk=256)
    end_s = time.monotonic() + START_LIMIT_S
    while not (place / "hangs").exists():
        assert time.monotonic() < end_s
    return room


@pytest.mark.slow
def test_a_gpu_that_hangs_fails_its_room_with_the_reason_and_the_next_worker_serves(
    place: Path, agent: GPUAgent, torch: Any
) -> None:
    with ExitStack() as stack:
        (prefill,) = started(stack, agent, "prefill", "SOURCE", 1, 0)
        (decode,) = started(stack, agent, "decode", "TARGET", 1, torch.cuda.device_count() - 1)
        move([prefill], [decode], 700, 1, list(range(44)))
        room = begin_to_hang(place, prefill, decode)
        for rank, half in ((prefill, "SOURCE"), (decode, "TARGET")):
            kind, text, _ = rank.ask("wait", room=room, half=half, instance="prefill")
            assert kind == "FAILED"
            assert "it hangs" in text
        end_s = time.monotonic() + START_LIMIT_S
        while not any(
            worker["worker"] == "prefill/0/0" and worker["state"] == "ready" and worker["restarts"]
            for worker in agent_status(agent)["workers"]
        ):
            assert time.monotonic() < end_s, "no next worker"
        decode.ask("poison")
        move([prefill], [decode], 700, 2, list(range(44)))
        assert decode.ask("differences", sequences=[(2, 700, list(range(44)))]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_memory_of_a_killed_engine_is_free_within_2_seconds_though_a_copy_on_it_never_ends(
    killed: str, place: Path, agent: GPUAgent, torch: Any
) -> None:
    torch.cuda.init()
    devices = {"prefill": 0, "decode": torch.cuda.device_count() - 1}
    with ExitStack() as stack:
        ranks = {}
        for instance, role in (("prefill", "SOURCE"), ("decode", "TARGET")):
            before = int(torch.cuda.mem_get_info(devices[killed])[0])
            # Some gigabytes, so that they are visible besides contexts and staging.
            count = 32768 if instance == killed else SHAPE["page_count"]
            (ranks[instance],) = started(stack, agent, instance, role, 1, devices[instance], page_count=count)
            if instance == killed:
                free_before = before
        pool_bytes = 32768 * 16 * 8 * 2 * 8 * 256
        move([ranks["prefill"]], [ranks["decode"]], 700, 1, list(range(44)))
        begin_to_hang(place, ranks["prefill"], ranks["decode"])
        assert free_before - int(torch.cuda.mem_get_info(devices[killed])[0]) > pool_bytes
        ranks[killed].kill()
        end_s = time.monotonic() + LET_GO_S
        while free_before - int(torch.cuda.mem_get_info(devices[killed])[0]) > pool_bytes // 2:
            assert time.monotonic() < end_s, "its memory is still held"
