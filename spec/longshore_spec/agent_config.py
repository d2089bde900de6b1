"""Types of the agent's config file. The operator writes it with `dump`; the agent reads it with `load`.

One file describes one deployment. Fields that the DisaggDeployment also has keep their names. Reading is strict: unknown
keys are faults, and all faults are reported together with their paths. Pure: text in, a value out; the caller opens the
file.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Collection
from enum import Enum
from typing import Annotated

import msgspec

from longshore_spec import names
from longshore_spec.quantity import Quantity
from longshore_spec.strict_document import Mapping, parse, plain, read_struct
from longshore_wire.claims import writer_count
from longshore_wire.errors import ConfigError, LayoutError
from longshore_wire.layout import (
    CACHES_MAX,
    DP_MAX,
    HEAD_DIM_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    PAGE_SIZE_MAX,
    PLANES_MAX,
    PP_MAX,
    ROW_BYTES_MAX,
    ROWS_MAX,
    TP_MAX,
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
)
from longshore_wire.layout import Plane as WirePlane
from longshore_wire.names import RUN_DIRECTORY, SOCKET_FILE, Wire
from longshore_wire.plan import Plan, Summary, plans
from longshore_wire.slabs import slab_limit_bytes
from longshore_wire.ways import Staging, Way

Instances = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
NamespaceName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=names.NAMESPACE_NAME_MAX)
]
# The name of a Service, which begins with a letter, begins with it.
DeploymentName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=names.DEPLOYMENT_NAME_MAX)
]
AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/", max_length=4096)]
# Wires for which NIXL opens a port, and wires that reach other nodes if GPU memory is allocated as fabric memory.
_NETWORK_WIRES = frozenset({"TCP", "RDMA"})
_GPU_WIRES = frozenset({"CudaIPC", "NVLink"})
# Names of fields in layouts' messages, and in the file.
_FILE_TERMS = (
    ("parallel.tp", "tensorParallel"),
    ("parallel.pp", "pipelineParallel"),
    ("model.planes[0].heads", "model.kvHeads"),
    ("page_size", "pageSize"),
    ("order is", "pageOrder is"),
    ("at the source", "in prefill"),
    ("at the target", "in decode"),
)


class Attention(Enum):
    """Kinds of attention."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


class Dtype(Enum):
    """Element types of a KV cache, by the engines' names."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return {"bfloat16": 2, "float16": 2, "float32": 4}.get(self.value, 1)


class Order(Enum):
    """Order of the dimensions inside a page; see layout.PageOrder."""

    NHD = "NHD"
    HND = "HND"
    OPAQUE = "Opaque"


class Target(Enum):
    """The memory of decode's pages: that of its device (a GPU or the CPU), or host memory beside it."""

    DEVICE = "Device"
    HOST = "Host"


class Backend(Enum):
    """The library that moves the bytes."""

    NIXL = "NIXL"
    MOONCAKE = "Mooncake"
    LOOPBACK = "Loopback"

    @property
    def moves_gpu_memory(self) -> bool:
        """Whether the library can move the memory of a GPU."""
        return self is not Backend.LOOPBACK


class Deployment(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The deployment that the agent serves."""

    namespace: NamespaceName
    name: DeploymentName

    @property
    def full_name(self) -> str:
        """Its name among the deployments of all namespaces."""
        return f"{self.namespace}/{self.name}"


Layers = Annotated[int, msgspec.Meta(ge=1, le=LAYERS_MAX)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=HEADS_MAX)]


class Unit(Enum):
    """What a cache has one entry of, in each layer: see `Cache`."""

    TOKEN = "Token"  # noqa: S105 - no password
    PAGE = "Page"
    SLOT = "Slot"


class Plane(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What each layer of a cache has of one kind: K, V, a latent, or a section of a recurrent state.

    Attributes:
        heads: of the whole model. Tensor parallel ranks split them, or hold replicas if there are fewer.
        width: elements of one row of a head.
        rows: of a head, of a state; otherwise 1.
    """

    heads: Heads
    width: Annotated[int, msgspec.Meta(ge=1, le=ROW_BYTES_MAX)]
    rows: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = 1


class Cache(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One kind of memory of a request, equal on both sides.

    Attributes:
        name: as the engines register it.
        unit: TOKEN: pages of tokens. PAGE: pages that nobody can take apart. SLOT: one recurrent state a sequence.
        planes: of each layer; of a page or a token the width is that of one token.
        window: the last tokens of which engines keep the cache; 0: of all tokens. Only sizes depend on it.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=32)]
    layers: Layers
    unit: Unit = Unit.TOKEN
    dtype: Dtype
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=PLANES_MAX)]
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0

    def kept(self, tokens: int) -> int:
        """Return how many of a sequence's tokens this cache keeps."""
        return min(tokens, self.window) if self.window else tokens

    @property
    def shape(self) -> ModelShape:
        """Return it as the type of the planner and the messages."""
        size = self.dtype.element_bytes
        planes = (WirePlane(plane.heads, plane.width * size, plane.rows) for plane in self.planes)
        return ModelShape(self.layers, tuple(planes), size)


