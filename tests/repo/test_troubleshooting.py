"""Messages that documentation pages quote must be in the code, so that users find a reworded message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree_of_files import ROOT, modules

# Page -> least number of quoted pieces.
PAGES = {
    ROOT / "docs" / "troubleshooting.md": 40,
    ROOT / "docs" / "how-to" / "gpus.md": 10,
    ROOT / "docs" / "how-to" / "mps.md": 10,
}
# Messages of the system, not of our code.
OTHERS = {
    "No such file or directory",
    "Connection refused",
    "No space left on device",
    "Too many open files",
    "way",
    "TCP",
}
PACKAGES = ("wire/", "spec/", "client/", "engines/", "agent/", "operator/", "cli/", "lab/")


def quoted(page: Path) -> list[str]:
    """Return every piece of text in the first cells of a page's tables, cut at names and numbers."""
    cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| ")]
    words = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece.strip(" :") for word in words for piece in word.split("…")]
    return [piece for piece in pieces if len(piece) > 2 and piece not in OTHERS and not piece.startswith("/v1/")]


def said() -> str:
    """Return all texts of our programs, and their metrics. Messages that span several lines are joined."""
    texts = [module.text for module in modules() if str(module.path).startswith(PACKAGES)]
    texts.append((ROOT / "docs" / "reference" / "metrics.md").read_text())
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_message_that_a_page_quotes_is_one_of_the_programs(page: Path) -> None:
    pieces, text = quoted(page), said()
    assert len(pieces) > PAGES[page]
    assert [piece for piece in pieces if piece not in text] == []


def test_a_message_that_nobody_says_is_found() -> None:
    assert "the moon is in the way" not in said()
