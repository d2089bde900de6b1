"""The command lines of the documentation's pages, and how tests type them. Used by the tests."""

from __future__ import annotations

import re

from cluster_site import Site
from deployments import ROOT

# `make images` gives the images this prefix.
REGISTRY = "localhost"


def commands(page: str, begin: str, end: str = "\n## ") -> list[str]:
    """Return the command lines of helm and kubectl in a part of a page, without the backslashes between their lines."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    code = re.sub(r"\\\n", " ", text)
    return re.findall(r"^(?: {4,}|\$ )((?:helm|kubectl) .*)$", code, re.MULTILINE)


def typed(site: Site, *lines: str, **values: str) -> list[str]:
    """Type command lines with `values` for their placeholders; return what they printed."""
    found = []
    for line in lines:
        text = line.replace("<registry>", REGISTRY)
        for name, value in values.items():
            text = text.replace(f"<{name}>", value)
        found.append(site.type(text))
    return found
