"""Reads files with secrets; refuses a file that every user of the machine can read.

Called by `main` and `control.curve`. Does not interpret the content.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from longshore_wire.errors import ConfigError


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
