"""Tells whether a GPU is shared by CUDA's Multi-Process Service (MPS), and refuses one that is not where that is required.

Called by `worker.resources` at a worker's start. A process becomes a client of MPS when the driver is initialized, if a
daemon answers in the pipe directory; otherwise the driver falls back to time-slicing without an error. This module starts
no daemon: the cluster or an administrator does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda
from longshore_spec.names import MPS_PIPE_VARIABLE
from longshore_wire.errors import Reason
from longshore_wire.names import ENVIRONMENT_PREFIX

# The driver's directory if the environment names none.
_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - the driver's choice
# The daemon's end of the first connection of each client.
_CONTROL = "control"


class MpsError(DeviceError):
    """A GPU is not shared by MPS although that is required; names the GPU and the pipe directory."""

    reason = Reason.UNSUPPORTED


def is_client(device: cuda.Device) -> bool | None:
    """Return whether this process uses the device as a client of MPS; None: the driver does not tell (before CUDA 12.4)."""
    found = device.attribute(cuda.MPS_ENABLED)
    return None if found is None else bool(found)


def require(device: cuda.Device, environment: Mapping[str, str] = os.environ) -> None:
    """Return if this process uses the device as a client of MPS.

    Args:
        environment: that in which the driver was initialized.
    Raises:
        MpsError: it does not, or the driver does not tell.
    """
    shared = is_client(device)
    if shared:
        return
    directory = environment.get(MPS_PIPE_VARIABLE) or _DEFAULT_DIRECTORY
    why = "the driver does not tell: it is older than CUDA 12.4" if shared is None else _trouble(Path(directory))
    raise MpsError(
        f"{device.name} is not shared by MPS (pipe directory {directory}: {why}), and {ENVIRONMENT_PREFIX}GPU_MPS=true "
        f"(gpu.mps) requires it: start nvidia-cuda-mps-control on this node with that {MPS_PIPE_VARIABLE}, give the agent "
        f"the directory and the variable, or set {ENVIRONMENT_PREFIX}GPU_MPS=false"
    )


def _trouble(directory: Path) -> str:
    """Return why no daemon was found there, as far as the files tell."""
    try:
        known = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return error.strerror or type(error).__name__
    return "no daemon answers there" if _CONTROL in known else "no daemon has made its pipes there"
