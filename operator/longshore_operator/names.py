"""Names of labels, annotations, children and the operator itself. Constants and pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from longshore_spec import names
from longshore_spec.node_groups import role_names
from longshore_wire.names import ENGINE_PREFIX

FIELD_MANAGER = "longshore-operator"
COMPONENT = "longshore-operator"

# Watches select by it.
DEPLOYMENT_LABEL = names.DEPLOYMENT_LABEL
ROLES_LABEL = names.ROLES_LABEL
PREFILL, DECODE, BOTH = names.PREFILL, names.DECODE, names.BOTH
# The role of engines, on the ConfigMap for them. The chart's injection finds that by it and by the deployment's label.
ENGINE_LABEL = "longshore.dev/engine"
# Digest of the applied object, on children. Detects drift without knowing the server's defaults.
RENDERED_ANNOTATION = "longshore.dev/rendered"
# Digests on agent pods. A change replaces the pod.
CONFIG_ANNOTATION = "longshore.dev/config"
KEYS_ANNOTATION = "longshore.dev/keys"
# Digest of an agent's pod template but its nodes, on DaemonSets' templates and pods.
TEMPLATE_ANNOTATION = "longshore.dev/template"
# The image of their init container.
HELPER_ANNOTATION = "longshore.dev/operator-image"

# Variables for the arguments of engines, in the ConfigMap of their role. Those that the client reads are the wire's.
ROLE_VARIABLE = f"{ENGINE_PREFIX}ROLE"
TENSOR_PARALLEL_VARIABLE = f"{ENGINE_PREFIX}TENSOR_PARALLEL"
PIPELINE_PARALLEL_VARIABLE = f"{ENGINE_PREFIX}PIPELINE_PARALLEL"
DATA_PARALLEL_VARIABLE = f"{ENGINE_PREFIX}DATA_PARALLEL"
PAGE_SIZE_VARIABLE = f"{ENGINE_PREFIX}PAGE_SIZE"
PAGE_ORDER_VARIABLE = f"{ENGINE_PREFIX}PAGE_ORDER"
VLLM_CONFIG_VARIABLE = f"{ENGINE_PREFIX}VLLM_CONFIG"
MPS_HOST_VARIABLE = f"{ENGINE_PREFIX}MPS_HOST_DIRECTORY"

CONTAINER = names.AGENT_CONTAINER
CONFIG_FILE = names.CONFIG_PATH.rpartition("/")[2]
KEYS_FILE = names.KEYS_FILE
PREVIOUS_KEYS_FILE = names.PREVIOUS_KEYS_FILE

GROUP = names.API_GROUP
VERSION = names.API_VERSION
PLURAL = names.PLURAL


def agent(deployment: str) -> str:
    """Return the name of all children of a deployment except its keys and those of one role."""
    return f"{deployment}-agent"


def daemon_set(deployment: str, roles: str) -> str:
    """Return the name of the DaemonSet for nodes of these roles."""
    return agent(deployment) if roles == BOTH else f"{agent(deployment)}-{roles}"


def config_digest(digests: Mapping[str, str], roles: str) -> str:
    """Return the digest of an agent's config, made of those of its roles; empty for a role that has none."""
    return "-".join(digests.get(role, "") for role in role_names(roles))


def engine(deployment: str, role: str) -> str:
    """Return the name of the ConfigMap for engines of a role."""
    return f"{deployment}-engine-{role}"


def labels(deployment: str) -> dict[str, str]:
    """Return the labels of every child."""
    values = ("longshore-agent", deployment, "agent", names.PRODUCT, COMPONENT)
    return dict(zip(names.CHILD_LABELS, values, strict=True)) | {DEPLOYMENT_LABEL: deployment}


def selector(deployment: str) -> dict[str, str]:
    """Return the labels that select all agent pods of a deployment."""
    return {DEPLOYMENT_LABEL: deployment}


def daemon_set_selector(deployment: str, roles: str) -> dict[str, str]:
    """Return the labels by which a DaemonSet selects its pods, which are immutable.

    The one for both roles had these before there were others. Pods of the others have another controller.
    """
    return selector(deployment) if roles == BOTH else selector(deployment) | {ROLES_LABEL: roles}
