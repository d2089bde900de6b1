"""Keeps agents whose pods differ from their DaemonSet in its nodes or in the operator's image alone. Pure. Called by `decision`.

An agent's init container has the operator's image. An upgrade of the operator alone keeps the image of the pods that run.

A DaemonSet replaces all pods of an older template, and its template holds its nodes. So that an edit of a selector
replaces nobody, the DaemonSet is OnDelete until no pod of an older template is left or another change comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longshore_operator import kinds, names
from longshore_operator.kinds import Kind
from longshore_operator.observe import Observed
from longshore_operator.render.wanted import is_ours, with_digest
from longshore_operator.world import ChildKey
from longshore_spec.manifest import UpdateType

Body = dict[str, Any]
_ON_DELETE = {"type": UpdateType.ON_DELETE.value}


def keep(observed: Observed, children: Sequence[tuple[Kind, Body]]) -> tuple[tuple[Kind, Body], ...]:
    """Return the children, with the images that stay, and with those DaemonSets as OnDelete that must not replace their pods."""
    found = [(kind, _with_its_helper(observed, kind, body)) for kind, body in children]
    return tuple((kind, _kept(body) if _must_keep(observed, kind, body) else body) for kind, body in found)


def updated_count(observed: Observed, found: Body) -> int:
    """Return how many agents of a DaemonSet differ from its template in their nodes at most."""
    made_for = _template(found)
    pods = [agent.pod for agent in observed.agents if agent.pod.roles == _roles(found) and not agent.pod.ending]
    counted = int((found.get("status") or {}).get("updatedNumberScheduled", 0))
    return max(counted, sum(bool(made_for) and pod.template == made_for for pod in pods))


def _must_keep(observed: Observed, kind: Kind, wanted: Body) -> bool:
    found = observed.children.get(ChildKey(kind.name, wanted["metadata"]["name"]))
    if kind is not kinds.DAEMON_SET or found is None or not is_ours(found, observed.uid):
        return False
    if wanted["spec"]["updateStrategy"] == _ON_DELETE or _template(found) != _template(wanted):
        return False
    pods = [agent.pod for agent in observed.agents if agent.pod.roles == _roles(wanted) and not agent.pod.ending]
    if any(pod.template != _template(wanted) for pod in pods):
        # They are being replaced because of an earlier change.
        return False
    if _affinity(found) != _affinity(wanted):
        return True
    status = found.get("status") or {}
    unseen = int(status.get("observedGeneration", 0)) < int(found["metadata"].get("generation", 0))
    behind = int(status.get("updatedNumberScheduled", 0)) < int(status.get("desiredNumberScheduled", 0))
    return bool(found["spec"]["updateStrategy"]["type"] == _ON_DELETE["type"] and (unseen or behind))


def _with_its_helper(observed: Observed, kind: Kind, wanted: Body) -> Body:
    """Return a child, a DaemonSet with the init container's image that it was made with if its pods are otherwise the same."""
    found = observed.children.get(ChildKey(kind.name, wanted["metadata"]["name"]))
    if kind is not kinds.DAEMON_SET or found is None or not is_ours(found, observed.uid):
        return wanted
    image = found["spec"]["template"]["metadata"].get("annotations", {}).get(names.HELPER_ANNOTATION)
    template = wanted["spec"]["template"]
    own = template["metadata"]["annotations"][names.HELPER_ANNOTATION]
    if image in (None, own) or _template(found) != _template(wanted):
        return wanted
    metadata = template["metadata"] | {
        "annotations": template["metadata"]["annotations"] | {names.HELPER_ANNOTATION: image}
    }
    pod = template["spec"] | {
        "initContainers": [entry | {"image": image} for entry in template["spec"]["initContainers"]]
    }
    return with_digest({**wanted, "spec": wanted["spec"] | {"template": {"metadata": metadata, "spec": pod}}})


def _kept(body: Body) -> Body:
    return with_digest({**body, "spec": body["spec"] | {"updateStrategy": _ON_DELETE}})


def _template(body: Body) -> str:
    """Return the digest of a DaemonSet's template without its nodes."""
    annotations = body["spec"]["template"]["metadata"].get("annotations") or {}
    return str(annotations.get(names.TEMPLATE_ANNOTATION, ""))


def _affinity(body: Body) -> Body:
    found: Body = body["spec"]["template"]["spec"].get("affinity") or {}
    return found


def _roles(body: Body) -> str:
    return str((body["metadata"].get("labels") or {}).get(names.ROLES_LABEL, names.BOTH))
