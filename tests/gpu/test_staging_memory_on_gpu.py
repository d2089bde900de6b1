"""Tests staging memory by cuMemCreate on a real GPU: it moves pages like other memory, or is refused with the remedy.

The result depends on the host (an IMEX channel). Each test accepts exactly these two results and prints which one it was.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_world import EngineProcess, GPUAgent, agent_status, wire_between

from longshore_agent.errors import DeviceError
from longshore_wire.errors import Reason

pytestmark = pytest.mark.gpu

LENGTH = (64 << 20) + 5
# Memory that the driver may keep after an unmapping.
KEPT_BYTES_MAX = 8 << 20
SHAPE = {"layers": 8, "kv_heads": 8, "tp": 1, "rank": 0, "page_size": 16, "page_count": 160}
ROOM = 2**63 + 8001
SETTINGS = {
    "LONGSHORE_GPU_STAGING_MEMORY": "cuMemCreate",
    # Several slabs a room, and a ring that wraps.
    "LONGSHORE_RING_BYTES": "24Mi",
    "LONGSHORE_LANE_BYTES": "2Mi",
    "LONGSHORE_SLAB_BYTES_MIN": "64Ki",
}
WAY_OUT = "set gpu_staging_memory: cudaMalloc"


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found.cuda.init()
    return found


def free_bytes(torch: Any) -> int:
    torch.cuda.synchronize(0)
    return int(torch.cuda.mem_get_info(0)[0])


def tell(capsys: pytest.CaptureFixture[str], outcome: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\ncuMemCreate here: {outcome}\n")


@pytest.mark.parametrize("kind", ["cudaMalloc", "cuMemCreate"])
def test_a_buffer_is_zero_then_what_was_written_and_gone_when_closed(
    kind: str, torch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from longshore_agent.memory import cuda
    from longshore_agent.memory.device_memory import DeviceStagingBuffer

    device = cuda.open_device(cuda.device_uuid(0))
    before = free_bytes(torch)
    refusal: DeviceError | None = None
    try:
        buffer = DeviceStagingBuffer(device, LENGTH, allocation=cuda.Allocation(kind))
    except DeviceError as error:
        refusal = error
    if refusal is not None:
        tell(capsys, f"refused: {refusal}")
        assert kind == "cuMemCreate"
        assert refusal.reason is Reason.UNSUPPORTED
        assert WAY_OUT in str(refusal)
        assert before - free_bytes(torch) < KEPT_BYTES_MAX
        return
    tell(capsys, f"{kind} has given {LENGTH} bytes at {buffer.address:#x}")
    assert before - free_bytes(torch) >= LENGTH
    ends = (0, LENGTH // 2, LENGTH - 8)
    assert [device.read(buffer.address + offset, 8) for offset in ends] == [bytes(8)] * 3
    place = {"shape": (LENGTH,), "typestr": "|u1", "data": (buffer.address, False), "version": 3}
    seen = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device="cuda:0")
    assert torch.equal(seen.cpu(), torch.zeros(LENGTH, dtype=torch.uint8))
    expected = torch.arange(LENGTH, dtype=torch.int64).mul_(7).remainder_(251).to(torch.uint8)
    seen.copy_(expected)
    torch.cuda.synchronize(0)
    assert torch.equal(seen.cpu(), expected)
    assert [device.read(buffer.address + offset, 8) for offset in ends] == [
        bytes(expected[offset : offset + 8].tolist()) for offset in ends
    ]
    del seen
    buffer.close()
    buffer.close()
    torch.cuda.empty_cache()
    assert before - free_bytes(torch) < KEPT_BYTES_MAX


def test_pages_are_moved_staged_through_such_memory_and_equal_or_the_engine_hears_why_not(
    torch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nixl")
    last = int(torch.cuda.device_count()) - 1
    with ExitStack() as stack:
        agents = [stack.enter_context(GPUAgent(**SETTINGS)) for _ in range(2)]
        prefill, decode = (stack.enter_context(EngineProcess()) for _ in range(2))
        for engine, device in ((prefill, 0), (decode, last)):
            engine.ask("allocate", device=device, **SHAPE)
        refusal = ""
        try:
            prefill.ask("register", socket=agents[0].socket, instance="prefill", role="SOURCE")
        except AssertionError as error:
            refusal = str(error)
        if refusal:
            tell(capsys, f"the engine was refused: {refusal}")
            assert "HelloRefused" in refusal
            assert "no memory with fabric handles" in refusal
            assert WAY_OUT in refusal
            return
        tell(capsys, "the agent has taken its staging memory so")
        decode.ask("register", socket=agents[1].socket, instance="decode", role="TARGET")
        endpoint = prefill.ask("endpoint")
        moved = []
        for index, tokens in enumerate((700, 1, 257)):
            room, count = ROOM + index, -(-tokens // 16)
            near = [(7 * page + index) % 160 for page in range(count)]
            far = [50 * index + page for page in range(count)]
            prefill.ask("fill", seed=index + 1, tokens=tokens, pages=near)
            decode.ask("receive", room=room, endpoint=endpoint, pages=far, tokens=tokens)
            prefill.ask("send", room=room, pages=near, tokens=tokens, chunk=256)
            for engine, half in ((decode, "TARGET"), (prefill, "SOURCE")):
                kind, text, _ = engine.ask("wait", room=room, half=half, instance="prefill")
                assert kind == "DONE", text
            moved.append((index + 1, tokens, far))
        assert decode.ask("differences", sequences=moved) == 0
        # Over the same wire as other memory. Memory that cannot be mapped would go through the host.
        found = {peer["wire"] for worker in agent_status(agents[0])["workers"] for peer in worker["peers"]}
        tell(capsys, f"pages were moved over {', '.join(found)}")
        assert found == {wire_between(0, last)}
