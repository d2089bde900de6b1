"""Keeps each rank's port and the newest epoch from one worker to the next.

Called by the supervisor. A peer finds the next life of a worker at the old address, and tells it which rooms have
failed. Peers take the life with the higher epoch for the newer one, whatever the clock says. A file in the run
directory keeps both for the agent's next life. If the file cannot be written (a full disk), they are kept in memory
only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from longshore_agent.files import write_whole
from longshore_wire.effects import PeerId
from longshore_wire.layout import TargetMemory

_log = logging.getLogger(__name__)

# Ports of ranks that have left, kept so that a rank gets its old port when it returns.
PORTS_MAX = 4096
PORT_MAX = 65535
FILE_NAME = "lives.json"


class _Port(msgspec.Struct, frozen=True, array_like=True):
    instance: str
    dp_rank: int
    rank: int
    port: int
    memory: TargetMemory = TargetMemory.DEVICE


class _Kept(msgspec.Struct, frozen=True):
    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    ports: tuple[_Port, ...] = ()


class Lives:
    """Ports by rank, and the newest epoch. `first_port` is the lowest port to assign; 0: the kernel chooses."""

    def __init__(self, directory: Path, first_port: int) -> None:
        self._path = directory / FILE_NAME
        self._first_port = first_port
        kept = self._read()
        self._epoch = kept.epoch
        ports = [each for each in kept.ports if 0 < each.port <= PORT_MAX][-PORTS_MAX:]
        self._ports = {PeerId(each.instance, each.dp_rank, each.rank, each.memory): each.port for each in ports}
        self._is_kept = True

    def next_epoch(self) -> int:
        """Return the epoch of a starting worker: the time, or one above the last epoch if the clock was set back."""
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._write()
        return self._epoch

    def choose_port(self, key: PeerId, others: Collection[PeerId]) -> int:
        """Return the port for a rank's worker; 0: any. `others` are the ranks that have a worker now."""
        port = self._ports.get(key, 0)
        if port or not self._first_port:
            return port
        used = {self._ports.get(other) for other in others}
        return next(port for port in range(self._first_port, PORT_MAX + 1) if port not in used)

    def note_port(self, key: PeerId, port: int) -> None:
        """Record the port at which a rank's worker listens."""
        if self._ports.get(key) == port:
            return
        self._ports[key] = port
        while len(self._ports) > PORTS_MAX:
            self._ports.pop(next(iter(self._ports)))
        self._write()

    def forget_port(self, key: PeerId) -> None:
        """Drop a port at which a rank's worker could not listen, since another process may have it."""
        if self._ports.pop(key, None) is not None:
            self._write()

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            # The agent works without it, but its workers do not learn how rooms of their last lives ended.
            return _Kept()

    def _write(self) -> None:
        kept = _Kept(self._epoch, tuple(_Port(*key[:3], port, key.memory) for key, port in self._ports.items()))
        try:
            # An agent may be killed at any instant.
            write_whole(self._path, msgspec.json.encode(kept))
        except OSError as error:
            if self._is_kept:
                _log.warning(
                    "%s cannot be written: %s; if this agent is killed, its next life does not know its workers' addresses",
                    self._path,
                    error.strerror,
                )
            self._is_kept = False
        else:
            self._is_kept = True
