"""Names and numbers of a deployment that the operator, the agent and the command line share."""

from __future__ import annotations

from enum import StrEnum


class Protection(StrEnum):
    """The protection of a worker's data ports against strangers, strongest first."""

    ABSENT = "Absent"  # there is no port
    LOOPBACK = "Loopback"  # only this machine, or this pod, can reach it
    FILTERED = "Filtered"  # the kernel admits only addresses of attached peers
    BOUND = "Bound"  # open to all that reach the agent's own address
    OPEN = "Open"  # open to all that reach any address of this network namespace


PROTECTIONS = tuple(each.value for each in Protection)

PRODUCT = "longshore"

API_GROUP = "longshore.dev"
API_VERSION = "v1alpha1"
API_GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
KIND = "DisaggDeployment"
PLURAL = "disaggdeployments"
# Labels of children are the deployment's name with a suffix; a label has at most 63 characters.
DEPLOYMENT_NAME_MAX = 40
NAMESPACE_NAME_MAX = 63

# Holds the deployment's name, on every child and agent pod.
DEPLOYMENT_LABEL = f"{API_GROUP}/deployment"
# The roles of the nodes that an agent's DaemonSet is for, on it and its pods: `prefill`, `decode` or `both`.
ROLES_LABEL = f"{API_GROUP}/roles"
# On engines' pods: `<deployment>.<role>`. The chart's injection reads it, and the operator watches pods that have it.
INJECT_LABEL = f"{API_GROUP}/inject"
# The agent's container in its pod.
AGENT_CONTAINER = "agent"

AGENT_CONFIG_KIND = "AgentConfig"

# Mount paths of the agent's config file and of the control protocol's keys.
CONFIG_PATH = "/etc/longshore/agent.json"
KEYS_DIRECTORY = "/etc/longshore/keys"
# The keys of this revision and, during a rotation, of the previous one, in that directory.
KEYS_FILE = "curve.json"
PREVIOUS_KEYS_FILE = "previous.json"

# Warning events of a kubelet about the DNS settings of a pod, which starts and becomes ready nevertheless.
HARMLESS_WARNINGS = frozenset({"MissingClusterDNS", "DNSConfigForming"})
# The variable in which the CUDA driver finds the daemon of the Multi-Process Service (MPS).
MPS_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"

HTTP_PORT = 9470
# The roles of engines, and of the nodes that both roles' selectors pick.
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES = (PREFILL, DECODE)
# Labels that every child of a deployment has. The operator sets them, and all those of API_GROUP.
CHILD_LABELS = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "managed-by"))
