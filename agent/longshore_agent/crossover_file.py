"""The crossover table's file: the one that ships with the agent, or another that a setting names.

Read by the supervisor, which refuses a faulty one, and by each worker. Knows where the table is, not what it says.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from longshore_wire import crossover
from longshore_wire.crossover import Crossover
from longshore_wire.errors import ConfigError

SHIPPED = "crossover.json"


def load(path: str) -> Crossover:
    """Return the table in the file at `path`; empty: the shipped one.

    Raises:
        ConfigError: the file cannot be read, or is no table; names it.
    """
    if not path:
        return crossover.read(resources.files("longshore_agent").joinpath(SHIPPED).read_bytes(), SHIPPED)
    try:
        return crossover.read(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
