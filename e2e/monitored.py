"""Two real agents in pods, a real operator, engines and a real Prometheus that scrapes them. Used by tests and `draw_dashboard`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_world import Engine, EngineProcess, content, room_ids
from controlplane.cluster import ControlPlane
from deployments import Deployments
from operator_process import OperatorProcess
from prometheus_server import Prometheus
from real_agents import MODEL, PAGE_SIZE, PodAgent, finish, move, process_node

from longshore_client import Half, RoomError, RoomEventKind
from longshore_spec.names import HTTP_PORT
from longshore_wire.errors import Reason

# Starting an agent, its self-test and its workers loads torch several times on few cores.
_START_LIMIT_S = 150.0
_REFUSAL_LIMIT_S = 150.0


@dataclass
class Scene:
    """One deployment with an agent and an engine for each role."""

    prometheus: Prometheus
    deployments: Deployments
    prefill: PodAgent
    decode: PodAgent
    source: EngineProcess
    target: Engine

    def moves(self, tokens: int) -> int:
        """Move a request, which succeeds; return its room."""
        room = next(room_ids)
        ends = move(self.source, self.target, room, tokens)
        assert {end.kind for end in ends} == {RoomEventKind.DONE}, ends
        return room

    def reuses(self, room: int) -> None:
        """Claim a room that is over, which its agent refuses."""
        rank = self.target.ranks[0]
        endpoint = self.source.endpoint()
        try:
            rank.client.receive(room, endpoint, [0], 0, PAGE_SIZE)
        except RoomError as error:
            refused = error.reason
        else:
            refused = rank.client.wait(room, Half.TARGET, self.source.instance, timeout_s=_REFUSAL_LIMIT_S).reason
        assert refused is Reason.ROOM_REUSED, refused

    def fails(self) -> None:
        """Begin a room in which the engines disagree on the prompt's length, so that it fails."""
        room, pages = next(room_ids), [0, 1]
        endpoint = self.source.endpoint()
        for rank in self.target.ranks:
            rank.client.receive(room, endpoint, pages, 0, 2 * PAGE_SIZE)
            rank.put(rank.expected, pages, content(room, 2 * PAGE_SIZE, rank.layout), 0, 2 * PAGE_SIZE)
        self.source.ask("send", room=room, pages=pages[:1], total=PAGE_SIZE)
        ends = finish(self.source, self.target, room)
        assert RoomEventKind.FAILED in {end.kind for end in ends}, ends


@contextlib.contextmanager
def scene(plane: ControlPlane, folder: Path) -> Iterator[Scene]:
    """Start a deployment of two nodes with its operator, its engines and a Prometheus. Needs the rights of process nodes."""
    namespace = f"watched-{uuid.uuid4().hex[:6]}"
    roles = {role: f"{namespace}-{role}" for role in ("prefill", "decode")}
    plane.kubectl("create", "namespace", namespace)
    with contextlib.ExitStack() as stack:
        stack.callback(plane.try_kubectl, "delete", "namespace", namespace, "--wait=false")
        nodes = {role: stack.enter_context(process_node(plane, f"{name}-0", name)) for role, name in roles.items()}
        settings = {"watch_namespace": namespace, "poll_stale_s": 5, "poll_timeout_s": 3}
        operator = stack.enter_context(OperatorProcess(plane, namespace, **settings))
        prometheus = stack.enter_context(Prometheus(folder, plane.kubeconfig, namespace, operator.port))
        deployments = Deployments(plane, namespace, HTTP_PORT)
        selectors = {role: {"longshore.dev/role": name} for role, name in roles.items()}
        shared = {"instances": 1, "pageSize": PAGE_SIZE}
        deployments.apply(
            model=MODEL,
            prefill={
                **shared,
                "tensorParallel": 1,
                "staging": {"bufferSize": "8Mi", "lanes": 2},
                "nodeSelector": selectors["prefill"],
            },
            decode={
                **shared,
                "tensorParallel": 2,
                "staging": {"poolSize": "32Mi"},
                "nodeSelector": selectors["decode"],
            },
        )
        deployments.wait_reason("Ready", "Ready", limit_s=_START_LIMIT_S)
        agents = {role: PodAgent(node, namespace) for role, node in nodes.items()}
        target = Engine(agents["decode"], f"d-{uuid.uuid4().hex[:4]}", 2, roles=[Half.TARGET])
        stack.callback(target.close)
        source = EngineProcess(agents["prefill"], f"p-{uuid.uuid4().hex[:4]}", roles=[Half.SOURCE])
        stack.callback(source.close)
        yield Scene(prometheus, deployments, agents["prefill"], agents["decode"], source, target)
