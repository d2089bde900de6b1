"""Tests the effect of each field of a DisaggDeployment on its agents' configuration, pods and status."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from operator_scene import Scene, instance, said, settled

from longshore_agent.settings import Settings
from longshore_agent.supervisor.reception import Reception
from longshore_spec.agent_config import AgentConfig, Backend, Decode, Prefill, Target, load
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Half, Hello
from longshore_wire.errors import LayoutError
from longshore_wire.names import Wire
from longshore_wire.ways import Staging

Body = dict[str, Any]
BASE: Body = {
    "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
    "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}},
    "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"role": "decode"}},
}


# Further fields that a field requires.
WITH = {"agents.hostNetwork": {"allowOpenDataPath": True}, "agents.networkPolicy": {"allowOpenDataPath": True}}


def changed(path: str, value: Any) -> Body:
    """The base deployment's spec with one field, or several of one part, set."""
    if path in WITH:
        return changed("agents.", {path.partition(".")[2]: value, **WITH[path]})
    part, _, field = path.partition(".")
    spec = {**BASE, part: dict(BASE.get(part, {}))}
    place = spec[part]
    *folders, last = field.split(".")
    for folder in folders:
        place = place.setdefault(folder, {})
    if last:
        place[last] = value
    else:
        place.update(value)
    return spec


def children(spec: Body) -> dict[str, Body]:
    return {kind.name: body for kind, body in Scene(**spec).decide().apply}


def orders(spec: Body) -> AgentConfig:
    """Return the configuration that its agents read."""
    return load(children(spec)["ConfigMap"]["data"]["agent.json"])


def pod(spec: Body) -> Body:
    return children(spec)["DaemonSet"]["spec"]["template"]["spec"]


def container(spec: Body) -> Body:
    return pod(spec)["containers"][0]


# -- the model and the layouts: which engines fit ------------------------------------------------------------------

LATENT = {"attention": "MLA", "kvHeads": 1, "headDim": 576}
LAYOUTS = [
    ("model.", LATENT, "model.attention"),
    ("model.layers", 40, "model.layers"),
    ("model.kvHeads", 16, "model.kv_heads"),
    ("model.headDim", 64, "model.head_dim"),
    ("model.dtype", "float32", "model.element_bytes"),
    *(
        (f"{role}.{field}", value, f"{role}.{field}")
        for role in ("prefill", "decode")
        for field, value in (
            ("tensorParallel", 2),
            ("pipelineParallel", 2),
            ("dataParallel", 3),
            ("pageSize", 16),
            ("pageOrder", "HND"),
        )
    ),
]


def hello(config: AgentConfig, role: Prefill | Decode) -> Hello:
    half = Half.SOURCE if isinstance(role, Prefill) else Half.TARGET
    return Hello(ENGINE_PROTOCOL_VERSION, "engine", role.layout(config.model), "cpu", (half,))


@pytest.mark.shows(
    "field.model.{attention,layers,kvHeads,headDim,dtype}",
    "field.{prefill,decode}.{tensorParallel,pipelineParallel,dataParallel,pageSize,pageOrder}",
    "argument.connect.layout",
)
@pytest.mark.parametrize(("path", "value", "named"), LAYOUTS, ids=[path for path, *_ in LAYOUTS])
def test_engines_of_the_declared_layout_are_taken_in_and_others_refused_by_the_field(
    path: str, value: Any, named: str
) -> None:
    before, after = orders(BASE), orders(changed(path, value))
    roles = ["decode"] if path.startswith("decode") else ["prefill"]
    for role in roles:
        old, new = hello(before, getattr(before, role)), hello(after, getattr(after, role))
        for config, fits, other in ((before, old, new), (after, new, old)):
            reception = Reception(Settings(), config)
            assert reception.admit(fits).instance == "engine"
            with pytest.raises(LayoutError, match=named):
                reception.admit(other)


