"""Sphinx's configuration of the documentation site, for `make docs`.

The tree's root is the source folder, so links between pages work in the repository and in the site alike. A link to a
file that is no page becomes a download. `make docs` treats warnings as errors, so a dead link fails it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

project = "Longshore"
author = "The Longshore authors"
html_title = "Longshore"
root_doc = "README"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/**.md",
    "charts/**.md",
    "crds/**.md",
    "docs/**.md",
    "e2e/**.md",
]
exclude_patterns = [".*", "build", "dist"]

# Links name a heading's section as in the repository.
myst_heading_anchors = 4
# Indented blocks and fences without a language are commands and output.
highlight_language = "text"
copybutton_prompt_text = "$ "

# The theme has its fonts and scripts in itself, so the site works offline.
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

# Captions and their pages. A pattern stands for all pages that no other entry names.
NAVIGATION = {
    "Start": ["docs/quickstart", "docs/concepts", "docs/compared"],
    "Run": [
        "docs/how-to/one-machine",
        "docs/how-to/gpus",
        "docs/how-to/kubernetes",
        "docs/how-to/kind",
        "docs/how-to/upgrade",
        "docs/how-to/new-keys",
        "docs/how-to/sizing",
        "docs/how-to/wires",
        "docs/how-to/rdma",
        "docs/how-to/mps",
        "docs/how-to/monitoring",
        "docs/how-to/trace",
        "docs/how-to/*",
    ],
    "Engines": ["docs/how-to/engine-pods", "docs/how-to/vllm", "docs/how-to/sglang", "docs/how-to/engines"],
    "When something fails": [
        "docs/troubleshooting",
        "docs/runbooks",
        "docs/reference/conditions",
        "docs/reference/reasons",
        "docs/reference/faults",
    ],
    "Reference": [
        "docs/reference/disaggdeployment",
        "docs/reference/cli",
        "docs/reference/http",
        "docs/reference/settings",
        "docs/reference/metrics",
        "docs/reference/operator",
        "docs/reference/*",
        "charts/*",
        "crds/*",
    ],
    "Security and performance": ["docs/security", "docs/reference/benchmarks", "benchmarks/*"],
    "Project": ["CHANGELOG", "CONTRIBUTING", "e2e/*", "docs/*"],
    "Design": ["docs/design/*"],
}


def navigation(found: set[str]) -> dict[str, list[str]]:
    """Return the pages of each caption. A page that `found` lacks stays in it, so that Sphinx reports it."""
    named = {entry for entries in NAVIGATION.values() for entry in entries if not entry.endswith("*")}
    left = sorted(found - named - {root_doc})
    chosen: dict[str, list[str]] = {}
    # A more special pattern takes its pages before `docs/*` does.
    patterns = sorted({entry for entries in NAVIGATION.values() for entry in entries if entry.endswith("*")}, key=len)
    pages_of: dict[str, list[str]] = {}
    for pattern in reversed(patterns):
        pages_of[pattern] = [page for page in left if fnmatchcase(page, pattern)]
        left = [page for page in left if page not in pages_of[pattern]]
    for caption, entries in NAVIGATION.items():
        chosen[caption] = [page for entry in entries for page in pages_of.get(entry, [entry])]
    return chosen


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Append the navigation to the first page. Its file has none, because the repository would show it as text."""
    if page == root_doc:
        for caption, pages in navigation(set(app.env.found_docs)).items():
            lines = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{lines}\n```\n"


def setup(app: Any) -> None:
    """Connect to Sphinx's events. Sphinx calls it."""
    app.connect("source-read", add_navigation)
