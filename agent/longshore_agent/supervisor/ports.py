"""Where each rank's worker listens, over the lives of its workers and of the agent itself.

Used by the supervisor. A peer finds the next life of a worker at the old address, and tells it which rooms have failed;
an agent that was killed must not lose the addresses, so they are in a file of its run directory until it ends in order.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from longshore_agent.supervisor.slots import SlotKey
from longshore_agent.whole_file import write_whole

# Ports of ranks that have left, kept so that a rank that comes back is found where it was.
PORTS_MAX = 4096
PORT_MAX = 65535
FILE_NAME = "ports.json"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    instance: str
    dp_rank: int
    rank: int
    port: int


class Ports:
    """Ports by rank; `first` is the lowest to give, 0: the kernel chooses."""

    def __init__(self, directory: Path, first: int) -> None:
        self._path = directory / FILE_NAME
        self._first = first
        self._ports = {SlotKey(kept.instance, kept.dp_rank, kept.rank): kept.port for kept in self._read()}

    def choose(self, key: SlotKey, others: Collection[SlotKey]) -> int:
        """Return the port at which a rank's worker is to listen; 0: any. `others` are the ranks that have one now."""
        port = self._ports.get(key, 0)
        if port or not self._first:
            return port
        used = {self._ports.get(other) for other in others}
        return next(port for port in range(self._first, PORT_MAX + 1) if port not in used)

    def note(self, key: SlotKey, port: int) -> None:
        """A rank's worker listens there."""
        if self._ports.get(key) == port:
            return
        self._ports[key] = port
        while len(self._ports) > PORTS_MAX:
            self._ports.pop(next(iter(self._ports)))
        self._write()

    def forget(self, key: SlotKey) -> None:
        """A rank's worker could not listen where it should: perhaps somebody else has its port now."""
        if self._ports.pop(key, None) is not None:
            self._write()

    def close(self) -> None:
        """No room is open any more: nobody will look for a worker at its old address."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> list[_Kept]:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=list[_Kept])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            # An agent without old addresses works; only rooms of its last life are not told of their end.
            return []
        return [kept for kept in found if 0 < kept.port <= PORT_MAX][-PORTS_MAX:]

    def _write(self) -> None:
        kept = [_Kept(*key, port) for key, port in self._ports.items()]
        # An agent may be killed at any instant.
        write_whole(self._path, msgspec.json.encode(kept))