class Model(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The shapes of all caches of a request, equal on both sides: `caches`, or the other fields for K and V, or a latent, alone.

    With MLA, kvHeads is 1 and headDim is the length of the latent.
    """

    attention: Attention | None = None
    layers: Layers | None = None
    kv_heads: Heads | None = None
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=HEAD_DIM_MAX)] | None = None
    dtype: Dtype | None = None
    caches: Annotated[tuple[Cache, ...], msgspec.Meta(min_length=1, max_length=CACHES_MAX)] | None = None

    @property
    def all_caches(self) -> tuple[Cache, ...]:
        """The caches, also of the short form. The first one is that of its fields."""
        if self.caches:
            return self.caches
        assert self.layers is not None, "`faults_of` tests the keys"
        assert self.kv_heads is not None
        assert self.head_dim is not None
        assert self.dtype is not None
        planes = (Plane(heads=self.kv_heads, width=self.head_dim),) * (1 if self.attention is Attention.MLA else 2)
        return (Cache(name="kv", layers=self.layers, dtype=self.dtype, planes=planes),)

    @classmethod
    def faults_of(cls, keys: Collection[str]) -> list[str]:
        """Return what is wrong with these keys together, each beginning with a key. `read_struct` asks for it."""
        short = [field.encode_name for field in msgspec.structs.fields(cls) if field.name != "caches"]
        given = [key for key in short if key in keys]
        if "caches" in keys:
            return [f"caches: given beside {', '.join(given)}: caches alone describe all memory"] if given else []
        return [f"{key}: missing" + ("" if given else "; or give caches") for key in short if key not in keys]


class PrefillStaging(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Staging memory of one prefill rank: one buffer a lane."""

    buffer_size: Quantity = 64 << 20  # bytes
    lanes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4


class DecodeStaging(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Staging memory of one decode rank: its ring."""

    pool_size: Quantity = 4 << 30  # bytes


class Role(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields of both roles. `instances` is the expected number of engine instances; None if it is not declared."""

    instances: Instances | None = None
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=TP_MAX)]
    pipeline_parallel: Annotated[int, msgspec.Meta(ge=1, le=PP_MAX)] = 1
    data_parallel: Annotated[int, msgspec.Meta(ge=1, le=DP_MAX)] = 1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=PAGE_SIZE_MAX)]  # tokens
    page_order: Order = Order.NHD

    def layout(self, model: Model) -> KVLayout:
        """Return the layout of rank 0 of an engine of this role. A page id of a slot covers all layers."""
        parallel = Parallel(tp=self.tensor_parallel, pp=self.pipeline_parallel, dp=self.data_parallel)
        orders = {Unit.TOKEN: PageOrder[self.page_order.name], Unit.PAGE: PageOrder.OPAQUE, Unit.SLOT: PageOrder.SLOT}
        first, *others = (
            KVLayout(
                cache.shape,
                parallel,
                cache.layers if cache.unit is Unit.SLOT else self.page_size,
                orders[cache.unit],
                name=cache.name,
            )
            for cache in model.all_caches
        )
        return msgspec.structs.replace(first, others=tuple(others))


class Prefill(Role, frozen=True, kw_only=True, rename="camel"):
    """The engines that compute prompts."""

    staging: PrefillStaging = PrefillStaging()


class Decode(Role, frozen=True, kw_only=True, rename="camel"):
    """The engines that generate."""

    target: Target = Target.DEVICE
    staging: DecodeStaging = DecodeStaging()


class Transfer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings of the transfer. `wires` are the allowed ones; empty allows any."""

    backend: Backend = Backend.NIXL
    staging: Staging = Staging.AUTO
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 8192
    wires: tuple[Wire, ...] = ()


class Control(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The agent's addresses, ports and keys.

    Attributes:
        keys_directory: directory of the CURVE keys; None for no keys, which agents accept only on a loopback address.
        run_directory: directory of the engine socket; None for the deployment's directory under RUN_DIRECTORY.
        bind_address: None if the agent's environment sets it, since one file serves agents on many nodes.
        http_port: port of health, status and metrics; 0 for any free one.
        worker_port: worker i listens for peers on worker_port + i; 0 for any free ports.
        host_network: the agent runs in its node's network, where every host that reaches the node reaches its ports.
        network_policy: a NetworkPolicy admits only the deployment's agents to its ports in a pod's network; None if unknown.
        allow_open_data_path: accept data ports, which have no authentication, although neither the loopback interface nor such
            a policy protects them.
    """

    keys_directory: AbsolutePath | None = names.KEYS_DIRECTORY
    run_directory: AbsolutePath | None = None
    bind_address: Annotated[str, msgspec.Meta(min_length=1, max_length=253)] | None = None
    http_port: Port = names.HTTP_PORT
    worker_port: Port = 0
    host_network: bool = False
    network_policy: bool | None = None
    allow_open_data_path: bool = False


