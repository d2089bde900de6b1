"""Moves KV between unequal layouts with real agents and engines on this machine, and compares all of it: `longshore demo`.

`command` parses the arguments, starts and ends everything; `cluster` runs processes; `prompts` makes requests; `pair` runs
one pair of layouts; `caches` moves requests of several caches; `compare` checks bytes and tokens; `table` prints.
"""

from __future__ import annotations

from longshore_lab.demo.command import add_arguments, run

__all__ = ["add_arguments", "run"]
