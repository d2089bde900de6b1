"""ZeroMQ between workers: one ROUTER to which decode workers dial, one DEALER for each source that this worker dials.

Moves encoded messages only; knows who is at the other end of a route once an Attach has said so. A message that
cannot be sent at once is dropped and counted: the protocol core repeats what is not answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

import zmq

from longshore_agent.control.curve import CurveKeys, Gatekeeper, KeyRing
from longshore_agent.control.doors import Door, join, split
from longshore_agent.errors import TransportError
from longshore_wire.codec import PEER, PEER_MESSAGE_BYTES_MAX
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.errors import CodecError
from longshore_wire.peer_messages import Attach, PeerMessage, Ping, Pong, Refuse

# Messages that wait in ZeroMQ for one peer; beyond it the peer is slow and repeats would only pile up.
QUEUE_MESSAGES_MAX = 10_000
# What one turn of the loop takes from one socket, so that lanes and engines get their turn.
MESSAGES_PER_TURN_MAX = 512

# Refused peers whose last route is kept: they ask once a second, and there are a few of them at most.
_REFUSED_MAX = 1024
# A message somewhat beyond the codec's limit is counted there; a longer one costs its sender the connection.
_RECEIVED_BYTES_MAX = 2 * PEER_MESSAGE_BYTES_MAX


class Received(NamedTuple):
    """One message; `half` is the half of ours that it is for."""

    half: Half
    peer: PeerId
    message: PeerMessage


class PeerNet:
    """All connections of one worker to workers of other instances."""

    def __init__(self, host: str, port: int, route: str, keys: KeyRing | None) -> None:
        """Listen at once.

        Args:
            host, port: where peers dial; port 0 takes a free one. Peers that know the previous keys only find a port beside.
            route: unique name of this worker's life, at most 240 bytes.
            keys: None: no encryption, for loopback addresses only.
        Raises:
            TransportError: the address cannot be bound.
        """
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._route = route
        self._dial_count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, keys) if keys is not None else None
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # The port that was asked for is the newest keys'.
        self.address = join(
            self._listen(host, port if number == 0 else 0, revision)
            for number, revision in enumerate(keys.revisions if keys is not None else (None,))
        )
        self._dealers: dict[PeerId, zmq.Socket[bytes]] = {}
        self._dialled: dict[zmq.Socket[bytes], PeerId] = {}
        self._routes: dict[PeerId, bytes] = {}
        self._peers: dict[bytes, PeerId] = {}
        self._epochs: dict[PeerId, int] = {}
        # Where the last Attach of a life came from that is not served, so that refusals find it.
        self._refused: dict[PeerId, bytes] = {}
        self.poller = zmq.Poller()
        self.poller.register(self._router, zmq.POLLIN)

    @property
    def refused_count(self) -> int:
        """Connections refused because of their key."""
        return self._gatekeeper.refused_count if self._gatekeeper is not None else 0

    def dial(self, peer: PeerId, address: str) -> None:
        """Open a connection to a source worker, in place of an older one.

        Raises:
            TransportError: the address cannot be dialled, or no key there is one of ours.
        """
        self.hang_up(peer)
        place, keys = self._choose(peer, address)
        dealer = self._socket(zmq.DEALER)
        # A name for each connection: where an old one lingers, or comes back late, a shared name would be taken over by
        # it, and what the new one says would be lost for good.
        self._dial_count += 1
        dealer.setsockopt(zmq.ROUTING_ID, f"{self._route}/{self._dial_count}".encode())
        if keys is not None:
            dealer.curve_serverkey = keys.server_public.encode()
            dealer.curve_publickey = keys.client_public.encode()
            dealer.curve_secretkey = keys.client_secret.encode()
        try:
            dealer.connect(f"tcp://{place}")
        except zmq.ZMQError as error:
            dealer.close()
            raise TransportError(f"cannot dial {peer.instance} rank {peer.rank} at {address!r}: {error}") from error
        self._dealers[peer], self._dialled[dealer] = dealer, peer
        self.poller.register(dealer, zmq.POLLIN)

    def hang_up(self, peer: PeerId) -> None:
        """Close the connection to a source worker, if there is one."""
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self._dialled.pop(dealer)
            self.poller.unregister(dealer)
            # Nobody is to hear what is still unsent: it was meant for a life that is over.
            dealer.close(linger=0)

    def forget(self, peer: PeerId, epoch: int) -> None:
        """Forget the route to a life of a target worker that is gone. Its next life may have said Attach already."""
        if peer in self._routes and self._epochs[peer] == epoch:
            self._peers.pop(self._routes.pop(peer), None)
            del self._epochs[peer]

    def send(self, half: Half, peer: PeerId, message: PeerMessage) -> None:
        """Send now or not at all: as the target that dialled `peer`, or as the source that was dialled by it."""
        try:
            data = PEER.encode(message)
            if half is Half.TARGET and peer in self._dealers:
                self._dealers[peer].send(data, zmq.NOBLOCK)
            elif half is Half.SOURCE and isinstance(message, Refuse):
                self._refuse(peer, message, data)
            elif half is Half.SOURCE and peer in self._routes:
                self._router.send_multipart([self._routes[peer], data], zmq.NOBLOCK)
            else:
                self.counters["unroutable"] += 1
        except zmq.ZMQError:
            self.counters["unsent"] += 1

    def receive(self, ready: Container[object]) -> list[Received]:
        """Return what has come on the sockets that are `ready`, decoded; what is no message is counted and dropped."""
        received: list[Received] = []
        for _ in range(MESSAGES_PER_TURN_MAX if self._router in ready else 0):
            try:
                route, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                self.counters["refused.MALFORMED_MESSAGE"] += 1
                continue
            self._take(None, route, data, received)
        for dealer, peer in [item for item in self._dialled.items() if item[0] in ready]:
            for _ in range(MESSAGES_PER_TURN_MAX):
                try:
                    data = dealer.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(peer, b"", data, received)
        return received

    def close(self) -> None:
        """Close every connection; what is not sent yet is given a moment."""
        for dealer in getattr(self, "_dealers", {}).values():
            dealer.close()
        self._router.close()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()

    def _listen(self, host: str, port: int, keys: CurveKeys | None) -> Door:
        """Bind one more address, whose server key is that of `keys`: ZeroMQ takes a socket's keys when it binds."""
        if keys is not None:
            self._router.curve_server = True
            self._router.curve_secretkey = keys.server_secret.encode()
            self._router.curve_publickey = keys.server_public.encode()
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen on {host}:{port}: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        return Door(endpoint.removeprefix("tcp://"), keys.fingerprint if keys is not None else "")

    def _choose(self, peer: PeerId, address: str) -> tuple[str, CurveKeys | None]:
        """Return where to dial a peer and with which of our keys: the newest ones that both sides have."""
        doors = split(address)
        if self._keys is None or not any(door.key for door in doors):
            return doors[0].address, self._keys.current if self._keys is not None else None
        for door in doors:
            if (keys := self._keys.named(door.key)) is not None:
                return door.address, keys
        raise TransportError(
            f"{peer.instance} rank {peer.rank} listens with other keys ({', '.join(door.key for door in doors)}) than this "
            f"agent has ({', '.join(keys.fingerprint for keys in self._keys.revisions)}): both need keys of one revision of "
            "their deployment"
        )

    def _take(self, dialled: PeerId | None, route: bytes, data: bytes, received: list[Received]) -> None:
        try:
            message = PEER.decode(data)
        except CodecError as error:
            self.counters[f"refused.{error.reason.name}"] += 1
            return
        if dialled is not None:
            received.append(Received(Half.TARGET, dialled, message))
            return
        peer = self._peers.get(route)
        if isinstance(message, Attach):
            peer = self._learn_route(route, message)
        if peer is None:
            self.counters["stale.Unattached"] += 1
            if isinstance(message, Ping):
                # It knew an earlier life of this worker: epoch 0 tells it to attach again.
                self._answer(route, PEER.encode(Pong(0)))
            return
        received.append(Received(Half.SOURCE, peer, message))

    def _answer(self, route: bytes, data: bytes) -> None:
        """Answer at once or not at all: who asked may have hung up before we came to read it."""
        try:
            self._router.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters["unsent"] += 1

    def _refuse(self, peer: PeerId, refusal: Refuse, data: bytes) -> None:
        """Answer the life that was refused; it has no route any more, so that another life may have it."""
        if self._epochs.get(peer) == refusal.epoch:
            self._note_refused(peer, self._routes[peer])
            self.forget(peer, refusal.epoch)
        if peer in self._refused:
            self._router.send_multipart([self._refused[peer], data], zmq.NOBLOCK)
        else:
            self.counters["unroutable"] += 1

    def _note_refused(self, peer: PeerId, route: bytes) -> None:
        self._refused.pop(peer, None)
        self._refused[peer] = route
        while len(self._refused) > _REFUSED_MAX:
            self._refused.pop(next(iter(self._refused)))

    def _learn_route(self, route: bytes, attach: Attach) -> PeerId:
        """Note where a life of a target is; one older than the known one takes nothing from it."""
        peer = PeerId(attach.instance, attach.layout.parallel.dp_rank, attach.layout.rank)
        old = self._routes.get(peer)
        if old is not None and self._epochs[peer] > attach.epoch:
            self._note_refused(peer, route)
            return peer
        if old is not None and old != route:
            self._peers.pop(old, None)
        self._routes[peer], self._peers[route], self._epochs[peer] = route, peer, attach.epoch
        return peer

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, _RECEIVED_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, 0)
        return socket
