"""Merges the settings of pods for each group of nodes, and finds those that may not be. Pure.

Called by the operator and the command line. The API server checks the values, when it takes the DaemonSet.
"""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Iterator
from typing import Any

from longshore_spec import names, pod_settings
from longshore_spec.manifest import Spec
from longshore_spec.node_groups import Group, groups
from longshore_spec.pod_settings import AGENT_VARIABLES, PodSettings, VolumeMount, entry_key
from longshore_wire.names import ENVIRONMENT_PREFIX

Body = dict[str, Any]
# Volumes of the agent's container that are the operator's.
_OWN_VOLUMES = ("config", "keys", "run", "shared-memory", "temporary")
# One more volume with `gpu.mps`.
MPS_VOLUME = "mps"
# The folder for volumes of the manifest. Nothing is loaded from it.
_MOUNT_FOLDER = "/mnt"
_DEVICES = "/dev"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a volume of the pod


def merged(spec: Spec, group: Group, runtime_class: str) -> Body:
    """Return the settings of a group's pods: those of all agents, overridden by those of its roles. See `pod_settings`."""
    return pod_settings.merged([spec.agents, *(_of(spec, role) for role in group.role_names)], runtime_class)


def _of(spec: Spec, role: str) -> PodSettings:
    return spec.prefill.agents if role == names.PREFILL else spec.decode.agents


def faults(spec: Spec) -> list[str]:
    """Return what the pods' settings may not say, each fault with its path."""
    found = []
    monitor = [key for key in spec.agents.pod_monitor_labels if _is_reserved(key)]
    found += [f"spec.agents.podMonitorLabels: {key} is set by the operator: leave it out" for key in monitor]
    for path, settings in sections(spec):
        found += [f"{path}.env: {fault}" for entry in settings.env if (fault := _variable_fault(entry.name))]
        for field, keys in (("labels", settings.labels), ("annotations", settings.annotations)):
            reserved = [key for key in keys if _is_reserved(key)]
            found += [f"{path}.{field}: {key} is set by the operator: leave it out" for key in reserved]
        own = (*_OWN_VOLUMES, MPS_VOLUME) if spec.gpu.mps else _OWN_VOLUMES
        taken = [volume.name for volume in settings.volumes if volume.name in own]
        found += [f"{path}.volumes: the agent has a volume {name}: choose another name" for name in taken]
        misplaced = [mount for mount in settings.volume_mounts if not _may_be_mounted(mount, spec, settings)]
        found += [
            f"{path}.volumeMounts: {mount.mount_path} is not below {_MOUNT_FOLDER}: mount it there; only a hostPath below "
            f"{_DEVICES} may have its own path"
            for mount in misplaced
        ]
    for group in groups(spec):
        pods = merged(spec, group, "")
        asked = pods.get("resources", {})
        if pods.get("guaranteed") and "cpu" not in {*asked.get("requests", {}), *asked.get("limits", {})}:
            found.append(f"spec.agents.guaranteed: give resources.limits.cpu too, for the agents of {group.roles}")
    if any(group.roles == names.BOTH for group in groups(spec)):
        prefill, decode = (_of(spec, role).as_pods_have_it() for role in (names.PREFILL, names.DECODE))
        found += [
            f"spec.prefill.agents.{path} and spec.decode.agents.{path} differ, and a node of both roles has one agent: "
            "make them equal, or choose selectors that pick no common node"
            for path in _conflicts(prefill, decode, "")
        ]
    return found


def sections(spec: Spec) -> tuple[tuple[str, PodSettings], ...]:
    """Return the settings of all agents and of those of each role, with their paths."""
    common = ("spec.agents", spec.agents)
    return (common, ("spec.prefill.agents", spec.prefill.agents), ("spec.decode.agents", spec.decode.agents))


def _variable_fault(name: str) -> str:
    """Say what is wrong with a variable of ours. Those of libraries are a matter of `permission`."""
    if name in AGENT_VARIABLES or not name.startswith(ENVIRONMENT_PREFIX):
        return ""
    nearest = difflib.get_close_matches(name, AGENT_VARIABLES, n=1, cutoff=0.0)[0]
    return (
        f"{name} is no setting of the agent, or a field of the spec or the operator sets it; the nearest is {nearest}"
    )


def _is_reserved(key: str) -> bool:
    return key.partition("/")[0] == names.API_GROUP or key in names.CHILD_LABELS


def _may_be_mounted(mount: VolumeMount, spec: Spec, settings: PodSettings) -> bool:
    """Whether a volume hides nothing of the agent: neither its programs nor its settings, keys, sockets and memory."""
    path = mount.mount_path.rstrip("/")
    if path != posixpath.normpath(path):
        return False
    if path.startswith(f"{_MOUNT_FOLDER}/"):
        return True
    volumes = {volume.name: volume for part in (spec.agents, settings) for volume in part.volumes}
    source = volumes[mount.name].host_path if mount.name in volumes else None
    return source is not None and path.startswith(f"{_DEVICES}/") and path == source.get("path") != _SHARED_MEMORY


def _conflicts(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two settings give different values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() & other.keys()):
            yield from _conflicts(one[key], other[key], f"{path}.{key}" if path else key)
    elif isinstance(one, list) and isinstance(other, list):
        entries = {entry_key(entry): entry for entry in one}
        yield from (f"{path}[{entry_key(entry)}]" for entry in other if entries.get(entry_key(entry), entry) != entry)
    elif one != other:
        yield path
