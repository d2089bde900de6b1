"""Reads the agent's secrets and its crossover table, and writes files atomically.

Called by `main`, `control.curve`, the supervisor and each worker. Does not interpret the content.
"""

from __future__ import annotations

import os
import stat
from importlib import resources
from pathlib import Path

from longshore_wire import crossover
from longshore_wire.crossover import Crossover
from longshore_wire.errors import ConfigError

SHIPPED = "crossover.json"


def read_secret(path: Path) -> bytes:
    """Return the content of the file, which may be a pipe.

    Its group may read it, since with an fsGroup Kubernetes makes the pod's group own the files of a Secret volume.

    Raises:
        OSError: the file cannot be read.
        ConfigError: all users can read it. Symlinks, as in a Secret volume, are followed.
    """
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            text = f"every user of this machine can read it (mode {stat.S_IMODE(mode):04o})"
            way_out = f"make it private with `chmod 600 {path}`, in a Secret volume with `defaultMode: 0440`"
            raise ConfigError([f"{path}: {text}: {way_out}, and replace the secret if others may have read it"])
        return file.read()


def read_crossover(path: str) -> Crossover:
    """Return the table in the file at `path`; an empty path selects the shipped one.

    Raises:
        ConfigError: the file cannot be read or is no table; names the file.
    """
    if not path:
        return crossover.read(resources.files("longshore_wire").joinpath(SHIPPED).read_bytes(), SHIPPED)
    try:
        return crossover.read(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Raises:
        OSError: the file cannot be written (for example on a full disk); the old content is kept.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