@pytest.mark.shows(
    "field.model.layers",
    "field.{prefill,decode}.tensorParallel",
    "field.prefill.staging.bufferSize",
    "field.transfer.{staging,chunkTokens}",
)
def test_the_plan_in_the_status_follows_the_layouts() -> None:
    def plan(spec: Body) -> Body:
        status = Scene(**spec).decide().status
        assert status is not None
        return status["plan"]

    assert (plan(BASE)["pairs"], plan(BASE)["way"]) == (4, "Staged")
    assert plan(changed("decode.tensorParallel", 4))["way"] == "Contiguous"
    assert plan(changed("prefill.tensorParallel", 8))["pairs"] == 8
    assert plan(changed("model.layers", 40))["bytesPerToken"] * 2 == plan(BASE)["bytesPerToken"]
    assert plan(changed("transfer.chunkTokens", 1024))["slicesPerChunk"] * 8 == plan(BASE)["slicesPerChunk"]
    assert plan(changed("transfer.staging", "Never"))["way"] == "Slices"
    writes = plan(BASE)["writesPerChunk"]
    assert plan(changed("prefill.staging.bufferSize", "16Mi"))["writesPerChunk"] > writes


# Qwen3.5 in small: K and V of some layers, and of the others a conv state of q, k and v and a recurrent one.
HYBRID: list[Body] = [
    {"name": "kv", "layers": 15, "dtype": "bfloat16", "planes": [{"heads": 2, "width": 256}] * 2},
    {
        "name": "conv",
        "layers": 45,
        "unit": "Slot",
        "dtype": "bfloat16",
        "planes": [{"heads": heads, "width": 128, "rows": 3} for heads in (16, 16, 64)],
    },
    {"name": "ssm", "layers": 45, "unit": "Slot", "dtype": "float32", "planes": [{"heads": 64, "width": 16384}]},
    {"name": "index", "layers": 15, "unit": "Page", "dtype": "uint8", "planes": [{"heads": 1, "width": 132}]},
]


def hybrid(cache: int = 0, **changes: Any) -> Body:
    caches = [{**each, **changes} if index == cache else each for index, each in enumerate(HYBRID)]
    return {**BASE, "model": {"caches": caches}}


CACHES = [
    (0, {"name": "main"}, r"model\.caches is (conv|index), .* at the engine and"),
    (1, {"layers": 44}, r"model\.caches\[conv\]\.layers is 4[45] at the engine and 4[45] in the deployment"),
    (0, {"dtype": "float32"}, r"model\.caches\[kv\]\.element_bytes is [24] at"),
    (2, {"unit": "Token"}, r"model\.caches\[ssm\]\.unit is (Slot|pages) at"),
    (2, {"planes": [{"heads": 32, "width": 16384}]}, r"\[ssm\]\.planes is \[(64|32) heads of 1 x 65536 bytes\] at"),
    (2, {"planes": [{"heads": 64, "width": 8192}]}, r"\[ssm\]\.planes is \[64 heads of 1 x (65536|32768) bytes\]"),
    (2, {"planes": [{"heads": 64, "width": 16384, "rows": 2}]}, r"\[ssm\]\.planes is \[64 heads of [12] x 65536"),
]


@pytest.mark.shows("field.model.caches.{name,layers,unit,dtype}", "field.model.caches.planes.{heads,width,rows}")
@pytest.mark.parametrize(("cache", "changes", "named"), CACHES, ids=[str(changes)[:20] for _, changes, _ in CACHES])
def test_engines_with_the_declared_caches_are_taken_in_and_others_refused_by_the_cache(
    cache: int, changes: Body, named: str
) -> None:
    before, after = orders(hybrid()), orders(hybrid(cache, **changes))
    for config, other in ((before, after), (after, before)):
        reception = Reception(Settings(), config)
        assert reception.admit(hello(config, config.prefill)).instance == "engine"
        with pytest.raises(LayoutError, match=named):
            reception.admit(hello(other, other.prefill))


