"""Chooses the memory of a test's pages, and checks that its pod has it, so that the kernel does not kill the agent for it.

Called by the program of `longshore verify` before it registers. All of a test's host memory counts as the agent's container. A GPU's
free memory is not checked: its driver refuses what does not fit, and kills nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longshore_client import cuda
from longshore_client.errors import ArgumentError
from longshore_lab.test_engine.memory import GPUMemory, HostMemory, Memory
from longshore_spec.agent_config import AgentConfig, Backend
from longshore_spec.verify_messages import MemoryKind, Start, WantedMemory
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import PageOrder
from longshore_wire.slabs import staging_of_tests

_MIB = 1 << 20
# As measured by the operator's `render.memory`, with a margin: a worker without its staging, and this process.
_WORKER_BYTES, _PROCESS_BYTES = 128 * _MIB, 48 * _MIB
# Estimates: with CUDA's context, and in the worker torch and Triton.
_GPU_WORKER_BYTES, _GPU_PROCESS_BYTES = 1024 * _MIB, 512 * _MIB
# (limit, usage, statistics, name of the cache that the kernel drops first) of cgroup v2 and v1, in a container.
_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


# Allocates the memory of a rank: its number and the bytes. Raises LongshoreError.
Allocate = Callable[[int, int], Memory]


class NoGPUError(LongshoreError):
    """GPU memory was asked for, and this process cannot use a GPU."""

    reason = Reason.UNSUPPORTED


class NoMemoryError(LongshoreError):
    """The pod has too little memory left for the test; names both sizes and the way out."""

    reason = Reason.BUSY


def chosen(wanted: WantedMemory, backend: Backend) -> tuple[MemoryKind, Allocate]:
    """Return which memory is used, and what allocates it. Ranks take the GPUs of the node in turn.

    Args:
        backend: of the agent.
    Raises:
        NoGPUError: GPU memory is wanted and there is no GPU, or its driver fails.
    """
    if wanted == "host" or (wanted == "auto" and not backend.moves_gpu_memory):
        return "host", on_host
    try:
        gpu_count = cuda.gpu_count()
    except ArgumentError as error:
        raise NoGPUError(f"the CUDA driver fails: {error}: mend it, or give --memory host") from error
    if gpu_count:
        return "gpu", lambda rank, length_bytes: _on_gpu(rank, length_bytes, rank % gpu_count)
    if wanted == "gpu":
        raise NoGPUError("the agent's pod sees no GPU: set agents.gpuAccess, or leave --memory gpu out")
    return "host", on_host


def on_host(_rank: int, length_bytes: int) -> Memory:
    """Allocate host memory for any rank."""
    return HostMemory(length_bytes)


def _on_gpu(rank: int, length_bytes: int, index: int) -> Memory:
    try:
        return GPUMemory(length_bytes, index)
    except ArgumentError as error:
        raise NoMemoryError(
            f"GPU {index} has no {length_bytes} bytes for rank {rank}: {error}: give smaller sizes or a lower "
            "concurrency, or --memory host"
        ) from error


def require(config: AgentConfig, ask: Start, tokens: int, kind: MemoryKind) -> None:
    """Raise NoMemoryError if the test needs more host memory than the container or the machine has left."""
    left, needed = _left_bytes(), needed_bytes(config, ask, tokens, kind)
    if left is not None and needed > left:
        raise NoMemoryError(
            f"the test needs about {needed // _MIB} MiB, and {max(left, 0) // _MIB} MiB of memory are left beside the agent: give "
            "smaller sizes or a lower concurrency, or its pod more memory by spec.agents.resources"
        )


def needed_bytes(config: AgentConfig, ask: Start, tokens: int, kind: MemoryKind) -> int:
    """Return the host memory that a test needs, roughly: workers, content to compare with, and what is not on GPUs.

    Staging and pages of ranks are in the memory that `kind` names. Both sides also make the content in host memory.
    """
    on_gpu = kind == "gpu"
    worker_bytes = _GPU_WORKER_BYTES if on_gpu else _WORKER_BYTES
    total = _GPU_PROCESS_BYTES if on_gpu else _PROCESS_BYTES
    # Of each side: its layout, the staging of a rank, and the rooms that have pages at the same time.
    sides = []
    if ask.prefill:
        layout, staging = config.prefill.layout(config.model), config.prefill.staging
        lane_bytes, _ = staging_of_tests(staging.buffer_size, 0, layout.largest_unit_bytes, on_gpu=on_gpu)
        sides.append((layout, staging.lanes * lane_bytes, 1))
    if ask.decode:
        layout = config.decode.layout(config.model)
        _, ring_bytes = staging_of_tests(
            0, config.decode.staging.pool_size, layout.largest_unit_bytes, on_gpu=on_gpu, cache_count=len(layout.caches)
        )
        sides.append((layout, ring_bytes, ask.room_count))
    for layout, staging_bytes, place_count in sides:
        content_bytes = sum(
            cache.token_bytes * (len(cache.layers) if cache.order is PageOrder.SLOT else tokens)
            for cache in layout.caches
        )
        own_bytes = 0 if on_gpu else staging_bytes + place_count * content_bytes
        total += layout.rank_count * (worker_bytes + content_bytes + own_bytes)
    return total


def _left_bytes() -> int | None:
    """Return what this container, or else this machine, may still allocate; None: unknown."""
    found = [left for left in (_left_of_container(), _left_of_machine()) if left is not None]
    return min(found, default=None)


def _left_of_machine() -> int | None:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return None


def _left_of_container() -> int | None:
    for limit, usage, statistics, cache in _FILES:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in Path(statistics).read_text(encoding="ascii").splitlines())
            used = int(Path(usage).read_text(encoding="ascii")) - int(counts.get(cache, 0))
            return int(Path(limit).read_text(encoding="ascii")) - used
    return None
