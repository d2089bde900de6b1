"""The fields of agents' pods that a manifest may set, with the names that Kubernetes gives them. Read by `manifest`.

Types only: the API server checks values, and the operator which of them it passes on. `longshore up` ignores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

# Variables of the libraries that agents load: they select devices, paths in the network, limits and what is logged. None
# names a file, a folder, a program, a plug-in, or an address or port to listen at. Others need the chart's `allow.variables`.
LIBRARY_VARIABLES = (
    "MC_ENABLE_DEST_DEVICE_AFFINITY",
    "MC_FORCE_TCP",
    "MC_GID_INDEX",
    "MC_IB_PCI_RELAXED_ORDERING",
    "MC_IB_PORT",
    "MC_IB_SL",
    "MC_IB_TC",
    "MC_LOG_LEVEL",
    "MC_MAX_CQE_PER_CTX",
    "MC_MAX_EP_PER_CTX",
    "MC_MAX_SGE",
    "MC_MAX_WR",
    "MC_MLX5_QP_UDP_SPORTS",
    "MC_MS_AUTO_DISC",
    "MC_MS_FILTERS",
    "MC_MTU",
    "MC_NUM_CQ_PER_CTX",
    "MC_NUM_QP_PER_EP",
    "MC_PKEY_INDEX",
    "MC_RETRY_CNT",
    "MC_SLICE_SIZE",
    "MC_TCP_ENABLE_CONNECTION_POOL",
    "MC_TCP_LANES_PER_PEER",
    "MC_TCP_SLICE_SIZE",
    "MC_TRANSFER_TIMEOUT",
    "MC_WORKERS_PER_CTX",
    "NIXL_LOG_LEVEL",
    "OTEL_BSP_EXPORT_TIMEOUT",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SDK_DISABLED",
    "OTEL_SERVICE_NAME",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "UCX_CUDA_COPY_DMABUF",
    "UCX_IB_ADDR_TYPE",
    "UCX_IB_GID_INDEX",
    "UCX_IB_GPU_DIRECT_RDMA",
    "UCX_IB_NUM_PATHS",
    "UCX_IB_PCI_RELAXED_ORDERING",
    "UCX_IB_PKEY",
    "UCX_IB_ROCE_LOCAL_SUBNET",
    "UCX_IB_ROCE_REACHABILITY_MODE",
    "UCX_IB_ROCE_SUBNET_PREFIX_LEN",
    "UCX_IB_SL",
    "UCX_IB_SUBNET_PREFIX",
    "UCX_IB_TRAFFIC_CLASS",
    "UCX_KEEPALIVE_INTERVAL",
    "UCX_KEEPALIVE_NUM_EPS",
    "UCX_LOG_LEVEL",
    "UCX_MAX_RMA_LANES",
    "UCX_MAX_RMA_RAILS",
    "UCX_MAX_RNDV_LANES",
    "UCX_MAX_RNDV_RAILS",
    "UCX_MEMTYPE_CACHE",
    "UCX_MEMTYPE_REG_WHOLE_ALLOC_TYPES",
    "UCX_NET_DEVICES",
    "UCX_PROTO_INFO",
    "UCX_RC_MLX5_TIMEOUT",
    "UCX_RC_PATH_MTU",
    "UCX_RC_RETRY_COUNT",
    "UCX_RC_RNR_RETRY_COUNT",
    "UCX_RC_RNR_TIMEOUT",
    "UCX_RC_TIMEOUT",
    "UCX_RNDV_FRAG_MEM_TYPES",
    "UCX_RNDV_SCHEME",
    "UCX_RNDV_THRESH",
    "UCX_TCP_CONN_NB",
    "UCX_TCP_KEEPCNT",
    "UCX_TCP_KEEPIDLE",
    "UCX_TCP_KEEPINTVL",
    "UCX_TCP_MAX_CONN_RETRIES",
    "UCX_TCP_RCVBUF",
    "UCX_TCP_SNDBUF",
    "UCX_TLS",
    "UCX_WARN_UNUSED_ENV_VARS",
    "UCX_ZCOPY_THRESH",
)
# The agent's settings that no field and no part of the operator sets. A test compares them with the agent's table.
AGENT_VARIABLES = (
    "LONGSHORE_CLIENT_SPANS",
    "LONGSHORE_CROSSOVER_FILE",
    "LONGSHORE_DIRECT",
    "LONGSHORE_ENDED_ROOMS_MAX",
    "LONGSHORE_GPU_GRANT_WINDOW",
    "LONGSHORE_GPU_SLAB_BYTES_MIN",
    "LONGSHORE_GPU_STAGING_MEMORY",
    "LONGSHORE_GRANT_WINDOW",
    "LONGSHORE_HEARTBEAT_S",
    "LONGSHORE_LEASE_S",
    "LONGSHORE_LOG_FORMAT",
    "LONGSHORE_LOG_LEVEL",
    "LONGSHORE_OTEL",
    "LONGSHORE_PEER_TIMEOUT_S",
    "LONGSHORE_PROCESS_WORKERS_MAX",
    "LONGSHORE_QUARANTINE_PERCENT",
    "LONGSHORE_RESTART_BACKOFF_MAX_S",
    "LONGSHORE_RESTART_BACKOFF_MIN_S",
    "LONGSHORE_RETRY_MS",
    "LONGSHORE_RING_EXTENT_BYTES",
    "LONGSHORE_RING_SHARE_DIVISOR",
    "LONGSHORE_ROOMS_MAX",
    "LONGSHORE_ROOM_TIMEOUT_S",
    "LONGSHORE_SCATTER_THREADS",
    "LONGSHORE_SELF_TEST_BYTES",
    "LONGSHORE_SLAB_BYTES_MIN",
    "LONGSHORE_SLICES_BATCH",
    "LONGSHORE_SPANS_MAX",
    "LONGSHORE_START_LIMIT_S",
    "LONGSHORE_TRAILER_DEADLINE_MS",
    "LONGSHORE_USER_WORKERS_MAX",
    "LONGSHORE_WRITE_TIMEOUT_S",
)
# A volume's source, as a pod has it. The API server checks it when the DaemonSet is applied.
Source = dict[str, Any]


class Toleration(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A taint that agents tolerate; fields that are None are omitted."""

    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: int | None = None


