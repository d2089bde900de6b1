"""Tests ZeroMQ over real sockets: a peer that returns at its old address is reached despite lingering connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection

import msgspec
import pytest
import zmq

from longshore_agent.control.peer_net import PeerNet, Received, nobody
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PEER, PROTOCOL_VERSION, Attach, PeerMessage, Ping, Pong, Refuse

LAYOUT = KVLayout(ModelShape.kv(layers=1, kv_heads=1, head_dim=8, element_bytes=2), Parallel(), 16)
SOURCE, TARGET = PeerId("prefill", 0, 0), PeerId("decode", 0, 0)
ATTACH = Attach(PROTOCOL_VERSION, "d", "decode", 1, LAYOUT, "Loopback", b"", None, (), 0)
LIMIT_S = 60.0
# A peer sends the first 10 bytes at once, and the others when it has heard those of its peer.
ZMTP_GREETING_BYTES = 10
# Longer than a closed ZeroMQ connection lingers and reconnects to send its pending messages.
LINGER_S = 0.3


@pytest.fixture
def nets():
    """Yield a function that makes nets; close all of them at the end."""
    made: list[PeerNet] = []

    def make(port: int = 0, route: str = "decode/0/0/1", admit: Callable[[Collection[str]], None] = nobody) -> PeerNet:
        made.append(PeerNet("127.0.0.1", port, route, None, admit))
        return made[-1]

    yield make
    for net in made:
        net.close()


def pump(net: PeerNet, until: Callable[[], bool], found: list[PeerMessage], say: Callable[[], None]) -> bool:
    """Receive until the condition holds, while repeating messages as cores do; return False after LIMIT_S."""
    end_s = time.monotonic() + LIMIT_S
    while not until():
        if time.monotonic() > end_s:
            return False
        say()
        ready = frozenset(socket for socket, _ in net.poller.poll(20))
        found += [received.message for received in net.receive(ready)]
    return True


def turn(net: PeerNet) -> list[PeerMessage]:
    """Receive what is there."""
    ready = frozenset(socket for socket, _ in net.poller.poll(0))
    return [received.message for received in net.receive(ready)]


def reaches(near: PeerNet, far: PeerNet) -> bool:
    found: list[PeerMessage] = []

    def say() -> None:
        turn(near)
        for message in (ATTACH, Ping(1, 1)):
            near.send(Half.TARGET, SOURCE, message)

    return pump(far, lambda: any(isinstance(message, Ping) for message in found), found, say)


def test_an_older_life_of_a_target_is_answered_where_it_asks_and_takes_nothing_from_the_newer_one(nets):
    source = nets(route="prefill/0/0/1")
    newer, older = nets(route="decode/0/0/2"), nets(route="decode/0/0/1")
    for net in (newer, older):
        net.dial(SOURCE, source.address)
    found: list[PeerMessage] = []
    attaches = [msgspec.structs.replace(ATTACH, epoch=epoch) for epoch in (2, 1)]
    for net, attach in zip((newer, older), attaches, strict=True):
        net.send(Half.TARGET, SOURCE, attach)
        assert pump(source, lambda attach=attach: attach in found, found, lambda net=net: turn(net))
    source.send(Half.SOURCE, TARGET, Refuse(Reason.STALE_EPOCH, "newer", 1, 1))
    source.send(Half.SOURCE, TARGET, Pong(2, 1, 1))
    told: dict[PeerNet, list[PeerMessage]] = {newer: [], older: []}
    for net, said in told.items():
        assert pump(net, lambda said=said: bool(said), said, lambda: None)
    assert told == {newer: [Pong(2, 1, 1)], older: [Refuse(Reason.STALE_EPOCH, "newer", 1, 1)]}
    newer.send(Half.TARGET, SOURCE, Ping(2, 1))
    assert pump(source, lambda: Ping(2, 1) in found, found, lambda: None)


def port_of(net: PeerNet) -> int:
    return int(net.address.rpartition(":")[2])


def test_a_source_that_returns_at_its_address_is_reached_by_the_new_connection_although_the_old_one_lingers(nets):
    target, first = nets(), nets(route="prefill/0/0/1")
    address = first.address
    target.dial(SOURCE, address)
    assert reaches(target, first)
    first.close()
    # Messages without a listener stay in the old connection, which lingers for a moment to deliver them.
    target.send(Half.TARGET, SOURCE, Ping(1, 1))
    second = nets(int(address.rpartition(":")[2]), "prefill/0/0/2")
    target.dial(SOURCE, address)
    target.send(Half.TARGET, SOURCE, ATTACH)
    # The old connection may arrive after the new one and must not take over its messages.
    assert reaches(target, second)
    gone_s = time.monotonic() + 2 * LINGER_S
    pump(second, lambda: time.monotonic() > gone_s, [], lambda: None)
    assert reaches(target, second)
    second.send(Half.SOURCE, TARGET, Pong(1, 1, 1))
    found: list[PeerMessage] = []
    assert pump(target, lambda: Pong(1, 1, 1) in found, found, lambda: None)


def test_a_peer_that_asked_who_is_there_and_hung_up_does_not_end_us(nets):
    near = nets()
    received: list[Received] = []
    # As `receive` does with a message whose sender has gone before the read.
    near._take(b"decode/0/0/2/1", zmq.Frame(PEER.encode(Ping(7, 1))), received)
    assert received == []
    assert near.counters["unsent"] == 1


def test_the_host_of_a_source_is_let_in_from_its_handshake_to_its_loss_and_again_when_it_attaches(nets):
    admitted: list[Collection[str]] = []
    source, target = nets(route="prefill/0/0/1"), nets(admit=admitted.append)
    target.dial(SOURCE, source.address)
    target.send(Half.TARGET, SOURCE, ATTACH)
    assert admitted == []
    found: list[PeerMessage] = []
    # Our Attach leaves only then: it tells the source where our data ports are.
    assert pump(source, lambda: found == [ATTACH], found, lambda: turn(target))
    assert admitted == [{"127.0.0.1"}]
    target.shut_out(SOURCE)
    assert admitted[1:] == [set()]

    source.send(Half.SOURCE, TARGET, ATTACH)
    found.clear()
    assert pump(target, lambda: ATTACH in found, found, lambda: None)
    assert admitted[2:] == [{"127.0.0.1"}]
    target.hang_up(SOURCE)
    assert admitted[3:] == [set()]


def test_an_address_where_no_peer_answers_is_never_let_in_and_gets_no_attach(nets):
    admitted: list[Collection[str]] = []
    target = nets(admit=admitted.append)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(LIMIT_S)
        target.dial(SOURCE, f"127.0.0.1:{stranger.getsockname()[1]}")
        target.send(Half.TARGET, SOURCE, ATTACH)
        line, _ = stranger.accept()
        with line:
            # The greeting of ZeroMQ is all that it hears.
            line.settimeout(LIMIT_S)
            heard = b""
            while len(heard) < ZMTP_GREETING_BYTES:
                heard += line.recv(4096)
                turn(target)
            assert b"decode" not in heard
        turn(target)
    assert admitted == []
    target.hang_up(SOURCE)
    assert admitted == []


def test_a_connection_that_never_greets_is_closed_and_holds_no_descriptor(nets, monkeypatch):
    monkeypatch.setattr("longshore_agent.control.peer_net.HANDSHAKE_MS", 50)
    host, _, port = nets().address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as silent:
        while silent.recv(1024):
            pass
