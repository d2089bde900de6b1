"""Tests the wire between two GPUs with the real NVML (NVLink if it joins them, else CUDA IPC), and allowed wires."""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from gpu_world import EngineProcess, GPUAgent, agent_status, wire_between
from open_ports import listening

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 4, "kv_heads": 8, "tp": 1, "rank": 0, "page_size": 16, "page_count": 64}
ROOM, TOKENS, PAGES = 2**63 + 9001, 300, list(range(19))


@pytest.fixture(scope="module")
def device_count(torch: Any) -> int:
    return int(torch.cuda.device_count())


def test_nvml_says_of_every_two_gpus_what_nvidia_smi_says(device_count: int) -> None:
    from longshore_agent.memory import cuda
    from longshore_agent.transports import nvml

    names = [cuda.device_uuid(index) for index in range(device_count)]
    for one, other in itertools.product(range(device_count), repeat=2):
        joined = nvml.joined_by_nvlink(names[one], names[other])
        sys.stdout.write(f"NVLink joins {one} and {other}: {joined}\n")
        assert joined == (wire_between(one, other) == "NVLink")
    assert not nvml.joined_by_nvlink(names[0], "GPU-00000000-0000-0000-0000-000000000001")


@pytest.mark.parametrize("allowed", ["CudaIPC", "NVLink"])
def test_agents_find_the_wire_between_their_gpus_and_hold_it_to_the_list(allowed: str, device_count: int) -> None:
    pytest.importorskip("nixl")
    settings = {"LONGSHORE_WIRES": allowed, "LONGSHORE_RING_BYTES": "64Mi", "LONGSHORE_LANE_BYTES": "16Mi"}
    wire = wire_between(0, device_count - 1)
    with ExitStack() as stack:
        agents = [stack.enter_context(GPUAgent(**settings)) for _ in range(2)]
        prefill, decode = (stack.enter_context(EngineProcess()) for _ in range(2))
        for engine, agent, role, device in (
            (prefill, agents[0], "SOURCE", 0),
            (decode, agents[1], "TARGET", device_count - 1),
        ):
            engine.ask("allocate", device=device, **SHAPE)
            engine.ask("register", socket=agent.socket, instance=role.lower(), role=role)
        prefill.ask("fill", seed=5, tokens=TOKENS, pages=PAGES)
        endpoint = prefill.ask("endpoint")
        decode.ask("receive", room=ROOM, endpoint=endpoint, pages=PAGES, tokens=TOKENS)
        prefill.ask("send", room=ROOM, pages=PAGES, tokens=TOKENS, chunk=TOKENS)
        ends: list[Any] = [decode.ask("wait", room=ROOM, half="TARGET", instance="source")]
        ends.append(prefill.ask("wait", room=ROOM, half="SOURCE", instance="source"))
        found = {peer["wire"] for worker in agent_status(agents[0])["workers"] for peer in worker["peers"]}
        assert found == {wire}
        if allowed == "NVLink" and wire == "CudaIPC":
            assert {kind for kind, _, _ in ends} == {"FAILED"}
            assert all("over CudaIPC" in text and "allows only NVLink" in text for _, text, _ in ends)
        else:
            assert [kind for kind, _, _ in ends] == ["DONE", "DONE"], ends
            assert decode.ask("differences", sequences=[(5, TOKENS, PAGES)]) == 0


def test_a_gpu_worker_listens_for_no_bytes_where_only_wires_of_gpus_are_allowed(device_count: int) -> None:
    pytest.importorskip("nixl")
    settings = {"LONGSHORE_WIRES": "CudaIPC,NVLink", "LONGSHORE_RING_BYTES": "64Mi", "LONGSHORE_LANE_BYTES": "16Mi"}
    with GPUAgent(**settings) as agent, EngineProcess() as engine:
        engine.ask("allocate", device=device_count - 1, **SHAPE)
        engine.ask("register", socket=agent.socket, instance="target", role="TARGET")
        (worker,) = agent_status(agent)["workers"]
        assert (worker["data_path"], worker["data_ports"]) == ("Absent", [])
        # Peers dial the remaining one.
        (control,) = listening(worker["pid"])
        assert control.address == "127.0.0.1"
