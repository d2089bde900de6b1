"""Compares every port of real agents with working rooms with the table in docs/security.md, and attacks them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import intruder
import pytest
from agent_fleet import World, over
from agent_world import Agent, Engine, Request, memory_name, wait_for
from intruder import UNMAPPED, reaching
from open_ports import listening
from own_network import HERE, STRANGER, STRANGER_THERE, THERE, there
from transport_peer import strike

from longshore_agent.control import curve
from longshore_agent.supervisor.restarts import DYING_S
from longshore_client import Half, RoomEventKind

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
# The page's name of a backend -> the settings with which an agent opens its ports.
SETTINGS: dict[str, dict[str, str]] = {
    "NIXL": {"LONGSHORE_BACKEND": "NIXL"},
    "NIXL without TCP": {"LONGSHORE_BACKEND": "NIXL", "LONGSHORE_WIRES": "SharedMemory"},
    "Mooncake": {"LONGSHORE_BACKEND": "Mooncake"},
}
EVERY_ADDRESS = {"0.0.0.0", "::"}


@dataclass
class Place:
    """Two agents of one deployment with keys, at two addresses; an engine at each, between which rooms work."""

    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine

    @property
    def sides(self) -> tuple[tuple[Agent, Engine], ...]:
        return (self.prefill, self.source), (self.decode, self.target)


@contextlib.contextmanager
def placed(directory: Path, kind: str, hosts: tuple[str, str], **settings: str) -> Iterator[Place]:
    curve.write(curve.generate(), directory)
    settings |= SETTINGS[kind] | {
        "LONGSHORE_KEYS_DIRECTORY": str(directory),
        "LONGSHORE_NETWORK_POLICY": "true",
        "LONGSHORE_HEARTBEAT_S": "0.2",
        "LONGSHORE_PEER_TIMEOUT_S": "8",
    }
    world = World(directory, **settings)
    try:
        prefill = world.agent("prefill", LONGSHORE_BIND_HOST=hosts[0])
        start = functools.partial(world.agent, "decode", LONGSHORE_BIND_HOST=hosts[1])
        decode = there(start) if hosts[1] == THERE else start()
        source = world.engine(prefill, "source", roles=[Half.SOURCE])
        target = world.engine(decode, "target", page_size=8, roles=[Half.TARGET])
        place = Place(prefill, decode, source.result(), target.result())
        moves(place)
        yield place
    finally:
        world.close()


def moves(place: Place) -> None:
    each = Request(place.source, place.target, 300, cuts=(150,))
    each.claim()
    each.offer()
    each.arrives()
    assert place.target.intact()


def worker_of(agent: Agent, engine: Engine) -> dict[str, Any]:
    found = agent.worker(engine.instance)
    assert found is not None
    return found


def rows(kind: str) -> dict[str, tuple[str, str]]:
    """Return process and address of each port that the page lists for agents of one kind."""
    table = PAGE.read_text().partition("## Ports")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return {cell[0]: (cell[1], cell[3]) for cell in cells[2:] if cell[2] in ("any", kind)}


def opened(agent: Agent, engine: Engine) -> dict[str, tuple[str, set[str]]]:
    """Return process and addresses of each open port, by the page's name for it; `unknown`: no name fits."""
    worker = worker_of(agent, engine)
    control = {
        int(port)
        for rank in agent.get("/v1/bootstrap")["instances"][0]["ranks"]
        for port in re.findall(r":(\d+)", rank["address"])
    }
    data = {port["port"] for port in worker["data_ports"]}
    http = int(agent.http.rpartition(":")[2])
    # The self-test runs in separate processes, and ends.
    wait_for(lambda: set(agent.children()) == {worker["pid"]})
    found: dict[str, tuple[str, set[str]]] = {}
    for process, pid in (("supervisor", agent.process.pid), ("worker", worker["pid"])):
        for port in listening(pid):
            name = "unknown"
            if process == "supervisor" and port.port == http:
                name = "HTTP"
            elif port.port in control:
                name = "control"
            elif port.port in data:
                name = {"tcp": "handshake", "tcp6": "data"}[port.kind] if port.address in EVERY_ADDRESS else "UCX"
            found.setdefault(name, (process, set()))[1].add(port.address)
    return found


