"""The distribution that holds all of Longshore's packages: its name, its version, and how to install its extras."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# On the package index `longshore` is another project, with a command of the same name.
NAME = "longshore-kv"


def installed_version() -> str:
    """Return the installed version; "unknown" in a tree that is not installed."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "unknown"


def to_install(*extras: str) -> str:
    """Return what installs these extras, from the package index and from a checkout, for the end of a message."""
    listed = ",".join(extras)
    return f"pip install '{NAME}[{listed}]', or '.[{listed}]' in a checkout"


def lacking(modules: Iterable[str], *extras: str) -> str:
    """Return that some of the modules cannot be imported, and which extras have them; empty if all are there."""
    missing = [name for name in modules if find_spec(name) is None]
    if not missing:
        return ""
    # An agent needs one transport.
    other = "; in place of nixl, mooncake serves too" if "nixl" in extras else ""
    return f"{', '.join(missing)} cannot be imported: {to_install(*extras)}{other}"
