"""The table of the operator's settings: names, defaults, units and meanings. `main` reads it once.

Each field is a row. Its environment variable is `LONGSHORE_` and the field's name in capitals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from longshore_spec import environment
from longshore_spec.environment import variable
from longshore_spec.log_lines import LogFormat, LogLevel
from longshore_spec.permission import Allowed
from longshore_wire.errors import ConfigError

DEFAULT_IMAGE = "longshore-agent:0.1.0"
DEFAULT_OPERATOR_IMAGE = "longshore-operator:0.1.0"
# What labels and annotations are in JSON.
TEXTS = dict[str, str]


def _row(default: Any, unit: str, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "meaning": meaning})


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one operator.

    Raises:
        ConfigError: from `from_environment`, with all faults; each begins with its variable.
    """

    namespace: str = _row("longshore-system", "", "Namespace of the operator itself, where its Lease is.")
    watch_namespace: str = _row("", "", "The one namespace whose deployments are served. Empty: all.")
    identity: str = _row("", "", "Name of this replica in the Lease: the pod's. Empty: host name and process id.")
    lease_name: str = _row("longshore-operator", "", "The Lease that makes one replica the active one.")
    watch_nodes: bool = _row(
        True, "", "Count nodes by their labels. Needs permission to read nodes of the whole cluster."
    )
    agent_image: str = _row(DEFAULT_IMAGE, "", "Image of agents whose deployment names none.")
    agent_image_pull_policy: str = _row("IfNotPresent", "", "Image pull policy of agents.")
    agent_image_pull_secrets: str = _row("", "", "Names of image pull Secrets of agents, separated by commas.")
    agent_runtime_class: str = _row("", "", "RuntimeClass of agents whose deployment names none. Empty: the cluster's.")
    agent_pod_labels: str = _row("", "", "Labels of all agents' pods, in JSON. Those of a deployment override them.")
    agent_pod_annotations: str = _row("", "", "Annotations of all agents' pods, in the same way.")
    operator_image: str = _row(DEFAULT_OPERATOR_IMAGE, "", "Image of the operator, for the init container of agents.")
    allow: str = _row("", "", "What deployments may use, in JSON: the chart's value `allow`. Empty: nothing.")
    mps_host_directory: str = _row(
        "",
        "",
        "Directory on the nodes with the pipes of their MPS daemon, for deployments with gpu.mps. Empty: none may.",
    )
    mps_pipe_directory: str = _row("", "", "The same directory as pods see it. Empty: by the node's path.")
    http_host: str = _row("127.0.0.1", "", "Address that serves health and metrics: the pod's own.")
    http_port: int = _row(8080, "", "Port of health and metrics.")
    lease_s: float = _row(15.0, "seconds", "A Lease that was not renewed for this long has expired.")
    lease_renew_s: float = _row(5.0, "seconds", "Time between two renewals.")
    resync_s: float = _row(60.0, "seconds", "Time between two listings and reconciles of everything.")
    watch_lag_limit_s: float = _row(
        90.0, "seconds", "A watch that misses an object for this long is dead, and the liveness probe fails."
    )
    poll_s: float = _row(10.0, "seconds", "Time between two polls of an agent's status.")
    poll_timeout_s: float = _row(1.0, "seconds", "Time limit of one poll.")
    poll_stale_s: float = _row(30.0, "seconds", "A report older than this is ignored, and its agent is silent.")
    poll_count_max: int = _row(64, "agents", "Agents that are polled concurrently.")
    request_timeout_s: float = _row(10.0, "seconds", "Time limit of a request to the API server.")
    worker_count: int = _row(8, "deployments", "Deployments that are reconciled concurrently.")
    log_level: LogLevel = _row(LogLevel.INFO, "", "Log level: debug, info, warning or error.")  # noqa: RUF009
    log_format: LogFormat = _row(  # noqa: RUF009
        LogFormat.TEXT, "", "Form of the log's lines: text, or json. Also of agents whose deployment does not set it."
    )

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Settings:
        """Return the settings in `env`; variables of other programs are ignored."""
        values, faults = environment.read(cls, env)
        if faults:
            raise ConfigError([f"{name}: {fault}" for name, fault in faults.items()])
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigError if a value is out of its range or contradicts another."""
        faults = [
            f"{variable(row.name)}: {getattr(self, row.name)} is not above 0"
            for row in dataclasses.fields(self)
            if row.metadata["unit"] and getattr(self, row.name) <= 0
        ]
        # Two renewals may fail before the Lease is lost.
        if self.lease_renew_s * 3 > self.lease_s:
            faults.append(
                f"{variable('lease_renew_s')}: three renewals must fit {variable('lease_s')}: make it shorter"
            )
        in_json = {"allow": Allowed, "agent_pod_labels": TEXTS, "agent_pod_annotations": TEXTS}
        for name, kind in in_json.items():
            try:
                environment.from_json(getattr(self, name), kind)
            except ConfigError as error:
                faults += [f"{variable(name)}: {fault}" for fault in error.faults]
        for name in ("mps_host_directory", "mps_pipe_directory"):
            if (path := getattr(self, name)) and not path.startswith("/"):
                faults.append(f"{variable(name)}: {path} is no absolute path")
        if self.mps_pipe_directory and not self.mps_host_directory:
            faults.append(f"{variable('mps_pipe_directory')}: give {variable('mps_host_directory')} too")
        if faults:
            raise ConfigError(faults)


def listed(text: str) -> tuple[str, ...]:
    """Return the entries of a list that commas separate."""
    return tuple(filter(None, (entry.strip() for entry in text.split(","))))


def reference() -> str:
    """Return the table as Markdown rows."""
    rows = [
        f"| `{variable(row.name)}` | {f'`{row.default}`' if row.default != '' else ''} | {row.metadata['unit']} "
        f"| {row.metadata['meaning']} |"
        for row in dataclasses.fields(Settings)
    ]
    return "\n".join(["| variable | default | unit | meaning |", "|---|---|---|---|", *rows])
