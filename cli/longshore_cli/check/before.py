"""Judges a cluster before an installation: version, rights, namespaces and their Pod Security. Pure. Called by `command`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longshore_cli.check import definition, nodes
from longshore_cli.check.lines import Line, error, ok, skipped, unread, warning
from longshore_cli.operator_deployments import Operator
from longshore_spec import manifest
from longshore_spec.manifest import Spec
from longshore_wire.errors import ConfigError

# The chart's `kubeVersion`.
KUBERNETES_MIN = (1, 29)
PAGE = "docs/how-to/check.md"
_KUBERNETES = "docs/how-to/kubernetes.md"
_POD_SECURITY = f"{_KUBERNETES}#pod-security"
ENFORCE = "pod-security.kubernetes.io/enforce"
# The level that agents' pods pass, because they share a folder of the node with engines.
NEEDED_LEVEL = "privileged"

Body = dict[str, Any]


class Right(NamedTuple):
    """One right of the user; an empty namespace is the whole cluster."""

    verb: str
    group: str
    resource: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


_RBAC = "rbac.authorization.k8s.io"
# The kinds that the chart's defaults create, and Helm's record of the release.
NAMESPACED = (
    ("", "serviceaccounts"),
    ("", "secrets"),
    ("apps", "deployments"),
    ("networking.k8s.io", "networkpolicies"),
    ("policy", "poddisruptionbudgets"),
    (_RBAC, "roles"),
    (_RBAC, "rolebindings"),
)
CLUSTER = ((_RBAC, "clusterroles"), (_RBAC, "clusterrolebindings"))
DEFINITION = Right("create", "apiextensions.k8s.io", "customresourcedefinitions")


class Subject(NamedTuple):
    """A deployment that is to be installed, or is there. `spec` is None if it is invalid, for these reasons."""

    namespace: str
    name: str
    spec: Spec | None
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Tried(NamedTuple):
    """A namespace.

    Attributes:
        body: None if it is not there; or why it cannot be read.
        refusal: what a dry run said of a pod like the agents'; empty: it was admitted; None: it could not be tried.
        why: why it could not be tried.
    """

    body: Body | Exception | None
    refusal: str | None
    why: str = ""


class Before(NamedTuple):
    """The answers of the cluster. An exception stands for what cannot be read.

    Attributes:
        release: the version of this command.
        mode: of the chart: `cluster` or `namespaced`.
        namespace, own: of the operator; None: it is not there.
        rights: those that `wanted` lists.
    """

    release: str
    mode: str
    namespace: str
    own: Body | Exception | None
    version: Body | Exception
    rights: Mapping[Right, bool | Exception]
    definition: Body | Exception | None
    operators: Sequence[Operator] | Exception
    nodes: Sequence[Body] | Exception
    runtime_classes: Sequence[str] | Exception
    namespaces: Mapping[str, Tried]
    subjects: Sequence[Subject]


def subject(body: Body) -> Subject:
    """Return a deployment of the API server with its spec, or with its faults."""
    metadata = body["metadata"]
    try:
        return Subject(metadata["namespace"], metadata["name"], manifest.read(body).spec)
    except ConfigError as error:
        return Subject(metadata["namespace"], metadata["name"], None, tuple(error.faults))


def wanted(mode: str, namespace: str) -> list[Right]:
    """Return the rights to ask for."""
    found = [Right("create", group, resource, namespace) for group, resource in NAMESPACED]
    found += [Right("create", group, resource) for group, resource in CLUSTER]
    role = "clusterroles" if mode == "cluster" else "roles"
    where = "" if mode == "cluster" else namespace
    all_of_it = Right("*", "*", "*", where)
    return [*found, DEFINITION, Right("create", "", "namespaces"), Right("escalate", _RBAC, role, where), all_of_it]


def lines(found: Before) -> list[Line]:
    """Return what is said of a cluster before an installation."""
    said = [version(found.version), *_rights(found), *_definition(found)]
    said += [_pod_security(namespace, tried, found.subjects) for namespace, tried in found.namespaces.items()]
    default = next((one.runtime_class for one in _serving(found)), "")
    if not found.subjects:
        text = "no manifest is given and no deployment is there, so nodes, GPUs and RuntimeClass are not checked"
        said.append(skipped("nodes", "nodes", text, "give -f MANIFEST", PAGE))
    for subject in found.subjects:
        if subject.spec is None:
            way_out = "correct these fields"
            said.append(
                error(
                    str(subject), "manifest", "; ".join(subject.faults), way_out, "docs/reference/disaggdeployment.md"
                )
            )
        else:
            said += nodes.lines(str(subject), subject.spec, found.nodes, found.runtime_classes, default)
    text = "image pull, kernel limits and peer access of GPUs are not checked before installation: only the nodes know them"
    said.append(
        skipped("agents", "node", text, "run longshore check NAME when the agents run", f"{PAGE}#after-an-installation")
    )
    return said


def version(found: Body | Exception) -> Line:
    """Return the line on the API server's version."""
    if isinstance(found, Exception):
        return unread("cluster", "version", found)
    numbers = re.match(r"v?(\d+)\.(\d+)", found.get("gitVersion", ""))
    least = ".".join(map(str, KUBERNETES_MIN))
    if not numbers or (int(numbers[1]), int(numbers[2])) < KUBERNETES_MIN:
        text = (
            f"the API server is of Kubernetes {found.get('gitVersion') or 'unknown'}, and the definition needs {least}"
        )
        return error("cluster", "version", text, f"upgrade the cluster to {least} or newer", _KUBERNETES)
    return ok("cluster", "version", f"the API server answers and is of Kubernetes {found['gitVersion']}")


