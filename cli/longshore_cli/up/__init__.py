"""`longshore up`: the agents that a DisaggDeployment asks for, on this machine, without Kubernetes.

`command` reads the arguments and owns the life of everything; `fleet` sizes and starts the agents; `view` shows them.
"""

from __future__ import annotations

from longshore_cli.up.command import add_arguments, run

__all__ = ["add_arguments", "run"]