def check_ports(place: Place, kind: str) -> None:
    """Compare the agents' open ports with the page, both ways."""
    for agent, engine in place.sides:
        host = agent.http.removeprefix("http://").rpartition(":")[0]
        expected = {
            name: (process, {host} if where.startswith("`LONGSHORE_BIND_HOST`") else EVERY_ADDRESS)
            for name, (process, where) in rows(kind).items()
        }
        found = opened(agent, engine)
        assert found.keys() == expected.keys()
        for name, (process, addresses) in found.items():
            assert process == expected[name][0] and addresses <= expected[name][1], (name, process, addresses)


@pytest.mark.parametrize("kind", over(*sorted(SETTINGS, key=lambda kind: kind != "NIXL")))
def test_an_agent_of_the_loopback_interface_has_the_ports_that_the_page_names_and_no_other(tmp_path, kind):
    with placed(tmp_path, kind, ("127.0.0.1", "127.0.0.1")) as place:
        check_ports(place, kind)
        expected = "Absent" if kind == "NIXL without TCP" else "Loopback"
        assert {worker_of(*side)["data_path"] for side in place.sides} == {expected}
        protections = {port["protection"] for side in place.sides for port in worker_of(*side)["data_ports"]}
        assert protections == ({expected} if expected != "Absent" else set())


@pytest.mark.own_network
@pytest.mark.parametrize("kind", over("Mooncake", "NIXL"))
def test_strangers_reach_no_data_port_and_attached_peers_do_as_long_as_they_are_there(tmp_path, kind):
    with placed(tmp_path, kind, (HERE, THERE)) as place:
        check_ports(place, kind)
        for agent, engine in place.sides:
            worker = worker_of(agent, engine)
            assert worker["data_path"] == "Filtered"
            ports = [port["port"] for port in worker["data_ports"]]
            assert strangers_reach(agent, ports) == []
            wait_for(
                lambda side=(agent, engine): all(port["refused"] > 0 for port in worker_of(*side)["data_ports"]),
                what="the refusals to be told",
            )
            assert agent.metric("longshore_data_port_refusals_total") >= len(ports)
            assert agent.metric("longshore_data_ports", protection="Filtered") == len(ports)
        ports = [port["port"] for port in worker_of(place.decode, place.target)["data_ports"]]
        assert reaching(THERE, ports, HERE) == [HERE] * len(ports)
        place.source.client.close()
        wait_for(lambda: not reaching(THERE, ports, HERE))


@pytest.mark.own_network
def test_a_stranger_writes_into_no_kv_page_of_an_agent_over_ucx_and_ends_no_worker(tmp_path):
    with placed(tmp_path, "NIXL", (HERE, THERE)) as place:
        worker = worker_of(place.decode, place.target)
        address = intruder.mapped_pages(worker["pid"], memory_name("target"))
        writes = ((address, b"INTRUDER" * 64), (UNMAPPED, b"x"))

        def write(attack: tuple[int, tuple[int, bytes]]) -> None:
            port, (where, data) = attack
            caller = intruder.connect(STRANGER, THERE, port)
            if caller is not None:
                with caller:
                    intruder.put(caller, where, data)

        attacks = [(port["port"], each) for port in worker["data_ports"] for each in writes]
        with ThreadPoolExecutor(len(attacks)) as attackers:
            list(attackers.map(write, attacks))
        moves(place)
        assert place.target.intact()
        assert worker_of(place.decode, place.target)["pid"] == worker["pid"]
        assert place.decode.metric("longshore_worker_restarts_total") == 0


