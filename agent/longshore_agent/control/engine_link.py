"""The agent's end of the engine link: sockets, framing, descriptors and the engine's identity.

Used by the supervisor (listener, first message) and by workers (`EngineLink`). Nothing here
blocks; the owner polls `fileno` and `pidfd`. This module does not interpret messages or check their order.
"""

from __future__ import annotations

import array
import errno
import fcntl
import functools
import os
import socket
import stat
import struct
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from longshore_agent.errors import EngineClosedError, EngineStuckError, ListenError
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    TO_AGENT,
    TO_ENGINE,
    RegisterPool,
    ToAgent,
    ToEngine,
)
from longshore_wire.errors import CodecError

# Unread messages of an engine: events of several thousand rooms. An engine that reads none of them is stuck.
OUTBOX_MESSAGES_MAX = 16_384
# Messages read from one engine before others get their turn.
RECEIVE_BATCH_MAX = 64
# The kernel's limit of descriptors in one message (SCM_MAX_FD).
DESCRIPTORS_MAX = 253
# Pending connections while the supervisor is busy starting a worker.
BACKLOG = 128
SOCKET_MODE = 0o660
# Linux 6.5 and later: a pidfd of the peer, also in another PID namespace, without races on reused PIDs.
SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_BYTES = array.array("i").itemsize
# As numbers: operators of flags of `enum` take as long as the system call.
_CUT_FLAGS = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_CONTROL_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR_BYTES)
_STARVED = frozenset({errno.ENOBUFS, errno.ENOMEM})


class PeerProcess(NamedTuple):
    """The process that connected, as the kernel reports it.

    Attributes:
        pid: 0 for a process that our PID namespace cannot see, such as one in another pod.
        life: a number unique among live processes, also in other PID namespaces; 0 if the kernel (before Linux 6.9) has
            none.
    """

    pid: int
    uid: int
    gid: int
    life: int = 0

    @property
    def shown(self) -> str:
        """The name of the engine in messages."""
        return f"the engine with PID {self.pid}" if self.pid else "the engine in another pod"

    def same_as(self, other: PeerProcess) -> bool:
        """Whether both are known to be the same process."""
        return (self.life or self.pid) > 0 and (self.life, self.pid) == (other.life, other.pid)


class EngineLink:
    """One engine's connection. Owns the socket. Not thread-safe.

    Attributes:
        peer: the process that connected.
        pidfd: readable once that process is dead, even if a forked child of it holds the socket; None if the
            kernel cannot provide it (an older kernel and a process in another PID namespace).
        connected_ns: when this process took the connection, on the monotonic clock.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connection.

        Raises:
            EngineClosedError: the process that connected is dead; the socket is closed.
        """
        connected.setblocking(False)
        self._socket = connected
        self._outbox: deque[bytes] = deque()
        self._ended = False
        self.connected_ns = time.monotonic_ns()
        self.peer = _credentials(connected)
        try:
            self.pidfd = open_pidfd(connected, self.peer.pid)
        except ProcessLookupError as error:
            connected.close()
            raise EngineClosedError(f"{self.peer.shown} died before it was served") from error

    def fileno(self) -> int:
        """Return the socket's descriptor; poll it for reading, and for writing while `outbox_count` is not 0."""
        return self._socket.fileno()

    @property
    def outbox_count(self) -> int:
        """Number of messages that wait for space in the socket; `flush` sends them."""
        return len(self._outbox)

    def receive(self) -> list[tuple[ToAgent, list[int]]]:
        """Return available messages, at most RECEIVE_BATCH_MAX, each with its attached descriptors.

        The caller owns the descriptors. Only RegisterPool may have any.

        Raises:
            CodecError: the framing is invalid; all descriptors of this call are closed. Close the link.
            EngineClosedError: the engine's end is closed, and all earlier messages were returned.
        """
        messages: list[tuple[ToAgent, list[int]]] = []
        try:
            while not self._ended and len(messages) < RECEIVE_BATCH_MAX:
                found = _receive(self._socket)
                if found is None:
                    break
                if not found[0]:
                    self._ended = True
                    close_all(found[1])
                    break
                messages.append(_decode(*found))
        except CodecError:
            for _, descriptors in messages:
                close_all(descriptors)
            raise
        if self._ended and not messages:
            raise EngineClosedError(f"{self.peer.shown} closed its end")
        return messages

    def send(self, message: ToEngine) -> None:
        """Send a message, or keep it for `flush`.

        Raises:
            EngineStuckError: OUTBOX_MESSAGES_MAX already wait; the message was not queued.
            EngineClosedError: the engine's end is closed.
        """
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            raise EngineStuckError(f"{self.peer.shown} has not read {len(self._outbox)} messages: is it stopped?")
        self._outbox.append(TO_ENGINE.encode(message))
        self.flush()

    def flush(self) -> bool:
        """Send as much as the socket accepts; return whether nothing is left. Raises EngineClosedError."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _STARVED:
                    return False
                raise EngineClosedError(f"{self.peer.shown} closed its end: {error}") from error
            self._outbox.popleft()
        return True

    def close(self) -> None:
        """Close the socket and the pidfd. Idempotent."""
        self._outbox.clear()
        self._socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class EngineListener:
    """The engine socket of a node, at a path to which engines connect. Not thread-safe."""

    def __init__(self, path: str) -> None:
        """Bind and listen. Replace a stale socket of a killed agent.

        Raises:
            ListenError: another agent listens there, or the path is no socket; nothing was changed.
        """
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Prevents two starting agents from removing each other's socket. Closing `folder` releases the lock.
                fcntl.flock(folder, fcntl.LOCK_EX)
                _remove_stale(path)
                # Linux gives the socket's mode to the file that bind creates, so that it is never open to all users.
                os.fchmod(self._socket.fileno(), SOCKET_MODE)
                self._socket.bind(path)
                Path(path).chmod(SOCKET_MODE)
                self._socket.listen(BACKLOG)
                self._identity = _identity(path)
            finally:
                os.close(folder)
        except OSError as error:
            self._socket.close()
            raise ListenError(f"no engine socket can be made at {path}: {error}") from error
        except ListenError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the listening descriptor; poll it for reading."""
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """Return a new non-blocking connection, or None. Raises ListenError if no descriptor is left."""
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            raise ListenError(f"{self.path}: no connection can be accepted now: {error}") from error
        connected.setblocking(False)
        return connected

    def close(self) -> None:
        """Stop listening and remove the path, unless another agent has replaced it. Idempotent."""
        if self._socket.fileno() < 0:
            return
        try:
            if _identity(self.path) == self._identity:
                Path(self.path).unlink()
        except FileNotFoundError:
            pass
        finally:
            self._socket.close()


