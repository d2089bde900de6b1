"""What a deployment's objects are rendered from. Made by `decide.spec`, read by everything in `render`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from longshore_operator import names
from longshore_operator.kinds import Kind
from longshore_wire import names as wire_names
from longshore_wire.agent_config import AgentConfig
from longshore_wire.manifest import Agents, DisaggDeployment

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageChoice:
    """What the operator was told of agents' images, for deployments that say nothing."""

    image: str
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()
    runtime_class: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One deployment, checked.

    Attributes:
        uid: of the DisaggDeployment, which owns every child.
        keys_secret, keys_fingerprint: the Secret with the keys, and which keys they are.
        previous_keys_secret: the Secret before it, which agents need to know agents that still have it; empty: none.
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
        """How its agents run."""
        return self.manifest.spec.agents

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.manifest.deployment.name

    @property
    def namespace(self) -> str:
        """The deployment's namespace."""
        return self.manifest.deployment.namespace


def child(wanted: Wanted, kind: Kind, content: Body) -> Body:
    """Return the whole object of a child whose own part is `content`; its digest is among its annotations."""
    return owned(wanted.namespace, wanted.manifest.deployment.name, wanted.uid, kind, names.agent(wanted.name), content)


def owned(namespace: str, deployment: str, uid: str, kind: Kind, name: str, content: Body) -> Body:
    """Return an object that is deleted with its deployment, with labels and the digest of what it holds."""
    owner = {
        "apiVersion": wire_names.API_GROUP_VERSION,
        "kind": wire_names.KIND,
        "name": deployment,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata: Body = {
        "name": name,
        "namespace": namespace,
        "labels": names.labels(deployment),
        "ownerReferences": [owner],
    }
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content}
    metadata["annotations"] = {names.RENDERED_ANNOTATION: digest(body)}
    return body


def digest(value: object) -> str:
    """Return a short name of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_ours(body: Body, uid: str) -> bool:
    """Whether this deployment owns an object."""
    return any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or ())