def _serving(found: Before) -> list[Operator]:
    if isinstance(found.operators, Exception):
        return []
    namespaces = {subject.namespace for subject in found.subjects} or set(found.namespaces)
    return [one for one in found.operators if any(one.serves(namespace) for namespace in namespaces)]


def _definition(found: Before) -> list[Line]:
    if isinstance(found.definition, Exception):
        return [unread("definition", "crd", found.definition)]
    return definition.lines(found.definition, _serving(found), found.release, before=True)


def _rights(found: Before) -> list[Line]:
    section = "rights"
    failures = [answer for answer in found.rights.values() if isinstance(answer, Exception)]
    if failures:
        return [unread(section, "rights", failures[0])]
    missing = [right for right, may in found.rights.items() if not may]
    link = f"{PAGE}#rights"
    in_namespace = [right for right in missing if right.namespace and right.verb == "create"]
    said = [
        error(
            section, "namespace", f"you may not {_listed(in_namespace)} in namespace {found.namespace}",
            "ask for these rights, or give another --operator-namespace", link,
        )
        if in_namespace
        else ok(section, "namespace", f"you may create what the chart has in namespace {found.namespace}")
    ]  # fmt: skip
    of_cluster = [right for right in missing if not right.namespace and (right.group, right.resource) in CLUSTER]
    of_cluster = [right for right in of_cluster if right.verb == "create"]
    if of_cluster and found.mode == "cluster":
        way_out = "ask for these rights, or install with mode=namespaced and check with --mode namespaced"
        said.append(error(section, "cluster", f"you may not {_listed(of_cluster)}", way_out, link))
    elif of_cluster:
        text = f"you may not {_listed(of_cluster)}, so the operator cannot count nodes"
        said.append(warning(section, "cluster", text, "install with watchNodes=false", link))
    else:
        said.append(ok(section, "cluster", "you may create what the chart has outside of namespaces"))
    if DEFINITION in missing and found.definition is None:
        way_out = "ask an administrator: kubectl apply --server-side -f crds/, then install with crds.install=false"
        said.append(error(section, "crd", f"you may not {DEFINITION}, and it is not there", way_out, link))
    return [*said, *_others(found, missing, link)]


def _listed(rights: Sequence[Right]) -> str:
    return ", ".join(map(str, rights))


def _others(found: Before, missing: Sequence[Right], link: str) -> list[Line]:
    """Judge the right to give rights away, and to make the operator's namespace."""
    section, said = "rights", []
    escalates = [right for right in found.rights if right.verb in {"escalate", "*"}]
    if all(right in missing for right in escalates):
        text = "you may give a role only rights that you have yourself; whether you have all of the operator's is not checked"
        way_out = "if Helm says `attempting to grant RBAC permissions not currently held`, ask for the right to escalate roles"
        said.append(warning(section, "escalate", text, way_out, link))
    if found.own is None and Right("create", "", "namespaces") in missing:
        text = f"namespace {found.namespace} is not there, and you may not create namespaces"
        said.append(error(section, "namespaces", text, "ask for that namespace", link))
    return said


def _pod_security(namespace: str, tried: Tried, subjects: Sequence[Subject]) -> Line:
    section, check = "Pod Security", "podsecurity"
    used = any(subject.namespace == namespace for subject in subjects)
    whose = f"namespace {namespace}"
    way_out = f"kubectl label namespace {namespace} --overwrite {ENFORCE}={NEEDED_LEVEL}"
    if tried.refusal is not None and "violates PodSecurity" in tried.refusal:
        return error(section, check, f"{whose} refuses agents' pods: {tried.refusal}", way_out, _POD_SECURITY)
    if tried.refusal == "":
        return ok(section, check, f"{whose} admits a pod like the agents' (a dry run)")
    if tried.refusal is not None:
        text = f"{whose} refuses a pod like the agents' (a dry run): {tried.refusal}"
        return error(section, check, text, "see the admission policy or quota that the message names", _POD_SECURITY)
    if tried.body is None:
        text = f"{whose} is not there yet, so its Pod Security is not known"
        return warning(
            section, check, text, f"create it{' before its deployment' if used else ''}, and check again", _POD_SECURITY
        )
    if isinstance(tried.body, Exception):
        return unread(section, check, tried.body)
    level = (tried.body["metadata"].get("labels") or {}).get(ENFORCE, "")
    if level == NEEDED_LEVEL:
        return ok(section, check, f"{whose} enforces {level}, which agents' pods pass")
    if level:
        text = f"{whose} enforces {level}, and agents' pods have a hostPath volume, which it refuses"
        return error(section, check, text, way_out, _POD_SECURITY)
    text = f"{whose} has no label {ENFORCE}, and the cluster's default is not known: {tried.why}"
    return warning(section, check, text, way_out, _POD_SECURITY)
