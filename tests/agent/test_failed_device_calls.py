"""A call to a GPU's driver that fails: its slab fails with the reason, holds nothing, and the next one is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_process import KernelProcess


@pytest.fixture(scope="module")
def process() -> Iterator[KernelProcess]:
    with KernelProcess("prepared_checks", {}) as started:
        yield started


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ("HostBytes", "refuses"),
        ("Event", "refuses"),
        ("launch", "refuses"),
        ("memory", "no memory left"),
        ("table", "no memory left"),
    ],
)
def test_a_failed_call_leaves_no_pool_held_and_nothing_queued(process: KernelProcess, call: str, word: str) -> None:
    error, busy, launches, launches_later = process.run("failed_call", call)
    assert error.startswith("DeviceError")
    assert word in error
    assert not busy
    assert (launches, launches_later) == (0, 1)


def test_a_pool_whose_kernels_cannot_be_compiled_is_refused_with_the_reason(process: KernelProcess) -> None:
    errors = process.run("failed_compilation", "Failed to find C compiler")
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("UNSUPPORTED")
        assert "Failed to find C compiler" in error


def test_a_device_that_does_not_end_its_copies_is_waited_for_no_longer_than_the_limit(process: KernelProcess) -> None:
    error = process.run("hung_device", 0.01)
    assert error.startswith("DeviceError")
    assert "0.01 s" in error
