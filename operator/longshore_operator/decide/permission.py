"""Finds the settings of pods that the cluster's administrator does not allow. Pure. Called by `decide.spec`."""

from __future__ import annotations

from longshore_operator.render.wanted import Allowed
from longshore_spec.agent_pods import sections
from longshore_spec.manifest import Spec


def not_allowed(spec: Spec, allowed: Allowed) -> list[str]:
    """Return what the deployment asks for although the cluster's administrator does not allow it."""
    agents = spec.agents
    asked = {
        "image": (agents.image is not None, "image"),
        "hostNetwork": (agents.host_network, "hostNetwork"),
        "hostIPC": (agents.host_ipc, "hostIPC"),
        "networkPolicy": (not agents.network_policy, "noNetworkPolicy"),
    }
    found = [
        f"spec.agents.{field}: {_refusal(f'allow.{value}')}"
        for field, (is_asked, value) in asked.items()
        if is_asked and field not in allowed.fields
    ]
    if spec.gpu.mps and not allowed.mps.host:
        found.append(f"spec.gpu.mps: {_refusal('gpu.mps.hostDirectory')}")
    for path, settings in sections(spec):
        if spec.gpu.mps and allowed.mps.pod in {mount.mount_path.rstrip("/") for mount in settings.volume_mounts}:
            found.append(f"{path}.volumeMounts: {allowed.mps.pod} is mounted by gpu.mps: leave it out")
        more = sorted(set(settings.security_context.capabilities.add) - allowed.capabilities)
        found += [f"{path}.securityContext.capabilities.add: {name}: {_refusal('allow.capabilities')}" for name in more]
        paths = [str(volume.host_path.get("path")) for volume in settings.volumes if volume.host_path is not None]
        found += [
            f"{path}.volumes: hostPath {entry}: {_refusal('allow.hostPaths')}"
            for entry in paths
            if not any(entry == root or entry.startswith(f"{root.rstrip('/')}/") for root in allowed.host_paths)
        ]
    return found


def _refusal(value: str) -> str:
    return f"the cluster's administrator does not allow it: leave it out, or ask for the chart's value {value}"
