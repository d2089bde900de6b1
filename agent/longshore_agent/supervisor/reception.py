"""Checks an engine's Hello against the limits of names and numbers, and the deployment's declared layouts.

Called by the supervisor. Of the machine, it checks only whether a GPU driver exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from longshore_agent.control.engine_link import PeerProcess
from longshore_agent.settings import Settings
from longshore_spec import distribution
from longshore_spec.agent_config import AgentConfig, Target, Unit
from longshore_spec.environment import variable
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Half, Hello
from longshore_wire.errors import CodecError, LayoutError, LongshoreError, Reason
from longshore_wire.layout import KVLayout, PageOrder, Plane, TargetMemory
from longshore_wire.names import is_instance_name

# The first file that CUDA opens. Only workers load the driver itself.
_DRIVER_FILE = Path("/dev/nvidiactl")
_GPU = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What a deployment declares of a model. `planes` is last: the others say more of K and V.
_MODEL = ("layers", "kv_heads", "head_dim", "element_bytes", "attention", "planes")


class Reception:
    """Decides on each Hello."""

    def __init__(self, settings: Settings, config: AgentConfig | None) -> None:
        self._settings = settings
        self._config = config
        self.version = distribution.installed_version()

    def admit(self, hello: Hello) -> PeerId:
        """Return whose slot an engine takes.

        Raises:
            CodecError: another protocol version.
            LayoutError: the layout cannot be, or is not the declared one; names the field.
            LongshoreError: a name or a device that this agent cannot serve.
        """
        if hello.version != ENGINE_PROTOCOL_VERSION:
            raise CodecError(
                f"the engine's client speaks version {hello.version}, this agent {ENGINE_PROTOCOL_VERSION}: "
                "install the same release on both",
                reason=Reason.UNKNOWN_VERSION,
            )
        if not is_instance_name(hello.instance):
            raise LongshoreError(
                f"instance is {hello.instance[:120]!r}: give 1 to 100 letters, digits, '.', '_' or '-'",
                reason=Reason.UNSUPPORTED,
            )
        if not hello.roles:
            raise LongshoreError("roles is empty: give SOURCE, TARGET or both", reason=Reason.UNSUPPORTED)
        if hello.device != "cpu" and not _GPU.fullmatch(hello.device):
            raise LongshoreError(
                f"device is {hello.device[:120]!r}: give 'cpu', or a GPU's UUID as nvidia-smi writes it",
                reason=Reason.UNSUPPORTED,
            )
        if hello.device != "cpu" and not _DRIVER_FILE.exists():
            raise LongshoreError(
                f"device is {hello.device!r}: this agent sees no NVIDIA driver; give its pod the GPUs of its engines",
                reason=Reason.UNSUPPORTED,
            )
        if hello.memory is TargetMemory.HOST and (hello.device != "cpu" or hello.roles != (Half.TARGET,)):
            raise LongshoreError(
                f"device is {hello.device!r} and roles are {', '.join(half.name for half in hello.roles)} for pages in host memory: "
                "give 'cpu' and TARGET alone",
                reason=Reason.UNSUPPORTED,
            )
        hello.layout.check()
        if self._config is not None:
            for half in hello.roles:
                self._compare(half, hello, self._config)
        return PeerId.of(hello)

    @staticmethod
    def check_siblings(hello: Hello, siblings: Sequence[KVLayout]) -> None:
        """Raise LayoutError if an engine's layout contradicts that of another rank of its replica; names the field.

        Args:
            siblings: layouts of those that are registered.
        """
        for sibling in siblings:
            _check_siblings(hello.instance, hello.layout, sibling)

    @staticmethod
    def check_pid(hello: Hello, workers: Sequence[tuple[str, int]]) -> None:
        """Check whether the workers of an agent's GPUs can open an engine's memory. Its own worker avoids its PID.

        Args:
            workers: name and PID of each.
        Raises:
            LongshoreError: a worker has the PID that the engine has in its own PID namespace; names both.
        """
        same = next((name for name, pid in workers if pid == hello.pid), None)
        if hello.device != "cpu" and same is not None:
            raise LongshoreError(
                f"this engine has PID {hello.pid} in its PID namespace, and worker {same} has it in the agent's: CUDA IPC "
                "fails between equal PIDs; start the engine with another PID, for example with shareProcessNamespace: "
                f"true in its pod, or set {variable('direct')} to false at the agent",
                reason=Reason.UNSUPPORTED,
            )

    def count(self, engine: PeerProcess, others: Sequence[tuple[PeerProcess, bool]]) -> None:
        """Check whether one more worker may be started for an engine.

        Args:
            others: the engine of each worker that there is, and whether it still serves that engine.
        Raises:
            LongshoreError: its process or its user has as many as are allowed; names the setting.
        """
        settings = self._settings
        process = f"this process (PID {engine.pid})" if engine.pid else "this process"
        limits = (
            (process, "process_workers_max", [lives for other, lives in others if engine.same_as(other)]),
            (f"user {engine.uid}", "user_workers_max", [lives for other, lives in others if other.uid == engine.uid]),
        )
        for owner, name, found in limits:
            limit = getattr(settings, name)
            if len(found) >= limit:
                # A worker whose engine has left is gone soon.
                passing = sum(found) < limit
                raise LongshoreError(
                    f"{owner} has {len(found)} workers, of {limit} that {variable(name)} allows: close a client, or raise it",
                    reason=Reason.BUSY if passing else Reason.UNSUPPORTED,
                )

    @staticmethod
    def _compare(half: Half, hello: Hello, config: AgentConfig) -> None:
        layout = hello.layout
        role = config.prefill if half is Half.SOURCE else config.decode
        name = "prefill" if half is Half.SOURCE else "decode"
        declared = role.layout(config.model)
        wanted = {cache.name: cache for cache in declared.caches}
        # The short form of a model declares the first cache of an engine, whatever its name.
        found = {cache.name: cache for cache in layout.caches} if config.model.caches else {declared.name: layout}
        checks: list[tuple[str, object, object]] = [
            *_compare_models(found, wanted, has_caches=bool(config.model.caches)),
            (f"{name}.tensorParallel", layout.parallel.tp, declared.parallel.tp),
            (f"{name}.pipelineParallel", layout.parallel.pp, declared.parallel.pp),
            (f"{name}.dataParallel", layout.parallel.dp, declared.parallel.dp),
        ]
        # Pages in decode's other memory may have another size and order. Those of a CPU are in host memory.
        wants_host, is_host = config.decode.target is Target.HOST, hello.memory is TargetMemory.HOST
        is_declared = is_host or hello.device == "cpu" if wants_host else not is_host
        # A role has one size and order of pages. Other caches may have theirs: both engines compare them.
        first = next((cache.name for cache in config.model.all_caches if cache.unit is Unit.TOKEN), None)
        if first in found and (half is Half.SOURCE or is_declared):
            checks += [
                (f"{name}.pageSize", found[first].page_size, wanted[first].page_size),
                (f"{name}.pageOrder", found[first].order, wanted[first].order),
            ]
        differing = [check for check in checks if check[1] != check[2]]
        faults = [
            f"{field} is {_shown(ours)} at the engine and {_shown(theirs)} in the deployment"
            for field, ours, theirs in differing
            if field != "model.planes" or len(differing) == 1
        ]
        if faults:
            raise LayoutError("; ".join(faults))


def _compare_models(
    found: Mapping[str, KVLayout], wanted: Mapping[str, KVLayout], *, has_caches: bool
) -> Iterator[tuple[str, object, object]]:
    """Yield (field, of the engine, of the deployment) of the caches that both have, by their names."""
    if has_caches:
        yield "model.caches", ", ".join(sorted(found)), ", ".join(sorted(wanted))
    for name in [name for name in found if name in wanted]:
        cache, other, path = found[name], wanted[name], f"model.caches[{name}]" if has_caches else "model"
        for each in ("layers", "element_bytes", "planes") if has_caches else _MODEL:
            yield f"{path}.{each}", getattr(cache.model, each), getattr(other.model, each)
        if has_caches:
            # Whether pages can be taken apart is compared with their order, or between both engines.
            yield f"{path}.unit", _unit(cache), _unit(other)


def _unit(cache: KVLayout) -> str:
    return Unit.SLOT.value if cache.order is PageOrder.SLOT else "pages"


def _shown(value: object) -> object:
    if isinstance(value, tuple) and value and isinstance(value[0], Plane):
        return "[" + ", ".join(f"{each.heads} heads of {each.rows} x {each.row_bytes} bytes" for each in value) + "]"
    return value.name if isinstance(value, IntEnum) else value


def _names(layout: KVLayout) -> str:
    return ", ".join(cache.name for cache in layout.caches)


def _check_siblings(instance: str, layout: KVLayout, sibling: KVLayout) -> None:
    """Raise LayoutError unless two ranks can be of one replica: peers plan for all of them from the layout of one."""
    shared = [
        (f"parallel.{name}", getattr(layout.parallel, name), getattr(sibling.parallel, name))
        for name in ("tp", "pp", "dp")
    ]
    names = ["model", "page_size", "order", "stage_layers", "blob_bytes"]
    if layout.parallel.pp_rank == sibling.parallel.pp_rank:
        names.append("layer_range")
    shared.append(("caches", _names(layout), _names(sibling)))
    for one, other in zip(layout.caches, sibling.caches, strict=False):
        place = f"cache {one.name!r}: " if one.name != layout.name else ""
        shared += [(f"{place}{name}", getattr(one, name), getattr(other, name)) for name in names]
    for field, found, wanted in shared:
        if found != wanted:
            raise LayoutError(
                f"{instance}: {field} is {_shown(found)} at rank {layout.rank} and {_shown(wanted)} at rank {sibling.rank}: ranks of "
                "one instance share it; wait until the ranks of an earlier life have left, or use another instance name"
            )
