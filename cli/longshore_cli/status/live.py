"""Draws something again and again on a terminal, with rich. Called by `status --watch` and by `up`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def draw(frame: Callable[[], RenderableType], interval_s: float, until_s: float | None = None) -> None:
    """Draw `frame()` every `interval_s` seconds until `until_s` (time.monotonic), or until the caller is interrupted."""
    from rich.live import Live

    with Live(frame(), auto_refresh=False) as live:
        live.refresh()
        while (pause_s := pause(interval_s, until_s)) > 0:
            time.sleep(pause_s)
            live.update(frame(), refresh=True)


def pause(usual_s: float, until_s: float | None) -> float:
    """Return the time to wait for the next frame, 0 after `until_s`."""
    return usual_s if until_s is None else max(0.0, min(usual_s, until_s - time.monotonic()))
