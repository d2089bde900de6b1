"""Tests a peer whose address has vanished, like that of a replaced pod: packets to it get no answer, not even a refusal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from agent_fleet import over
from agent_world import EVENT_LIMIT_S, Agent, Engine, Request, wait_for
from transport_peer import TCP_ALONE, PeerProcess

from longshore_agent.control import curve
from longshore_agent.transports import create
from longshore_agent.transports.data_ports import DataPorts

HERE, THERE, ELSEWHERE = "10.78.0.1", "10.78.0.2", "10.78.0.3"
CABLE = "cable"
# A call that waits for a connection to a missing host takes more than a minute.
STOPPED_LIMIT_S = 55.0


class FarNetwork:
    """A second network, joined to this one by a veth pair whose two ends are called CABLE."""

    def __init__(self) -> None:
        # Its interfaces are listed in its own /sys, where UCX looks.
        script = "mount -t sysfs none /sys && ip link set lo up && echo ready && exec cat"
        command = ["unshare", "--net", "--mount", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.inside = ("nsenter", f"--target={self._holder.pid}", "--net", "--mount")
        ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(self._holder.pid))
        ip("link", "set", CABLE, "up")
        self.ip("link", "set", CABLE, "up")

    def ip(self, *arguments: str) -> str:
        return run(*self.inside, "ip", *arguments)

    def close(self) -> None:
        # The kernel removes a network with a delay, and the next one needs the name.
        ip("link", "del", CABLE)
        self._holder.kill()
        self._holder.communicate()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def ip(*arguments: str) -> str:
    return run("ip", *arguments)


@contextlib.contextmanager
def far_network() -> Iterator[FarNetwork]:
    """Connect HERE with THERE. Packets to THERE are also routed when it is gone, so no host reports it as unreachable."""
    far = FarNetwork()
    ip("address", "add", f"{HERE}/24", "dev", CABLE)
    far.ip("address", "add", f"{THERE}/24", "dev", CABLE)
    (end,) = json.loads(far.ip("-json", "link", "show", "dev", CABLE))
    ip("neighbour", "add", THERE, "lladdr", end["address"], "dev", CABLE, "nud", "permanent")
    try:
        yield far
    finally:
        far.close()


def arrives(source: Engine, target: Engine) -> None:
    room = Request(source, target, 100)
    room.claim()
    room.offer()
    room.arrives()


@pytest.mark.own_network
def test_a_transport_that_is_to_answer_a_peer_does_not_wait_for_one_whose_address_is_gone(monkeypatch):
    # Inside a machine NIXL would use a faster wire than TCP, even between network namespaces.
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    with far_network() as network:
        near, other = (create("NIXL", name, ports=DataPorts(HERE)) for name in ("near", "other"))
        far = PeerProcess("NIXL", "far", host=THERE, inside=network.inside)
        far.ask("connect", metadata=near.metadata().hex())
        near.notices()
        # When a peer is released, UCX exchanges further messages with it, which need an answer.
        far.ask("disconnect", peer=far.ask("connect", metadata=other.metadata().hex()))
        far.signal(signal.SIGKILL)
        network.ip("address", "del", f"{THERE}/24", "dev", CABLE)
        began_s = time.monotonic()
        for transport in (near, other):
            for _ in range(100):
                transport.notices()
            transport.close()
        assert time.monotonic() - began_s < STOPPED_LIMIT_S
        far.close()


@pytest.mark.own_network
@pytest.mark.parametrize("backend", over("NIXL", "Mooncake"))
def test_rooms_of_others_and_of_its_next_life_arrive_while_nothing_answers_at_a_peers_address(tmp_path, backend):
    curve.write(curve.generate(), tmp_path)
    settings = {
        "LONGSHORE_BACKEND": backend,
        "LONGSHORE_KEYS_DIRECTORY": str(tmp_path),
        "LONGSHORE_ALLOW_OPEN_DATA_PATH": "true",
        "UCX_TLS": TCP_ALONE,
    }
    with far_network() as network, contextlib.ExitStack() as stack:

        def agent(name: str, address: str, inside: tuple[str, ...] = ()) -> Agent:
            started = Agent(tmp_path / name, inside, **settings, LONGSHORE_BIND_HOST=address)
            stack.callback(started.stop)
            return started

        prefill, beside, far = agent("prefill", HERE), agent("beside", HERE), agent("far", THERE, network.inside)
        source, other, target = Engine(prefill, "source"), Engine(beside, "other"), Engine(far, "target")
        for engine in (other, target):
            arrives(source, engine)
        worker = prefill.worker("source")
        assert {peer["wire"] for peer in worker["peers"]} == {"TCP"}
        # It is notified of the end of its connections, but only after the address has vanished.
        os.kill(worker["pid"], signal.SIGSTOP)
        for pid in [*far.children(), far.process.pid]:
            os.kill(pid, signal.SIGKILL)
        far.process.wait()
        network.ip("address", "del", f"{THERE}/24", "dev", CABLE)
        os.kill(worker["pid"], signal.SIGCONT)
        target.close()
        network.ip("address", "add", f"{ELSEWHERE}/24", "dev", CABLE)
        moved = Engine(agent("moved", ELSEWHERE, network.inside), "moved")
        wait_for(lambda: "target" not in attached(prefill), EVENT_LIMIT_S, "the loss of the peer to be seen")
        for _ in range(3):
            arrives(source, moved)
            arrives(source, other)
        for engine in (source, other, moved):
            engine.close()


def attached(agent: Agent) -> set[str]:
    return {peer["instance"] for peer in agent.worker("source")["peers"] if peer["state"] == "attached"}
