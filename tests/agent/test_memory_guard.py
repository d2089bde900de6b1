"""The guard of mapped files: faults that it handles, and faults that still end the process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from longshore_agent.errors import PoolError
from longshore_agent.memory import host_memory
from longshore_agent.memory.host_memory import map_shared

LIMIT_S = 240.0
PAGE_BYTES = 4096
_MAP = """
import fcntl
import os
from longshore_agent.memory.host_memory import Mapping, _handler, map_shared
descriptor = os.memfd_create("longshore-guard-test", os.MFD_CLOEXEC)
os.posix_fallocate(descriptor, 0, 8 * 4096)
"""
# A page of a file that is not guarded any more.
UNGUARDED = """
other = os.memfd_create("longshore-guard-test", os.MFD_CLOEXEC)
os.posix_fallocate(other, 0, 4096)
mapping = map_shared(other, 4096)
_handler().leave(mapping._row)
os.ftruncate(other, 0)
"""


def memory(length_bytes: int) -> int:
    descriptor = os.memfd_create("longshore-guard-test", os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, length_bytes)
    return descriptor


def test_memory_with_holes_is_refused_with_the_way_out_and_a_file_on_a_disk_is_not_looked_at(tmp_path):
    descriptor = os.memfd_create("longshore-guard-test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 1 << 20)
    os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PoolError, match=f"{PAGE_BYTES} of the memory's {1 << 20} bytes are allocated.*posix_fallocate"):
        map_shared(descriptor, 1 << 20)
    # Also where the part that is declared would fit what is allocated: that may be another part.
    with pytest.raises(PoolError, match="are allocated"):
        map_shared(descriptor, PAGE_BYTES)
    os.posix_fallocate(descriptor, 0, 1 << 20)
    map_shared(descriptor, 1 << 20).unmap()
    os.close(descriptor)
    with (tmp_path / "pages").open("w+b") as file:
        if host_memory._filesystem(file.fileno()) != host_memory._TMPFS:
            file.truncate(1 << 20)
            map_shared(file.fileno(), 1 << 20).unmap()


def test_huge_pages_count_as_memory_that_can_be_taken_away():
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    found = {}
    for name, more in (("small", 0), ("huge", os.MFD_HUGETLB)):
        descriptor = os.memfd_create("longshore-guard-test", flags | more)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        found[name] = host_memory._is_sealed(descriptor)
        os.close(descriptor)
    assert found == {"small": True, "huge": False}


def test_what_is_gone_reads_as_zeros_and_what_is_left_as_it_was():
    descriptor = memory(8 * PAGE_BYTES)
    mapping = map_shared(descriptor, 8 * PAGE_BYTES)
    view = mapping.bytes_view()
    view[:] = 7
    os.ftruncate(descriptor, 3 * PAGE_BYTES)
    before = host_memory.torn_count()
    assert (int(view[3 * PAGE_BYTES - 1]), mapping.torn) == (7, False)
    assert (int(view[5 * PAGE_BYTES]), mapping.torn) == (0, True)
    assert host_memory.torn_count() > before
    view[7 * PAGE_BYTES] = 1
    assert int(view[: 3 * PAGE_BYTES].sum()) == 7 * 3 * PAGE_BYTES
    assert int(view[5 * PAGE_BYTES :].sum()) == 1
    assert os.fstat(descriptor).st_size == 3 * PAGE_BYTES
    del view
    mapping.unmap()
    os.close(descriptor)


def test_threads_that_copy_from_memory_that_goes_meanwhile_all_come_back():
    descriptors = [memory(1024 * PAGE_BYTES) for _ in range(4)]
    mappings = [map_shared(descriptor, 1024 * PAGE_BYTES) for descriptor in descriptors]
    copying = threading.Barrier(len(mappings) + 1)

    def copy(view: np.ndarray) -> None:
        copying.wait(LIMIT_S)
        while not host_memory.torn_count() or view.any():
            view.copy()

    for mapping in mappings:
        mapping.bytes_view()[:] = 1
    threads = [threading.Thread(target=copy, args=(mapping.bytes_view(),)) for mapping in mappings]
    for thread in threads:
        thread.start()
    copying.wait(LIMIT_S)
    for descriptor in descriptors:
        os.ftruncate(descriptor, 0)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert all(mapping.torn for mapping in mappings)
    for mapping, descriptor in zip(mappings, descriptors, strict=True):
        mapping.unmap()
        os.close(descriptor)


def test_a_range_that_is_unmapped_is_guarded_no_longer_and_its_place_is_taken_again():
    handler = host_memory._handler()
    free = len(handler._free)
    descriptor = memory(PAGE_BYTES)
    for _ in range(3):
        map_shared(descriptor, PAGE_BYTES).unmap()
    assert len(handler._free) == free
    os.close(descriptor)


def test_more_ranges_than_the_table_holds_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(host_memory._handler(), "_free", [])
    descriptor = memory(PAGE_BYTES)
    with pytest.raises(PoolError, match="register pools of fewer regions"):
        map_shared(descriptor, PAGE_BYTES)
    os.close(descriptor)


@pytest.mark.parametrize("first", ["", "map_shared(descriptor, 4096)\n"], ids=["no guard at all", "another is guarded"])
def test_a_fault_in_memory_that_is_not_guarded_ends_the_process_as_ever(first):
    code = _MAP + first + UNGUARDED + "mapping.bytes_view()[0]\n"
    ended = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False)
    assert ended.returncode == -signal.SIGBUS
