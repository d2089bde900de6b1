"""The table of the agent's settings: names, defaults, units and meanings.

Each field of `Settings` is a row. It defines the environment variable (`LONGSHORE_` and the
field's name in capitals), what they may hold, the field of the config file that says the same, whether the
protocol core gets the value, and the reference page (`python -m longshore_agent.settings`).
The supervisor reads the settings once and passes them to workers. This module reads no file.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from longshore_agent.memory.cuda import Allocation
from longshore_spec import environment
from longshore_spec.agent_config import AgentConfig, Backend, Target, is_loopback, opens_data_ports
from longshore_spec.environment import (
    Nanoseconds,
    check_range,
    choices,
    format_value,
    parse_value,
    unit_of,
    variable,
)
from longshore_spec.log_lines import LogFormat, LogLevel
from longshore_wire import names
from longshore_wire.errors import ConfigError
from longshore_wire.names import Wire
from longshore_wire.slabs import GPU_SLAB_BYTES_MIN, SLAB_BYTES_MIN, slab_bytes, small_slab_bytes
from longshore_wire.ways import AllowedWires, Staging, Way, contradicts

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

_OPEN_DATA_PATH = (
    "data ports have no authentication, and every host that reaches that address reaches them; bind a loopback address, run "
    "in a pod's network under the deployment's NetworkPolicy, allow only wires that need no port "
    f"({names.ENVIRONMENT_PREFIX}WIRES=SharedMemory,CudaIPC,NVLink, with NIXL), or accept it with "
    f"{names.ENVIRONMENT_PREFIX}ALLOW_OPEN_DATA_PATH=true"
)

T = TypeVar("T")


class Role(StrEnum):
    """The role whose behaviour a setting changes."""

    AGENT = "agent"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    TEST = "test"


def _setting(
    default: T,
    role: Role,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    file: str = "",
    core: bool = False,
) -> T:
    """One row.

    Args:
        low, high: the smallest and largest values allowed.
        file: the path of attributes in an AgentConfig that say the same; empty: none do.
        core: the protocol core gets it, too, by the same name; a time in nanoseconds, by a name with `_ns`.
    """
    row = {"role": role, "meaning": meaning, "low": low, "high": high, "file": file, "core": core}
    return dataclasses.field(default=default, metadata=row)


_core = functools.partial(_setting, core=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One agent's checked settings. Units are in the names; `environment.unit_of` finds them there.

    RUF009 is off on some rows because every default is a call of `_setting`, which makes a frozen row.

    Raises:
        ConfigError: from `check` and `from_environment`, with all faults; each begins with its variable.
    """

    config_file: str = _setting("", Role.AGENT, "The deployment's config file. Variables that are set override it.")
    deployment: str = _core(
        "", Role.AGENT, "The deployment. Agents and engines of other ones are refused.", file="deployment.full_name"
    )
    node: str = _setting("", Role.AGENT, "Name of the node, shown in status and metrics.")
    run_directory: str = _setting(
        names.RUN_DIRECTORY, Role.AGENT, "Directory of the engine socket.", file="run_directory"
    )
    keys_directory: str = _setting(
        "",
        Role.AGENT,
        "Directory of the CURVE keys: curve.json, and previous.json of the previous revision. Empty: only on a loopback address.",
        file="control.keys_directory",
    )
    bind_host: str = _setting(
        "127.0.0.1", Role.AGENT, "IPv4 address of workers and HTTP: the pod's.", file="control.bind_address"
    )
    http_port: int = _setting(
        0, Role.AGENT, "Port of health, status and metrics; 0: a free one.", low=0, high=65535, file="control.http_port"
    )
    http_token_file: str = _setting(
        "", Role.AGENT, "File with the bearer token that HTTP requires, except for /healthz, /readyz, /. Empty: none."
    )
    http_certificate_file: str = _setting("", Role.AGENT, "PEM chain for HTTPS. Empty: plain HTTP.")
    http_key_file: str = _setting("", Role.AGENT, "PEM key of the certificate.")
    worker_port: int = _setting(
        0,
        Role.AGENT,
        "Worker i listens for peers on this port plus i; 0: on a free one.",
        low=0,
        high=65535,
        file="control.worker_port",
    )
    host_network: bool = _setting(
        False, Role.AGENT, "The agent runs in its node's network.", file="control.host_network"
    )
    network_policy: bool = _setting(
        False,
        Role.AGENT,
        "A NetworkPolicy of the operator admits only this deployment's agents to the data ports.",
        file="control.network_policy",
    )
    allow_open_data_path: bool = _setting(
        False,
        Role.AGENT,
        "Accept data ports, which have no authentication, although other hosts reach them without such a policy.",
        file="control.allow_open_data_path",
    )
    log_level: LogLevel = _setting(LogLevel.INFO, Role.AGENT, "Log level.")  # noqa: RUF009
    log_format: LogFormat = _setting(  # noqa: RUF009
        LogFormat.TEXT,
        Role.AGENT,
        "Form of the log's lines; json: one object a line, with fields for room, peer and instance.",
    )

    backend: Backend = _setting(  # noqa: RUF009
        Backend.NIXL, Role.BOTH, "Library that moves the bytes.", file="transfer.backend"
    )
    gpu_staging_memory: Allocation = _setting(  # noqa: RUF009
        Allocation.CUDA_MALLOC,
        Role.BOTH,
        "How a GPU worker allocates lanes, ring and probe memory. cuMemCreate needs NIXL and an IMEX channel of the host.",
    )
    gpu_mps: bool = _setting(False, Role.BOTH, "A GPU's worker only starts as a client of CUDA MPS.", file="gpu.mps")
    wires: tuple[Wire, ...] = _setting(
        (),
        Role.BOTH,
        "Wires that may carry bytes between peers, separated by commas. Empty: any. CudaIPC includes NVLink.",
        file="transfer.wires",
    )
    staging: Staging = _core(  # noqa: RUF009
        Staging.AUTO,
        Role.BOTH,
        "Whether pages are moved through staging buffers: by the crossover table, always, or never. Between GPUs of two agents, Auto means always and Never is refused.",
        file="transfer.staging",
    )
    crossover_file: str = _setting(
        "",
        Role.DECODE,
        "Crossover table for staging Auto, written by `longshore bench crossover`. Empty: the shipped one.",
    )
    ring_bytes: int = _core(
        4 * _GIB,
        Role.DECODE,
        "Size of the staging ring of one decode rank. 0: the rank accepts no staged bytes.",
        low=0,
        high=1 << 44,
        file="decode.staging.pool_size",
    )
    ring_extent_bytes: int = _setting(
        64 * _MIB, Role.DECODE, "Size of the extents in which a CPU worker registers its ring.", low=_MIB, high=1 << 40
    )
    ring_share_divisor: int = _core(
        4,
        Role.DECODE,
        "A room holds at most the ring divided by this, or one ready slab in addition to its grants ahead.",
        low=1,
        high=1024,
    )
    grant_window: int = _core(4, Role.DECODE, "Grants that one writer of one room may hold.", low=1, high=1024)
    gpu_grant_window: int = _setting(
        16, Role.DECODE, "Grant window on a GPU, where a slab ends before the next grant can arrive.", low=1, high=1024
    )
    scatter_threads: int = _setting(2, Role.DECODE, "Threads that scatter on a CPU worker.", low=1, high=64)
    lane_count: int = _core(
        4, Role.PREFILL, "Transfer threads of one prefill rank.", low=1, high=64, file="prefill.staging.lanes"
    )
    lane_bytes: int = _setting(
        64 * _MIB, Role.PREFILL, "Buffer of a lane.", low=4 * _KIB, high=1 << 40, file="prefill.staging.buffer_size"
    )
    slab_bytes_min: int = _core(
        SLAB_BYTES_MIN, Role.PREFILL, "Minimum size of slabs that are cut to overlap stages.", low=_KIB, high=1 << 32
    )
    gpu_slab_bytes_min: int = _setting(
        GPU_SLAB_BYTES_MIN,
        Role.PREFILL,
        "LONGSHORE_SLAB_BYTES_MIN of a GPU worker, where control of a slab takes 130 us or more. Limited to half of all lanes' buffers.",
        low=_KIB,
        high=1 << 32,
    )
    slices_batch: int = _setting(
        1000, Role.PREFILL, "Slices in one write of a CPU worker, if slices are not staged.", low=1, high=1000
    )
    chunk_tokens: int = _setting(
        8192,
        Role.PREFILL,
        "Tokens of a prefill chunk, for planning.",
        low=1,
        high=1 << 24,
        file="transfer.chunk_tokens",
    )
    decode_target: Target = _setting(  # noqa: RUF009
        Target.DEVICE, Role.DECODE, "Memory of the pages of claims that name none.", file="decode.target"
    )
    digest: bool = _core(False, Role.DECODE, "Rooms compare digests of both sides' pages.", file="integrity.digest")
    direct: bool = _setting(
        True, Role.BOTH, "Ranks of one agent copy directly into each other's pages, without staging and transport."
    )

    lease_s: float = _core(
        60.0, Role.BOTH, "A room whose engine does not renew it for this long fails.", low=0.1, high=86400
    )
    heartbeat_s: float = _core(1.0, Role.BOTH, "Time between two pings of a peer.", low=0.01, high=3600)
    peer_timeout_s: float = _core(
        5.0,
        Role.BOTH,
        "A peer that is silent for this long is lost; up to 4 times as long if it did not run recently or a probe finds its process.",
        low=0.05,
        high=3600,
    )
    retry_ms: int = _core(200, Role.BOTH, "Time until an unanswered message is repeated.", low=1, high=60000)
    trailer_deadline_ms: int = _setting(
        2000, Role.DECODE, "A trailer that is wrong for this long fails its room.", low=1, high=60000
    )
    write_timeout_s: float = _core(
        120.0,
        Role.BOTH,
        "A room fails when a prefill rank has ready tokens and granted memory, but writes none for this long. A prefill worker is "
        "replaced when a write has not ended this long after its room failed; a decode worker, when a lost prefill rank may still write "
        "an engine's pages this long after that.",
        low=1,
        high=86400,
    )
    room_timeout_s: float = _core(
        600.0,
        Role.BOTH,
        "An open room fails without an offer, claim or slab for this long. Must exceed the time that a prompt may wait in a queue.",
        low=1,
        high=86400,
    )
    rooms_max: int = _core(
        16384, Role.BOTH, "Open rooms of one worker; more are refused with BUSY.", low=1, high=1 << 20
    )
    ended_rooms_max: int = _core(65536, Role.BOTH, "Ended rooms whose outcome one worker keeps.", low=64, high=1 << 22)
    process_workers_max: int = _setting(
        8,
        Role.AGENT,
        "Workers of one engine process, one for each rank and memory. Each takes 190 MiB in addition to its staging.",
        low=1,
        high=4096,
    )
    user_workers_max: int = _setting(
        64,
        Role.AGENT,
        "Workers of all engine processes of one user; the only such limit if the kernel does not identify processes.",
        low=1,
        high=4096,
    )
    quarantine_percent: int = _setting(
        25,
        Role.DECODE,
        "A worker drains and is replaced when more of its ring is in quarantine for longer than LONGSHORE_PEER_TIMEOUT_S.",
        low=1,
        high=100,
    )
    spans_max: int = _setting(
        65536, Role.BOTH, "Spans of stages and steps that one worker keeps: the newest ones.", low=1, high=1 << 22
    )
    client_spans: bool = _setting(
        False, Role.BOTH, "Engines' clients report their own steps of each room when it ends, one message each."
    )
    otel: bool = _setting(
        False, Role.BOTH, "Send ended rooms to OpenTelemetry: to OTEL_EXPORTER_OTLP_ENDPOINT. Needs the extra `otel`."
    )

    self_test_bytes: int = _setting(
        _MIB, Role.AGENT, "Bytes that the self-test must move before the agent is ready.", low=1, high=_GIB
    )
    start_limit_s: float = _setting(
        60.0, Role.AGENT, "If a worker takes longer to start, the agent is unready.", low=1, high=3600
    )
    drain_s: float = _setting(10.0, Role.AGENT, "Time for open rooms to finish when the agent stops.", low=0, high=3600)
    restart_backoff_min_s: float = _setting(
        0.2,
        Role.AGENT,
        "Wait before the next worker when one cannot start, or dies within 10 s of service. It doubles each further time. The first is "
        "restarted at once.",
        low=0.01,
        high=3600,
    )
    restart_backoff_max_s: float = _setting(10.0, Role.AGENT, "Maximum of that wait.", low=0.01, high=3600)

    force_way: Way | None = _core(  # noqa: RUF009
        None, Role.TEST, "One way for all pairs, for benchmarks. Auto follows the plan."
    )
    loopback_faults: str = _setting("", Role.TEST, "Faults that the loopback transport injects; see its reference.")

    # The same times in nanoseconds.
    lease_ns = Nanoseconds("lease_s")
    peer_timeout_ns = Nanoseconds("peer_timeout_s")
    retry_ns = Nanoseconds("retry_ms")
    write_timeout_ns = Nanoseconds("write_timeout_s")
    trailer_deadline_ns = Nanoseconds("trailer_deadline_ms")

    @property
    def allowed_wires(self) -> AllowedWires:
        """`wires` as the type of the protocol cores."""
        return AllowedWires(tuple(wire.value for wire in self.wires))

    @classmethod
    def from_environment(cls, env: Mapping[str, str], base: Settings | None = None) -> Settings:
        """Return the settings in `env`; variables of other programs are ignored.

        Args:
            base: values for unset or empty variables, for example from `from_config`; None for the defaults.
        Raises:
            ConfigError: unknown `LONGSHORE_` variables (with the nearest known name) and invalid values, all together.
        """
        values, faults = environment.read(cls, env)
        settings = dataclasses.replace(base or cls(), **values)
        _raise(settings, faults)
        return settings

    @classmethod
    def from_config(cls, config: AgentConfig) -> Settings:
        """Return the settings of a deployment's config file, unchecked, since the environment may override them."""
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for row in dataclasses.fields(cls):
            path, unit = row.metadata["file"], unit_of(row.name)
            if path and (said := operator.attrgetter(path)(config)) is not None:
                values[row.name] = parse_value(format_value(said, unit), hints[row.name], unit)
        made = cls(**values)
        least = small_slab_bytes(made.slab_bytes_min, made.lane_bytes, made.ring_bytes)
        return dataclasses.replace(made, slab_bytes_min=least)

    def check(self) -> None:
        """Raise ConfigError if a value is out of range or contradicts another. For settings made in code."""
        faults: dict[str, str] = {}
        for row in dataclasses.fields(self):
            try:
                check_range(getattr(self, row.name), unit_of(row.name), row.metadata["low"], row.metadata["high"])
            except ValueError as error:
                faults[variable(row.name)] = str(error)
        _raise(self, faults)

    def environment(self) -> dict[str, str]:
        """Return the variables that pass these settings to another process, without defaults."""
        changed = (row for row in dataclasses.fields(self) if getattr(self, row.name) != row.default)
        return {variable(row.name): format_value(getattr(self, row.name), unit_of(row.name)) for row in changed}

    def for_core(self) -> dict[str, Any]:
        """Return what the protocol core gets, by the names of `SessionConfig`."""
        given = [row.name for row in dataclasses.fields(self) if row.metadata["core"]]
        return dict(environment.in_nanoseconds(name, getattr(self, name)) for name in given)

    def contradictions(self) -> list[tuple[str, str, str]]:
        """Return (setting, other setting, remedy) for each contradiction."""
        least_bytes = slab_bytes(self.slab_bytes_min)
        is_alone = is_loopback(self.bind_host)
        is_open = not (is_alone or self.allow_open_data_path or (self.network_policy and not self.host_network))
        fabric = self.gpu_staging_memory is Allocation.CU_MEM_CREATE
        is_open = is_open and opens_data_ports(self.backend, self.allowed_wires.names, fabric=fabric)
        rules = (
            (self.lane_bytes < least_bytes, "lane_bytes", "slab_bytes_min", _too_small(least_bytes)),
            (0 < self.ring_bytes < 2 * least_bytes, "ring_bytes", "slab_bytes_min", _too_small(2 * least_bytes)),
            (self.peer_timeout_s <= self.heartbeat_s, "peer_timeout_s", "heartbeat_s", "make the first one longer"),
            (self.lease_ns <= self.retry_ns, "lease_s", "retry_ms", "make the lease longer than a repetition takes"),
            (
                self.restart_backoff_max_s < self.restart_backoff_min_s,
                "restart_backoff_max_s",
                "restart_backoff_min_s",
                "make the first one at least as long",
            ),
            (
                bool(self.http_certificate_file) != bool(self.http_key_file),
                "http_certificate_file",
                "http_key_file",
                "give both, or neither",
            ),
            (is_open, "bind_host", "host_network" if self.host_network else "network_policy", _OPEN_DATA_PATH),
            (
                self.backend is Backend.MOONCAKE and self.gpu_staging_memory is Allocation.CU_MEM_CREATE,
                "backend",
                "gpu_staging_memory",
                f"Mooncake registers memory of cudaMalloc alone: use NIXL, or {Allocation.CUDA_MALLOC.value} (the default)",
            ),
            (
                contradicts(self.staging, self.force_way),
                "staging",
                "force_way",
                "they exclude each other; leave one at Auto",
            ),
            (
                not self.keys_directory and not is_alone,
                "bind_host",
                "keys_directory",
                "give keys for an address that others reach",
            ),
        )
        return [(name, other, fault) for broken, name, other, fault in rules if broken]


