"""The command `longshore-operator`: names the extra to install if a library of the operator is missing, else runs `main`."""

from __future__ import annotations

import sys

from longshore_spec import distribution

REQUIRED = ("aiohttp", "cryptography", "kopf", "kubernetes", "msgspec", "prometheus_client", "urllib3", "yaml")
_EXIT_NOT_INSTALLED = 2


def main() -> int:
    """Run the operator; return its exit status: 2 if it is not installed."""
    if fault := distribution.lacking(REQUIRED, "operator"):
        sys.stderr.write(f"longshore-operator: {fault}\n")
        return _EXIT_NOT_INSTALLED
    from longshore_operator import main as program

    return program.main()
