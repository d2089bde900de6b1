"""The command `longshore-operator`: names the extra to install if a library of the operator is missing, else runs `main`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

REQUIRED = ("aiohttp", "cryptography", "kopf", "kubernetes", "msgspec", "prometheus_client", "urllib3", "yaml")
_EXIT_NOT_INSTALLED = 2


def main() -> int:
    """Run the operator; return its exit status: 2 if it is not installed."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"longshore-operator: {', '.join(missing)} cannot be imported: install longshore[operator]\n")
        return _EXIT_NOT_INSTALLED
    from longshore_operator import main as program

    return program.main()
