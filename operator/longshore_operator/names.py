"""How the operator spells labels, annotations, children and itself. Constants and pure functions."""

from __future__ import annotations

from longshore_wire import names

FIELD_MANAGER = "longshore-operator"
COMPONENT = "longshore-operator"

# On every child and agent pod: the deployment's name; watches select by it.
DEPLOYMENT_LABEL = "longshore.dev/deployment"
# On children: digest of what was applied, so that a difference is seen without rendering defaults as the server does.
RENDERED_ANNOTATION = "longshore.dev/rendered"
# On agent pods: digests whose change has to replace the pod.
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
    """Return the name that all children of a deployment but its keys share."""
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
    """Return the labels by which pods are selected; they can never change for a DaemonSet."""
    return {DEPLOYMENT_LABEL: deployment}
