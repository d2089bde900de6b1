"""Tests agents and engines as clients of a real MPS daemon: what they say, what they move, and how they fail.

The daemon's pipes are this test's own, so that other processes of the machine stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpu_world import START_LIMIT_S, EngineProcess, GPUAgent, agent_status
from mps_daemon import PROGRAM, mps_daemon, mps_logs

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 8, "kv_heads": 8, "tp": 1, "rank": 0, "page_size": 16, "page_count": 160}
ROOM = 2**63 + 9001
# Several slabs a room, and a ring that wraps.
SMALL = {"LONGSHORE_RING_BYTES": "24Mi", "LONGSHORE_LANE_BYTES": "2Mi", "LONGSHORE_SLAB_BYTES_MIN": "64Ki"}
# An MPS client as small as possible, for namespaces and users that cannot read this tree. It prints JSON: the error of
# cuInit, whether it is a client (CU_DEVICE_ATTRIBUTE_MPS_ENABLED), and 8 bytes of another process's memory.
CLIENT = """
import ctypes, json, sys
class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
cuda.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
found = {"init": cuda.cuInit(0)}
if not found["init"]:
    device, number = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    found["attribute"] = cuda.cuDeviceGetAttribute(ctypes.byref(number), 133, device)
    found["mps"] = number.value
    context, address, read = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(8)
    found["context"] = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    if len(sys.argv) > 1:
        handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
        found["open"] = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1)
        found["copy"] = cuda.cuMemcpyDtoH_v2(read, address.value + int(sys.argv[2]), 8)
        found["read"] = read.raw.hex()
print(json.dumps(found))
"""
# As a pod: mounts, IPC objects and PIDs of its own, with a /dev/shm of its own.
POD = ["unshare", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c"]
POD_BEGIN = 'mount -t tmpfs none /dev/shm && exec "$0" "$@"'
CLIENT_LIMIT_S = 60.0
# Any other user than that of these tests; the agents' image has this one.
OTHER_USER = 10001
FAULT = "import torch; x = torch.zeros(4, device='cuda'); x[torch.tensor([1 << 40], device='cuda')]; torch.cuda.synchronize()"


@pytest.fixture(scope="module")
def device_count(torch: Any) -> int:
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"needs {PROGRAM}")
    return int(torch.cuda.device_count())


@pytest.fixture
def folder(device_count: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")


@pytest.fixture
def clients(folder: Path) -> Iterator[Mapping[str, str]]:
    """The variables of clients of a running daemon."""
    with mps_daemon(folder) as variables:
        yield variables
    sys.stdout.write(mps_logs(folder))


def tell(capsys: pytest.CaptureFixture[str], outcome: object) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\nMPS here: {outcome}\n")


def shared(agent: GPUAgent) -> list[bool | None]:
    """What the status page says of each worker."""
    return [worker["mps"] for worker in agent_status(agent)["workers"]]


def moved(prefill: EngineProcess, decode: EngineProcess, agents: list[GPUAgent]) -> None:
    """Register both engines, move pages between them, and compare every byte."""
    pytest.importorskip("nixl")
    prefill.ask("register", socket=agents[0].socket, instance="prefill", role="SOURCE")
    decode.ask("register", socket=agents[-1].socket, instance="decode", role="TARGET")
    near, far, tokens = [(7 * page) % 160 for page in range(44)], list(range(50, 94)), 700
    prefill.ask("fill", seed=5, tokens=tokens, pages=near)
    decode.ask("receive", room=ROOM, endpoint=prefill.ask("endpoint"), pages=far, tokens=tokens)
    prefill.ask("send", room=ROOM, pages=near, tokens=tokens, chunk=256)
    for engine, half in ((decode, "TARGET"), (prefill, "SOURCE")):
        kind, text, _ = engine.ask("wait", room=ROOM, half=half, instance="prefill")
        assert kind == "DONE", text
    assert decode.ask("differences", sequences=[(5, tokens, far)]) == 0


@pytest.mark.parametrize("agent_count", [1, 2], ids=["direct", "staged"])
def test_clients_of_one_daemon_move_pages_and_the_status_says_that_gpus_are_shared_by_mps(
    agent_count: int, clients: Mapping[str, str], device_count: int
) -> None:
    with ExitStack() as stack:
        agents = [
            stack.enter_context(GPUAgent(LONGSHORE_GPU_MPS="true", **SMALL, **clients)) for _ in range(agent_count)
        ]
        prefill, decode = (stack.enter_context(EngineProcess(**clients)) for _ in range(2))
        for engine, device in ((prefill, 0), (decode, device_count - 1)):
            engine.ask("allocate", device=device, **SHAPE)
        moved(prefill, decode, agents)
        assert [found for agent in agents for found in shared(agent)] == [True, True]


def test_without_the_setting_an_agent_that_is_no_client_works_and_its_status_says_so(
    folder: Path, device_count: int
) -> None:
    nobody = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    with GPUAgent(**SMALL, **nobody) as agent, EngineProcess(**nobody) as engine:
        engine.ask("allocate", device=0, **SHAPE)
        engine.ask("register", socket=agent.socket, instance="prefill", role="SOURCE")
        assert shared(agent) == [False]


def test_with_the_setting_and_no_daemon_an_engine_is_refused_with_directory_and_way_out(
    folder: Path, device_count: int
) -> None:
    nobody = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    with GPUAgent(LONGSHORE_GPU_MPS="true", **SMALL, **nobody) as agent, EngineProcess(**nobody) as engine:
        engine.ask("allocate", device=0, **SHAPE)
        with pytest.raises(AssertionError) as refused:
            engine.ask("register", socket=agent.socket, instance="prefill", role="SOURCE")
        text = str(refused.value)
        assert "HelloRefused" in text
        assert f"is not shared by MPS (pipe directory {folder}: no daemon has made its pipes there)" in text
        assert "start nvidia-cuda-mps-control on this node" in text


def test_memory_of_a_client_cannot_be_opened_by_a_process_that_is_none_or_can(
    clients: Mapping[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outcome is NVIDIA's. An agent that is no client beside an engine that is one meets it at registration."""
    outside = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    for name, agents_are, engine_is in (
        ("an agent outside", outside, clients),
        ("an engine outside", clients, outside),
    ):
        with GPUAgent(**SMALL, **agents_are) as agent, EngineProcess(**engine_is) as engine:
            engine.ask("allocate", device=0, **SHAPE)
            refusal = ""
            try:
                engine.ask("register", socket=agent.socket, instance="prefill", role="SOURCE")
            except AssertionError as error:
                refusal = str(error)
            tell(capsys, f"{name}: the pages are {f'refused: {refusal}' if refusal else 'mapped'}")
            assert not refusal or "cannot be mapped" in refusal


