"""Names and numbers that the operator, the agent, the client and the command line share."""

from __future__ import annotations

from enum import IntEnum


class Labelled(IntEnum):
    """An enumeration of which messages carry the number.

    Attributes:
        label: how metrics, statuses and texts name a member.
    """

    label: str

    def __init__(self, _number: int) -> None:
        self.label = self.name.lower()


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
# The agent's container in its pod.
AGENT_CONTAINER = "agent"

AGENT_CONFIG_KIND = "AgentConfig"
# Prefix of all of the product's environment variables. An unknown variable with this prefix is an error.
ENVIRONMENT_PREFIX = "LONGSHORE_"

# Mount paths of the agent's config file and of the control protocol's keys.
CONFIG_PATH = "/etc/longshore/agent.json"
KEYS_DIRECTORY = "/etc/longshore/keys"
# The engine socket is in <RUN_DIRECTORY>/<namespace>/<deployment>/. An agent without a deployment has it in RUN_DIRECTORY.
RUN_DIRECTORY = "/run/longshore"
SOCKET_FILE = "agent.sock"
# Prefix of the variables for engines, which are no settings of our programs.
ENGINE_PREFIX = f"{ENVIRONMENT_PREFIX}ENGINE_"
# The variable in which an engine's client finds the path of the engine socket, if the engine gives none.
ENGINE_SOCKET_VARIABLE = f"{ENGINE_PREFIX}SOCKET"
# The variable with which the names of an engine's instances begin.
INSTANCE_PREFIX_VARIABLE = f"{ENGINE_PREFIX}INSTANCE_PREFIX"
# Instances of `longshore verify` and `longshore bench cluster` have names with this prefix. Agents give their workers less
# staging memory, and the operator does not count them. No agent can tell a test engine from another, so the client refuses
# these names for engines. Names of deployments, with which engines' names begin, have no dot.
TEST_INSTANCE_PREFIX = "longshore.test-"
# Limits of such a worker's staging: of each lane, and of the ring, which then holds two slabs of each of 8 writers. A GPU
# needs longer slabs, or control takes most of the time.
TEST_LANE_BYTES_MAX, TEST_GPU_LANE_BYTES_MAX = 4 << 20, 32 << 20
TEST_RING_BYTES_MAX, TEST_GPU_RING_BYTES_MAX = 64 << 20, 512 << 20
# Warning events of a kubelet about the DNS settings of a pod, which starts and becomes ready nevertheless.
HARMLESS_WARNINGS = frozenset({"MissingClusterDNS", "DNSConfigForming"})
# The variable in which the CUDA driver finds the daemon of the Multi-Process Service (MPS).
MPS_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
# User and group of the agent's image. The engine socket is for this group.
AGENT_USER_ID = 10001
HTTP_PORT = 9470
# The roles of engines, and of the nodes that both roles' selectors pick.
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES = (PREFILL, DECODE)
# Labels that every child of a deployment has. The operator sets them, and all those of API_GROUP.
CHILD_LABELS = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "managed-by"))
# Protections of a worker's data ports, strongest first. Absent: no ports. Loopback: only this machine or pod has access.
# Filtered: the kernel admits only addresses of attached peers. Bound: every host that reaches the agent's address reaches them.
# Open: every host that reaches any address of the agent's network namespace reaches them.
PROTECTIONS = ("Absent", "Loopback", "Filtered", "Bound", "Open")
# Suffix of an agent's name in endpoints of engines on GPUs.
ON_GPU = ".gpu"
# The name of a wire that no probe has found.
UNKNOWN_WIRE = "Unknown"
# Wires that another one includes: CUDA IPC may use NVLink, so its permissions and measurements also apply to NVLink.
WIDER_WIRES = {"NVLink": "CudaIPC"}
