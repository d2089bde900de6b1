"""Tests what an agent reports of its node: limits of its process and container, and device files."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from longshore_agent.status.node_facts import NodeFacts, read


def test_devices_of_gpus_and_rdma_are_named(tmp_path: Path) -> None:
    (tmp_path / "dev" / "infiniband").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    for name in ("uverbs1", "rdma_cm", "uverbs0"):
        (tmp_path / "dev" / "infiniband" / name).touch()
    found = read(tmp_path)
    assert (found.gpus, found.infiniband) == (2, ("rdma_cm", "uverbs0", "uverbs1"))


def test_a_node_without_devices_and_limits_has_none(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert (found.gpus, found.infiniband, found.memory_limit_bytes, found.shared_memory_bytes) == (0, (), None, 0)


@pytest.mark.parametrize(
    ("file", "text", "limit_bytes"),
    [
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "536870912\n", 1 << 29),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
    ],
)
def test_the_memory_limit_is_that_of_either_cgroup_version(
    tmp_path: Path, file: str, text: str, limit_bytes: int | None
) -> None:
    path = tmp_path / "sys" / "fs" / "cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read(tmp_path).memory_limit_bytes == limit_bytes


def test_the_limits_are_those_of_the_process() -> None:
    program = """
import resource, sys, msgspec
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
from longshore_agent.status.node_facts import read
sys.stdout.buffer.write(msgspec.json.encode(read()))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=240)
    found = msgspec.json.decode(done.stdout, type=NodeFacts)
    assert (found.memlock_bytes, found.descriptors) == (4096, 99)
    assert found.shared_memory_bytes > 0
    own, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert read().memlock_bytes == (None if own == resource.RLIM_INFINITY else own)
