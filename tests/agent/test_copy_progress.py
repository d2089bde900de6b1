"""A device that hangs is distinguished from a busy one, sooner if an engine waits for its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longshore_agent.errors import DeviceError
from longshore_agent.kernels.copy_progress import LEAVING_LIMIT_S, QUIET_LIMIT_S, CopyProgress


def pool(closed_s: float | None = None) -> Any:
    return SimpleNamespace(closed_s=closed_s)


def hangs(progress: CopyProgress, now_s: float, queued_s: float, *pools: Any) -> bool:
    try:
        progress.check(now_s, queued_s, pools)
    except DeviceError:
        return True
    return False


def test_a_copy_that_does_not_end_is_a_device_that_hangs_and_is_named() -> None:
    progress = CopyProgress("cuda:3")
    assert not hangs(progress, 100 + QUIET_LIMIT_S / 2, 100, pool())
    with pytest.raises(DeviceError, match=r"cuda:3 has ended no copy for 5 s: it hangs"):
        progress.check(100 + QUIET_LIMIT_S, 100, [pool()])


def test_a_copy_that_waits_behind_others_which_end_is_waited_for_however_long_it_takes() -> None:
    progress = CopyProgress("cuda:0")
    for second in range(100, 200):
        progress.ended(second)
        assert not hangs(progress, second + LEAVING_LIMIT_S / 2, 100, pool(closed_s=100))
    assert hangs(progress, 199 + QUIET_LIMIT_S, 100, pool())


@pytest.mark.parametrize("pools", [(pool(103), pool()), (pool(), pool(103)), (pool(103), pool(103.5))])
def test_pages_that_an_engine_waits_for_are_waited_for_less(pools: tuple[Any, ...]) -> None:
    progress = CopyProgress("cuda:0")
    assert not hangs(progress, 102, 100, *pools)
    # It counts from the time at which they were asked for.
    assert not hangs(progress, 102.9 + LEAVING_LIMIT_S, 100, *pools)
    assert hangs(progress, 103.1 + LEAVING_LIMIT_S, 100, *pools)
    # And from the last copy that ended since.
    progress.ended(103.5)
    assert not hangs(progress, 103.5 + LEAVING_LIMIT_S / 2, 100, *pools)
    assert hangs(progress, 103.6 + LEAVING_LIMIT_S, 100, *pools)
