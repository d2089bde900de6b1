"""Reads what the kernel grants this agent on its node: limits, and the devices of GPUs and RDMA. Called by the supervisor once.

Its workers inherit the limits. The status page shows the facts, and `longshore check` judges them.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from longshore_spec.status import NodeFacts

# The memory limit of a container, as a process in it sees it: with cgroup v2, and with v1.
_MEMORY_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
# Version 1 has a number near 2^63 for no limit.
_NO_LIMIT_BYTES = 1 << 60
_GPU = re.compile(r"nvidia\d+")


def read(root: Path = Path("/")) -> NodeFacts:
    """Return the facts of this process. A folder that is not there has no devices.

    Args:
        root: the root of the filesystem.
    """
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        descriptors=descriptors,
        memory_limit_bytes=_memory_limit(root),
        shared_memory_bytes=_size(root / "dev" / "shm"),
        gpus=sum(1 for name in _names(root / "dev") if _GPU.fullmatch(name)),
        infiniband=tuple(_names(root / "dev" / "infiniband")),
    )


def _memory_limit(root: Path) -> int | None:
    for name in _MEMORY_LIMITS:
        try:
            text = (root / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 2 says `max`.
        return int(text) if text.isdecimal() and int(text) < _NO_LIMIT_BYTES else None
    return None


def _size(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
