"""Messages between the supervisor and its workers over a socket pair, with attached file descriptors.

Datagrams of at most 64 KiB; longer bodies (snapshots) are split. Both ends are of one release, so there is no version.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque

import msgspec

from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import DeviceRegion, Endpoint, Half, Hello
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import RoomKey

DATAGRAM_BYTES_MAX = 64 << 10
# Size of one part. A snapshot at all of its limits stays below 8 MiB.
PART_BYTES = 48 << 10
ALL_POOLS = -1


class AdoptEngine(msgspec.Struct, tag=1):
    """To a worker: the connection of its engine, as an attached descriptor. `hello` was already read."""

    hello: Hello


class EndpointKnown(msgspec.Struct, tag=2):
    """To a worker: the ranks of its engine's instance that are known so far."""

    endpoint: Endpoint


class SnapshotWanted(msgspec.Struct, tag=3):
    """To a worker: answer with SnapshotParts. `room`: include its spans."""

    number: int
    room: str | None


class SiblingLost(msgspec.Struct, tag=5):
    """To a worker: a sibling rank's worker or engine is gone; fail every claimed room, since each has a piece on it."""

    reason: Reason
    text: str


class Drain(msgspec.Struct, tag=6):
    """To a worker: finish open rooms within the limit, then stop."""

    limit_s: float


class PoolWanted(msgspec.Struct, tag=7):
    """From a worker to another of this node, whose pages it wants to write. Answered by PoolRegion."""

    owner: PeerId
    asker: PeerId
    cache: int


class PoolRegion(msgspec.Struct, tag=8):
    """From a pool's owner to a worker that asked for it: one region of `count`.

    Attributes:
        count: 0: the pool is not registered, or its owner is not there.
        index: which region it is.
        region: of a GPU's memory; None: the region's descriptor comes beside.
    """

    owner: PeerId
    asker: PeerId
    cache: int
    count: int
    index: int = 0
    region: DeviceRegion | None = None


class PoolGone(msgspec.Struct, tag=9):
    """From a pool's owner to all other workers of this node: unmap it. Answered by PoolUnmapped.

    Attributes:
        cache: ALL_POOLS means all; the supervisor says so of a worker that has ended.
    """

    owner: PeerId
    cache: int


class PoolUnmapped(msgspec.Struct, tag=10):
    """From a worker: it has unmapped what PoolGone named. To the pool's owner: so have all that had it mapped."""

    owner: PeerId
    cache: int


class Started(msgspec.Struct, tag=16):
    """From a worker: staging is allocated and registered, peers may dial.

    Attributes:
        near: the endpoints' name of the agent whose engines may write its pages by way DIRECT; empty if none may.
    """

    address: str
    epoch: int
    near: str


class NotStarted(msgspec.Struct, tag=26):
    """From a worker, its only message: it cannot serve its engine, for this reason."""

    reason: Reason
    text: str


class EngineAdopted(msgspec.Struct, tag=17):
    """From a worker: its engine has received Welcome."""


class EngineLeft(msgspec.Struct, tag=18):
    """From a worker: its engine is gone; the worker drains and stops."""

    reason: Reason
    text: str


class Retiring(msgspec.Struct, tag=25):
    """From a worker: only its end proves its memory free. It accepts no new rooms and ends after the open ones."""

    text: str


class Failed(msgspec.Struct, tag=28):
    """From a worker: its device has failed or hangs. It notifies its engine and peers, and ends at once."""

    text: str


class RoomFailed(msgspec.Struct, tag=19):
    """From a worker: it has failed a room. To the workers of its sibling ranks: fail it, too.

    `capability` is that of the request, if a target ended the room before the worker's engine offered it. It is None if the
    room is every request's.
    """

    half: Half
    key: RoomKey
    reason: Reason
    text: str
    capability: bytes | None = None


# The number of the snapshot that a worker sends at its end.
LAST_SNAPSHOT = 0


class SnapshotPart(msgspec.Struct, tag=20):
    """From a worker: one part of an encoded WorkerSnapshot. `number` is that of SnapshotWanted, or LAST_SNAPSHOT."""

    number: int
    last: bool
    data: bytes


class RoomReported(msgspec.Struct, tag=27):
    """From a worker: a part of the report on a room that has ended, for OpenTelemetry; see `status.room_report`."""

    data: bytes
    span_count: int


# The supervisor forwards these to the worker of the PeerId that they are for.
PoolMessage = PoolWanted | PoolRegion | PoolGone | PoolUnmapped
ToWorker = AdoptEngine | EndpointKnown | SnapshotWanted | RoomFailed | SiblingLost | Drain | PoolMessage
FromWorker = (
    Started
    | NotStarted
    | EngineAdopted
    | EngineLeft
    | Retiring
    | Failed
    | RoomFailed
    | RoomReported
    | SnapshotPart
    | PoolMessage
)
NodeMessage = ToWorker | FromWorker

_DECODER = msgspec.msgpack.Decoder(NodeMessage)
_ENCODER = msgspec.msgpack.Encoder()


class NodeLink:
    """One end of the socket pair. Non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages wait to be sent by `flush`."""
        return bool(self._outbox)

    def send(self, message: NodeMessage, descriptor: int | None = None) -> None:
        """Send, or keep for `flush`. The caller keeps the descriptor and may close it afterwards."""
        data = _ENCODER.encode(message)
        assert len(data) <= DATAGRAM_BYTES_MAX, f"{type(message).__name__} of {len(data)} bytes"
        if self._outbox or not self._transmit(data, descriptor):
            self._outbox.append((data, _kept(descriptor)))

    def offer(self, message: NodeMessage) -> bool:
        """Send now, or not at all; return whether the message was sent. Any thread may call this."""
        return self._transmit(msgspec.msgpack.encode(message), None)

    def flush(self) -> None:
        """Send waiting messages."""
        while self._outbox and self._transmit(*self._outbox[0]):
            _, descriptor = self._outbox.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _transmit(self, data: bytes, descriptor: int | None) -> bool:
        """Send one message; return False if it must wait, or if the other end is closed."""
        held = [] if descriptor is None else [descriptor]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))] if held else []
        try:
            self._socket.sendmsg([data], rights)
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            return False
        return True

    def receive(self) -> list[tuple[NodeMessage, int | None]]:
        """Return received messages, each with its descriptor, if any. Sets `closed` at the end of the connection."""
        received: list[tuple[NodeMessage, int | None]] = []
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return received
            except ConnectionResetError:
                # The other end was closed before it had read everything. Its sent messages follow, and then the end.
                self.closed = True
                continue
            except OSError:
                self.closed = True
                return received
            if not data:
                self.closed = True
                return received
            descriptor = None
            for level, kind, content in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptor = array.array("i", content)[0]
            received.append((_DECODER.decode(data), descriptor))

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        for _, descriptor in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        self._socket.close()


def _kept(descriptor: int | None) -> int | None:
    """Return a duplicate, or None if no descriptor is left: the message then goes alone, and its reader refuses it."""
    if descriptor is None:
        return None
    try:
        return os.dup(descriptor)
    except OSError:
        return None


def snapshot_parts(number: int, body: bytes) -> list[SnapshotPart]:
    """Split an encoded snapshot into messages."""
    offsets = range(0, max(len(body), 1), PART_BYTES)
    return [
        SnapshotPart(number, offset + PART_BYTES >= len(body), body[offset : offset + PART_BYTES]) for offset in offsets
    ]