def test_an_engine_may_list_its_caches_in_another_order_with_pages_of_its_own_beside_the_first() -> None:
    config = orders(hybrid())
    known = hello(config, config.prefill)
    kv, conv, ssm, index = known.layout.caches
    ours = [replace(conv, page_size=15), kv, replace(index, page_size=128), ssm]
    reception = Reception(Settings(), config)
    assert reception.admit(replace(known, layout=replace(ours[0], others=tuple(ours[1:])))).instance == "engine"
    kv = replace(kv, page_size=32)
    with pytest.raises(LayoutError, match=r"^prefill\.pageSize is 32 at the engine and 64 in the deployment$"):
        reception.admit(replace(known, layout=replace(conv, others=(kv, ssm, index))))


def test_the_plan_in_the_status_has_the_numbers_of_each_cache() -> None:
    status = Scene(**hybrid()).decide().status
    assert status is not None
    plan = status["plan"]
    caches = {each["name"]: each for each in plan["caches"]}
    # Every prefill rank holds a copy of the one head of index keys, and a K and V head of which two ranks have each.
    assert {name: each["pairs"] for name, each in caches.items()} == {"kv": 2, "conv": 4, "ssm": 4, "index": 1}
    assert {name: each.get("slotBytes") for name, each in caches.items()} == {
        "kv": None,
        "conv": 45 * 3 * (16 + 16 + 64) * 128 * 2,
        "ssm": 45 * 64 * 128 * 128 * 4,
        "index": None,
    }
    assert {name: each["bytesPerToken"] for name, each in caches.items()} == {
        "kv": 15 * 2 * 2 * 256 * 2,
        "conv": 0,
        "ssm": 0,
        "index": 15 * 132,
    }
    assert plan["slotBytes"] == caches["conv"]["slotBytes"] + caches["ssm"]["slotBytes"]
    # Whole pages of index keys are moved in place.
    assert {name: each["way"] for name, each in caches.items() if each["way"] != "Staged"} == {"index": "Contiguous"}
    assert plan["way"] == "Mixed"
    assert "caches" not in (Scene(**BASE).decide().status or {})["plan"]


# -- staging and transfer: agents' settings, whose effects agents' tests show ---------------------------------------

SETTINGS = [
    ("prefill.staging.bufferSize", "32Mi", "lane_bytes", 32 << 20),
    ("prefill.staging.lanes", 7, "lane_count", 7),
    ("decode.staging.poolSize", "3Gi", "ring_bytes", 3 << 30),
    ("transfer.backend", "Mooncake", "backend", Backend.MOONCAKE),
    ("transfer.staging", "Always", "staging", Staging.ALWAYS),
    ("transfer.chunkTokens", 777, "chunk_tokens", 777),
    ("transfer.wires", ["TCP", "RDMA"], "wires", (Wire.TCP, Wire.RDMA)),
    ("decode.target", "Host", "decode_target", Target.HOST),
    ("integrity.digest", True, "digest", True),
    ("gpu.mps", True, "gpu_mps", True),
    ("agents.httpPort", 9999, "http_port", 9999),
    ("agents.workerPort", 9700, "worker_port", 9700),
    ("agents.hostNetwork", True, "host_network", True),
    ("agents.networkPolicy", False, "network_policy", False),
    ("agents.allowOpenDataPath", True, "allow_open_data_path", True),
]


@pytest.mark.shows(
    "field.prefill.staging.{bufferSize,lanes}",
    "field.decode.target",
    "field.decode.staging.poolSize",
    "field.transfer.{backend,staging,chunkTokens,wires}",
    "field.integrity.digest",
    "field.gpu.mps",
    "field.agents.{hostNetwork,allowOpenDataPath,networkPolicy,httpPort,workerPort}",
)
@pytest.mark.parametrize(("path", "value", "name", "wanted"), SETTINGS, ids=[path for path, *_ in SETTINGS])
def test_a_field_becomes_the_setting_of_its_agents(path: str, value: Any, name: str, wanted: Any) -> None:
    before, after = (Settings.from_config(orders(spec)) for spec in (BASE, changed(path, value)))
    assert getattr(before, name) != wanted
    assert getattr(after, name) == wanted


# -- where and how agents run --------------------------------------------------------------------------------------


