"""Sends and receives messages and descriptors over one socket to the agent.

Used by `connection.Connection` only. It does not interpret messages.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import stat
from collections import deque
from pathlib import Path

from longshore_client.calls import Outgoing
from longshore_wire.engine_messages import ENGINE_MESSAGE_BYTES_MAX, TO_ENGINE, ToEngine
from longshore_wire.errors import CodecError
from longshore_wire.names import AGENT_USER_ID

# Messages read before callers get the lock again.
RECEIVE_BATCH_MAX = 64
_STARVED = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_REMEDY = (
    f"give the engine's pod securityContext.supplementalGroups: [{AGENT_USER_ID}], or on a machine of your own the group "
    "of the agent; if it has that group, SELinux or AppArmor refuses it"
)


class ConnectionEndedError(ConnectionError):
    """The agent's end of the socket is closed."""


class AgentSocket:
    """A connected, non-blocking SOCK_SEQPACKET socket. Not thread-safe: its owner locks.

    Attributes:
        starved: the kernel had no memory for the first message of the outbox; try again after a pause.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.starved = False

    @classmethod
    def dial(cls, path: str) -> AgentSocket:
        """Connect to an agent. Raises OSError; a PermissionError says what this process lacks."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connected.setblocking(False)
            connected.connect(path)
        except PermissionError as error:
            connected.close()
            raise PermissionError(_what_is_lacking(path)) from error
        except OSError:
            connected.close()
            raise
        return cls(connected)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def flush(self, outbox: deque[Outgoing]) -> None:
        """Send as many messages as the socket accepts and remove them from `outbox`. Raises OSError if it is closed."""
        self.starved = False
        while outbox:
            data, descriptors = outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _STARVED:
                    raise
                self.starved = True
                return
            outbox.popleft()

    def receive(self) -> list[ToEngine]:
        """Return available messages, at most RECEIVE_BATCH_MAX.

        Raises:
            ConnectionEndedError, OSError: the connection is closed.
            CodecError: the agent sent an invalid message.
        """
        messages: list[ToEngine] = []
        while len(messages) < RECEIVE_BATCH_MAX:
            try:
                # With no space for control data, the kernel closes descriptors, which an agent must not send.
                data, _, flags, _ = self._socket.recvmsg(ENGINE_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            if flags & socket.MSG_TRUNC:
                raise CodecError(f"a message above {ENGINE_MESSAGE_BYTES_MAX} bytes")
            if not data:
                if messages:
                    break  # the end stays readable, so the next call reports it
                raise ConnectionEndedError("the agent closed the connection")
            messages.append(TO_ENGINE.decode(data))
        return messages

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def _what_is_lacking(path: str) -> str:
    """Return why the kernel does not let this process connect, and the remedy."""
    own = f"user {os.geteuid()}, groups {', '.join(map(str, sorted({os.getegid(), *os.getgroups()})))}"
    try:
        found = Path(path).stat()
    except OSError:
        # The socket's folder is closed to this process.
        return f"{path} is not accessible to this process ({own}): {_REMEDY}"
    return (
        f"{path} is for user {found.st_uid} and group {found.st_gid} (mode {stat.S_IMODE(found.st_mode):04o}), "
        f"and this process has {own}: {_REMEDY}"
    )
