"""Asks a cluster and its agents for the parts of a dump. Called by `command`. Judges nothing, and reads no Secret.

A part that cannot be read becomes the reason, so that a missing right ends nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import quote

from longshore_cli import operator_deployments
from longshore_cli.check import after, definition
from longshore_cli.check import lines as check_lines
from longshore_cli.check import reading as check_reading
from longshore_cli.check.reading import tried
from longshore_cli.cluster import CONNECTIONS, AgentPod, Cluster, ClusterError, DeniedError, MissingError, within
from longshore_cli.dump.bundle import Part
from longshore_cli.dump.clean import cleaned, node
from longshore_cli.operator_deployments import Operator
from longshore_cli.status.reading import Reader
from longshore_cli.threads import Threads
from longshore_cli.words import as_json
from longshore_spec import definition as definition_content
from longshore_spec import distribution, names
from longshore_wire.errors import LongshoreError

_CORE, _APPS = "/api/v1", "/apis/apps/v1"
# The kinds of a deployment's children, by the group that serves them.
_CHILDREN = {
    "daemonsets": _APPS,
    "configmaps": _CORE,
    "services": _CORE,
    "serviceaccounts": _CORE,
    "networkpolicies": "/apis/networking.k8s.io/v1",
}
# On an engine's pod, with the deployment's name, a dot and the role.
# Pages of an agent, by the file's name.
_PAGES = {"status.json": "/v1/status", "rooms.json": "/v1/rooms", "metrics.txt": "/metrics"}
# Between the two reads that rates of `status` need.
_RATES_S = 1.0

Body = dict[str, Any]


class _Objects(NamedTuple):
    """The objects of deployments, by kind, and why some are missing."""

    found: dict[str, list[Body]]
    faults: dict[str, Exception]


def parts(cluster: Cluster, arguments: argparse.Namespace, where: str, removed: set[str]) -> Iterator[Part]:
    """Yield the parts of a dump: first all objects, whose secret texts then are in `removed`.

    Args:
        arguments: `deployment`, `operator_namespace`, and those of the cluster.
        where: the namespace; empty: all.
    Raises:
        ClusterError: the API server does not answer, or has no deployment of that name.
    """
    name: str = arguments.deployment
    version = tried(lambda: cluster.get("/version"))
    if isinstance(version, ClusterError) and not isinstance(version, DeniedError):
        raise version
    objects = _objects(cluster, name, where)
    if name and isinstance(fault := objects.faults.get(names.PLURAL), MissingError):
        raise fault
    operators = tried(lambda: operator_deployments.installed(cluster, arguments.operator_namespace))
    serving = [] if isinstance(operators, ClusterError) else [one for one in operators if one.serves(where)]
    # All are read before the first is written, since a later one may show what must be removed from an earlier.
    read = [
        *_by_namespace(objects, where, removed),
        *(part for one in serving for part in _of_operator(cluster, one, removed)),
    ]
    removed -= _names([each for bodies in objects.found.values() for each in bodies] + [one.body for one in serving])
    yield from read
    yield _part("nodes.json", lambda: [node(each) for each in cluster.listed(f"{_CORE}/nodes")])
    if isinstance(operators, ClusterError):
        yield Part("operators/", operators)
    yield _part("versions.json", lambda: _versions(cluster, version))
    yield _part("status.json", lambda: _status(arguments))
    yield _part("check.json", lambda: _check(cluster, arguments, where))
    for one in serving:
        yield from _operator_logs(cluster, one)
    agents = tried(lambda: cluster.agents(name, where))
    if isinstance(agents, ClusterError):
        yield Part(f"{_folder(where)}/agents/", agents)
        return
    # Logs of all agents of a large cluster do not fit into memory.
    for first in range(0, len(agents), CONNECTIONS):
        with Threads(CONNECTIONS) as threads:
            futures = [threads.submit(_of_agent, cluster, pod) for pod in agents[first : first + CONNECTIONS]]
            threads.finish()
        for future in futures:
            yield from future.result()


def _names(bodies: Iterable[Body]) -> set[str]:
    """Return names of objects. A variable may have one as its value, which then is no secret."""
    return {body["metadata"].get(key, "") for body in bodies for key in ("name", "namespace")}


def _part(path: str, read: Callable[[], object]) -> Part:
    """Return a part: texts as they are, other values as JSON."""
    try:
        found = read()
    except LongshoreError as error:
        return Part(path, error)
    return Part(path, found if isinstance(found, str) else as_json(found))


def _objects(cluster: Cluster, name: str, where: str) -> _Objects:
    selector = f"{names.DEPLOYMENT_LABEL}={name}" if name else names.DEPLOYMENT_LABEL
    calls: dict[str, Callable[[], list[Body]]] = {
        names.PLURAL: lambda: [cluster.deployment(name)] if name else cluster.deployments(where),
        "events": lambda: cluster.listed(within(_CORE, where, "events")),
        "agent-pods": lambda: cluster.listed(within(_CORE, where, "pods"), {"labelSelector": selector}),
        "engine-pods": lambda: cluster.listed(within(_CORE, where, "pods"), {"labelSelector": names.INJECT_LABEL}),
    }
    for plural, group in _CHILDREN.items():
        calls[plural] = lambda plural=plural, group=group: cluster.listed(  # type: ignore[misc]
            within(group, where, plural), {"labelSelector": selector}
        )
    with Threads(CONNECTIONS) as threads:
        futures = {kind: threads.submit(tried, call) for kind, call in calls.items()}
        threads.finish()
    answers = {kind: future.result() for kind, future in futures.items()}
    found = {kind: answer for kind, answer in answers.items() if not isinstance(answer, ClusterError)}
    for kind in found.keys() & _CHILDREN.keys():
        # Another object may have the label, and a ConfigMap of others any content.
        found[kind] = [each for each in found[kind] if _is_child(each)]
    if name and "engine-pods" in found:
        found["engine-pods"] = [
            each
            for each in found["engine-pods"]
            if each["metadata"]["labels"][names.INJECT_LABEL].startswith(f"{name}.")
        ]
    if "events" in found:
        found["events"] = _about(found)
    return _Objects(found, {kind: answer for kind, answer in answers.items() if isinstance(answer, ClusterError)})


def _is_child(body: Body) -> bool:
    return any(owner["kind"] == names.KIND for owner in body["metadata"].get("ownerReferences") or ())


def _about(found: dict[str, list[Body]]) -> list[Body]:
    """Return the events about the objects, and about those of the same deployments that are gone."""
    bodies = [each for kind, listed in found.items() if kind != "events" for each in listed]
    there = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in bodies}
    gone = {(each["metadata"]["namespace"], f"{each['metadata']['name']}-") for each in found.get(names.PLURAL, ())}
    return [
        event
        for event in found["events"]
        if (key := (event["metadata"]["namespace"], event.get("involvedObject", {}).get("name", ""))) in there
        or any(key[0] == namespace and key[1].startswith(prefix) for namespace, prefix in gone)
    ]


def _by_namespace(objects: _Objects, where: str, removed: set[str]) -> Iterator[Part]:
    grouped: dict[str, list[Body]] = defaultdict(list)
    for kind, bodies in objects.found.items():
        for body in bodies:
            grouped[f"{_folder(body['metadata']['namespace'])}/{kind}.json"].append(cleaned(body, removed))
    for path, bodies in sorted(grouped.items()):
        yield Part(path, as_json(bodies))
    for kind, error in objects.faults.items():
        yield Part(f"{_folder(where)}/{kind}.json", error)


def _folder(namespace: str) -> str:
    return f"namespaces/{namespace or '*'}"


def _of_operator(cluster: Cluster, operator: Operator, removed: set[str]) -> Iterator[Part]:
    folder = f"operators/{operator}"
    yield _part(f"{folder}/deployment.json", lambda: cleaned(operator.body, removed))
    yield _part(f"{folder}/lease.json", lambda: cleaned(cluster.get(operator.lease_path), removed))
    yield _part(f"{folder}/pods.json", lambda: cleaned(_pods(cluster, operator), removed))

    def events() -> list[Body]:
        found = cluster.listed(within(_CORE, operator.namespace, "events"))
        return [each for each in found if str(each["involvedObject"].get("name", "")).startswith(operator.name)]

    yield _part(f"{folder}/events.json", lambda: cleaned(events(), removed))


def _pods(cluster: Cluster, operator: Operator) -> list[Body]:
    labels = operator.body["spec"]["selector"]["matchLabels"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    return cluster.listed(within(_CORE, operator.namespace, "pods"), {"labelSelector": selector})


def _operator_logs(cluster: Cluster, operator: Operator) -> Iterator[Part]:
    pods = tried(lambda: _pods(cluster, operator))
    folder = f"operators/{operator}"
    if isinstance(pods, ClusterError):
        yield Part(f"{folder}/logs/", pods)
        return
    for pod in pods:
        yield from _logs(cluster, pod, "operator", f"{folder}/{pod['metadata']['name']}")


def _logs(cluster: Cluster, pod: Body, container: str, folder: str) -> Iterator[Part]:
    """Yield the end of a container's log, and of the one before its last restart."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    yield _part(f"{folder}/log.txt", lambda: cluster.log(namespace, name, container))
    states = pod.get("status", {}).get("containerStatuses") or ()
    if any(each["name"] == container and each.get("restartCount") for each in states):
        yield _part(f"{folder}/previous-log.txt", lambda: cluster.log(namespace, name, container, previous=True))