def _raise(settings: Settings, faults: Mapping[str, str]) -> None:
    """Raise ConfigError with `faults` (by variable) and the contradictions between valid values."""
    faults = dict(faults)
    if ":" in settings.bind_host:
        faults[variable("bind_host")] = (
            f"{settings.bind_host} is an IPv6 address, and agents reach each other over IPv4 only: give the pod's IPv4 address"
        )
    lines = [f"{name}: {fault}" for name, fault in faults.items()]
    for name, other, fault in settings.contradictions():
        if not {variable(name), variable(other)} & faults.keys():
            one, two = (f"{variable(each)} is {environment.shown(getattr(settings, each))}" for each in (name, other))
            lines.append(f"{variable(name)}: {one} and {two}: {fault}")
    if lines:
        raise ConfigError(lines)


def _too_small(needed_bytes: int) -> str:
    return f"give the first one at least {needed_bytes} bytes, which slabs of that size take with their trailers"


def reference() -> str:
    """Return the reference page, in Markdown."""
    hints = get_type_hints(Settings)
    lines = [
        "# Settings of the agent",
        "",
        "Generated from the table in `longshore_agent.settings` by `python -m longshore_agent.settings`; do not edit.",
        "",
        "The agent reads these environment variables once, at its start. A variable that begins with `LONGSHORE_`",
        "and is not listed here is an error, as is an invalid value. All faults are reported together. `_S` is seconds,",
        "`_MS` milliseconds. Sizes are bytes and may carry `Ki`, `Mi`, `Gi`, `Ti`, `k`, `M`, `G` or `T`. An empty value",
        "means the default. *Role* is the side whose behaviour a setting changes.",
        "",
        "| variable | default | allowed | role | meaning |",
        "|---|---|---|---|---|",
    ]
    for row in dataclasses.fields(Settings):
        unit, low, high = unit_of(row.name), row.metadata["low"], row.metadata["high"]
        default = format_value(row.default, unit) or "(empty)"
        span = f"{format_value(low, unit)} to {format_value(high, unit)}" if low is not None else ""
        allowed = span or ", ".join(choices(hints[row.name])) or "text"
        role, meaning = row.metadata["role"].value, row.metadata["meaning"]
        lines.append(f"| `{variable(row.name)}` | `{default}` | {allowed} | {role} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
