"""Runs agents as real processes on process nodes, and engines that connect to them by the client. Used by tests.

Agents run exactly the pods that the operator rendered and the API server gave to their node.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from agent_world import START_LIMIT_S, EngineProcess, Request, content
from controlplane.cluster import ControlPlane
from controlplane.process_node import ProcessNode, missing_rights
from controlplane.process_pod import Container, Image
from controlplane.waiting import until
from deployments import ROOT, VERSION

from longshore_client import AgentLost, Busy, Client, Half, RoomError, RoomEvent, RoomEventKind
from longshore_wire.names import RUN_DIRECTORY

AGENT_IMAGE = f"longshore-agent:{VERSION}"
OPERATOR_IMAGE = f"longshore-operator:{VERSION}"
_ROOM_LIMIT_S = 150.0
# The same as in the Dockerfiles. `python` and our programs are those of this environment.
_ENVIRONMENT = {
    "PATH": os.pathsep.join([str(ROOT / ".venv" / "bin"), f"{sys.prefix}/bin", "/usr/bin", "/bin"]),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Set where the environment's installation is not of this tree.
    **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
}
IMAGES = {
    AGENT_IMAGE: Image(("longshore-agent",), _ENVIRONMENT),
    OPERATOR_IMAGE: Image(("python", "-m", "longshore_operator.main"), _ENVIRONMENT),
}
# The model of the tests' engines, in a deployment's form.
MODEL = {"attention": "GQA", "layers": 4, "kvHeads": 12, "headDim": 32, "dtype": "float32"}
PAGE_SIZE = 16


def process_node(plane: ControlPlane, name: str, role: str) -> ProcessNode:
    """Return a node, not started, with the label of `role`."""
    if reason := missing_rights():
        pytest.skip(reason)
    return ProcessNode(plane, name, {"longshore.dev/role": role}, IMAGES)


class PodAgent:
    """The agent of a deployment on one process node."""

    def __init__(self, node: ProcessNode, namespace: str, name: str = "llama") -> None:
        self._node = node
        self._namespace = namespace
        self._name = name

    @property
    def container(self) -> Container:
        """Its current container."""
        return self._node.container(self._namespace, f"{self._name}-agent-")

    @property
    def socket(self) -> str:
        """Path of its engine socket on this machine."""
        return str(self._node.path(f"{RUN_DIRECTORY}/{self._namespace}/{self._name}/agent.sock"))

    @property
    def http(self) -> str:
        """Address of its HTTP pages."""
        pod = self._node.pod(self._namespace, f"{self._name}-agent-")
        port = next(port["containerPort"] for port in pod.containers[0].spec["ports"] if port["name"] == "http")
        return f"http://{pod.address}:{port}"

    @property
    def life(self) -> tuple[str, str]:
        """Its pod's uid and the fingerprint of its keys; empty while it is being replaced."""
        try:
            metadata = self._node.pod(self._namespace, f"{self._name}-agent-").body["metadata"]
        except AssertionError:
            return "", ""
        return metadata["uid"], metadata["annotations"]["longshore.dev/keys"]

    @property
    def digest(self) -> str:
        """The digest of the config that its pod was made for."""
        pod = self._node.pod(self._namespace, f"{self._name}-agent-")
        return str(pod.body["metadata"]["annotations"]["longshore.dev/config"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=START_LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    @property
    def ask(self) -> Callable[[], dict[str, Any]]:
        """Return a function that gets the status of the current agent, also while its pod is ending."""
        url = f"{self.http}/v1/status"

        def status() -> dict[str, Any]:
            with urllib.request.urlopen(url, timeout=START_LIMIT_S) as answer:
                return dict(json.loads(answer.read()))

        return status

    def status(self) -> dict[str, Any]:
        """Return its status page."""
        return self.ask()

    def log(self) -> str:
        """Return the end of its log."""
        process = self.container.process
        return process.log() if process is not None else ""

    def wires(self, half: str) -> set[str]:
        """Return the wires that its workers of one half found to their attached peers."""
        return {
            peer["wire"]
            for worker in self.status()["workers"]
            if any(half in engine["roles"] for engine in worker["engines"])
            for peer in worker["peers"]
            if peer["state"] == "attached"
        }


def move(source: EngineProcess, target: Any, room: int, tokens: int) -> list[RoomEvent]:
    """Move a request from a single-rank engine to all ranks of `target`; return the target ranks' events."""
    begin(source, target, room, tokens)
    return finish(source, target, room)


def begin(source: EngineProcess, target: Any, room: int, tokens: int) -> None:
    """Claim a room and offer all of it."""
    endpoint = source.endpoint()
    pages = list(range(-(-tokens // PAGE_SIZE)))
    for rank in target.ranks:
        rank.client.receive(room, endpoint, pages, 0, tokens)
        rank.put(rank.expected, pages, content(room, tokens, rank.layout), 0, tokens)
    assert source.ask("send", room=room, pages=pages, total=tokens) == "sent"


def finish(source: EngineProcess, target: Any, room: int) -> list[RoomEvent]:
    """Wait until a room's pages are released at the target's ranks; return its end there."""
    return [_ended(rank.client, room, Half.TARGET, source.instance) for rank in target.ranks]


def _ended(client: Client, room: int, half: Half, instance: str) -> RoomEvent:
    end = client.wait(room, half, instance, timeout_s=_ROOM_LIMIT_S)
    client.wait(room, half, instance, [RoomEventKind.RELEASED], _ROOM_LIMIT_S)
    return end


def move_through(request: Request) -> list[RoomEvent]:
    """Move a request while agents may be replaced, as engines do, and return its end.

    Calls without an agent are retried. If decode's claim has failed, prefill cancels its offer: an agent that started
    after the failure does not know it and waits for a claim. A rank is refused if the room has already failed.
    """
    room, instance = request.room, request.source.instance
    endpoint = request.source.endpoint()
    ends: list[RoomEvent] = []
    claimed, offered = [], []
    for rank in request.target.ranks:
        try:
            again(lambda rank=rank: rank.client.receive(room, endpoint, request.target_pages, 0, request.total))
            claimed.append(rank)
        except RoomError as error:
            ends.append(_refused(room, Half.TARGET, instance, error))
        rank.put(rank.expected, request.target_pages, request.data, 0, request.total)
    for rank in request.source.ranks:
        try:
            again(lambda rank=rank: rank.client.send(room, request.source_pages, 0, request.total, last=True))
            offered.append(rank)
        except RoomError as error:
            ends.append(_refused(room, Half.SOURCE, instance, error))
    ends += [_ended(rank.client, room, Half.TARGET, instance) for rank in claimed]
    for rank in offered:
        if any(end.kind is RoomEventKind.FAILED for end in ends):
            again(lambda rank=rank: rank.client.cancel(room, Half.SOURCE, instance=instance))
        ends.append(_ended(rank.client, room, Half.SOURCE, instance))
    request.give_back(ends)
    return ends


def _refused(room: int, half: Half, instance: str, error: RoomError) -> RoomEvent:
    return RoomEvent(half, instance, room, RoomEventKind.FAILED, error.reason, str(error))


def again(call: Callable[[], None]) -> None:
    """Repeat a call until an agent answers."""

    def answered() -> bool:
        try:
            call()
        except (AgentLost, Busy):
            return False
        return True

    until(answered, "an agent answers", START_LIMIT_S)
