"""Renders the agents' DaemonSets and ServiceAccount, with the least privilege that works."""

from __future__ import annotations

from longshore_operator import kinds, names
from longshore_operator.render.config import config_digest
from longshore_operator.render.wanted import Body, Wanted, child, digest
from longshore_spec import names as spec_names
from longshore_spec.agent_memory import resources, shared_memory_limit
from longshore_spec.agent_pods import MPS_VOLUME, merged
from longshore_spec.log_lines import LogFormat
from longshore_spec.manifest import UpdateStrategy, UpdateType
from longshore_spec.node_groups import Group
from longshore_wire.names import AGENT_USER_ID, ENVIRONMENT_PREFIX

# The user id in the agent's image.
_USER = AGENT_USER_ID
# On SIGTERM the agent drains its rooms for this long. The kubelet's grace period must be longer.
DRAIN_S = 20
GRACE_S = 45
_CONFIG_FOLDER = spec_names.CONFIG_PATH.rpartition("/")[0]
_LOG_FORMAT = f"{ENVIRONMENT_PREFIX}LOG_FORMAT"
_POD_FIELDS = ("runtimeClassName", "priorityClassName", "tolerations", "resourceClaims")
# The init container runs one `chown`. Requests that equal limits fit every quality of service.
_INIT_RESOURCES = {kind: {"cpu": "50m", "memory": "32Mi"} for kind in ("requests", "limits")}
# A worker with GPU staging takes tens of seconds to start.
_START_TRIES = 60


def service_account(wanted: Wanted) -> Body:
    """Return the agents' ServiceAccount. It mounts no token, as agents do not call the API server."""
    return child(wanted, kinds.SERVICE_ACCOUNT, {"automountServiceAccountToken": False})


def daemon_set(wanted: Wanted, group: Group) -> Body:
    """Return the DaemonSet for one group of nodes. Its pods change only with what agents of its roles read at start."""
    annotations = {
        names.CONFIG_ANNOTATION: config_digest(wanted, group),
        names.KEYS_ANNOTATION: wanted.keys_fingerprint,
    }
    roles = {names.ROLES_LABEL: group.roles}
    settings = merged(wanted.manifest.spec, group, wanted.images.runtime_class)
    template: Body = {
        "metadata": {
            "labels": {
                **dict(wanted.images.pod_labels),
                **settings.get("labels", {}),
                **names.labels(wanted.name),
                **roles,
            },
            "annotations": {**dict(wanted.images.pod_annotations), **settings.get("annotations", {}), **annotations},
        },
        "spec": _pod(wanted, group, settings),
    }
    # A new image of the operator alone replaces no agent, see `keep`.
    prepare = [container | {"image": ""} for container in template["spec"]["initContainers"]]
    counted = template | {"spec": template["spec"] | {"initContainers": prepare}}
    template["metadata"]["annotations"] |= {
        names.TEMPLATE_ANNOTATION: digest(counted),
        names.HELPER_ANNOTATION: wanted.images.operator_image,
    }
    if affinity := group.affinity():
        template["spec"]["affinity"] = affinity
    spec = {
        "selector": {"matchLabels": names.daemon_set_selector(wanted.name, group.roles)},
        "updateStrategy": _update_strategy(wanted.agents.update_strategy),
        "template": template,
    }
    return child(wanted, kinds.DAEMON_SET, {"spec": spec}, names.daemon_set(wanted.name, group.roles), roles)


def _update_strategy(chosen: UpdateStrategy) -> Body:
    if chosen.type is UpdateType.ON_DELETE:
        return {"type": chosen.type.value}
    return {"type": chosen.type.value, "rollingUpdate": {"maxUnavailable": chosen.rolling_update.max_unavailable}}


def _pod(wanted: Wanted, group: Group, settings: Body) -> Body:
    agents = wanted.agents
    security = settings.get("securityContext", {})
    pod: Body = {
        "serviceAccountName": names.agent(wanted.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            **({"seLinuxOptions": options} if (options := security.get("seLinuxOptions")) else {}),
        },
        "initContainers": [_prepare(wanted)],
        "containers": [_container(wanted, settings) | {"resources": resources(wanted.manifest.spec, group, settings)}],
        "volumes": [*_volumes(wanted, shared_memory_limit(wanted.manifest.spec, group)), *settings.get("volumes", [])],
    }
    optional: Body = {
        "hostNetwork": agents.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if agents.host_network else "",
        "hostIPC": agents.host_ipc,
        "imagePullSecrets": [{"name": name} for name in wanted.images.pull_secrets],
        **{name: settings.get(name) for name in _POD_FIELDS},
    }
    return pod | {name: value for name, value in optional.items() if value}


