"""Tests failed calls to a GPU's driver: the slab fails with the reason and holds no memory, and the next slab works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_process import KernelProcess

NEVER = (1000.0, 1000.0)


@pytest.fixture(scope="module")
def process() -> Iterator[KernelProcess]:
    with KernelProcess("failed_call_checks", {}) as started:
        yield started


@pytest.fixture(scope="module")
def compiling() -> Iterator[KernelProcess]:
    with KernelProcess("prepared_checks", {}) as started:
        yield started


@pytest.mark.parametrize(
    ("call", "word", "direct"),
    [
        ("HostBytes", "refuses", False),
        ("Event", "refuses", False),
        ("launch", "refuses", False),
        ("memory", "no memory left", False),
        ("table", "no memory left", False),
        ("Event", "refuses", True),
        ("launch", "refuses", True),
        ("memory", "no memory left", True),
        ("table", "no memory left", True),
    ],
)
def test_a_failed_call_leaves_no_pool_held_and_nothing_queued(
    process: KernelProcess, call: str, word: str, direct: bool
) -> None:
    error, busy, launches, events, launches_later = process.run("failed_call", call, direct=direct)
    assert error.startswith("DeviceError")
    assert word in error
    assert not busy
    assert (launches, launches_later) == (0, 1)
    # A copy that had taken an event before the failed call has returned it.
    assert events == (call in ("HostBytes", "launch"))


@pytest.mark.parametrize("kind", ["gather", "scatter", "direct"])
def test_a_kernel_whose_event_is_refused_holds_its_pools_until_its_stream_has_passed_it(
    process: KernelProcess, kind: str
) -> None:
    found = process.run("unmarked_copy", kind)
    pools = 2 if kind == "direct" else 1
    assert found == {
        "launches": 1,
        "held": [True] * pools,
        "passed": False,
        "unmapped": [False] * pools,
        "error": found["error"],
        "passed later": True,
        "unmapped later": [True] * pools,
    }
    assert found["error"].startswith("DeviceError")
    assert "an illegal address" in found["error"]


@pytest.mark.parametrize("near_closes", [True, False], ids=["source", "target"])
def test_a_copy_between_pools_one_of_which_has_left_is_refused_and_nothing_is_kept_for_that_one(
    process: KernelProcess, near_closes: bool
) -> None:
    error, busy, launches = process.run("closed_pools", near_closes)
    assert error.startswith("PoolError")
    assert not busy
    assert launches == 2


def test_a_scatter_tells_at_its_end_whether_the_trailer_that_it_has_read_is_accepted(process: KernelProcess) -> None:
    assert process.run("trailers", "whole") == [True, False, True, 3]


def test_a_scatter_whose_trailer_would_lie_behind_its_memory_is_refused(process: KernelProcess) -> None:
    *refused, unasked, launches = process.run("trailers", "short")
    assert len(refused) == 2
    assert all(text.startswith("ShapeError source has no trailer") for text in refused)
    assert (unasked, launches) == (True, 1)


def test_a_pool_whose_kernels_cannot_be_compiled_is_refused_with_the_reason(compiling: KernelProcess) -> None:
    errors = compiling.run("failed_compilation", "Failed to find C compiler")
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("UNSUPPORTED")
        assert "Failed to find C compiler" in error


def test_a_kernel_that_is_compiled_beside_the_thread_that_copies_holds_no_other_copy_up(
    compiling: KernelProcess,
) -> None:
    assert compiling.run("compiled_beside", fails=False) == {
        "first": [None] * 3,
        "held": False,
        "meanwhile": 1,
        "launches": 2,
        "compiled by the main thread": [False],
    }


def test_a_kernel_that_cannot_be_compiled_beside_is_told_to_its_copy_and_the_next_one_tries_again(
    compiling: KernelProcess,
) -> None:
    found = compiling.run("compiled_beside", fails=True)
    assert found["error"].startswith("DeviceError")
    assert "no compiler" in found["error"]
    assert not found["held after it"]
    assert found["launches"] == 2
    assert found["compiled by the main thread"] == [False, False]


@pytest.mark.parametrize(
    ("passed_at_s", "closed_at_s", "asked_at_s", "hangs"),
    [
        ([], NEVER, [101, 104.9, 105], [False, False, True]),
        ([float(second) for second in range(101, 120)], NEVER, [119.8, 123.9, 124], [False, False, True]),
        ([], (1000, 103), [102, 103.7, 103.9], [False, False, True]),
        ([], (103, 1000), [102, 103.7, 103.9], [False, False, True]),
        ([], (103, 103.5), [102, 103.7, 103.9], [False, False, True]),
        ([103.5, 104], (1000, 103), [104.7, 104.9], [False, True]),
    ],
    ids=[
        "alone",
        "behind others",
        "left by the target's engine",
        "left by the source's engine",
        "left by both engines",
        "left by an engine, behind others",
    ],
)
def test_a_copy_that_never_ends_is_told_to_whoever_asks_for_it(
    process: KernelProcess,
    passed_at_s: list[float],
    closed_at_s: tuple[float, float],
    asked_at_s: list[float],
    hangs: list[bool],
) -> None:
    heard = process.run("hung_copy", passed_at_s, closed_at_s, asked_at_s)
    assert [bool(text) for text in heard] == [False] * len(passed_at_s) + hangs
    assert heard[-1].startswith("DeviceError device GPU-0 has ended no copy for")


@pytest.mark.parametrize("stream", ["_gathers", "_scatters", "_directs"])
def test_a_device_that_does_not_end_its_copies_is_waited_for_no_longer_than_the_limit(
    process: KernelProcess, stream: str
) -> None:
    error = process.run("hung_device", 0.01, stream)
    assert error.startswith("DeviceError")
    assert "0.01 s" in error