def read_message(connected: socket.socket) -> bytes | None:
    """Return the next message of a connection undecoded, or None if there is none yet.

    Raises:
        CodecError: it is too long, or has descriptors attached.
        EngineClosedError: the other end is closed.
    """
    found = _receive(connected)
    if found is None:
        return None
    data, descriptors = found
    if descriptors:
        close_all(descriptors)
        raise CodecError("descriptors came with a first message: only RegisterPool may carry them")
    if not data:
        raise EngineClosedError("the engine closed its end before it said anything")
    return data


def close_all(descriptors: list[int]) -> None:
    """Close unused descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _receive(link: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return one datagram and its descriptors; None if there is none; empty bytes at the end of the connection."""
    try:
        data, control, flags, _ = link.recvmsg(ENGINE_MESSAGE_BYTES_MAX, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b"", []
    descriptors = array.array("i")
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A truncated list may end within a descriptor.
            descriptors.frombytes(content[: len(content) - len(content) % _DESCRIPTOR_BYTES])
    if flags & _CUT_FLAGS:
        close_all(descriptors.tolist())
        raise CodecError(
            f"a message was cut: at most {ENGINE_MESSAGE_BYTES_MAX} bytes and {DESCRIPTORS_MAX} descriptors are allowed, "
            "and no more descriptors than this process may still open"
        )
    return data, descriptors.tolist()


def _decode(data: bytes, descriptors: list[int]) -> tuple[ToAgent, list[int]]:
    try:
        message = TO_AGENT.decode(data)
        if descriptors and not isinstance(message, RegisterPool):
            raise CodecError(f"descriptors came with {type(message).__name__}: only RegisterPool may carry them")
    except CodecError:
        close_all(descriptors)
        raise
    return message, descriptors


def process_of(connected: socket.socket) -> PeerProcess:
    """Return the process that connected. Raises EngineClosedError: that process is dead."""
    peer = _credentials(connected)
    try:
        pidfd = open_pidfd(connected, peer.pid)
    except ProcessLookupError as error:
        raise EngineClosedError(f"{peer.shown} died before it was served") from error
    except OSError:
        # No descriptor is left, so its worker cannot start either.
        return peer
    if pidfd is None:
        return peer
    found = os.fstat(pidfd)
    os.close(pidfd)
    # Older kernels, where pidfds have no filesystem of their own, use one inode for all of them, as for eventfds.
    return peer._replace(life=found.st_ino if found.st_dev != _anonymous_device() else 0)


@functools.cache
def _anonymous_device() -> int:
    """Return the device number of descriptors without their own inode."""
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _credentials(connected: socket.socket) -> PeerProcess:
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerProcess(*_CREDENTIALS.unpack(packed))


def open_pidfd(connected: socket.socket, pid: int) -> int | None:
    """Return a pidfd of the process that connected. Raises ProcessLookupError if it is dead."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.ENODATA, errno.EINVAL, errno.ESRCH):
            raise
        if error.errno in (errno.ENODATA, errno.ESRCH):
            raise ProcessLookupError(errno.ESRCH, "the process is dead") from error
    return os.pidfd_open(pid) if pid > 0 else None


def _identity(path: str) -> tuple[int, int]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino


def _remove_stale(path: str) -> None:
    """Remove a socket without a listener. Raises ListenError if a process listens on it, or if it is no socket."""
    try:
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise ListenError(f"{path} is no socket: give another path, or move it away")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:
            pass  # its queue of connections is full, so it has a listener
        except OSError as error:
            raise ListenError(f"{path} cannot be probed: {error}") from error
    raise ListenError(f"an agent answers at {path} already: stop it first, or give this one another path")
