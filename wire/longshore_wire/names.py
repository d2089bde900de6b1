"""Names and numbers that the operator, the agent, the client and the command line must spell alike. Constants only."""

from __future__ import annotations

PRODUCT = "longshore"

API_GROUP = "longshore.dev"
API_VERSION = "v1alpha1"
API_GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
KIND = "DisaggDeployment"
PLURAL = "disaggdeployments"
SHORT_NAME = "dgdep"
CATEGORY = "disagg"
# Children's labels are the deployment's name with a suffix; labels end at 63 characters.
DEPLOYMENT_NAME_MAX = 40
NAMESPACE_NAME_MAX = 63

AGENT_CONFIG_KIND = "AgentConfig"
# Every environment variable of the product begins so; an unknown one that does is an error.
ENVIRONMENT_PREFIX = "LONGSHORE_"

# Where the operator mounts the agent's config file and the keys of the control protocol.
CONFIG_PATH = "/etc/longshore/agent.json"
KEYS_DIRECTORY = "/etc/longshore/keys"
# Engine sockets lie in <RUN_DIRECTORY>/<namespace>/<deployment>/.
RUN_DIRECTORY = "/run/longshore"
HTTP_PORT = 9470
# Protections of a worker's data ports, the best first. Absent: there are none. Loopback: only this machine, or pod, reaches them.
# Filtered: the kernel admits only addresses of attached peers. Bound: every host that reaches the agent's address reaches them.
# Open: every host that reaches any address of its network namespace does.
PROTECTIONS = ("Absent", "Loopback", "Filtered", "Bound", "Open")
# What stands in a wire's place where no probe has found it out.
UNKNOWN_WIRE = "Unknown"
# A wire that is one kind of another: what allows or measures CUDA IPC does so for NVLink, over which it may go.
WIDER_WIRES = {"NVLink": "CudaIPC"}
