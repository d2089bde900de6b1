"""Draws the agent's web page, on a desk and on a phone, while rooms move between two real agents.

    make dashboard    # PYTHONPATH=e2e:tests/agent python e2e/draw_web_page.py docs/images

Called by hand, to make the pictures of docs/how-to/status.md. Measures nothing: agents and engines share the processors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from browser import Browser
from controlplane.waiting import until
from page_scene import pages

# The pictures are small files, since each is shown as it is.
DESK = (1000, 720)
PHONE = (375, 720)
# So that a room is open at most times.
PAUSE_S = 0.02
_ROOMS = 40


def is_drawn(text: str) -> bool:
    """Whether the page shows rates, and an open room."""
    return "Oldest" in text and "\n-" not in text and "No room is open" not in text


def main() -> None:
    """Run the scene and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    with tempfile.TemporaryDirectory(prefix="web-page-") as name, pages(Path(name), LONGSHORE_BACKEND="NIXL") as scene:
        for _ in range(2):
            scene.fails()
        for _ in range(_ROOMS):
            scene.moves()
        with scene.busy(PAUSE_S), Browser(Path(name)) as browser:
            for file, agent, size in (("web-page-desk", scene.decode, DESK), ("web-page-phone", scene.prefill, PHONE)):
                is_phone = size is PHONE
                browser.has_size(*size, phone=is_phone, dark=is_phone, scale=1.5 if is_phone else 1.0)
                browser.open(f"{agent.http}/")
                until(lambda: is_drawn(browser.text()), "rates and a room")
                browser.picture(directory / f"{file}.png")
    sys.stdout.write(f"{directory}/web-page-desk.png, web-page-phone.png\n")


if __name__ == "__main__":
    main()
