"""The command `longshore-agent`: names the extra to install if a library of the agent is missing, else runs `main`."""

from __future__ import annotations

import sys

from longshore_spec import distribution

# Imports of the agent without a transport and without a GPU.
REQUIRED = ("fastapi", "llvmlite", "msgspec", "numpy", "pydantic", "starlette", "uvicorn", "yaml", "zmq")
_EXIT_NOT_INSTALLED = 2


def main() -> int:
    """Run the agent; return its exit status: 2 if it is not installed."""
    if fault := distribution.lacking(REQUIRED, "agent", "nixl"):
        sys.stderr.write(f"longshore-agent: {fault}\n")
        return _EXIT_NOT_INSTALLED
    from longshore_agent import main as program

    return program.main()