def _prepare(wanted: Wanted) -> Body:
    """Return the container that makes the agent own its sockets' folder. The kubelet creates the folder as root.

    It runs as root on a path of the node, so that its image is the operator's and nobody else chooses it.
    """
    return {
        "name": "own-run-directory",
        "image": wanted.images.operator_image,
        "imagePullPolicy": wanted.images.pull_policy,
        "command": ["chown", f"{_USER}:{_USER}", wanted.config.run_directory],
        "securityContext": _least_privilege()
        | {"runAsNonRoot": False, "runAsUser": 0}
        | {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}},
        "resources": _INIT_RESOURCES,
        "volumeMounts": [{"name": "run", "mountPath": wanted.config.run_directory}],
    }


def _least_privilege() -> Body:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _container(wanted: Wanted, settings: Body) -> Body:
    added = settings.get("securityContext", {}).get("capabilities", {})
    return {
        "name": names.CONTAINER,
        "image": wanted.agents.image or wanted.images.image,
        "imagePullPolicy": wanted.images.pull_policy,
        "env": _environment(wanted, settings.get("env", [])),
        "ports": _ports(wanted),
        "startupProbe": _probe("/healthz") | {"periodSeconds": 2, "failureThreshold": _START_TRIES},
        "livenessProbe": _probe("/healthz") | {"periodSeconds": 10, "timeoutSeconds": 5},
        "readinessProbe": _probe("/readyz") | {"periodSeconds": 5, "timeoutSeconds": 5},
        "securityContext": _least_privilege() | {"capabilities": {"drop": ["ALL"], **added}},
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "keys", "mountPath": spec_names.KEYS_DIRECTORY, "readOnly": True},
            {"name": "run", "mountPath": wanted.config.run_directory},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - a volume of the pod's own
            {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108 - as above
            # Clients of MPS lock a file there, so that the mount is not read-only.
            *([{"name": MPS_VOLUME, "mountPath": wanted.mps.pod}] if wanted.mps else []),
            *settings.get("volumeMounts", []),
        ],
    }


def _environment(wanted: Wanted, given: list[Body]) -> list[Body]:
    """Return the variables of an agent: ours, the operator's default that `given` does not override, and `given`."""
    form = wanted.images.log_format
    is_given = any(entry["name"] == _LOG_FORMAT for entry in given)
    return [
        {"name": "LONGSHORE_CONFIG_FILE", "value": spec_names.CONFIG_PATH},
        {"name": "LONGSHORE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "LONGSHORE_BIND_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "LONGSHORE_DRAIN_S", "value": str(DRAIN_S)},
        *([{"name": spec_names.MPS_PIPE_VARIABLE, "value": wanted.mps.pod}] if wanted.mps else []),
        *([{"name": _LOG_FORMAT, "value": form.value}] if form is not LogFormat.TEXT and not is_given else []),
        *given,
    ]


def _ports(wanted: Wanted) -> list[Body]:
    """Return the declared ports. In the host network the first worker's port is included, so that conflicts show."""
    control = wanted.config.control
    ports = [("http", control.http_port)]
    if control.worker_port:
        ports.append(("worker", control.worker_port))
    host = wanted.agents.host_network
    return [
        {"name": name, "containerPort": port, "protocol": "TCP"} | ({"hostPort": port} if host else {})
        for name, port in ports
    ]


def _probe(path: str) -> Body:
    return {"httpGet": {"path": path, "port": "http"}}


def _volumes(wanted: Wanted, shared_memory: str) -> list[Body]:
    return [
        {"name": "config", "configMap": {"name": names.agent(wanted.name)}},
        {"name": "keys", "projected": {"sources": _keys(wanted), "defaultMode": 0o440}},
        {"name": "run", "hostPath": {"path": wanted.config.run_directory, "type": "DirectoryOrCreate"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
        {"name": "temporary", "emptyDir": {}},
        # Without the daemon's directory, the pod waits, and its events name the path.
        *([{"name": MPS_VOLUME, "hostPath": {"path": wanted.mps.host, "type": "Directory"}}] if wanted.mps else []),
    ]


def _keys(wanted: Wanted) -> list[Body]:
    """Return the current and previous keys: agents of two revisions work together during a rollout."""
    sources: list[Body] = [_secret(wanted.keys_secret, names.KEYS_FILE)]
    if wanted.previous_keys_secret:
        # Optional: if the Secret is gone, only agents that are about to be replaced have its keys.
        sources.append(_secret(wanted.previous_keys_secret, names.PREVIOUS_KEYS_FILE, optional=True))
    return sources


def _secret(name: str, file: str, *, optional: bool = False) -> Body:
    source: Body = {"name": name, "items": [{"key": names.KEYS_FILE, "path": file}]}
    return {"secret": source | ({"optional": True} if optional else {})}
