"""Reads a DisaggDeployment manifest and converts it into its agents' config.

Called by the command line and the operator, so that both accept the same manifests. Strict below `spec`: all faults are
reported together with their paths. Only the names in `metadata` are read; the rest, and `status`, are ignored.
Pure: text in, a value out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import msgspec

from longshore_spec import names
from longshore_spec.agent_config import (
    AgentConfig,
    Control,
    Decode,
    Deployment,
    Gpu,
    Integrity,
    Model,
    Port,
    Prefill,
    Transfer,
)
from longshore_spec.pod_settings import PodSettings
from longshore_spec.strict_document import known_part, parse, read_struct
from longshore_wire.errors import ConfigError

_DEFAULT_NAMESPACE = "default"
_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")


# Ranks on one node, for the memory of their agent; None for as many as tensor parallelism has.
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class PrefillSpec(Prefill, frozen=True, kw_only=True, rename="camel"):
    """Prefill's engines, the nodes that they run on, and settings of the agents' pods there."""

    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    ranks_per_node: Ranks | None = None
    agents: PodSettings = PodSettings()


class DecodeSpec(Decode, frozen=True, kw_only=True, rename="camel"):
    """Decode's engines, the nodes that they run on, and settings of the agents' pods there."""

    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    ranks_per_node: Ranks | None = None
    agents: PodSettings = PodSettings()


class UpdateType(Enum):
    """How agents are replaced after a change; the names of a DaemonSet's update strategies."""

    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


# A number of agents from 1, or a share from 1% to 100%.
Unavailable = (
    Annotated[int, msgspec.Meta(ge=1, le=100_000)] | Annotated[str, msgspec.Meta(pattern="^([1-9][0-9]?|100)%$")]
)


class RollingUpdate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How many agents of a DaemonSet may be away at a time."""

    max_unavailable: Unavailable = 1


class UpdateStrategy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How agents are replaced. `rolling_update` is ignored with OnDelete."""

    type: UpdateType = UpdateType.ROLLING_UPDATE
    rolling_update: RollingUpdate = RollingUpdate()


class Agents(PodSettings, frozen=True, kw_only=True, rename="camel"):
    """Settings of the agents and, for all of them, of their pods. `longshore up` ignores them.

    Attributes:
        image: None for the operator's default.
        allow_open_data_path: accept data ports, which have no authentication, with hostNetwork or without a NetworkPolicy.
        worker_port: 0 for free ports; with hostNetwork, 0 selects the ports after the HTTP port.
        keys_revision: increase it to get new keys.
    """

    image: str | None = None
    host_network: bool = False
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    allow_open_data_path: bool = False
    network_policy: bool = True
    pod_monitor: bool = False
    pod_monitor_labels: dict[str, str] = msgspec.field(default_factory=dict)
    http_port: Port = names.HTTP_PORT
    worker_port: Port = 0
    keys_revision: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    update_strategy: UpdateStrategy = UpdateStrategy()

    @property
    def control(self) -> Control:
        """Ports of the agents. With hostNetwork they are fixed, because they are ports of the node."""
        worker_port = self.worker_port or (self.http_port + 1 if self.host_network else 0)
        return Control(
            http_port=self.http_port,
            worker_port=worker_port,
            host_network=self.host_network,
            network_policy=self.network_policy,
            allow_open_data_path=self.allow_open_data_path,
        )


class Spec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`spec` of a DisaggDeployment. While it is paused, nothing is created, changed or deleted but the status."""

    paused: bool = False
    model: Model
    prefill: PrefillSpec
    decode: DecodeSpec
    transfer: Transfer = Transfer()
    integrity: Integrity = Integrity()
    gpu: Gpu = Gpu()
    agents: Agents = Agents()


class DisaggDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """The whole manifest."""

    deployment: Deployment
    spec: Spec

    def agent_config(self) -> AgentConfig:
        """Return the config of its agents. Paths and ports are the defaults of a cluster.

        Raises:
            ConfigError: valid fields contradict each other; names both.
        """
        config = self.unchecked_config()
        try:
            config.check()
        except ConfigError as error:
            # The manifest's name for `control` is `agents`.
            raise ConfigError([f"spec.{fault}".replace("control.", "agents.") for fault in error.faults]) from error
        return config

    def unchecked_config(self) -> AgentConfig:
        """Return the config of its agents, whose fields may contradict each other."""
        spec = self.spec
        prefill = {name: getattr(spec.prefill, name) for name in Prefill.__struct_fields__}
        decode = {name: getattr(spec.decode, name) for name in Decode.__struct_fields__}
        return AgentConfig(
            deployment=self.deployment,
            model=spec.model,
            prefill=Prefill(**prefill),
            decode=Decode(**decode),
            transfer=spec.transfer,
            control=spec.agents.control,
            integrity=spec.integrity,
            gpu=spec.gpu,
        )


def load(text: str | bytes) -> DisaggDeployment:
    """Return the manifest in `text`, JSON or (where PyYAML is installed) YAML.

    Raises:
        ConfigError: all faults; each begins with its path, for example `spec.prefill.staging.lanes`.
    """
    return read(parse(text))


def read(document: object) -> DisaggDeployment:
    """Return the manifest in a parsed document, such as the API server's. Raises the errors of `load`."""
    if not isinstance(document, Mapping):
        raise ConfigError([f"(document): give one {names.KIND} as a mapping"])
    faults = [
        f"{path}: {document.get(path)!r} is unknown here: this version reads {known}"
        for path, known in (("apiVersion", names.API_GROUP_VERSION), ("kind", names.KIND))
        if document.get(path) != known
    ]
    faults += [f"{key}: unknown key; there are {', '.join(_TOP_LEVEL)}" for key in document if key not in _TOP_LEVEL]
    deployment = read_struct(Deployment, _names(document.get("metadata")), "metadata", faults)
    spec = read_struct(Spec, document.get("spec"), "spec", faults)
    if faults or deployment is None or spec is None:
        raise ConfigError(faults)
    return DisaggDeployment(deployment=deployment, spec=spec)


def read_known(document: Mapping[str, Any]) -> tuple[DisaggDeployment, tuple[str, ...]]:
    """Return the manifest in an object of the API server, and the paths below `spec` that this release does not know.

    The CRD of a newer release gives such fields to every deployment, by their defaults. That of this release prunes them.
    Raises the errors of `load`.
    """
    unknown: list[str] = []
    return read({**document, "spec": known_part(Spec, document.get("spec"), "spec", unknown)}), tuple(unknown)


def _names(metadata: object) -> object:
    if not isinstance(metadata, Mapping):
        return metadata
    found: dict[str, Any] = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    return {"namespace": _DEFAULT_NAMESPACE, **found}
