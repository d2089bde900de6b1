"""Names the parts of a manifest that the pods of a group's agents are made of. Pure. Called by the command line.

Two manifests with equal parts have agents with equal pods, so that a change from one to the other replaces none of them. A test
compares this with the DaemonSets that the operator renders.
"""

from __future__ import annotations

from typing import Any

from longshore_spec.agent_config import digests
from longshore_spec.agent_memory import resources, shared_memory_limit
from longshore_spec.agent_pods import merged
from longshore_spec.manifest import DisaggDeployment
from longshore_spec.node_groups import Group

Body = dict[str, Any]


def template_parts(found: DisaggDeployment, group: Group, runtime_class: str = "") -> Body:
    """Return the parts, but the nodes of the group.

    Args:
        found: its fields may contradict each other.
        runtime_class: the operator's default.
    """
    spec = found.spec
    settings = merged(spec, group, runtime_class)
    config = digests(found.unchecked_config())
    return {
        "config": [config[role] for role in group.role_names],
        "keys": spec.agents.keys_revision,
        "image": spec.agents.image,
        "host": [spec.agents.host_network, spec.agents.host_ipc],
        "resources": resources(spec, group, settings),
        "sharedMemory": shared_memory_limit(spec, group),
        "settings": {name: value for name, value in settings.items() if name not in {"gpus", "resources"}},
    }
