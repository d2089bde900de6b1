"""Checks a cluster before and after an installation: `longshore check`.

`command` parses the arguments; `reading` asks the cluster and the agents; the other modules judge the answers, and are pure.
"""

from __future__ import annotations

from longshore_cli.check.command import add_arguments, run

__all__ = ["add_arguments", "run"]
