"""Writes what support needs to know of a cluster into one file, without secrets: `longshore dump`.

`command` parses the arguments; `reading` asks the cluster and the agents; `clean` removes what may be secret, and is pure;
`bundle` writes the file.
"""

from __future__ import annotations

from longshore_cli.dump.command import add_arguments, run

__all__ = ["add_arguments", "run"]