class Integrity(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Whether both sides compare digests of each room's pages."""

    digest: bool = False


class Gpu(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How the GPUs of a node are shared. With `mps`, agents only work as clients of CUDA's Multi-Process Service.

    The file has all sections with their defaults, also this one; workers on CPUs do not read it.
    """

    mps: bool = False


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole file. `load` reads it; `check` tests the rules that concern several fields."""

    api_version: str = names.API_GROUP_VERSION
    kind: str = names.AGENT_CONFIG_KIND
    deployment: Deployment
    model: Model
    prefill: Prefill
    decode: Decode
    transfer: Transfer = Transfer()
    control: Control = Control()
    integrity: Integrity = Integrity()
    gpu: Gpu = Gpu()

    @property
    def run_directory(self) -> str:
        """Directory of the engine socket."""
        return self.control.run_directory or f"{RUN_DIRECTORY}/{self.deployment.full_name}"

    @property
    def engine_socket(self) -> str:
        """Path of the engine socket."""
        return f"{self.run_directory}/{SOCKET_FILE}"

    def plans(self) -> dict[str, Plan]:
        """Return the plan of each cache between the declared layouts. Raises LayoutError if there is none."""
        source, target = self.prefill.layout(self.model), self.decode.layout(self.model)
        found = plans(source, target, staging=self.transfer.staging)
        return {cache.name: plan for cache, plan in zip(self.model.all_caches, found, strict=True)}

    def summaries(self) -> dict[str, Summary]:
        """Return the numbers of each cache's plan; the lane's buffer and the ring's share limit a slab. Raises as `plans`."""
        found = self.plans()
        limit = slab_limit_bytes(
            self.prefill.staging.buffer_size, self.decode.staging.pool_size, _writers(*found.values())
        )
        chunks = {cache.name: cache.kept(self.transfer.chunk_tokens) for cache in self.model.all_caches}
        return {name: plan.summary(chunks[name], max(1, limit)) for name, plan in found.items()}

    def check(self) -> None:
        """Raise ConfigError with all faults if valid fields contradict each other."""
        faults = [*_identity_faults(self.api_version, self.kind), *_transfer_faults(self.transfer)]
        faults += _network_faults(self.transfer, self.control)
        faults += _layout_faults(self.model, self.prefill, self.decode)
        if not faults:
            faults += _plan_faults(self)
        if faults:
            raise ConfigError(faults)


def load(text: str | bytes) -> AgentConfig:
    """Return the config in `text`, JSON or (where PyYAML is installed) YAML.

    Raises:
        ConfigError: all faults; each begins with its path, for example `prefill.staging.lanes`.
    """
    document = parse(text)
    kind = document.get("kind", names.AGENT_CONFIG_KIND) if isinstance(document, Mapping) else names.AGENT_CONFIG_KIND
    if kind == names.KIND:
        # All other fields would be faults as well, which would not help the user.
        raise ConfigError(
            [f"kind: {kind} is for the operator and `longshore up`: this agent reads {names.AGENT_CONFIG_KIND}"]
        )
    faults: list[str] = []
    config = read_struct(AgentConfig, document, "", faults)
    if faults or config is None:
        raise ConfigError(faults)
    config.check()
    return config


def dump(config: AgentConfig) -> str:
    """Return `config` as JSON text, from which `load` returns an equal value.

    What equals its default is left out, so that an agent of an older release reads a config of a newer operator as long as no
    field that it does not know is set.
    """
    head = {"apiVersion": config.api_version, "kind": config.kind}
    return json.dumps(head | plain(config), indent=2) + "\n"


def digests(config: AgentConfig) -> dict[str, str]:
    """Return a digest by role (prefill, decode) of what an agent with engines of this role reads at start.

    A field at its default is left out, so that releases with more fields agree. A field that only planning and the
    status read is left out, and so is the order of wires. The other role's staging only moves the default of
    `LONGSHORE_SLAB_BYTES_MIN`, which peers need not share.
    """
    wires = tuple(sorted(config.transfer.wires, key=lambda wire: wire.value))
    transfer = msgspec.structs.replace(config.transfer, chunk_tokens=Transfer().chunk_tokens, wires=wires)
    shared = json.loads(dump(msgspec.structs.replace(config, transfer=transfer)))
    roles = {name: shared.pop(name) for name in ("prefill", "decode")}
    for role in roles.values():
        role.pop("instances", None)
    return {
        name: hashlib.sha256(json.dumps([shared, role], sort_keys=True).encode()).hexdigest()[:16]
        for name, role in roles.items()
    }


def _identity_faults(api_version: str, kind: str) -> list[str]:
    expected = (("apiVersion", api_version, names.API_GROUP_VERSION), ("kind", kind, names.AGENT_CONFIG_KIND))
    return [
        f"{path}: {value!r} is unknown here: this agent reads {ours}" for path, value, ours in expected if value != ours
    ]


def _transfer_faults(transfer: Transfer) -> list[str]:
    seen = [wire.value for wire in transfer.wires]
    return [
        f"transfer.wires: {wire} is listed {seen.count(wire)} times"
        for wire in sorted(set(seen))
        if seen.count(wire) > 1
    ]


def opens_data_ports(backend: Backend, wires: Collection[str], *, fabric: bool = False) -> bool:
    """Return whether agents open data ports, which have no authentication.

    Args:
        wires: names of the allowed wires; empty allows any.
        fabric: GPU staging memory can be reached over NVLink from other nodes, which also needs TCP.
    """
    if backend is not Backend.NIXL:
        return backend is Backend.MOONCAKE
    reach_further = _NETWORK_WIRES | (_GPU_WIRES if fabric else frozenset())
    return not wires or not reach_further.isdisjoint(wires)


def is_loopback(host: str) -> bool:
    """Return whether only this machine or pod can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _network_faults(transfer: Transfer, control: Control) -> list[str]:
    if control.allow_open_data_path or not opens_data_ports(transfer.backend, [wire.value for wire in transfer.wires]):
        return []
    if control.bind_address is not None and is_loopback(control.bind_address):
        return []
    if control.host_network:
        named, remedy = "control.hostNetwork: true", "leave hostNetwork off"
    elif control.network_policy is False:
        named, remedy = "control.networkPolicy: false", "leave networkPolicy on"
    else:
        return []
    fault = (
        f"{named} opens the data ports of {transfer.backend.value}, which have no authentication, to every host that reaches the agent's "
        f"address: {remedy}, {_remedies(transfer.backend)}accept it with control.allowOpenDataPath"
    )
    return [fault]


def _remedies(backend: Backend) -> str:
    wires = (
        "allow only wires that need no port (transfer.wires: [SharedMemory, CudaIPC, NVLink], with backend NIXL), or "
    )
    return wires if backend is Backend.MOONCAKE else wires.replace(", with backend NIXL", "")


def _layout_faults(model: Model, prefill: Prefill, decode: Decode) -> list[str]:
    if model.attention in (Attention.MQA, Attention.MLA) and model.kv_heads != 1:
        return [f"model.kvHeads: {model.kv_heads} with attention {model.attention.value}: it has 1"]
    faults = []
    for path, role in (("prefill", prefill), ("decode", decode)):
        try:
            role.layout(model).check()
        except LayoutError as error:
            faults.append(f"{path}: {_in_file_terms(error)}")
    return faults


def _writers(*found: Plan) -> int:
    """Return how many pairs of these plans write to the target rank with the most."""
    return max(writer_count(found, rank) for rank in {pair.target_rank for plan in found for pair in plan.pairs})


def _in_file_terms(error: LayoutError) -> str:
    """Return the message with the file's names of fields."""
    text = str(error)
    if text.startswith("cache "):
        text = text.replace("model.", "")
    for ours, theirs in _FILE_TERMS:
        text = text.replace(ours, theirs)
    return text


def _plan_faults(config: AgentConfig) -> list[str]:
    """Return the faults between the two roles, each of which is valid by itself."""
    try:
        made = config.plans()
    except LayoutError as error:
        return [f"prefill, decode: {_in_file_terms(error)}"]
    if not any(plan.way is Way.STAGED for plan in made.values()):
        return []
    # Caches follow each other, so the ring need not hold slabs of all of them at once.
    writers = max(_writers(plan) for plan in made.values())
    needed, given = 2 * writers * config.prefill.staging.buffer_size, config.decode.staging.pool_size
    if given >= needed:
        return []
    fault = (
        f"decode.staging.poolSize: {given} bytes hold less than two slabs of prefill.staging.bufferSize "
        f"({config.prefill.staging.buffer_size}) for each of {writers} source ranks: give at least {needed}"
    )
    return [fault]
