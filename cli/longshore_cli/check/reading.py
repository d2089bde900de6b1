"""Asks the API server and the agents for what the checks judge. Called by `command`. Judges nothing.

What cannot be read is returned as the error, so that its check says why it was not made.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from longshore_cli import agents, operator_deployments
from longshore_cli.agent_report import Report, report_of
from longshore_cli.check import before, definition
from longshore_cli.check.after import After
from longshore_cli.check.before import Before, Right, Subject, Tried
from longshore_cli.check.operators import Lease
from longshore_cli.check.pages import Reached
from longshore_cli.cluster import (
    CONNECTIONS,
    AgentPod,
    Cluster,
    ClusterError,
    DeniedError,
    MissingError,
    UnavailableError,
)
from longshore_cli.operator_deployments import Operator
from longshore_cli.status_pages import AgentPages
from longshore_cli.threads import Threads
from longshore_spec import names
from longshore_wire.names import AGENT_USER_ID, RUN_DIRECTORY

# Between two looks at a Lease that seems old.
_LEASE_LOOK_S = 0.5
# Added to the duration of a Lease, within which its holder must renew it before our eyes.
_LEASE_MORE_S = 2.0
_LEASE_LIMIT_S = 30.0
_CORE = "/api/v1"

Body = dict[str, Any]
_T = TypeVar("_T")


def before_installation(
    cluster: Cluster, subjects: Sequence[Subject] | None, mode: str, namespace: str, release: str
) -> Before:
    """Return the answers that checks before an installation judge.

    Args:
        subjects: the deployments of manifests; None: those of the cluster's namespace.
        mode, namespace: of the chart's release.
        release: of this command.
    Raises:
        ClusterError: the API server does not answer, or does not know the user.
    """
    version = _version(cluster)
    if subjects is None:
        there = tried(cluster.deployments)
        subjects = [] if isinstance(there, Exception) else [before.subject(body) for body in there]
    spaces = dict.fromkeys([one.namespace for one in subjects] or [cluster.namespace])
    with Threads(CONNECTIONS) as threads:
        rights = {
            right: threads.submit(tried, lambda right=right: _may(cluster, right))
            for right in before.wanted(mode, namespace)
        }
        crd = threads.submit(_definition, cluster)
        found = threads.submit(tried, lambda: operator_deployments.installed(cluster, namespace))
        nodes = threads.submit(tried, lambda: cluster.listed(f"{_CORE}/nodes"))
        classes = threads.submit(tried, lambda: cluster.listed("/apis/node.k8s.io/v1/runtimeclasses"))
        own = threads.submit(_namespace, cluster, namespace)
        admitted = {
            space: threads.submit(_tried, cluster, space, [one for one in subjects if one.namespace == space])
            for space in spaces
        }
        threads.finish()
    listed = classes.result()
    return Before(
        release=release,
        mode=mode,
        namespace=namespace,
        own=own.result(),
        version=version,
        rights={right: future.result() for right, future in rights.items()},
        definition=crd.result(),
        operators=found.result(),
        nodes=nodes.result(),
        runtime_classes=listed if isinstance(listed, Exception) else [one["metadata"]["name"] for one in listed],
        namespaces={space: future.result() for space, future in admitted.items()},
        subjects=subjects,
    )


def after_installation(cluster: Cluster, name: str, where: str, namespace: str) -> After:
    """Return the answers that checks after an installation judge.

    Args:
        name: of the only deployment to check; empty: all.
        where: their namespace; empty: all namespaces.
        namespace: of the operator, if deployments of all namespaces may not be listed.
    Raises:
        ClusterError: the API server does not answer, or does not know the user.
    """
    version = _version(cluster)
    with Threads(CONNECTIONS) as threads:
        crd = threads.submit(_definition, cluster)
        found = threads.submit(tried, lambda: operator_deployments.installed(cluster, namespace))
        bodies = threads.submit(tried, lambda: [cluster.deployment(name)] if name else cluster.deployments(where))
        agents_pods = threads.submit(tried, lambda: cluster.agents(name, where))
        threads.finish()
    deployments, pods = bodies.result(), agents_pods.result()
    installed = found.result()
    serving = () if isinstance(installed, Exception) else installed
    there = () if isinstance(pods, Exception) else pods
    running = [pod for pod in there if pod.port and runs(pod)]
    asked = agents.answers([cluster.pages(pod) for pod in running], _status, agents.PAGES_LIMIT_S)
    return After(
        version=version,
        definition=crd.result(),
        operators=installed,
        leases={(one.namespace, one.lease): _lease(cluster, one) for one in serving if one.serves(where)},
        deployments=deployments,
        pods=pods,
        reached=[Reached(pod, page) for pod, page in zip(running, asked, strict=True)],
        warnings={space: _warnings(cluster, space) for space in _troubled(deployments, there)},
    )


def tried(read: Callable[[], _T]) -> _T | ClusterError:
    """Return what `read` returns, or its error."""
    try:
        return read()
    except ClusterError as error:
        return error


def _version(cluster: Cluster) -> Body | DeniedError:
    """Return the API server's version. Raises ClusterError: nothing else can be read either."""
    try:
        return cluster.get("/version")
    except DeniedError as error:
        return error


