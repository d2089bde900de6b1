"""Computes the memory of agents from the staging of the ranks on a node. Pure. Called by `render.agents`.

Staging of ranks on GPUs is GPU memory. The bases below were measured as resident memory in `longshore demo` (agent and
self-test 145 MiB, a worker's own 100 MiB, 4 MiB of /dev/shm a process) and doubled; that of a worker with CUDA and torch
is an estimate.
"""

from __future__ import annotations

from typing import Any

from longshore_operator import names
from longshore_operator.render.groups import Group
from longshore_wire.agent_config import Target
from longshore_wire.manifest import DecodeSpec, PrefillSpec, Spec
from longshore_wire.quantity import format_quantity

Body = dict[str, Any]
_MIB = 1 << 20
_AGENT_BYTES = 256 * _MIB
_WORKER_BYTES = 256 * _MIB
_GPU_WORKER_BYTES = 2048 * _MIB
# The kernel kills a process that writes beyond the limit of /dev/shm, so that it is far above what was seen.
_SHARED_BYTES = 256 * _MIB
_SHARED_RANK_BYTES = 64 * _MIB
_MEMORY = "memory"
# The init container runs one `chown`. Requests that equal limits fit every quality of service.
INIT_RESOURCES = {kind: {"cpu": "50m", _MEMORY: "32Mi"} for kind in ("requests", "limits")}


def resources(spec: Spec, group: Group, settings: Body) -> Body:
    """Return the resources of the agent's container: the given ones, and memory where none is given.

    Args:
        settings: the group's settings of pods.
    """
    found = {**settings.get("resources", {})}
    requests, limits = dict(found.get("requests", {})), dict(found.get("limits", {}))
    if _MEMORY not in requests and _MEMORY not in limits:
        requests[_MEMORY] = format_quantity(_bytes(spec, group, gpus=settings["gpus"]))
        if all(_role(spec, role).ranks_per_node is not None for role in group.role_names):
            limits[_MEMORY] = requests[_MEMORY]
    if settings.get("guaranteed"):
        limits = requests | limits
        requests = limits
    found |= {"requests": requests, "limits": limits}
    return {name: value for name, value in found.items() if value}


def shared_memory_limit(spec: Spec, group: Group) -> str:
    """Return the size of /dev/shm."""
    workers = sum(_ranks(spec, role) + _host_workers(spec, role) for role in group.role_names)
    return format_quantity(_SHARED_BYTES + _SHARED_RANK_BYTES * workers)


def _bytes(spec: Spec, group: Group, *, gpus: bool) -> int:
    total = _AGENT_BYTES
    for role in group.role_names:
        worker = _GPU_WORKER_BYTES if gpus else _WORKER_BYTES + _staging_bytes(spec, role)
        total += worker * _ranks(spec, role)
        total += (_WORKER_BYTES + _staging_bytes(spec, role)) * _host_workers(spec, role)
    return total


def _ranks(spec: Spec, role: str) -> int:
    found = _role(spec, role)
    return found.tensor_parallel if found.ranks_per_node is None else found.ranks_per_node


def _host_workers(spec: Spec, role: str) -> int:
    """Return the workers on a node that serve pages in host memory beside those of their ranks' devices."""
    return _ranks(spec, role) if role == names.DECODE and spec.decode.target is Target.HOST else 0


def _staging_bytes(spec: Spec, role: str) -> int:
    """Return the staging memory of one rank."""
    if role == names.DECODE:
        return spec.decode.staging.pool_size
    return spec.prefill.staging.lanes * spec.prefill.staging.buffer_size


def _role(spec: Spec, role: str) -> PrefillSpec | DecodeSpec:
    return spec.prefill if role == names.PREFILL else spec.decode
