"""Reads a cluster with the user's kubeconfig, as kubectl does. The only module of the command that knows Kubernetes.

Objects are the API server's JSON. The pages of agents in pods are read through the API server's proxy, so that neither a
route to the pods nor a port-forward is needed. The user needs the right to `get` `pods/proxy`, and for programs in pods
that to `create` and `get` `pods/exec`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlencode

from longshore_cli.status_pages import HTTP_TIMEOUT_S, AgentPages, Page
from longshore_cli.threads import Threads
from longshore_spec import distribution, names
from longshore_wire.errors import LongshoreError, Reason

Body = dict[str, Any]

DEPLOYMENTS = f"/apis/{names.API_GROUP_VERSION}"
# Objects in one page of a list. Bounds the memory that one answer takes.
_PAGE_COUNT = 500
# The end of one container's log. An agent writes some lines a minute, and more while something fails.
_LOG_LINES_MAX, _LOG_BYTES_MAX = 5000, 2 << 20
# Requests of one command at the same time.
CONNECTIONS = 16
# For the start of a program in a pod, for which a busy node takes seconds.
START_LIMIT_S = 30.0
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# Channels of a program's connection, besides its standard input and output: its error output, and the API server's verdict.
_STDERR, _ERROR = 2, 3
# Of a program's error output, or of an answer that is no object, in an error.
_SHOWN_CHARACTERS_MAX = 400
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 200, 401, 403, 404
# Too many requests, or a part of the API server or a proxy before it is away.
_UNAVAILABLE = frozenset({429, 502, 503, 504})


class ClusterError(LongshoreError):
    """The API server cannot be reached or refuses a request; names the request and the way out."""

    reason = Reason.INTERNAL


class MissingError(ClusterError):
    """An object or a kind of objects is not there."""


class DeniedError(ClusterError):
    """The user may not do this."""

    reason = Reason.AUTHENTICATION


class UnavailableError(ClusterError):
    """The API server cannot be reached, or cannot answer now. It has refused nothing."""


class AgentPod(NamedTuple):
    """The pod of an agent.

    Attributes:
        deployment: the name of its DisaggDeployment, in the same namespace.
        roles: `prefill`, `decode` or `both`.
        port: of its HTTP pages; 0: the pod declares none.
        body: the whole object.
    """

    namespace: str
    name: str
    node: str
    deployment: str
    roles: str
    port: int
    ready: bool
    body: Body


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `connect` reads, by kubectl's names."""
    parser.add_argument("-n", "--namespace", help="the namespace of the deployment (that of the context)")
    parser.add_argument("--context", help="the context of the kubeconfig (its current one)")
    parser.add_argument("--kubeconfig", help="path of the kubeconfig (that of KUBECONFIG, else ~/.kube/config)")


