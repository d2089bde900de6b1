"""The input of rendering: one checked deployment. Made by `decide.decision`, read by all of `render`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from longshore_operator import names
from longshore_operator.kinds import Kind
from longshore_spec import names as spec_names
from longshore_spec.agent_config import AgentConfig
from longshore_spec.log_lines import LogFormat
from longshore_spec.manifest import Agents, DisaggDeployment
from longshore_spec.permission import NOTHING_ALLOWED, Allowed

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MpsDirectory:
    """Where the nodes' daemon of CUDA's Multi-Process Service has its pipes; empty: nodes have no such daemon.

    Attributes:
        host: the path on the node.
        pod: the path in pods, which is the value of CUDA_MPS_PIPE_DIRECTORY there.
    """

    host: str = ""
    pod: str = ""


@dataclass(frozen=True, slots=True)
class ImageChoice:
    """The operator's defaults for agents' pods, its own image, and what deployments may choose. Hashable: rendering is cached.

    Attributes:
        pod_labels, pod_annotations: each a name and a text.
    """

    image: str
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()
    runtime_class: str = ""
    operator_image: str = "longshore-operator:0.1.0"
    allowed: Allowed = NOTHING_ALLOWED
    mps: MpsDirectory = MpsDirectory()
    pod_labels: tuple[tuple[str, str], ...] = ()
    pod_annotations: tuple[tuple[str, str], ...] = ()
    log_format: LogFormat = LogFormat.TEXT


@dataclass(frozen=True, slots=True)
class Wanted:
    """One deployment, checked.

    Attributes:
        uid: uid of the DisaggDeployment, the owner of every child.
        keys_secret, keys_fingerprint: the Secret with the keys, and their fingerprint.
        previous_keys_secret: the Secret before it, so that agents accept agents that still use it; empty if none.
    """

    manifest: DisaggDeployment
    config: AgentConfig
    uid: str
    images: ImageChoice
    keys_secret: str
    keys_fingerprint: str
    previous_keys_secret: str = ""

    @property
    def agents(self) -> Agents:
        """The spec's section on agents."""
        return self.manifest.spec.agents

    @property
    def mps(self) -> MpsDirectory | None:
        """The pipes of the daemon that agents and engines use; None: they use none."""
        return self.images.mps if self.manifest.spec.gpu.mps else None

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.manifest.deployment.name

    @property
    def namespace(self) -> str:
        """The deployment's namespace."""
        return self.manifest.deployment.namespace


def child(
    wanted: Wanted, kind: Kind, content: Body, name: str = "", labels: Mapping[str, str] = MappingProxyType({})
) -> Body:
    """Return a child with this content, plus metadata with its digest. Without a name, it gets that of most children."""
    return owned(wanted.namespace, wanted.name, wanted.uid, kind, name or names.agent(wanted.name), content, labels)


def owned(
    namespace: str,
    deployment: str,
    uid: str,
    kind: Kind,
    name: str,
    content: Body,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Body:
    """Return an object that the deployment owns, with our labels, further ones, and the digest of its content."""
    owner = {
        "apiVersion": spec_names.API_GROUP_VERSION,
        "kind": spec_names.KIND,
        "name": deployment,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata: Body = {
        "name": name,
        "namespace": namespace,
        "labels": {**names.labels(deployment), **labels},
        "ownerReferences": [owner],
    }
    return with_digest({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content})


def with_digest(body: Body) -> Body:
    """Return an object with the digest of its content in place of the one that it may have."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "annotations"}
    found = digest({**body, "metadata": metadata})
    return {**body, "metadata": metadata | {"annotations": {names.RENDERED_ANNOTATION: found}}}


def digest(value: object) -> str:
    """Return a short name of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_ours(body: Body, uid: str) -> bool:
    """Whether this deployment owns an object."""
    return any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or ())
