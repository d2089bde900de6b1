"""Reads the crossover table from the shipped file or from one that a setting names.

Called by the supervisor, which refuses an invalid one, and by each worker. Does not interpret the table.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from longshore_wire import crossover
from longshore_wire.crossover import Crossover
from longshore_wire.errors import ConfigError

SHIPPED = "crossover.json"


def load(path: str) -> Crossover:
    """Return the table in the file at `path`; an empty path selects the shipped one.

    Raises:
        ConfigError: the file cannot be read or is no table; names the file.
    """
    if not path:
        return crossover.read(resources.files("longshore_agent").joinpath(SHIPPED).read_bytes(), SHIPPED)
    try:
        return crossover.read(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