class Cluster:
    """One API server. A context manager.

    Attributes:
        host: its address.
        namespace: that of the arguments, or of the context.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.host: str = client.configuration.host
        self.namespace = namespace

    @classmethod
    def connect(cls, arguments: argparse.Namespace) -> Self:
        """Open what the kubeconfig names, in a pod without one the pod's ServiceAccount. Raises ClusterError."""
        try:
            import urllib3
            import yaml  # type: ignore[import-untyped, unused-ignore]
            from kubernetes import config
            from kubernetes.client import ApiClient, Configuration
        except ModuleNotFoundError as error:
            raise ClusterError(f"{error.name} cannot be imported: {distribution.to_install('cli')}") from error
        configuration = Configuration()
        known: Any = config
        try:
            if _in_a_pod(arguments):
                known.load_incluster_config(client_configuration=configuration)
                namespace = Path(_SERVICE_ACCOUNT, "namespace").read_text(encoding="ascii").strip()
            else:
                known.load_kube_config(arguments.kubeconfig, arguments.context, configuration)
                contexts, current = known.list_kube_config_contexts(arguments.kubeconfig)
                chosen = next((each for each in contexts if each["name"] == arguments.context), current)
                namespace = chosen["context"].get("namespace") or "default"
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError) as error:
            raise ClusterError(
                f"no cluster is known: {' '.join(str(error).split())}: set KUBECONFIG, or give --kubeconfig and --context"
            ) from error
        if not configuration.verify_ssl:
            # The user's kubeconfig says so. The library would warn at each request.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        configuration.retries = False
        configuration.connection_pool_maxsize = CONNECTIONS
        return cls(ApiClient(configuration), arguments.namespace or namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Body:
        """Return an object. Raises ClusterError."""
        return self._read("GET", f"{path}?{urlencode(query)}" if query else path)

    def create(self, path: str, body: Body) -> Body:
        """Create an object, such as a review of rights, and return it. Raises ClusterError."""
        return self._read("POST", path, body)

    def listed(self, path: str, query: Mapping[str, str] | None = None) -> list[Body]:
        """Return all objects of a list, in pages. Raises ClusterError."""
        found: list[Body] = []
        asked = {"limit": str(_PAGE_COUNT), **(query or {})}
        while True:
            page = self.get(path, asked)
            found += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                return found
            asked["continue"] = token

    def deployments(self, namespace: str | None = None) -> list[Body]:
        """Return the DisaggDeployments of a namespace, of all for an empty one (that of the arguments).

        Raises:
            MissingError: the API server does not know the kind.
        """
        try:
            return self.listed(within(DEPLOYMENTS, self.namespace if namespace is None else namespace, names.PLURAL))
        except MissingError as error:
            # Also of a namespace that is not there the API server lists nothing, and does not say 404.
            text = f"{self.host} serves no {names.KIND} of {names.API_VERSION}: install the chart, or see `longshore check`"
            raise MissingError(text) from error

    def deployment(self, name: str) -> Body:
        """Return one DisaggDeployment. Raises MissingError that names those there are."""
        try:
            return self.get(f"{within(DEPLOYMENTS, self.namespace, names.PLURAL)}/{quote(name)}")
        except MissingError as error:
            try:
                others = [body["metadata"]["name"] for body in self.deployments()]
                there = f"it has {', '.join(others)}" if others else "it has none: give -n NAMESPACE"
            except DeniedError:
                there = "correct the name, or give -n NAMESPACE"
            raise MissingError(f"namespace {self.namespace} has no {names.KIND} {name}: {there}") from error

    def agents(self, deployment: str = "", namespace: str | None = None) -> list[AgentPod]:
        """Return the agents' pods of a deployment, of all for an empty name, ordered by node.

        Pods that are being deleted are left out.

        Args:
            namespace: an empty one is all (that of the arguments).
        """
        where = self.namespace if namespace is None else namespace
        label = f"{names.DEPLOYMENT_LABEL}={deployment}" if deployment else names.DEPLOYMENT_LABEL
        pods = self.listed(within("/api/v1", where, "pods"), {"labelSelector": label})
        there = [_agent_pod(pod) for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return sorted(there, key=lambda agent: (agent.deployment, agent.node, agent.name))

    def pages(self, agent: AgentPod) -> AgentPages:
        """Return an agent's pages, read through the API server's proxy."""
        pod = f"/api/v1/namespaces/{agent.namespace}/pods/{agent.name}:{agent.port}/proxy"

        def fetch(path: str) -> Page:
            status, body = self._send("GET", f"{pod}{path}", None, f"the agent in pod {agent.namespace}/{agent.name}")
            # A Status is of the API server, not of the agent.
            if status != _OK and (said := _message(body)):
                if status == _FORBIDDEN:
                    raise DeniedError(f"{said}: ask for the right to get pods/proxy in {agent.namespace}")
                raise ClusterError(f"the agent in pod {agent.namespace}/{agent.name} cannot be reached: {said}")
            if status == _UNAUTHORIZED:
                raise DeniedError(
                    f"the agent in pod {agent.namespace}/{agent.name} wants its token, which the API server does not pass "
                    "on: forward the agent's port by `kubectl port-forward`, and give --agent and --token-file"
                )
            return Page(status, body)

        return AgentPages(f"{agent.namespace}/{agent.name} on {agent.node or 'no node'}", fetch)

    def log(self, namespace: str, pod: str, container: str, *, previous: bool = False) -> str:
        """Return the end of a container's log. Raises ClusterError.

        Args:
            previous: of the container before its last restart.
        """
        query = {"container": container, "tailLines": str(_LOG_LINES_MAX), "limitBytes": str(_LOG_BYTES_MAX)}
        query |= {"previous": "true"} if previous else {}
        path = f"{within('/api/v1', namespace, 'pods')}/{quote(pod)}/log"
        return self._answer("GET", f"{path}?{urlencode(query)}").decode(errors="replace")

    def start(self, agent: AgentPod, command: Sequence[str]) -> PodProgram:
        """Start a program in an agent's container, with the user's right to exec. Raises ClusterError."""
        from kubernetes.stream.ws_client import WSClient
        from websocket import WebSocketBadStatusException, WebSocketException

        connect: Any = WSClient
        words = [("container", names.AGENT_CONTAINER), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
        path = f"/api/v1/namespaces/{quote(agent.namespace)}/pods/{quote(agent.name)}/exec"
        url = f"{self.host}{path}?{urlencode([*words, *(('command', word) for word in command)])}"
        where = f"pod {agent.namespace}/{agent.name}"
        try:
            # Its binary messages keep a character whole that two of them share. It has no limit of its own.
            with Threads(1) as threads:
                connected = threads.submit(
                    partial(connect, binary=True),
                    *(self._client.configuration, url.replace("http", "ws", 1), self._credentials(), False),
                )
                threads.finish(START_LIMIT_S)
            if not connected.done():
                connected.add_done_callback(_close_late)
                raise ClusterError(f"no program has started in {where} within {START_LIMIT_S:g} s")
            client = connected.result()
            # For the rest of a message that has begun.
            client.sock.settimeout(HTTP_TIMEOUT_S)
        except WebSocketBadStatusException as error:
            said = _message(getattr(error, "resp_body", None) or b"") or str(error)
            if error.status_code in {_UNAUTHORIZED, _FORBIDDEN}:
                text = f"{said}: ask for the right to create and get pods/exec in {agent.namespace}"
                raise DeniedError(text) from error
            raise ClusterError(f"no program can be started in {where}: {said}") from error
        except (WebSocketException, OSError) as error:
            raise ClusterError(f"no program can be started in {where}: {error}") from error
        return PodProgram(where, client)

    def _credentials(self) -> dict[str, str]:
        # Read at each call, since tokens of a plugin or a pod are replaced.
        settings: dict[str, Any] = dict(self._client.configuration.auth_settings())
        return {str(entry["key"]): str(entry["value"]) for entry in settings.values() if entry["in"] == "header"}

    def _read(self, verb: str, path: str, body: Body | None = None) -> Body:
        data = self._answer(verb, path, body)
        try:
            return dict(json.loads(data))
        except (ValueError, TypeError) as error:
            said = data[:_SHOWN_CHARACTERS_MAX].decode(errors="replace")
            what = f"{verb} {path.partition('?')[0]}"
            text = f"{what}: {self.host} answered {said!r}, as no API server does: correct the kubeconfig, or log in"
            raise ClusterError(text) from error

    def _answer(self, verb: str, path: str, body: Body | None = None) -> bytes:
        status, data = self._send(verb, path, body)
        what = f"{verb} {path.partition('?')[0]}"
        if _OK <= status < 300:  # noqa: PLR2004
            return data
        said = _message(data) or data[:_SHOWN_CHARACTERS_MAX].decode(errors="replace").strip()
        if status == _UNAUTHORIZED:
            text = f"{self.host} does not accept the credentials of the kubeconfig: log in again"
            raise ClusterError(text, reason=Reason.AUTHENTICATION)
        if status == _FORBIDDEN:
            # What is created may also be refused for its content.
            raise DeniedError(f"{said}: ask for this right" if verb == "GET" else said)
        if status == _NOT_FOUND:
            raise MissingError(f"{what}: {said}")
        made = UnavailableError if status in _UNAVAILABLE else ClusterError
        raise made(f"{what}: the API server answered {status}: {said}")

    def _send(self, verb: str, path: str, body: Body | None, asked: str = "") -> tuple[int, bytes]:
        headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": names.PRODUCT}
        headers |= self._credentials()
        with self._foreign_errors(asked or f"the API server {self.host}"):
            answer = self._client.rest_client.pool_manager.request(
                verb,
                f"{self.host}{path}",
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=HTTP_TIMEOUT_S,
                retries=False,
            )
            return answer.status, answer.data

    @contextmanager
    def _foreign_errors(self, asked: str) -> Iterator[None]:
        import urllib3

        try:
            yield
        except urllib3.exceptions.ReadTimeoutError as error:
            raise UnavailableError(f"{asked} does not answer within {HTTP_TIMEOUT_S:g} s") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"the API server {self.host} cannot be reached: {error}") from error


class PodProgram:
    """A program in a pod, with pipes. Its standard input ends with the connection, also if this process is killed."""

    def __init__(self, where: str, client: Any) -> None:
        self._where = where
        self._client = client

    def write(self, data: bytes) -> None:
        """Write to its standard input; any thread may. Raises ClusterError: the connection is lost."""
        from websocket import WebSocketException

        try:
            self._client.write_stdin(data)
        except (WebSocketException, OSError) as error:
            raise ClusterError(f"the connection to {self._where} is lost: {error}") from error

    def read_line(self, limit_s: float) -> bytes:
        """Return a line of its standard output without the line's end; empty: none came in time.

        Raises:
            ClusterError: the program has ended, with what it wrote to its error output, or the connection is lost.
        """
        from websocket import WebSocketException

        try:
            line = bytes(self._client.readline_stdout(timeout=limit_s))
            if line or self._client.is_open():
                return line
            said = bytes(self._client.read_channel(_STDERR)) or bytes(self._client.read_channel(_ERROR))
        except (WebSocketException, OSError) as error:
            raise ClusterError(f"the connection to {self._where} is lost: {error}") from error
        text = _message(said) or said.decode(errors="replace").strip()[-_SHOWN_CHARACTERS_MAX:]
        raise ClusterError(f"the program in {self._where} has ended: {text or 'the connection was closed'}")

    def close(self) -> None:
        """Close the connection, which ends the standard input. Waits for no answer, and for no write that hangs."""
        line = self._client.sock.sock
        if line is not None and not _takes_more(line):
            # A thread whose write waits would hold the lock that the library's `close` needs.
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._client.close(timeout=0)


def _takes_more(line: socket.socket) -> bool:
    """Return whether a write to a connection does not wait."""
    poller = select.poll()
    poller.register(line, select.POLLOUT)
    return bool(poller.poll(0))


def _close_late(connected: Future[Any]) -> None:
    """Close a connection for which nobody waits any longer, which ends its program."""
    if connected.exception() is None:
        connected.result().close()


def container(pod: Body) -> Body:
    """Return the agent's container as the pod declares it; empty: it has none."""
    return next((each for each in pod["spec"].get("containers", ()) if each["name"] == names.AGENT_CONTAINER), {})


def _agent_pod(pod: Body) -> AgentPod:
    metadata = pod["metadata"]
    conditions: Sequence[Body] = pod.get("status", {}).get("conditions") or ()
    ports = container(pod).get("ports") or ()
    return AgentPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=pod["spec"].get("nodeName", ""),
        deployment=metadata["labels"][names.DEPLOYMENT_LABEL],
        roles=metadata["labels"].get(names.ROLES_LABEL, ""),
        port=next((port["containerPort"] for port in ports if port.get("name") == "http"), 0),
        ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
        body=pod,
    )


def within(group: str, namespace: str, plural: str) -> str:
    """Return the path of a list: of a namespace, or of all for an empty one."""
    return f"{group}/namespaces/{quote(namespace)}/{plural}" if namespace else f"{group}/{plural}"


def _message(data: bytes) -> str:
    """Return what a Status of the API server says; empty: the data is none."""
    try:
        found = json.loads(data)
    except ValueError:
        return ""
    return str(found.get("message") or "") if isinstance(found, dict) and found.get("kind") == "Status" else ""


def _in_a_pod(arguments: argparse.Namespace) -> bool:
    chosen = arguments.kubeconfig or arguments.context or "KUBECONFIG" in os.environ
    return not chosen and "KUBERNETES_SERVICE_HOST" in os.environ
