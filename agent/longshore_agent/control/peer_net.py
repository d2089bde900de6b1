"""Connects workers over ZeroMQ: one ROUTER for decode workers that dial us, one DEALER for each source that we dial.

Called by the worker's control thread. Moves encoded messages only, and learns the peer of a route from its Attach. A
message that cannot be sent at once is dropped and counted: the protocol core repeats unanswered messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from longshore_agent.control.curve import CurveKeys, Gatekeeper, KeyRing
from longshore_agent.errors import TransportError
from longshore_wire.addresses import Listener, join, split
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.errors import CodecError, Reason
from longshore_wire.peer_messages import PEER, PEER_MESSAGE_BYTES_MAX, Attach, PeerMessage, Ping, Pong, Refuse

# Messages that ZeroMQ queues for one peer. More would only be repeats for a slow peer.
QUEUE_MESSAGES_MAX = 10_000
# Messages that one turn of the loop reads from one socket, so that lanes and engines get their turn.
MESSAGES_PER_TURN_MAX = 512

# ZeroMQ's sockets of one worker: one for each source that it dials.
_SOCKETS_MAX = 8192
# Refused peers whose last route is kept. They retry once a second, and normally there are few.
_REFUSED_MAX = 1024
# A connection that has not greeted within this time is closed, so that strangers hold few descriptors.
HANDSHAKE_MS = 5_000
# The codec counts messages up to this size that exceed its limit. For longer ones ZeroMQ closes the connection.
_RECEIVED_BYTES_MAX = 2 * PEER_MESSAGE_BYTES_MAX


def nobody(addresses: Collection[str]) -> None:
    """Admit no address, for a worker without data ports."""
    del addresses


class Received(NamedTuple):
    """One message; `half` is our half that receives it."""

    half: Half
    peer: PeerId
    message: PeerMessage


@dataclass(eq=False)
class Dialled:
    """The source worker of a socket.

    Attributes:
        greeted: the handshake has succeeded.
        attach: our newest Attach to it, which waits for the handshake.
    """

    peer: PeerId
    host: str
    greeted: bool = False
    attach: bytes = b""


class PeerNet:
    """All connections of one worker to workers of other instances."""

    def __init__(
        self, host: str, port: int, route: str, keys: KeyRing | None, admit: Callable[[Collection[str]], None] = nobody
    ) -> None:
        """Bind the listeners.

        Args:
            host, port: the address for peers; port 0 selects a free one. The previous keys have a separate port.
            route: unique name of this worker's life, at most 240 bytes.
            keys: None for no encryption, on loopback addresses only.
            admit: called with the addresses of all peers whose handshakes have succeeded when they change: before we send
                to a new peer, and before `receive` returns its messages.
        Raises:
            TransportError: the address cannot be bound.
        """
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._host = host
        self._route = route
        self._admit = admit
        # Hosts of admitted peers, by the socket that dialled the peer or by the route of its Attach.
        self._addresses: dict[zmq.Socket[bytes] | bytes, str] = {}
        self._dial_count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        self._gatekeeper = Gatekeeper(self._context, keys) if keys is not None else None
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # The configured port uses the newest keys.
        self.address = join(
            self._listen(host, port if number == 0 else 0, revision)
            for number, revision in enumerate(keys.revisions if keys is not None else (None,))
        )
        self._dealers: dict[PeerId, zmq.Socket[bytes]] = {}
        self._dialled: dict[zmq.Socket[bytes], Dialled] = {}
        self._routes: dict[PeerId, bytes] = {}
        self._peers: dict[bytes, PeerId] = {}
        self._epochs: dict[PeerId, int] = {}
        # Routes of the last Attach of refused lives, for their Refuse.
        self._refused: dict[PeerId, bytes] = {}
        self.poller = zmq.Poller()
        self.poller.register(self._router, zmq.POLLIN)
        self._strangers = self._router.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._stranger_count = 0
        self._keyless_count = 0
        self.poller.register(self._strangers, zmq.POLLIN)

    @property
    def refused_count(self) -> int:
        """Number of connections refused for their key or an invalid handshake, or not made for lack of a common key."""
        gatekeeper_count = self._gatekeeper.refused_count if self._gatekeeper is not None else 0
        return self._stranger_count + gatekeeper_count + self._keyless_count

    def dial(self, peer: PeerId, address: str) -> None:
        """Open a connection to a source worker; replace an older one. Its host is admitted after its handshake.

        Raises:
            TransportError: the address cannot be dialled, no socket is left, or no key of the address is ours.
        """
        self.hang_up(peer)
        place, keys = self._choose(peer, address)
        try:
            dealer = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot dial {peer.instance} rank {peer.rank}: {error}") from error
        # Each connection has its own name. If an old one lingered or returned late under the same name, it would take
        # over the route, and messages of the new one would be lost.
        self._dial_count += 1
        # The socket can be written to once the handshake has succeeded, and no message waits in it before.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.ROUTING_ID, f"{self._route}/{self._dial_count}".encode())
        if keys is not None:
            dealer.curve_serverkey = keys.server_public.encode()
            dealer.curve_publickey = keys.client_public.encode()
            dealer.curve_secretkey = keys.client_secret.encode()
        try:
            # Connect from the address of our own ports, because the peer admits the address of our Attach to its data
            # ports.
            dealer.connect(f"tcp://{self._host}:0;{place}")
        except zmq.ZMQError as error:
            dealer.close()
            text = f"cannot dial {peer.instance} rank {peer.rank} at {address!r}: {error}"
            raise TransportError(text, reason=Reason.UNKNOWN_INSTANCE) from error
        self._dealers[peer], self._dialled[dealer] = dealer, Dialled(peer, place.rpartition(":")[0])
        self.poller.register(dealer, zmq.POLLIN | zmq.POLLOUT)

    def hang_up(self, peer: PeerId) -> None:
        """Close the connection to a source worker, if any."""
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self._dialled.pop(dealer)
            self.poller.unregister(dealer)
            # Unsent messages were for a life that has ended.
            dealer.close(linger=0)
            self._dismiss_host(dealer)

    def shut_out(self, peer: PeerId) -> None:
        """Stop admitting the host of a lost source worker until it is dialled again or attaches."""
        if peer in self._dealers:
            self._dismiss_host(self._dealers[peer])

    def forget(self, peer: PeerId, epoch: int) -> None:
        """Drop the route to an ended life of a target worker. Its next life may have attached already."""
        if peer in self._routes and self._epochs[peer] == epoch:
            route = self._routes.pop(peer)
            self._peers.pop(route, None)
            del self._epochs[peer]
            self._dismiss_host(route)

    def send(self, half: Half, peer: PeerId, message: PeerMessage) -> None:
        """Send now or drop: as the target that dialled `peer`, or as the source that `peer` dialled."""
        try:
            data = PEER.encode(message)
            if half is Half.TARGET and peer in self._dealers:
                self._send_to_source(self._dealers[peer], message, data)
            elif half is Half.SOURCE and isinstance(message, Refuse):
                self._refuse(peer, message, data)
            elif half is Half.SOURCE and peer in self._routes:
                self._router.send_multipart([self._routes[peer], data], zmq.NOBLOCK)
            else:
                self.counters["unroutable"] += 1
        except zmq.ZMQError:
            self.counters["unsent"] += 1

    def receive(self, ready: Container[object]) -> list[Received]:
        """Return decoded messages of the sockets that are `ready`; count and drop invalid ones."""
        received: list[Received] = []
        if self._strangers in ready:
            self._count_strangers()
        for _ in range(MESSAGES_PER_TURN_MAX if self._router in ready else 0):
            try:
                route = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = self._router.recv(copy=False)
            if frame.more:
                # Our messages have one frame. Read the other frames of this invalid one, which are available.
                self._router.recv_multipart()
                self.counters["refused.MALFORMED_MESSAGE"] += 1
                continue
            self._take(route, frame, received)
        for dealer, dialled in [item for item in self._dialled.items() if item[0] in ready]:
            if not dialled.greeted and dealer.poll(0, zmq.POLLOUT):
                self._greeted(dealer, dialled)
            for _ in range(MESSAGES_PER_TURN_MAX):
                try:
                    data = dealer.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take_answer(dealer, dialled, data, received)
        return received

    def close(self) -> None:
        """Close all connections after a short time for unsent messages."""
        for dealer in getattr(self, "_dealers", {}).values():
            dealer.close()
        if not self._router.closed:
            self._router.disable_monitor()
        if (strangers := getattr(self, "_strangers", None)) is not None:
            strangers.close()
        self._router.close()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()

    def _listen(self, host: str, port: int, keys: CurveKeys | None) -> Listener:
        """Bind one more address with the server key of `keys`. ZeroMQ reads a socket's keys at the bind."""
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
        return Listener(endpoint.removeprefix("tcp://"), keys.fingerprint if keys is not None else "")

    def _choose(self, peer: PeerId, address: str) -> tuple[str, CurveKeys | None]:
        """Return the address to dial and our keys for it: the newest ones that both sides have."""
        listeners = split(address)
        if self._keys is None or not any(each.key for each in listeners):
            return listeners[0].address, self._keys.current if self._keys is not None else None
        for each in listeners:
            if (keys := self._keys.named(each.key)) is not None:
                return each.address, keys
        self._keyless_count += 1
        raise TransportError(
            f"{peer.instance} rank {peer.rank} listens with other keys ({', '.join(each.key for each in listeners)}) than this "
            f"agent has ({', '.join(keys.fingerprint for keys in self._keys.revisions)}): both need keys of one revision of "
            "their deployment",
            reason=Reason.UNKNOWN_INSTANCE,
        )

    def _send_to_source(self, dealer: zmq.Socket[bytes], message: PeerMessage, data: bytes) -> None:
        """Send, or keep an Attach until the handshake: after it the source may connect to our data ports."""
        dialled = self._dialled[dealer]
        if dialled.greeted:
            dealer.send(data, zmq.NOBLOCK)
        elif isinstance(message, Attach):
            dialled.attach = data
        else:
            self.counters["unsent"] += 1

    def _greeted(self, dealer: zmq.Socket[bytes], dialled: Dialled) -> None:
        """A handshake has succeeded: admit the host, and send the Attach that waited for that."""
        dialled.greeted = True
        self.poller.modify(dealer, zmq.POLLIN)
        self._admit_host(dealer, dialled.host)
        if dialled.attach:
            dealer.send(dialled.attach, zmq.NOBLOCK)

    def _decode(self, data: bytes) -> PeerMessage | None:
        try:
            return PEER.decode(data)
        except CodecError as error:
            self.counters[f"refused.{error.reason.name}"] += 1
            return None

    def _take_answer(self, dealer: zmq.Socket[bytes], dialled: Dialled, data: bytes, received: list[Received]) -> None:
        """Handle a message of a source worker."""
        message = self._decode(data)
        if message is None:
            return
        if isinstance(message, Attach):
            self._admit_host(dealer, dialled.host)
        received.append(Received(Half.TARGET, dialled.peer, message))

    def _take(self, route: bytes, frame: zmq.Frame, received: list[Received]) -> None:
        """Handle a message of a target worker."""
        message = self._decode(frame.bytes)
        if message is None:
            return
        peer = self._peers.get(route)
        if isinstance(message, Attach):
            peer = self._learn_route(route, message, str(frame["Peer-Address"]))
        if peer is None:
            self.counters["stale.Unattached"] += 1
            if isinstance(message, Ping):
                # It was attached to an earlier life of this worker. Epoch 0 makes it attach again.
                self._answer(route, PEER.encode(Pong(0, message.epoch, message.number)))
            return
        received.append(Received(Half.SOURCE, peer, message))

    def _answer(self, route: bytes, data: bytes) -> None:
        """Answer at once or drop: the peer may have disconnected already."""
        try:
            self._router.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters["unsent"] += 1

    def _refuse(self, peer: PeerId, refusal: Refuse, data: bytes) -> None:
        """Send a Refuse to a refused life and drop its route, so that another life can have it."""
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

    def _learn_route(self, route: bytes, attach: Attach, address: str) -> PeerId:
        """Record the route of a target's life, unless a newer life has one."""
        peer = PeerId.of(attach)
        old = self._routes.get(peer)
        if old is not None and self._epochs[peer] > attach.epoch:
            self._note_refused(peer, route)
            return peer
        if old is not None and old != route:
            self._peers.pop(old, None)
            self._addresses.pop(old, None)
        self._admit_host(route, address)
        self._routes[peer], self._peers[route], self._epochs[peer] = route, peer, attach.epoch
        return peer

    def _count_strangers(self) -> None:
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                self._strangers.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._stranger_count += 1

    def _admit_host(self, connection: zmq.Socket[bytes] | bytes, host: str) -> None:
        """Admit the host of a peer."""
        if self._addresses.get(connection) != host:
            self._addresses[connection] = host
            self._admit(frozenset(self._addresses.values()))

    def _dismiss_host(self, connection: zmq.Socket[bytes] | bytes) -> None:
        """Stop admitting a peer's host for a closed route."""
        if self._addresses.pop(connection, None) is not None:
            self._admit(frozenset(self._addresses.values()))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, _RECEIVED_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, 0)
        return socket
