"""`longshore demo`: real agents and real engines on this machine move KV between unequal layouts, and all is compared.

`command` reads the arguments and owns the life of everything; `cluster` starts processes; `prompts` are what is asked;
`pair` runs one pair of layouts; `compare` judges; `table` prints.
"""

from __future__ import annotations

from longshore_lab.demo.command import add_arguments, run

__all__ = ["add_arguments", "run"]
