"""Tests the ports on which transports' libraries listen, and which hosts reach them, with real sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from intruder import reaching
from open_ports import listening
from own_network import (
    ALSO_HERE,
    HERE,
    HERE_IPV6,
    INTERFACE,
    SECOND_OF_HERE,
    STRANGER_IPV6,
    STRANGER_THERE,
    THERE,
    THERE_IPV6,
    there,
)

from longshore_agent.errors import TransportError
from longshore_agent.transports import create, data_ports, nixl_library
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.own_network import interface_of, numeric
from longshore_spec.names import Protection
from longshore_wire.errors import Reason
from longshore_wire.names import Wire

# Long enough for an answer of this machine. A dropped packet gets no answer, so each attempt takes this long.
ANSWER_LIMIT_S = 1.5
BACKENDS = ("NIXL", "Mooncake")
RDMA = ("mlx5_0:1",)


def reaches(source: str, target: str, port: int) -> bool:
    """Whether one address of this machine can connect to another."""
    return reaching(target, [port], source, limit_s=ANSWER_LIMIT_S) != []


@contextlib.contextmanager
def started(backend: str, ports: DataPorts, **options) -> Iterator[None]:
    transport = create(backend, f"ports-of-{backend}", ports=ports, **options)
    try:
        yield
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("wires", "devices", "fabric", "excluded", "mode"),
    [
        ((), (), False, (), "peer"),
        ((), RDMA, False, (), "peer"),
        ((Wire.TCP,), RDMA, False, ("ib",), "peer"),
        ((Wire.TCP, Wire.SHARED_MEMORY), (), False, ("ib",), "peer"),
        ((Wire.TCP, Wire.RDMA), RDMA, False, (), "peer"),
        ((Wire.RDMA,), RDMA, False, ("tcp",), "peer"),
        ((Wire.RDMA, Wire.NVLINK), RDMA, True, ("tcp",), "peer"),
        ((Wire.RDMA,), (), False, ("tcp", "ib"), "none"),
        ((Wire.SHARED_MEMORY,), RDMA, False, ("tcp", "ib"), "none"),
        ((Wire.CUDA_IPC,), (), False, ("tcp", "ib"), "none"),
        ((Wire.NVLINK, Wire.SHARED_MEMORY), (), False, ("tcp", "ib"), "none"),
        ((Wire.SHARED_MEMORY,), (), True, ("tcp", "ib"), "none"),
        ((Wire.NVLINK,), (), True, ("ib",), "peer"),
        ((Wire.CUDA_IPC,), (), True, ("ib",), "peer"),
    ],
)
def test_ucx_opens_no_port_that_no_allowed_wire_needs(wires, devices, fabric, excluded, mode):
    setup = nixl_library.setup_for(wires, rdma_devices=devices, fabric=fabric)
    assert (setup.excluded, setup.error_handling) == (excluded, mode)
    said = nixl_library.environment(setup, numeric("127.0.0.1"), devices)
    assert said.get("UCX_TLS", "") == ("^" + ",".join(excluded) if excluded else "")
    assert said.get("UCX_NET_DEVICES", "") == ("" if "tcp" in excluded else ",".join(("lo", *devices)))


def test_an_agent_of_the_loopback_interface_uses_no_rdma_device(monkeypatch, tmp_path):
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    monkeypatch.setattr(nixl_library, "_INFINIBAND_DIRECTORY", tmp_path)
    assert nixl_library.find_rdma_devices(ip_address(HERE)) == RDMA
    loopback = ip_address("127.0.0.9")
    devices = nixl_library.find_rdma_devices(loopback)
    assert devices == ()
    assert (
        nixl_library.environment(nixl_library.setup_for((), rdma_devices=devices), loopback, devices)["UCX_NET_DEVICES"]
        == "lo"
    )
    assert nixl_library.setup_for((Wire.RDMA,), rdma_devices=devices).excluded == ("tcp", "ib")


def test_somebodys_own_settings_of_ucx_count_more_and_ours_are_gone_afterwards(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with nixl_library.told({"UCX_TLS": "^ib", "UCX_NET_DEVICES": "lo"}):
        assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("tcp,self", "lo")
    assert os.environ["UCX_TLS"] == "tcp,self" and "UCX_NET_DEVICES" not in os.environ


def test_an_address_is_found_on_its_interface_and_one_that_nobody_can_be_reached_at_is_refused():
    assert interface_of(numeric("localhost")) == interface_of(ip_address("127.0.0.77")) == "lo"
    for host, named in (("0.0.0.0", "every address"), ("::", "every address"), ("no.such.host.invalid", "no.such")):
        with pytest.raises(TransportError, match=named) as caught:
            DataPorts(host)
        assert "LONGSHORE_BIND_HOST" in str(caught.value)
    with pytest.raises(TransportError, match=r"no network interface has the address 203\.0\.113\.9"):
        interface_of(ip_address("203.0.113.9"))


@pytest.mark.shows("agent.wires", "field.transfer.wires")
def test_no_port_is_open_where_no_allowed_wire_needs_one():
    before = listening(os.getpid())
    ports = DataPorts()
    with started("NIXL", ports, wires=(Wire.SHARED_MEMORY, Wire.NVLINK)):
        assert ports.describe() == ()
        assert listening(os.getpid()) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_of_the_loopback_interface_is_reached_there_alone(backend):
    ports = DataPorts()
    with started(backend, ports):
        found = ports.describe()
        assert {port.protection for port in found} == {Protection.LOOPBACK}
        assert {port.port for port in found} == {port.port for port in listening(os.getpid())}
        outside = [str(place.address) for place in data_ports.places() if not place.address.is_loopback]
        for port in found:
            assert reaches("127.0.0.1", "127.0.0.1", port.port)
            assert [host for host in outside if ":" not in host and reaches(host, host, port.port)] == []
    assert ports.describe() == ()


@pytest.mark.own_network
@pytest.mark.parametrize("host", [HERE, ALSO_HERE, HERE_IPV6])
def test_nixl_listens_on_the_address_that_it_was_told_and_on_no_other(host):
    ports = DataPorts(host)
    with started("NIXL", ports):
        found = ports.describe()
        assert {(port.address, port.protection) for port in found} == {(host, Protection.BOUND)}
        assert {(port.address, port.port) for port in found} == {
            (port.address, port.port) for port in listening(os.getpid())
        }


@pytest.mark.own_network
def test_an_address_that_ucx_does_not_take_of_its_interface_is_refused_and_the_way_out_named():
    with pytest.raises(TransportError, match=rf"listens on {HERE}, which is not the address") as caught:
        create("NIXL", "second-of-its-interface", ports=DataPorts(SECOND_OF_HERE))
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "the first of its interface" in str(caught.value)
    assert listening(os.getpid()) == []
    ports = DataPorts(SECOND_OF_HERE, allow_open=True)
    with started("NIXL", ports):
        assert {port.address for port in ports.describe()} == {HERE}


@pytest.mark.own_network
@pytest.mark.parametrize("allow_open", [False, True])
def test_an_address_that_mooncake_does_not_connect_from_is_refused_as_peers_would_drop_its_data(allow_open):
    ports = DataPorts(SECOND_OF_HERE, allow_open=allow_open)
    ports.admit(())
    with pytest.raises(TransportError, match=rf"connects from {HERE}, which is not the address") as caught:
        create("Mooncake", "second-of-its-interface", ports=ports)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "the first of its interface, to LONGSHORE_BIND_HOST" in str(caught.value)


@pytest.mark.own_network
@pytest.mark.parametrize("backend", BACKENDS)
def test_exactly_attached_peers_connect_and_none_before_the_first(backend):
    ports = DataPorts(HERE)
    ports.admit(())
    with started(backend, ports):
        found = ports.describe()
        assert {port.protection for port in found} == {Protection.FILTERED}
        numbers = [port.port for port in found]

        def reach(*sources: str) -> list[str]:
            return there(functools.partial(reaching, limit_s=ANSWER_LIMIT_S), HERE, numbers, *sources)

        assert reach(THERE, STRANGER_THERE) == []
        ports.admit([THERE])
        assert reach(THERE, STRANGER_THERE) == [THERE] * len(numbers)
        ports.admit([THERE, STRANGER_THERE])
        assert reach(THERE, STRANGER_THERE) == [THERE] * len(numbers) + [STRANGER_THERE] * len(numbers)
        ports.admit([STRANGER_THERE])
        assert reach(THERE) == []
        assert all(port.refused_count > 0 for port in ports.describe())
        # Between two addresses of one machine, a socket that is not bound connects from the target address.
        assert reaching(HERE, numbers, HERE, limit_s=ANSWER_LIMIT_S) == []
        ports.admit([ALSO_HERE])
        assert all(reaches(HERE, HERE, port) for port in numbers)


def test_a_port_that_its_library_closes_while_it_is_described_is_lost_and_ends_nobody(monkeypatch):
    ports, library = DataPorts(), socket.socket()
    with ports.opening(is_lasting=True):
        library.bind(("127.0.0.1", 0))
        library.listen()
    assert len(ports.describe()) == 1
    protection = ports._protection

    def closed_meanwhile(opened, port):
        library.close()
        return protection(opened, port)

    monkeypatch.setattr(ports, "_protection", closed_meanwhile)
    assert ports.describe() == ()
    assert "has closed" in ports.lost()


@pytest.mark.own_network
def test_a_filter_admits_ipv6_peers_by_all_of_their_address():
    with socket.create_server((HERE_IPV6, 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        for admitted, through in (
            ((THERE_IPV6,), True),
            ((THERE, "fd77::1:2", "fd77:0:0:1::2", HERE_IPV6, STRANGER_IPV6), False),
            ((HERE_IPV6, THERE, THERE_IPV6), True),
        ):
            data_ports.attach(listener, data_ports.filter_program([ip_address(host) for host in admitted]))
            assert there(reaches, THERE_IPV6, HERE_IPV6, port) is through


@pytest.mark.own_network
def test_a_connection_that_stands_goes_on_when_its_peer_is_not_admitted_any_more():
    ports = DataPorts(HERE)
    with ports.opening():
        listener = socket.create_server((HERE, 0))
    with listener:
        ports.admit([THERE])
        with there(socket.create_connection, listener.getsockname()) as caller, listener.accept()[0] as accepted:
            ports.admit(())
            accepted.settimeout(60)
            caller.sendall(b"still here")
            assert accepted.recv(16) == b"still here"
        assert not there(reaches, THERE, HERE, listener.getsockname()[1])


@pytest.mark.own_network
def test_as_many_peers_as_a_kernel_takes_are_admitted_and_beyond_that_the_port_says_that_it_is_unfiltered():
    ports = DataPorts(HERE)
    with ports.opening():
        listener = socket.create_server((HERE, 0))
    with listener:
        port = listener.getsockname()[1]
        ports.admit([f"10.{index >> 8}.{index & 255}.1" for index in range(500)] + [THERE])
        assert [each.protection for each in ports.describe()] == [Protection.FILTERED]
        assert there(reaches, THERE, HERE, port)
        assert not there(reaches, STRANGER_THERE, HERE, port)
        ports.admit([f"10.{index >> 8}.{index & 255}.1" for index in range(20_000)])
        assert [each.protection for each in ports.describe()] == [Protection.BOUND]
        # An outdated list must not block a peer.
        assert there(reaches, STRANGER_THERE, HERE, port)
        ports.admit([THERE])
        assert [each.protection for each in ports.describe()] == [Protection.FILTERED]


# The error of a kernel of mid-2026 without CAP_NET_ADMIN. This process has that capability in its own network.
@pytest.mark.own_network
def test_where_the_kernel_takes_no_filter_mooncake_is_refused_if_other_networks_reach_it(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(data_ports, "attach", refuse)
    ports = DataPorts(HERE)
    ports.admit(())
    with pytest.raises(TransportError, match=rf"listens on every address, also on {ALSO_HERE} ") as caught:
        create("Mooncake", "open", ports=ports)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "LONGSHORE_ALLOW_OPEN_DATA_PATH=true" in str(caught.value)
    accepted = DataPorts(HERE, allow_open=True)
    with started("Mooncake", accepted):
        assert {port.protection for port in accepted.describe()} == {Protection.OPEN}
    assert interface_of(numeric(HERE)) == INTERFACE
