"""Reads a file that holds a secret; refuses one that every user of the machine can read.

Called by `main` and `control.curve`. Knows nothing of the content.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from longshore_wire.errors import ConfigError


def read_secret(path: Path) -> bytes:
    """Return the content of the file, which may be a pipe.

    A group may read it: with an fsGroup, Kubernetes gives the files of a Secret volume to the pod's group.

    Raises:
        OSError: it cannot be read.
        ConfigError: all users can read it. Symlinks, which a Secret volume is made of, are followed.
    """
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            text = f"every user of this machine can read it (mode {stat.S_IMODE(mode):04o})"
            way_out = f"make it private with `chmod 600 {path}`, in a Secret volume with `defaultMode: 0440`"
            raise ConfigError([f"{path}: {text}: {way_out}, and replace the secret if others may have read it"])
        return file.read()
