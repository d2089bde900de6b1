"""Runs the agents of a DisaggDeployment on this machine, without Kubernetes: `longshore up`.

`command` parses the arguments, starts and ends everything; `fleet` sizes and starts the agents; `view` shows them.
"""

from __future__ import annotations

from longshore_cli.up.command import add_arguments, run

__all__ = ["add_arguments", "run"]