def _may(cluster: Cluster, right: Right) -> bool:
    """Whether the user has a right."""
    asked = {"verb": right.verb, "group": right.group, "resource": right.resource, "namespace": right.namespace}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    return bool(cluster.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)["status"]["allowed"])


def _definition(cluster: Cluster) -> Body | Exception | None:
    """Return the CRD; None: there is none."""
    found = tried(lambda: cluster.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition.NAME}"))
    return None if isinstance(found, MissingError) else found


def _namespace(cluster: Cluster, name: str) -> Body | Exception | None:
    found = tried(lambda: cluster.get(f"{_CORE}/namespaces/{quote(name)}"))
    return None if isinstance(found, MissingError) else found


def _lease(cluster: Cluster, operator: Operator) -> Lease | Exception:
    """Return an operator's Lease. One that seems old is watched for its duration, as clocks of two machines may differ."""
    path = operator.lease_path
    try:
        found = cluster.get(path)
        duration_s = float(found["spec"].get("leaseDurationSeconds") or 0)
        age_s = operator_deployments.age_s(found, dt.datetime.now(dt.UTC))
        if -duration_s <= age_s <= duration_s or not found["spec"].get("holderIdentity"):
            return Lease(found, renewed=True)
        until_s = time.monotonic() + min(duration_s + _LEASE_MORE_S, _LEASE_LIMIT_S)
        while time.monotonic() < until_s:
            time.sleep(_LEASE_LOOK_S)
            again = cluster.get(path)
            if again["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                return Lease(again, renewed=True)
        return Lease(found, renewed=False)
    except MissingError:
        return Lease(None, renewed=False)
    except ClusterError as error:
        return error


def _tried(cluster: Cluster, namespace: str, subjects: Sequence[Subject]) -> Tried:
    """Return a namespace, and whether it admits a pod like the agents', which a dry run creates and nobody keeps."""
    body = _namespace(cluster, namespace)
    if body is None:
        return Tried(None, None)
    may = tried(lambda: _may(cluster, Right("create", "", "pods", namespace)))
    if isinstance(may, ClusterError):
        return Tried(body, None, str(may))
    if not may:
        return Tried(body, None, f"you may not create pods in {namespace}, so that a dry run is not possible")
    specs = [one.spec for one in subjects if one.spec is not None]
    host = {
        "hostNetwork": any(spec.agents.host_network for spec in specs),
        "hostIPC": any(spec.agents.host_ipc for spec in specs),
    }
    try:
        cluster.create(f"{_CORE}/namespaces/{quote(namespace)}/pods?dryRun=All", _pod(host))
    except (MissingError, UnavailableError) as error:
        return Tried(body, None, str(error))
    except ClusterError as error:
        return Tried(body, str(error))
    return Tried(body, "")


def _pod(host: Body) -> Body:
    """Return a pod with the parts of the agents' that Pod Security judges."""
    container = {
        "name": names.AGENT_CONTAINER,
        "image": "longshore-agent",
        "resources": {kind: {"cpu": "1m", "memory": "1Mi"} for kind in ("requests", "limits")},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "run", "mountPath": RUN_DIRECTORY}],
    }
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": AGENT_USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "run", "hostPath": {"path": RUN_DIRECTORY, "type": "DirectoryOrCreate"}}],
        **{name: True for name, asked in host.items() if asked},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "longshore-check-"}, "spec": spec}


def runs(pod: AgentPod) -> bool:
    """Whether an agent's container runs. One that waits for its next start has no pages."""
    status = pod.body.get("status", {})
    states = [
        each.get("state") or {}
        for each in status.get("containerStatuses") or ()
        if each["name"] == names.AGENT_CONTAINER
    ]
    return status.get("phase") == "Running" and not any({"waiting", "terminated"} & state.keys() for state in states)


def _status(agent: AgentPages) -> Report:
    return report_of(agent.name, agent.status())


def _troubled(deployments: Sequence[Body] | Exception, pods: Iterable[AgentPod]) -> set[str]:
    """Return the namespaces with agents that are missing or not ready."""
    found = {pod.namespace for pod in pods if not pod.ready}
    for body in () if isinstance(deployments, Exception) else deployments:
        counts = (body.get("status") or {}).get("agents") or {}
        if counts.get("ready", 0) < counts.get("desired", 0):
            found.add(body["metadata"]["namespace"])
    return found


def _warnings(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Return the newest warning about each pod and DaemonSet; empty if they may not be read, since they only explain."""
    found = tried(
        lambda: cluster.listed(f"{_CORE}/namespaces/{quote(namespace)}/events", {"fieldSelector": "type=Warning"})
    )
    if isinstance(found, Exception):
        return {}
    newest: dict[str, str] = {}
    causes = [event for event in found if event.get("reason") not in names.HARMLESS_WARNINGS]
    for event in sorted(causes, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")):
        about = event.get("involvedObject", {})
        # A Service may have a DaemonSet's name.
        key = {"Pod": about.get("uid"), "DaemonSet": about.get("name")}.get(about.get("kind"))
        if key:
            newest[key] = f"{event.get('reason', '')}: {event.get('message', '')}"
    return newest