def client(
    arguments: list[str], variables: Mapping[str, str], before: list[str] | None = None, user: int | None = None
) -> dict[str, Any] | str:
    """Run CLIENT; return what it printed, or why it printed nothing."""
    command = [*(before or []), os.path.realpath(sys.executable), "-I", "-c", CLIENT, *arguments]
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=CLIENT_LIMIT_S,
            user=user,
        )
    except subprocess.TimeoutExpired:
        return f"waits for more than {CLIENT_LIMIT_S:g} s"
    except PermissionError as error:
        return str(error)
    return dict(json.loads(done.stdout)) if done.stdout.startswith("{") else done.stderr.strip()[-300:]


def test_a_client_in_namespaces_and_a_dev_shm_of_its_own_opens_an_engines_memory(
    clients: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As an agent's pod beside an engine's: the pipe directory is all that they share."""
    tried = subprocess.run([*POD, POD_BEGIN, "true"], capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        pytest.skip(f"needs the right to make namespaces: {tried.stderr.strip()}")
    with EngineProcess(**clients) as engine:
        memory = engine.ask("allocate", device=0, **SHAPE)
        found = client([memory["handle"], str(memory["offset"])], clients, [*POD, POD_BEGIN])
        tell(capsys, f"in a pod's namespaces: {found}")
        assert isinstance(found, dict), found
        assert (found["init"], found["mps"], found["open"], found["copy"]) == (0, 1, 0, 0)
        # gpu_world.POISON, as an engine's pages hold it at first.
        assert found["read"] == "a55a" * 4


@pytest.mark.slow
def test_another_user_is_a_client_of_a_daemon_for_all_users(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.getuid():
        pytest.skip("needs root, to be another user")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    for options in ([], ["-multiuser-server"]):
        with mps_daemon(folder, *options) as variables, EngineProcess(**variables) as engine:
            engine.ask("allocate", device=0, **SHAPE)
            found = client([], variables, user=OTHER_USER)
            tell(capsys, f"user {OTHER_USER} beside root, daemon {options}: {found}")
            if isinstance(found, str) and "Permission" in found:
                pytest.skip(f"that user cannot run this interpreter: {found}")
            if options:
                assert isinstance(found, dict), found
                assert (found["init"], found["mps"]) == (0, 1)
            else:
                assert not isinstance(found, dict) or (found["init"], found.get("mps")) != (0, 1)


def test_after_a_fault_of_one_client_the_next_engine_is_served_again(
    clients: Mapping[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with GPUAgent(LONGSHORE_GPU_MPS="true", **SMALL, **clients) as agent:
        with EngineProcess(**clients) as engine:
            engine.ask("allocate", device=0, **SHAPE)
            engine.ask("register", socket=agent.socket, instance="first", role="SOURCE")
            begin_s = time.monotonic()
            fault = subprocess.run(
                [sys.executable, "-c", FAULT], env=os.environ | clients, capture_output=True, check=False, timeout=120
            )
            assert fault.returncode
            try:
                engine.ask("fill", seed=1, tokens=16, pages=[0])
                tell(capsys, "the fault of one client did not reach the other")
            except AssertionError as error:
                tell(capsys, f"the fault of one client ends the others: {error}")
            engine.kill()
        end_s = time.monotonic() + 2 * START_LIMIT_S
        while True:
            with EngineProcess(**clients) as engine:
                refusal = ""
                try:
                    engine.ask("allocate", device=0, **SHAPE)
                    engine.ask("register", socket=agent.socket, instance="next", role="SOURCE")
                except AssertionError as error:
                    refusal = str(error)
                if refusal:
                    # The server takes no client before all that it had have ended.
                    assert time.monotonic() < end_s, f"{refusal}\n{mps_logs(folder)}"
                    continue
                tell(capsys, f"an engine is served again {time.monotonic() - begin_s:.1f} s after the fault")
                assert True in shared(agent)
                return
