"""Computes the memory of agents from the staging of the ranks on a node. Pure. Called by the operator and the command line.

Staging of ranks on GPUs is GPU memory. The bases below were measured as resident memory in `longshore demo` (agent and
self-test 145 MiB, a worker's own 100 MiB, 4 MiB of /dev/shm a process) and doubled; that of a worker with CUDA and torch
is an estimate.
"""

from __future__ import annotations

from typing import Any

from longshore_spec import names
from longshore_spec.agent_config import Target
from longshore_spec.manifest import DecodeSpec, PrefillSpec, Spec
from longshore_spec.node_groups import Group
from longshore_spec.quantity import format_quantity

Body = dict[str, Any]
_MIB = 1 << 20
_AGENT_BYTES = 256 * _MIB
_WORKER_BYTES = 256 * _MIB
_GPU_WORKER_BYTES = 2048 * _MIB
# The kernel kills a process that writes beyond the limit of /dev/shm, so that it is far above what was seen.
_SHARED_BYTES = 256 * _MIB
_SHARED_RANK_BYTES = 64 * _MIB
_MEMORY = "memory"


def resources(spec: Spec, group: Group, settings: Body) -> Body:
    """Return the resources of the agent's container: the given ones, and memory where none is given.

    Args:
        settings: the group's settings of pods.
    """
    found = {**settings.get("resources", {})}
    requests, limits = dict(found.get("requests", {})), dict(found.get("limits", {}))
    if _MEMORY not in requests and _MEMORY not in limits:
        requests[_MEMORY] = format_quantity(needed_bytes(spec, group, gpus=settings["gpus"]))
        if all(_role(spec, role).ranks_per_node is not None for role in group.role_names):
            limits[_MEMORY] = requests[_MEMORY]
    if settings.get("guaranteed"):
        limits = requests | limits
        requests = limits
    found |= {"requests": requests, "limits": limits}
    return {name: value for name, value in found.items() if value}


def shared_memory_limit(spec: Spec, group: Group) -> str:
    """Return the size of /dev/shm."""
    workers = sum(rank_count(spec, role) + host_worker_count(spec, role) for role in group.role_names)
    return format_quantity(_SHARED_BYTES + _SHARED_RANK_BYTES * workers)


def needed_bytes(spec: Spec, group: Group, *, gpus: bool) -> int:
    """Return the memory of a node that the agent of a group's node takes; on GPUs without the staging of their ranks."""
    total = _AGENT_BYTES
    for role in group.role_names:
        worker = _GPU_WORKER_BYTES if gpus else _WORKER_BYTES + staging_bytes(spec, role)
        total += worker * rank_count(spec, role)
        total += (_WORKER_BYTES + staging_bytes(spec, role)) * host_worker_count(spec, role)
    return total


def rank_count(spec: Spec, role: str) -> int:
    """Return the ranks of a role on one node."""
    found = _role(spec, role)
    return found.tensor_parallel if found.ranks_per_node is None else found.ranks_per_node


def host_worker_count(spec: Spec, role: str) -> int:
    """Return the workers on a node that serve pages in host memory beside those of their ranks' devices."""
    return rank_count(spec, role) if role == names.DECODE and spec.decode.target is Target.HOST else 0


def staging_bytes(spec: Spec, role: str) -> int:
    """Return the staging memory of one rank and memory: the lanes' buffers of prefill, the ring of decode."""
    if role == names.DECODE:
        return spec.decode.staging.pool_size
    return spec.prefill.staging.lanes * spec.prefill.staging.buffer_size


def _role(spec: Spec, role: str) -> PrefillSpec | DecodeSpec:
    return spec.prefill if role == names.PREFILL else spec.decode
