"""Warns of settings that are valid, and wasteful, without effect or dangerous. Pure. Called by `inspect_manifests`."""

from __future__ import annotations

from collections.abc import Iterator

from longshore_cli.analyze.findings import By, Finding, warning
from longshore_cli.analyze.sizes import GPU, RingSizes, Sizes, variables
from longshore_spec import names
from longshore_spec.agent_config import Backend, Target, opens_data_ports
from longshore_spec.manifest import Spec, UpdateType
from longshore_spec.node_groups import groups
from longshore_spec.quantity import QuantityError, format_quantity, parse_quantity
from longshore_wire.names import ENVIRONMENT_PREFIX
from longshore_wire.ways import Staging, Why

# Of one pair in one room. A slab takes 130 us or more on a GPU, so that these take 0.1 s beside their bytes.
SLABS_WARNED = 1000
_MIB = 1 << 20
# With these reasons, the way depends on the size of a room.
_SIZED = {Why.MEASURED.label, Why.NO_RING.label}


def warnings(spec: Spec, found: Sizes) -> list[Finding]:
    """Return the warnings about a valid deployment."""
    return [*_staging(spec, found), *_gpus(spec, found), *_unused(spec), *_placement(spec, found)]


def _staging(spec: Spec, found: Sizes) -> Iterator[Finding]:
    ring = found.ring
    if ring is None and {way.why for way in found.ways} & _SIZED:
        return
    if ring is None:
        yield warning(
            By.AGENTS,
            "spec.decode.staging.poolSize",
            f"no pair is staged ({found.ways[0].meaning}), and each decode rank allocates its ring all the same: 16Mi is enough",
        )
        return
    if ring.rooms == 0:
        yield _too_small(ring, f"one room of {ring.tokens} tokens", ring.room_bytes)
    if ring.chunk_tokens != ring.tokens and ring.chunk_bytes > ring.ring_bytes:
        yield _too_small(ring, f"one chunk of {ring.chunk_tokens} tokens", ring.chunk_bytes)
    most = max(pair.room_slabs for pair in found.pairs)
    if most > SLABS_WARNED:
        yield warning(
            By.AGENTS,
            "spec.prefill.staging.bufferSize",
            f"{format_quantity(spec.prefill.staging.buffer_size)} cuts a room of {ring.tokens} tokens into {most} slabs a pair, and each "
            "costs messages: enlarge bufferSize, and poolSize to two slabs for each source rank",
        )


def _too_small(ring: RingSizes, whole: str, needed_bytes: int) -> Finding:
    return warning(
        By.AGENTS,
        "spec.decode.staging.poolSize",
        f"{format_quantity(ring.ring_bytes)} holds less than {whole} ({_rounded(needed_bytes)}): its slabs wait for each other; "
        f"give {_rounded(needed_bytes)} or more for each room that is to move at once",
    )


def _gpus(spec: Spec, found: Sizes) -> Iterator[Finding]:
    on_gpus = GPU in found.devices.values()
    apart = not any(group.roles == names.BOTH for group in groups(spec))
    where = "rooms between GPUs of two agents are refused" + (", and the selectors leave no other" if apart else "")
    if on_gpus and spec.transfer.staging is Staging.NEVER:
        yield warning(By.AGENTS, "spec.transfer.staging", f"it is Never: {where}; set it to Auto")
    mixed = found.devices[names.PREFILL] == GPU and spec.decode.target is Target.HOST
    if mixed and spec.transfer.backend is Backend.MOONCAKE:
        yield warning(
            By.AGENTS,
            "spec.decode.target",
            "it is Host, and Mooncake moves nothing from a GPU to host memory of another agent: use backend NIXL, or one node",
        )


def _unused(spec: Spec) -> Iterator[Finding]:
    agents = spec.agents
    strategy = agents.update_strategy
    # 1 is the default, which the API server adds.
    if strategy.type is UpdateType.ON_DELETE and strategy.rolling_update.max_unavailable != 1:
        yield _useless("agents.updateStrategy.rollingUpdate", "with type OnDelete: leave it out")
    if agents.pod_monitor_labels and not agents.pod_monitor:
        yield _useless("agents.podMonitorLabels", "without agents.podMonitor: set that, or leave it out")
    wires = [wire.value for wire in spec.transfer.wires]
    fabric = any(f"{ENVIRONMENT_PREFIX}GPU_STAGING_MEMORY" in variables(spec, role) for role in names.ROLES)
    ports = opens_data_ports(spec.transfer.backend, wires, fabric=fabric)
    is_open = (agents.host_network or not agents.network_policy) and ports
    if agents.allow_open_data_path and not is_open:
        yield _useless(
            "agents.allowOpenDataPath", "as nothing opens a data path: leave it out, so that a later change is refused"
        )
    if agents.host_ipc:
        yield warning(
            By.AGENTS, "spec.agents.hostIPC", "Longshore does not need the node's IPC namespace: leave it out"
        )


def _placement(spec: Spec, found: Sizes) -> Iterator[Finding]:
    for role, declared in ((names.PREFILL, spec.prefill), (names.DECODE, spec.decode)):
        if not declared.node_selector:
            text = "it is left out, so that every node of the cluster gets an agent: name the nodes of this role by their labels"
            yield warning(By.OPERATOR, f"spec.{role}.nodeSelector", text)
    counts = {names.PREFILL: spec.prefill.instances, names.DECODE: spec.decode.instances}
    for role, count in counts.items():
        if count == 0 and any(other for other in counts.values()):
            text = "it is 0 while the other role expects engines: no room can move; give a number, or leave it out"
            yield warning(By.OPERATOR, f"spec.{role}.instances", text)
    for agent in found.agents:
        limit = agent.limit or agent.request
        if agent.is_given and limit and (given_bytes := _bytes(limit)) is not None and given_bytes < agent.needed_bytes:
            kind = "limits" if agent.limit else "requests"
            where = "agents" if agent.roles == names.BOTH else f"{agent.roles}.agents or agents"
            text = (
                f"{limit} of memory is less than the {_rounded(agent.needed_bytes)} that agents of {agent.roles} take with the staging "
                "of their ranks: enlarge it, or leave memory out"
            )
            yield warning(By.OPERATOR, f"spec.{where}.resources.{kind}.memory", text)


def _useless(field: str, why: str) -> Finding:
    return warning(By.OPERATOR, f"spec.{field}", f"it has no effect {why}")


def _bytes(text: str) -> int | None:
    try:
        return parse_quantity(text)
    except QuantityError:
        return None


def _rounded(size_bytes: int) -> str:
    """Return a size in MiB, rounded up."""
    return f"{-(-size_bytes // _MIB)}Mi"
