"""Kinds of objects that the operator reads or writes, and their API paths. Constants and pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from longshore_spec import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object.

    Attributes:
        group: empty for the core group.
        label: of the objects that the operator watches; empty: all.
    """

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True
    label: str = ""

    @property
    def api_version(self) -> str:
        """The apiVersion in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version


DEPLOYMENT = Kind(names.KIND, names.API_GROUP, names.API_VERSION, names.PLURAL)
SERVICE_ACCOUNT = Kind("ServiceAccount", "", "v1", "serviceaccounts", label=names.DEPLOYMENT_LABEL)
CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps", label=names.DEPLOYMENT_LABEL)
SECRET = Kind("Secret", "", "v1", "secrets")
SERVICE = Kind("Service", "", "v1", "services", label=names.DEPLOYMENT_LABEL)
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", label=names.DEPLOYMENT_LABEL)
POD_MONITOR = Kind("PodMonitor", "monitoring.coreos.com", "v1", "podmonitors")
DAEMON_SET = Kind("DaemonSet", "apps", "v1", "daemonsets", label=names.DEPLOYMENT_LABEL)
POD = Kind("Pod", "", "v1", "pods", label=names.DEPLOYMENT_LABEL)
# A pod of an engine. Its name here, which metrics show, is not the one of manifests.
ENGINE_POD = Kind("EnginePod", "", "v1", "pods", label=names.INJECT_LABEL)
NODE = Kind("Node", "", "v1", "nodes", namespaced=False)
EVENT = Kind("Event", "", "v1", "events")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")

# In the order in which they are applied. Objects that agents mount come before the DaemonSet; the PodMonitor comes
# last, as its kind may not be installed.
CHILDREN = (SERVICE_ACCOUNT, CONFIG_MAP, NETWORK_POLICY, SERVICE, DAEMON_SET, POD_MONITOR)
# Watched by our label. Secrets are missing because the operator may not read them.
WATCHED_CHILDREN = (SERVICE_ACCOUNT, CONFIG_MAP, NETWORK_POLICY, SERVICE, DAEMON_SET)
_BY_NAME = {kind.name: kind for kind in (DEPLOYMENT, *CHILDREN, SECRET, POD, ENGINE_POD, NODE, EVENT, LEASE)}


def of(name: str) -> Kind:
    """Return the kind that manifests call `name`."""
    return _BY_NAME[name]


def path(kind: Kind, namespace: str, name: str = "", subresource: str = "") -> str:
    """Return the path of an object, or of a list; an empty namespace selects all."""
    parts = ["apis", kind.group, kind.version] if kind.group else ["api", kind.version]
    if kind.namespaced and namespace:
        parts += ["namespaces", namespace]
    parts += [part for part in (kind.plural, name, subresource) if part]
    return "/" + "/".join(parts)
