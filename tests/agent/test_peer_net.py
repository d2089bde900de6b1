"""Tests ZeroMQ over real sockets: a peer that returns at its old address is reached despite lingering connections."""

from __future__ import annotations

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

LAYOUT = KVLayout(ModelShape(layers=1, kv_heads=1, head_dim=8, element_bytes=2), Parallel(), 16)
SOURCE, TARGET = PeerId("prefill", 0, 0), PeerId("decode", 0, 0)
ATTACH = Attach(PROTOCOL_VERSION, "d", "decode", 1, LAYOUT, "Loopback", b"", None, (), 0)
LIMIT_S = 60.0
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


def reaches(near: PeerNet, far: PeerNet) -> bool:
    found: list[PeerMessage] = []
    return pump(
        far,
        lambda: any(isinstance(message, Ping) for message in found),
        found,
        lambda: [near.send(Half.TARGET, SOURCE, message) for message in (ATTACH, Ping(1, 1))],  # type: ignore[func-returns-value]
    )


def test_an_older_life_of_a_target_is_answered_where_it_asks_and_takes_nothing_from_the_newer_one(nets):
    source = nets(route="prefill/0/0/1")
    newer, older = nets(route="decode/0/0/2"), nets(route="decode/0/0/1")
    for net in (newer, older):
        net.dial(SOURCE, source.address)
    found: list[PeerMessage] = []
    attaches = [msgspec.structs.replace(ATTACH, epoch=epoch) for epoch in (2, 1)]
    for net, attach in zip((newer, older), attaches, strict=True):
        net.send(Half.TARGET, SOURCE, attach)
        assert pump(source, lambda attach=attach: attach in found, found, lambda: None)
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


def test_the_host_of_a_source_is_let_in_while_it_is_to_attach_or_is_attached_and_not_while_a_lost_one_is_sought(nets):
    admitted: list[Collection[str]] = []
    source, target = nets(route="prefill/0/0/1"), nets(admit=admitted.append)
    target.dial(SOURCE, source.address)
    assert admitted == [{"127.0.0.1"}]
    target.shut_out(SOURCE)
    assert admitted[1:] == [set()]

    target.dial(SOURCE, source.address, admits=False)
    assert reaches(target, source)
    assert admitted[2:] == []
    source.send(Half.SOURCE, TARGET, ATTACH)
    found: list[PeerMessage] = []
    assert pump(target, lambda: ATTACH in found, found, lambda: None)
    assert admitted[2:] == [{"127.0.0.1"}]
    target.hang_up(SOURCE)
    assert admitted[3:] == [set()]