class Variable(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """An environment variable of the agent."""

    name: str
    value: str = ""


class ClaimUse(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A resource claim of the pod that the agent's container uses, or one request of it."""

    name: str
    request: str | None = None


class Resources(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Compute resources of an agent's container."""

    requests: dict[str, str | int] = msgspec.field(default_factory=dict)
    limits: dict[str, str | int] = msgspec.field(default_factory=dict)
    claims: tuple[ClaimUse, ...] = ()


class ResourceClaim(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A claim of dynamic resource allocation."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Linux capabilities of the agent's container."""

    add: tuple[str, ...] = ()


class SELinuxOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The SELinux context of the pod; fields that are None are omitted."""

    level: str | None = None
    type: str | None = None


class SecurityContext(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Parts of the security context that may differ from the least privilege."""

    capabilities: Capabilities = Capabilities()
    se_linux_options: SELinuxOptions = SELinuxOptions()


class Volume(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A volume with one source."""

    name: str
    config_map: Source | None = None
    secret: Source | None = None
    empty_dir: Source | None = None
    projected: Source | None = None
    downward_api: Source | None = msgspec.field(default=None, name="downwardAPI")
    csi: Source | None = None
    host_path: Source | None = None


class VolumeMount(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Where the agent's container sees a volume."""

    name: str
    mount_path: str
    sub_path: str | None = None
    read_only: bool | None = None


class GpuAccess(Enum):
    """How agents see the GPUs of their node. They request none from the kubelet."""

    RUNTIME = "Runtime"
    CDI = "CDI"


class PodSettings(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings of pods: of all agents, or of those on the nodes of one role."""

    gpu_access: GpuAccess | None = None
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    env: tuple[Variable, ...] = ()
    runtime_class_name: str | None = None
    priority_class_name: str | None = None
    tolerations: tuple[Toleration, ...] = ()
    resources: Resources = Resources()
    guaranteed: bool | None = None
    resource_claims: tuple[ResourceClaim, ...] = ()
    security_context: SecurityContext = SecurityContext()
    volumes: tuple[Volume, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()

    def as_pods_have_it(self) -> dict[str, Any]:
        """Return the fields that are set, as a pod has them."""
        plain = _plain({name: getattr(self, field) for name, field in _FIELDS.items()})
        for name in ("resources", "securityContext"):
            plain[name] = _without_empty(plain[name])
        return {name: value for name, value in plain.items() if value}


_FIELDS = {field.encode_name: field.name for field in msgspec.structs.fields(PodSettings)}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without fields that are None."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    entries = value if isinstance(value, dict) else msgspec.to_builtins(value)
    if not isinstance(entries, dict):
        return entries
    return {key: _plain(entry) for key, entry in entries.items() if entry is not None}


def _without_empty(value: Any) -> Any:
    """Return a structure without empty lists and structures. An empty volume source is a source, so none comes here."""
    if not isinstance(value, dict):
        return value
    found = {key: _without_empty(entry) for key, entry in value.items()}
    return {key: entry for key, entry in found.items() if entry not in ({}, [])}


_GPU_TAINT = "nvidia.com/gpu"
_CDI_ANNOTATION = "cdi.k8s.io/longshore-agent"
_EVERY_GPU = {
    GpuAccess.RUNTIME.value: {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
    # The image asks the runtime for all GPUs. With CDI this would give them twice.
    GpuAccess.CDI.value: {"NVIDIA_VISIBLE_DEVICES": "void"},
}


def merged(given: Sequence[PodSettings], runtime_class: str) -> dict[str, Any]:
    """Return the settings of pods on some nodes. `gpus` in it says whether they see GPUs.

    Args:
        given: those of all agents, and those of the nodes' roles, which override them entry by entry.
        runtime_class: the operator's default.
    """
    found: dict[str, Any] = {}
    for settings in given:
        found = _merge(found, settings.as_pods_have_it())
    found.setdefault("runtimeClassName", runtime_class)
    access = found.pop("gpuAccess", None)
    if access is not None:
        variables = [{"name": name, "value": value} for name, value in _EVERY_GPU[access].items()]
        found["env"] = _merge(variables, found.get("env", []))
    if access == GpuAccess.RUNTIME.value:
        found["runtimeClassName"] = found["runtimeClassName"] or "nvidia"
    if access == GpuAccess.CDI.value:
        found["annotations"] = {_CDI_ANNOTATION: "nvidia.com/gpu=all"} | found.get("annotations", {})
    tolerations = found.get("tolerations", [])
    found["gpus"] = access is not None or _asks_for_gpus(found)
    if found["gpus"] and not any(entry.get("key", _GPU_TAINT) == _GPU_TAINT for entry in tolerations):
        found["tolerations"] = [*tolerations, {"key": _GPU_TAINT, "operator": "Exists", "effect": "NoSchedule"}]
    return found


def _asks_for_gpus(settings: dict[str, Any]) -> bool:
    resources = settings.get("resources", {})
    asked = {*resources.get("requests", {}), *resources.get("limits", {})}
    return bool(settings["runtimeClassName"]) or any(name.startswith(_GPU_TAINT) for name in asked)


def _merge(value: Any, other: Any) -> Any:
    """Return `value` overridden by `other`. Entries of lists are told apart by `entry_key`."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value | {key: _merge(value[key], entry) if key in value else entry for key, entry in other.items()}
    if isinstance(value, list) and isinstance(other, list):
        return list({entry_key(entry): entry for entry in [*value, *other]}.values())
    return other


def entry_key(entry: Any) -> str:
    """Return what tells an entry of a list from the others: its mount path or name, if it has one."""
    if not isinstance(entry, dict):
        return str(entry)
    return str(entry.get("mountPath") or entry.get("name") or sorted(entry.items()))