@pytest.mark.shows("field.{prefill,decode}.nodeSelector")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_agents_run_on_the_nodes_that_a_selector_picks(role: str) -> None:
    def terms(spec: Body) -> list[Body]:
        affinity = pod(spec)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return [expression for term in affinity["nodeSelectorTerms"] for expression in term["matchExpressions"]]

    other = {"key": "zone", "operator": "In", "values": ["b"]}
    assert other not in terms(BASE)
    assert other in terms(changed(f"{role}.nodeSelector", {"zone": "b"}))


PODS = [
    ("agents.image", "other:2", lambda spec: container(spec)["image"], "agent:1", "other:2"),
    ("agents.runtimeClassName", "nvidia", lambda spec: pod(spec).get("runtimeClassName"), None, "nvidia"),
    ("agents.hostNetwork", True, lambda spec: pod(spec).get("hostNetwork"), None, True),
    ("agents.hostIPC", True, lambda spec: pod(spec).get("hostIPC"), None, True),
    ("agents.networkPolicy", False, lambda spec: "NetworkPolicy" in children(spec), True, False),
    ("agents.podMonitor", True, lambda spec: "PodMonitor" in children(spec), False, True),
    (
        "agents.httpPort",
        9999,
        lambda spec: [port["containerPort"] for port in container(spec)["ports"] if port["name"] == "http"],
        [9470],
        [9999],
    ),
    (
        "agents.workerPort",
        9700,
        lambda spec: [port["containerPort"] for port in container(spec)["ports"] if port["name"] == "worker"],
        [],
        [9700],
    ),
    (
        "agents.resources",
        {"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 1}},
        lambda spec: container(spec).get("resources"),
        {"requests": {"memory": "4608Mi"}},
        {"requests": {"cpu": 2, "memory": "2304Mi"}, "limits": {"nvidia.com/gpu": 1}},
    ),
]


@pytest.mark.shows("field.agents.{image,hostNetwork,hostIPC,networkPolicy,podMonitor,httpPort,workerPort}")
@pytest.mark.parametrize(("path", "value", "look", "before", "after"), PODS, ids=[path for path, *_ in PODS])
def test_a_field_of_agents_is_seen_in_their_pods(path: str, value: Any, look: Any, before: Any, after: Any) -> None:
    assert (look(BASE), look(changed(path, value))) == (before, after)


@pytest.mark.shows("field.{,prefill.,decode.}agents.tolerations.{key,operator,value,effect,tolerationSeconds}")
@pytest.mark.parametrize(
    "toleration",
    [{"key": "gpu"}, {"operator": "Exists"}, {"value": "yes"}, {"effect": "NoExecute"}, {"tolerationSeconds": 60}],
    ids=lambda toleration: next(iter(toleration)),
)
def test_agents_tolerate_what_is_listed(toleration: Body) -> None:
    assert "tolerations" not in pod(BASE)
    assert pod(changed("agents.tolerations", [toleration]))["tolerations"] == [toleration]


@pytest.mark.shows("field.agents.keysRevision")
def test_a_raised_revision_of_keys_asks_for_new_ones() -> None:
    assert Scene(**BASE).decide().keys is None
    new = Scene(**changed("agents.keysRevision", 2)).decide().keys
    assert new is not None
    assert (new.revision, new.previous) == (2, "llama-keys-0123")


@pytest.mark.shows("field.{prefill,decode}.instances")
@pytest.mark.parametrize(("role", "half"), [("prefill", "source"), ("decode", "target")])
def test_expected_instances_are_counted_and_missed(role: str, half: str) -> None:
    def engines(instances: int | None) -> tuple[str, Any]:
        scene = settled(**(BASE if instances is None else changed(f"{role}.instances", instances)))
        scene.put_agent("a", said=said(instance("one", half)))
        scene.put_agent("b", said=said())
        status = scene.decide().status
        assert status is not None
        return scene.reasons()["EnginesConnected"], status[role].get("expectedInstances")

    assert engines(None) == ("EnginesConnected", None)
    assert engines(1) == ("EnginesConnected", 1)
    assert engines(2) == ("EnginesMissing", 2)
