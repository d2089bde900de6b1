"""Tests the effect of each of the operator's settings, on its process with a fake API server and on its parts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from held_api import DEPLOYMENT_COUNT, HOST, LIMIT_S, ApiServer, Running, free_port
from operator_scene import ALLOWED, KEY, Nobody, Scene, said
from test_operator_lease import Server as LeaseServer

from longshore_operator import kinds, names
from longshore_operator.decide.decision import decide
from longshore_operator.handlers import configure
from longshore_operator.lease import Mutex
from longshore_operator.metrics import Metrics
from longshore_operator.polling import Poller
from longshore_operator.reconcile import Reconciler, look_at_all
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import Poll, World
from longshore_spec.log_lines import LogFormat
from longshore_wire.errors import ConfigError

# Most of them start the operator, which imports for two seconds.
pytestmark = pytest.mark.slow


def until(found: Callable[[], object], what: str) -> None:
    end_s, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not found():
        assert time.monotonic() < end_s, f"not within {LIMIT_S:g} s: {what}"
        pause.wait(0.02)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def start(tmp_path: Path, api: ApiServer) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(**settings: object) -> Running:
        running.append(Running(tmp_path, api, **settings))
        return running[-1]

    yield begin
    api.ended.set()
    for one in running:
        one.stop()


@pytest.mark.shows("operator.namespace", "operator.identity", "operator.lease_name", "operator.lease_s")
def test_the_lease_is_the_one_that_is_named_in_the_name_that_is_given_and_for_the_time_that_is_set(
    api: ApiServer, start: Callable[..., Running]
) -> None:
    start(namespace="own", lease_name="only-one", identity="replica-7", lease_s=33, lease_renew_s=1)
    until(lambda: len(api.leases) > 2, "a Lease that is renewed")
    path = "/apis/coordination.k8s.io/v1/namespaces/own/leases"
    assert {found for found in api.paths("PUT") if "/leases" in found} == {f"{path}/only-one"}
    lease = api.leases[-1]
    assert (lease["metadata"]["name"], lease["metadata"]["namespace"]) == ("only-one", "own")
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("replica-7", 33)


@pytest.mark.shows("operator.watch_namespace", "operator.watch_nodes")
@pytest.mark.parametrize(("namespace", "nodes"), [("team", "false"), ("", "true")])
def test_one_namespace_or_all_are_watched_and_nodes_where_they_may_be_read(
    api: ApiServer, start: Callable[..., Running], namespace: str, nodes: str
) -> None:
    start(watch_namespace=namespace, watch_nodes=nodes)
    place = f"/namespaces/{namespace}" if namespace else ""

    def watched() -> set[str]:
        return {path.partition("?")[0] for path in api.paths() if "watch=true" in path}

    expected = {f"/apis/longshore.dev/v1alpha1{place}/disaggdeployments", f"/api/v1{place}/pods"}
    until(lambda: expected <= watched() and ("/api/v1/nodes" in watched() or nodes == "false"), "every watch")
    assert ("/api/v1/nodes" in watched()) == (nodes == "true")
    others = {path for path in watched() if path != "/api/v1/nodes"}
    assert {("/namespaces/team/" in path) for path in others} == {bool(namespace)}


@pytest.mark.shows("operator.http_host", "operator.http_port")
def test_pages_are_served_where_they_are_set_to_be(api: ApiServer, start: Callable[..., Running]) -> None:
    host = "127.0.0.3"
    port = free_port(host)
    start(http_host=host, http_port=port)

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as page:
            return b"longshore_operator_leader" in page.read()
        return False

    until(answers, "its metrics")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=5)


@pytest.mark.shows("operator.resync_s")
def test_everything_is_listed_again_after_the_time_that_is_set(api: ApiServer, start: Callable[..., Running]) -> None:
    start(resync_s=1)

    def lists() -> int:
        return sum("/pods" in path and "watch=true" not in path for path in api.paths())

    until(lambda: lists() > 3, "pods to be listed again and again")


@pytest.mark.shows("operator.worker_count")
@pytest.mark.parametrize("count", [2, 5])
def test_as_many_deployments_are_reconciled_at_once_as_are_set(
    api: ApiServer, start: Callable[..., Running], count: int
) -> None:
    api.hold = lambda method, path: method == "POST" and path.endswith("/secrets")
    one = start(worker_count=count, request_timeout_s=600, log_level="info")
    until(lambda: api.held["secrets"] == count, "as many requests at once")
    # The remaining ones wait for a worker.
    until(lambda: one.metric("longshore_operator_queue_length") == DEPLOYMENT_COUNT - count, "a queue of the others")
    assert api.held["secrets"] == count


@pytest.mark.shows("operator.request_timeout_s")
def test_a_request_that_is_not_answered_ends_after_the_time_that_is_set(
    api: ApiServer, start: Callable[..., Running]
) -> None:
    api.hold = lambda _method, path: "/leases/" in path
    start(request_timeout_s=0.3, lease_renew_s=100, lease_s=300)
    until(lambda: len([path for path in api.paths() if "/leases/" in path]) > 3, "it to be tried again")
    assert configure(Settings(request_timeout_s=3), ()).networking.request_timeout == 3


@pytest.mark.shows("operator.log_level")
@pytest.mark.parametrize(("level", "told"), [("debug", True), ("error", False)])
def test_lines_below_the_set_level_are_not_logged(
    api: ApiServer, start: Callable[..., Running], level: str, *, told: bool
) -> None:
    one = start(log_level=level, lease_renew_s=1)
    until(lambda: len(api.leases) > 2, "its Lease")
    assert ("is the active replica" in one.log.read_text()) == told


@pytest.mark.shows("operator.log_format")
def test_every_line_is_one_object_where_that_is_set_also_those_of_kopf(
    api: ApiServer, start: Callable[..., Running]
) -> None:
    failed: list[str] = []

    def fails_once(_method: str, path: str) -> bool:
        is_first = "watch=true" in path and not failed
        failed.extend([path] if is_first else [])
        return is_first

    api.fail = fails_once
    one = start(log_format="json", log_level="debug", lease_renew_s=1)

    def lines() -> list[dict[str, Any]]:
        text = one.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    until(lambda: any(line.get("deployment") == "team/llama-1" for line in lines()), "a line on a deployment")
    until(lambda: any(line["logger"].startswith("kopf") for line in lines()), "kopf's line on its failed watch")
    one.stop()
    assert {line["process"] for line in lines()} == {"operator"}


# -- parts -----------------------------------------------------------------------------------------------------------


class Held:
    """A mutex that this replica holds."""

    is_held = True

    async def held(self) -> None:
        """Return at once."""


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


async def soon(found: Callable[[], object]) -> None:
    """Return once the condition holds; `run` limits the time. Polls, because the tasks that make it true signal nothing."""
    pause = asyncio.Event()
    while not found():
        with suppress(TimeoutError):
            await asyncio.wait_for(pause.wait(), 0.005)


class Agents:
    """Pages of agents in this process, which answer once `go_on` is set."""

    def __init__(self, count: int) -> None:
        self.scene = Scene()
        self.count = count
        self.go_on = asyncio.Event()
        self.asked = self.waiting = self.peak = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v1/status", self._page)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, HOST, port).start()
        for number in range(self.count):
            ports = [{"name": "http", "containerPort": port}]
            status = {"podIP": HOST, "conditions": [{"type": "Ready", "status": "True"}]}
            labels = {names.DEPLOYMENT_LABEL: KEY.name}
            metadata = {"name": f"llama-{number}", "namespace": KEY.namespace, "labels": labels}
            spec = {"nodeName": f"node-{number}", "containers": [{"name": names.CONTAINER, "ports": ports}]}
            self.scene.put(kinds.POD, {"metadata": metadata, "spec": spec, "status": status})
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go_on.set()
        await self._runner.cleanup()

    async def _page(self, _request: web.Request) -> web.Response:
        self.asked += 1
        self.waiting += 1
        self.peak = max(self.peak, self.waiting)
        try:
            await self.go_on.wait()
        finally:
            self.waiting -= 1
        return web.Response(body=b"{}")

    def poller(self, **settings: Any) -> Poller:
        chosen = dataclasses.replace(Settings(), **settings)
        return Poller(self.scene.world, WorkQueue(), Held(), chosen)  # type: ignore[arg-type]


@pytest.mark.shows("operator.poll_count_max")
@pytest.mark.parametrize("count_max", [2, 5])
def test_as_many_agents_are_asked_at_once_as_are_set(count_max: int) -> None:
    async def scenario() -> None:
        async with Agents(5) as agents, aiohttp.ClientSession() as session:
            sweep = asyncio.create_task(agents.poller(poll_count_max=count_max).sweep(session))
            await soon(lambda: agents.waiting == count_max)
            agents.go_on.set()
            await sweep
            assert (agents.peak, agents.asked) == (count_max, 5)

    run(scenario)


@pytest.mark.shows("operator.poll_timeout_s")
def test_an_agent_has_as_long_to_answer_as_is_set() -> None:
    async def scenario() -> None:
        async with Agents(1) as agents:
            short, long = agents.poller(poll_timeout_s=0.05), agents.poller(poll_timeout_s=600.0)
            tasks = [asyncio.create_task(each.run()) for each in (short, long)]
            await soon(lambda: short.silent_count == 1 and agents.asked >= 2)
            assert long.silent_count == 0
            for task in tasks:
                task.cancel()

    run(scenario)


@pytest.mark.shows("operator.poll_s")
def test_agents_are_asked_again_after_the_time_that_is_set() -> None:
    async def scenario() -> None:
        async with Agents(1) as often, Agents(1) as seldom:
            for agents in (often, seldom):
                agents.go_on.set()
            tasks = [
                asyncio.create_task(agents.poller(poll_s=poll_s).run())
                for agents, poll_s in ((often, 0.01), (seldom, 600.0))
            ]
            await soon(lambda: often.asked > 5 and seldom.asked)
            assert seldom.asked == 1
            for task in tasks:
                task.cancel()

    run(scenario)


@pytest.mark.shows("operator.lease_renew_s")
def test_a_lease_is_renewed_after_the_time_that_is_set() -> None:
    async def scenario() -> None:
        often, seldom = LeaseServer(), LeaseServer()
        tasks = [
            asyncio.create_task(
                Mutex(server, dataclasses.replace(Settings(), lease_s=1800.0, lease_renew_s=renew_s), "one").run()  # type: ignore[arg-type]
            )
            for server, renew_s in ((often, 0.01), (seldom, 600.0))
        ]

        def version(server: LeaseServer) -> int:
            return 0 if server.body is None else int(server.body["metadata"]["resourceVersion"])

        await soon(lambda: version(often) > 5 and version(seldom))
        assert version(seldom) == 1
        for task in tasks:
            task.cancel()

    run(scenario)


@pytest.mark.shows("operator.resync_s")
def test_everything_is_looked_at_again_after_the_time_that_is_set() -> None:
    async def scenario() -> None:
        often, seldom = WorkQueue(), WorkQueue()
        world = Scene().world
        tasks = [
            asyncio.create_task(look_at_all(world, queue, every_s))
            for queue, every_s in ((often, 0.01), (seldom, 600.0))
        ]
        for _ in range(3):
            often.done(await often.take())
        seldom.done(await seldom.take())
        assert len(seldom) == 0
        for task in tasks:
            task.cancel()

    run(scenario)


def reconciler(world: World, **settings: Any) -> Reconciler:
    chosen = dataclasses.replace(Settings(), **settings)
    return Reconciler(world, Nobody(), WorkQueue(), Nobody(), chosen, Metrics())  # type: ignore[arg-type]


@pytest.mark.shows(
    "operator.agent_image",
    "operator.agent_image_pull_policy",
    "operator.agent_image_pull_secrets",
    "operator.agent_runtime_class",
    "operator.operator_image",
)
def test_agents_are_of_the_image_that_is_set_where_their_deployment_names_none() -> None:
    def pod(**settings: str) -> dict[str, Any]:
        scene = Scene()
        images = reconciler(scene.world, **settings)._images
        children = {kind.name: body for kind, body in decide(scene.observe(), images).apply}
        found: dict[str, Any] = children["DaemonSet"]["spec"]["template"]["spec"]
        return found

    plain = pod()
    assert (plain["containers"][0]["imagePullPolicy"], "imagePullSecrets" in plain) == ("IfNotPresent", False)
    assert pod(agent_image="mine:3")["containers"][0]["image"] == "mine:3" != plain["containers"][0]["image"]
    assert pod(agent_image_pull_policy="Always")["containers"][0]["imagePullPolicy"] == "Always"
    assert pod(agent_image_pull_secrets="a, b")["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert pod(agent_runtime_class="nvidia")["runtimeClassName"] == "nvidia"
    assert pod(operator_image="ours:4")["initContainers"][0]["image"] == "ours:4"


@pytest.mark.shows("operator.agent_pod_labels", "operator.agent_pod_annotations")
def test_agents_pods_have_the_labels_and_annotations_that_are_set_and_their_deployments_own() -> None:
    scene = Scene(agents={"labels": {"team": "own"}})

    def metadata(**settings: str) -> dict[str, Any]:
        images = dataclasses.replace(reconciler(scene.world, **settings)._images, allowed=ALLOWED)
        children = {kind.name: body for kind, body in decide(scene.observe(), images).apply}
        found: dict[str, Any] = children["DaemonSet"]["spec"]["template"]["metadata"]
        return found

    plain = metadata()
    labels = json.dumps({"team": "all", "cost": "kv", names.ROLES_LABEL: "x"})
    found = metadata(agent_pod_labels=labels, agent_pod_annotations='{"sidecar.istio.io/inject": "false"}')
    assert found["labels"] == plain["labels"] | {"cost": "kv"}
    assert found["annotations"]["sidecar.istio.io/inject"] == "false"
    assert found["annotations"].keys() - plain["annotations"].keys() == {"sidecar.istio.io/inject"}
    with pytest.raises(ConfigError, match=r"LONGSHORE_AGENT_POD_LABELS: .*got `int`"):
        Settings.from_environment({"LONGSHORE_AGENT_POD_LABELS": '{"a": 1}'})


@pytest.mark.shows("operator.log_format")
def test_agents_log_in_the_form_that_is_set_where_their_deployment_sets_none() -> None:
    def form(given: list[dict[str, str]], **settings: LogFormat) -> list[str]:
        scene = Scene(agents={"env": given})
        children = {
            kind.name: body for kind, body in decide(scene.observe(), reconciler(scene.world, **settings)._images).apply
        }
        entries = children["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["env"]
        return [entry["value"] for entry in entries if entry["name"] == "LONGSHORE_LOG_FORMAT"]

    text = {"name": "LONGSHORE_LOG_FORMAT", "value": "text"}
    assert (form([]), form([], log_format=LogFormat.JSON), form([text], log_format=LogFormat.JSON)) == (
        [],
        ["json"],
        ["text"],
    )
    with pytest.raises(ConfigError, match="LONGSHORE_LOG_FORMAT: 'xml' is none of text, json"):
        Settings.from_environment({"LONGSHORE_LOG_FORMAT": "xml"})


@pytest.mark.shows("operator.allow")
def test_deployments_get_what_the_setting_allows() -> None:
    volumes = [{"name": "verbs", "hostPath": {"path": "/dev/infiniband/uverbs0"}}]
    agents = {"hostIPC": True, "volumes": volumes, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    scene = Scene(agents=agents)

    def compatible(allow: str) -> str:
        return scene.reasons(images=reconciler(scene.world, allow=allow)._images)["Compatible"]

    every = {"hostIPC": True, "capabilities": ["IPC_LOCK"], "hostPaths": ["/dev/infiniband"]}
    assert compatible(json.dumps(every)) == "PlanMade"
    for left_out in every:
        assert (
            compatible(json.dumps({name: value for name, value in every.items() if name != left_out})) == "NotAllowed"
        )
    assert compatible("") == "NotAllowed"
    with pytest.raises(ConfigError, match=r"LONGSHORE_ALLOW: .*hostPID"):
        Settings.from_environment({"LONGSHORE_ALLOW": '{"hostPID": true}'})


@pytest.mark.shows("operator.mps_host_directory", "operator.mps_pipe_directory")
def test_deployments_with_mps_get_the_directory_that_is_set_under_the_path_that_is_set() -> None:
    scene = Scene(gpu={"mps": True})

    def mounted(**settings: str) -> tuple[str, str, str]:
        images = reconciler(scene.world, **settings)._images
        children = {kind.name: body for kind, body in decide(scene.observe(), images).apply}
        spec = children["DaemonSet"]["spec"]["template"]["spec"]
        (host,) = (entry["hostPath"]["path"] for entry in spec["volumes"] if entry["name"] == "mps")
        (agent,) = spec["containers"]
        (path,) = (entry["mountPath"] for entry in agent["volumeMounts"] if entry["name"] == "mps")
        (value,) = (entry["value"] for entry in agent["env"] if entry["name"] == "CUDA_MPS_PIPE_DIRECTORY")
        return host, path, value

    assert mounted(mps_host_directory="/run/mps") == ("/run/mps", "/run/mps", "/run/mps")
    assert mounted(mps_host_directory="/run/mps", mps_pipe_directory="/mps") == ("/run/mps", "/mps", "/mps")
    assert scene.reasons(images=reconciler(scene.world)._images)["Compatible"] == "NotAllowed"
    with pytest.raises(ConfigError, match="LONGSHORE_MPS_HOST_DIRECTORY: mps is no absolute path"):
        Settings.from_environment({"LONGSHORE_MPS_HOST_DIRECTORY": "mps"})
    with pytest.raises(ConfigError, match="LONGSHORE_MPS_PIPE_DIRECTORY: give LONGSHORE_MPS_HOST_DIRECTORY too"):
        Settings.from_environment({"LONGSHORE_MPS_PIPE_DIRECTORY": "/mps"})


@pytest.mark.shows("operator.poll_stale_s")
@pytest.mark.parametrize(("stale_s", "silent"), [(5.0, True), (60.0, False)])
def test_an_answer_counts_for_as_long_as_is_set(stale_s: float, *, silent: bool) -> None:
    scene = Scene()
    scene.put_agent("a", said=said())
    scene.world.answered("Pod-llama-a", Poll(time.monotonic() - 20, said()))
    observed = reconciler(scene.world, poll_stale_s=stale_s)._observe(KEY)
    assert observed is not None
    assert [agent.silent for agent in observed.agents] == [silent]