def _of_agent(cluster: Cluster, pod: AgentPod) -> list[Part]:
    folder = f"{_folder(pod.namespace)}/agents/{pod.name}"
    found = list(_logs(cluster, pod.body, names.AGENT_CONTAINER, folder))
    if not (pod.port and check_reading.runs(pod)):
        return [*found, Part(f"{folder}/", ClusterError("its container does not run, so it has no pages"))]
    pages = cluster.pages(pod)
    for number, (name, path) in enumerate(_PAGES.items()):
        page = _part(f"{folder}/{name}", lambda path=path: pages.text(path))  # type: ignore[misc]
        if isinstance(page.content, Exception):
            # The others would take as long to fail.
            return [*found, Part(f"{folder}/{', '.join(list(_PAGES)[number:])}", page.content)]
        found.append(page)
    return found


def _versions(cluster: Cluster, version: Body | ClusterError) -> Body:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{quote(definition.NAME)}"
    crd = tried(lambda: cluster.get(path))
    told: object = str(crd)
    if not isinstance(crd, ClusterError):
        told = {
            "name": definition.NAME,
            "content": definition_content.digest(crd["spec"]),
            "annotation": (crd["metadata"].get("annotations") or {}).get(definition_content.ANNOTATION, ""),
            "versions": [each["name"] for each in crd["spec"]["versions"] if each["served"]],
            "conditions": (crd.get("status") or {}).get("conditions"),
        }
    kubernetes = str(version) if isinstance(version, ClusterError) else version
    return {"longshore": distribution.installed_version(), "kubernetes": kubernetes, "definition": told}


def _status(arguments: argparse.Namespace) -> Body:
    """Return what `longshore status -o json` prints."""
    asked = argparse.Namespace(**vars(arguments), agent=[], directory=None, token_file=None, authority=None)
    with ExitStack() as stack:
        reader = Reader(asked, stack)
        reader.read()
        time.sleep(_RATES_S)
        return {"deployments": reader.read()}


def _check(cluster: Cluster, arguments: argparse.Namespace, where: str) -> str:
    """Return what `longshore check -o json` prints."""
    found = check_reading.after_installation(cluster, arguments.deployment, where, arguments.operator_namespace)
    return check_lines.as_json(after.lines(found, where, distribution.installed_version()))
