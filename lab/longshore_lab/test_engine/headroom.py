"""Checks that a test fits into the memory that its pod has left, so that the kernel does not kill the agent for it.

Called by the test engine's program before it registers. All of a test's host memory counts as the agent's container. A GPU's
free memory is not checked: its driver refuses what does not fit, and kills nothing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from longshore_spec.agent_config import AgentConfig
from longshore_spec.verify_messages import MemoryKind, Start
from longshore_wire.errors import LongshoreError, Reason
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


class NoMemoryError(LongshoreError):
    """The pod has too little memory left for the test; names both sizes and the way out."""

    reason = Reason.BUSY


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

    Staging and pages of ranks are in the memory that `kind` names. Both sides also keep the content in host memory.
    """
    on_gpu = kind == "gpu"
    worker_bytes = _GPU_WORKER_BYTES if on_gpu else _WORKER_BYTES
    total = _GPU_PROCESS_BYTES if on_gpu else _PROCESS_BYTES
    # Of each side: its layout, the staging of a rank, and the rooms that have pages at the same time.
    sides = []
    if ask.prefill:
        layout, staging = config.prefill.layout(config.model), config.prefill.staging
        lane_bytes, _ = staging_of_tests(staging.buffer_size, 0, layout.rank_unit_bytes, on_gpu=on_gpu)
        sides.append((layout, staging.lanes * lane_bytes, 1))
    if ask.decode:
        layout = config.decode.layout(config.model)
        _, ring_bytes = staging_of_tests(0, config.decode.staging.pool_size, layout.rank_unit_bytes, on_gpu=on_gpu)
        sides.append((layout, ring_bytes, ask.room_count))
    for layout, staging_bytes, place_count in sides:
        content_bytes = tokens * layout.token_bytes
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
