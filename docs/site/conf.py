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

# Captions and their entries: a page, `Title <page>`, or a pattern of all pages that no other entry names. A page takes the
# longest pattern that fits it. Sphinx reports a page that is in no entry.
NAVIGATION = {
    "Start": ["docs/quickstart", "docs/concepts", "docs/compared"],
    "Run": [
        "One machine <docs/how-to/one-machine>",
        "GPUs <docs/how-to/gpus>",
        "Kubernetes <docs/how-to/kubernetes>",
        "Cluster with GPUs <docs/how-to/gpu-cluster>",
        "kind <docs/how-to/kind>",
        "Upgrade <docs/how-to/upgrade>",
        "New keys <docs/how-to/new-keys>",
        "Sizing <docs/how-to/sizing>",
        "Wires <docs/how-to/wires>",
        "RDMA <docs/how-to/rdma>",
        "MPS <docs/how-to/mps>",
        "Analyze <docs/how-to/analyze>",
        "Check <docs/how-to/check>",
        "Status <docs/how-to/status>",
        "Verify <docs/how-to/verify>",
        "Trace <docs/how-to/trace>",
        "Logs <docs/how-to/logs>",
        "Monitoring <docs/how-to/monitoring>",
        "docs/how-to/*",
    ],
    "Engines": [
        "vLLM <docs/how-to/vllm>",
        "SGLang <docs/how-to/sglang>",
        "Your own engine <docs/how-to/engines>",
        "Engines in pods <docs/how-to/engine-pods>",
    ],
    "When something fails": [
        "Find what is wrong <docs/how-to/find-faults>",
        "Dump <docs/how-to/dump>",
        "docs/troubleshooting",
        "docs/runbooks",
        "Reasons <docs/reference/reasons>",
        "Conditions <docs/reference/conditions>",
        "Faults <docs/reference/faults>",
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
    "Security and performance": [
        "docs/security",
        "docs/reference/benchmarks",
        "Programs of the benchmarks <benchmarks/README>",
        "benchmarks/*",
    ],
    "Project": ["CHANGELOG", "CONTRIBUTING", "Index of pages <docs/README>", "docs/*", "e2e/*"],
    "Design": ["docs/design/*"],
}


def navigation(found: set[str]) -> dict[str, list[str]]:
    """Return the pages of each caption. A page that `found` lacks stays in it, so that Sphinx reports it."""
    entries = [entry for part in NAVIGATION.values() for entry in part]
    named = {entry.rpartition("<")[2].rstrip(">") for entry in entries}
    pages_of: dict[str, list[str]] = {entry: [] for entry in entries if entry.endswith("*")}
    for page in sorted(found - named - {root_doc}):
        fitting = [pattern for pattern in pages_of if fnmatchcase(page, pattern)]
        if fitting:
            pages_of[max(fitting, key=len)].append(page)
    return {
        caption: [page for entry in part for page in pages_of.get(entry, [entry])]
        for caption, part in NAVIGATION.items()
    }


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Append the navigation to the first page. Its file has none, because the repository would show it as text."""
    if page == root_doc:
        for caption, pages in navigation(set(app.env.found_docs)).items():
            lines = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{lines}\n```\n"


def setup(app: Any) -> None:
    """Connect to Sphinx's events. Sphinx calls it."""
    app.connect("source-read", add_navigation)