@pytest.mark.rest("storms")
@pytest.mark.own_network
@pytest.mark.parametrize("kind", over("Mooncake", "NIXL"))
def test_junk_from_a_peers_own_address_restarts_a_worker_and_is_told_of_when_it_goes_on(tmp_path, kind):
    with placed(tmp_path, kind, (HERE, THERE), LONGSHORE_RESTART_BACKOFF_MAX_S="1") as place:
        wait_for(lambda: place.decode.ask("/readyz")[0] == 200)
        begun_s = time.monotonic()
        for death in range(1, 4):
            assert place.decode.ask("/readyz")[0] == 200
            epoch = place.target.client.epoch
            send_junk(place, kind)
            # NIXL reads its sockets only when there is work. A room may fail with its worker; the next room works.
            each = Request(place.source, place.target, 100)
            each.claim()
            each.offer()
            wait_for(lambda epoch=epoch: place.target.client.connected and place.target.client.epoch != epoch)
            assert {end.kind for end in each.ends()} <= {RoomEventKind.DONE, RoomEventKind.FAILED}
            assert place.decode.metric("longshore_worker_restarts_total") == death
            moves(place)
        code, body = place.decode.ask("/readyz")
        assert place.prefill.ask("/readyz")[0] == 200
        assert place.target.intact()
        if time.monotonic() - begun_s > DYING_S:
            # A machine on which three workers do not even start within a minute.
            return
        (check,) = [check for check in json.loads(body)["checks"] if check["name"] == "Workers"]
        assert (code, check["reason"]) == (503, "WorkersDying")
        assert (
            "the worker of target rank 0 has died 3 times within a minute, last because it ended with -"
            in check["message"]
        )
        assert any(finding["code"] == "WorkersDying" for finding in place.decode.status()["findings"])


@pytest.mark.rest("storms")
@pytest.mark.own_network
def test_noise_in_messages_of_ucx_from_a_peers_own_address_costs_restarts_alone_and_changes_no_page(tmp_path):
    with placed(tmp_path, "NIXL", (HERE, THERE), LONGSHORE_RESTART_BACKOFF_MAX_S="1") as place:
        ports = [port["port"] for port in worker_of(place.decode, place.target)["data_ports"]]
        for number in range(32):
            # If an attack ends the worker, its port refuses connections until the next worker listens.
            for caller in filter(None, (intruder.connect(HERE, THERE, port) for port in ports)):
                with caller, contextlib.suppress(OSError):
                    intruder.message(caller, number)
        wait_for(lambda: completes(place))
        assert place.source.intact() and place.target.intact()
        assert place.prefill.metric("longshore_worker_restarts_total") == 0


@pytest.mark.own_network
def test_noise_on_the_ports_of_http_and_of_control_restarts_nothing_and_what_shakes_hands_wrongly_is_counted(tmp_path):
    with placed(tmp_path, "NIXL without TCP", (HERE, THERE)) as place:
        before = {engine.instance: worker_of(agent, engine)["pid"] for agent, engine in place.sides}
        for pid in (place.decode.process.pid, before["target"]):
            (port,) = listening(pid)
            for seed in range(20):
                caller = intruder.connect(STRANGER, port.address, port.port)
                assert caller is not None
                intruder.noise(caller, seed)
                caller = intruder.connect(STRANGER, port.address, port.port)
                assert caller is not None
                intruder.greet(caller, seed)
        wait_for(lambda: place.decode.metric("longshore_http_refusals_total") >= 20)
        wait_for(lambda: place.decode.metric("longshore_authentication_failures_total") >= 20)
        moves(place)
        assert {engine.instance: worker_of(agent, engine)["pid"] for agent, engine in place.sides} == before
        assert place.decode.metric("longshore_worker_restarts_total") == 0


def completes(place: Place) -> bool:
    """Return whether a room is done. A room may fail if its worker ends."""
    if not place.target.client.connected:
        return False
    each = Request(place.source, place.target, 100)
    each.claim()
    each.offer()
    return {end.kind for end in each.ends()} == {RoomEventKind.DONE}


def strangers_reach(agent: Agent, ports: list[int]) -> list[str]:
    """Return the address without a peer for each port to which it can connect."""
    if HERE in agent.http:
        return there(reaching, HERE, ports, STRANGER_THERE)
    return reaching(THERE, ports, STRANGER)


def send_junk(place: Place, kind: str) -> None:
    """Send junk that ends decode's worker, from the address of its peer."""
    ports = worker_of(place.decode, place.target)["data_ports"]
    if kind == "Mooncake":
        (handshake,) = [port["port"] for port in ports if port["address"] == "0.0.0.0"]
        strike(handshake, THERE, HERE)
        return
    for port in ports:
        caller = intruder.connect(HERE, THERE, port["port"])
        assert caller is not None
        with caller:
            intruder.put(caller, UNMAPPED, b"x")
