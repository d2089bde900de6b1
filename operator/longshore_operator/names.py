"""Names of labels, annotations, children and the operator itself. Constants and pure functions."""

from __future__ import annotations

from longshore_wire import names

FIELD_MANAGER = "longshore-operator"
COMPONENT = "longshore-operator"

# Holds the deployment's name, on every child and agent pod. Watches select by it.
DEPLOYMENT_LABEL = "longshore.dev/deployment"
# Digest of the applied object, on children. Detects drift without knowing the server's defaults.
RENDERED_ANNOTATION = "longshore.dev/rendered"
# Digests on agent pods. A change replaces the pod.
CONFIG_ANNOTATION = "longshore.dev/config"
KEYS_ANNOTATION = "longshore.dev/keys"

CONTAINER = "agent"
CONFIG_FILE = names.CONFIG_PATH.rpartition("/")[2]
KEYS_FILE = "curve.json"
PREVIOUS_KEYS_FILE = "previous.json"

GROUP = names.API_GROUP
VERSION = names.API_VERSION
PLURAL = names.PLURAL


def agent(deployment: str) -> str:
    """Return the name of all children of a deployment except its keys."""
    return f"{deployment}-agent"


def labels(deployment: str) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        "app.kubernetes.io/name": "longshore-agent",
        "app.kubernetes.io/instance": deployment,
        "app.kubernetes.io/component": "agent",
        "app.kubernetes.io/part-of": names.PRODUCT,
        "app.kubernetes.io/managed-by": COMPONENT,
        DEPLOYMENT_LABEL: deployment,
    }


def selector(deployment: str) -> dict[str, str]:
    """Return the labels that select agent pods. A DaemonSet's selector is immutable."""
    return {DEPLOYMENT_LABEL: deployment}
