"""Tests the agent's config file: valid and invalid content, and that writing it loses nothing."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore_spec.agent_config import (
    AgentConfig,
    Attention,
    Backend,
    Control,
    Decode,
    DecodeStaging,
    Deployment,
    Dtype,
    Integrity,
    Model,
    Order,
    Prefill,
    PrefillStaging,
    Transfer,
    dump,
    load,
)
from longshore_spec.quantity import QuantityError, format_quantity, parse_quantity
from longshore_spec.strict_document import DOCUMENT_BYTES_MAX, parse
from longshore_wire.errors import ConfigError
from longshore_wire.layout import ModelShape, PageOrder, Plane
from longshore_wire.names import Wire
from longshore_wire.ways import Staging, Way

YAML = """
apiVersion: longshore.dev/v1alpha1
kind: AgentConfig
deployment: {namespace: default, name: llama-70b}
model: {attention: GQA, layers: 80, kvHeads: 8, headDim: 128, dtype: bfloat16}
prefill:
  instances: 2
  tensorParallel: 4
  pageSize: 64
  staging: {bufferSize: 64Mi, lanes: 4}
decode:
  tensorParallel: 1
  pageSize: 16
  pageOrder: HND
  target: Device
  staging: {poolSize: 4Gi}
transfer: {backend: NIXL, staging: Auto, chunkTokens: 4096, wires: [RDMA, TCP]}
"""


def faults_of(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return caught.value.faults


def test_a_config_in_yaml_is_read_with_the_defaults_of_what_it_leaves_out() -> None:
    config = load(YAML)
    assert config.deployment == Deployment(namespace="default", name="llama-70b")
    assert config.prefill.staging == PrefillStaging(buffer_size=64 << 20, lanes=4)
    assert config.decode.staging.pool_size == 4 << 30
    assert config.decode.page_order is Order.HND and config.decode.instances is None
    assert config.transfer.wires == (Wire.RDMA, Wire.TCP)
    assert config.integrity == Integrity(digest=False)
    assert config.run_directory == "/run/longshore/default/llama-70b"
    assert config.decode.layout(config.model).order is PageOrder.HND
    assert config.plans()["kv"].way is Way.STAGED


def test_the_same_document_as_json_or_bytes_reads_the_same() -> None:
    config = load(YAML)
    assert load(YAML.encode()) == config
    assert load(dump(config)) == config
    # An older agent refuses a field that it does not know, so that no default is written.
    assert json.loads(dump(config)) == {
        "apiVersion": "longshore.dev/v1alpha1",
        "kind": "AgentConfig",
        "deployment": {"namespace": "default", "name": "llama-70b"},
        "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
        "prefill": {"instances": 2, "tensorParallel": 4, "pageSize": 64},
        "decode": {"tensorParallel": 1, "pageSize": 16, "pageOrder": "HND"},
        "transfer": {"chunkTokens": 4096, "wires": ["RDMA", "TCP"]},
    }


CACHES = """
  caches:
  - {name: kv, layers: 15, dtype: bfloat16, planes: [{heads: 2, width: 256}, {heads: 2, width: 256}]}
  - {name: ssm, layers: 45, unit: Slot, dtype: float32, planes: [{heads: 64, width: 128, rows: 128}]}
"""
SEVERAL = YAML.replace(" {attention: GQA, layers: 80, kvHeads: 8, headDim: 128, dtype: bfloat16}", CACHES)


def test_several_caches_are_a_layout_with_each_and_written_as_they_were_read() -> None:
    config = load(SEVERAL)
    assert load(dump(config)) == config
    caches = config.decode.layout(config.model).caches
    assert [(cache.name, cache.order, cache.page_size) for cache in caches] == [
        ("kv", PageOrder.HND, 16),
        ("ssm", PageOrder.SLOT, 45),
    ]
    assert caches[1].model == ModelShape(45, (Plane(64, 512, 128),), 4)
    assert [plan.way for plan in config.plans().values()] == [Way.STAGED, Way.STAGED]
    # What a cache leaves out is not written either, so that an older agent reads it.
    assert json.loads(dump(config))["model"]["caches"][0] == {
        "name": "kv",
        "layers": 15,
        "dtype": "bfloat16",
        "planes": [{"heads": 2, "width": 256}] * 2,
    }


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (CACHES, " {}", "model.attention: missing; or give caches"),
        ("caches:", "layers: 3\n  caches:", "model.caches: given beside layers: caches alone describe all memory"),
        ("width: 128", "widht: 128", "model.caches[1].planes[0]: Object contains unknown field `widht`"),
        ("name: ssm", "name: kv", "prefill: caches have the names kv, kv: give each its own"),
        ("heads: 64", "heads: 6", "prefill: cache 'ssm': tensorParallel is 4 and planes[0].heads is 6"),
        ("unit: Slot", "unit: Page", "prefill: cache 'ssm': planes[0].rows is 128: give a number from 1 to 1"),
        ("unit: Slot", "unit: Slots", "model.caches[1].unit: Invalid enum value 'Slots'"),
    ],
)
def test_what_is_wrong_with_a_cache_is_named_by_its_field(old: str, new: str, fault: str) -> None:
    assert old in SEVERAL
    assert fault in "\n".join(faults_of(SEVERAL.replace(old, new)))


def test_all_faults_are_reported_at_once_each_with_its_path() -> None:
    broken = (
        YAML.replace("name: llama-70b", "name: Llama")
        .replace("kvHeads: 8, ", "")
        .replace("bfloat16", "bf17")
        .replace("lanes: 4", "lanes: 0, poolSize: 1")
        .replace("64Mi", "64MB")
        .replace("pageOrder: HND", "pageOrdr: HND")
        .replace("[RDMA, TCP]", "[RDMA, Token]")
        .replace("transfer:", "transfers: 1\ntransfer:")
    )
    paths = [fault.split(":")[0] for fault in faults_of(broken)]
    assert sorted(paths) == [
        "decode.pageOrdr",
        "deployment.name",
        "model.dtype",
        "model.kvHeads",
        "prefill.staging.bufferSize",
        "prefill.staging.lanes",
        "prefill.staging.poolSize",
        "transfer.wires[1]",
        "transfers",
    ]


def test_an_unknown_key_comes_with_the_one_that_was_meant() -> None:
    (fault,) = faults_of(YAML.replace("pageOrder", "pageOrdr"))
    assert fault == "decode.pageOrdr: unknown key; did you mean pageOrder?"


def test_a_wrong_choice_comes_with_the_choices() -> None:
    (fault,) = faults_of(YAML.replace("backend: NIXL", "backend: nixl"))
    assert fault.startswith("transfer.backend:")
    assert "NIXL, Mooncake, Loopback" in fault


@pytest.mark.parametrize(
    "text", ['{"kind": "AgentConfig", "kind": "AgentConfig"}', "kind: AgentConfig\nkind: AgentConfig"]
)
def test_a_key_that_is_given_twice_is_a_fault(text: str) -> None:
    assert "kind: given more than once" in faults_of(text)


@pytest.mark.parametrize(
    ("old", "new", "path", "text"),
    [
        ("tensorParallel: 4", "tensorParallel: 3", "prefill", "tensorParallel is 3 and model.kvHeads is 8"),
        ("attention: GQA", "attention: MLA", "model.kvHeads", "8 with attention MLA"),
        ("attention: GQA", "attention: MQA", "model.kvHeads", "8 with attention MQA"),
        ("pageOrder: HND", "pageOrder: Opaque", "prefill, decode", "pageOrder is NHD in prefill and OPAQUE in decode"),
        (
            "poolSize: 4Gi",
            "poolSize: 511Mi",
            "decode.staging.poolSize",
            "each of 4 source ranks: give at least 536870912",
        ),
        ("v1alpha1", "v9", "apiVersion", "longshore.dev/v9"),
        ("AgentConfig", "DisaggDeployment", "kind", "DisaggDeployment"),
        ("[RDMA, TCP]", "[TCP, TCP]", "transfer.wires", "TCP is listed 2 times"),
        ("layers: 80", "layers: 80.0", "model.layers", "Expected `int`, got `float`"),
        ("layers: 80", "layers: '80'", "model.layers", "Expected `int`, got `str`"),
        ("layers: 80", "layers: true", "model.layers", "Expected `int`, got `bool`"),
        ("instances: 2", "instances: -1", "prefill.instances", ">= 0"),
        ("transfer:", "control: {httpPort: 65536}\ntransfer:", "control.httpPort", "<= 65535"),
        (
            "transfer: {backend: NIXL",
            "control: {hostNetwork: true}\ntransfer: {backend: Mooncake",
            "control.hostNetwork",
            "true opens the data ports of Mooncake, which have no authentication, to every host that reaches the agent's address",
        ),
        (
            "transfer: {backend: NIXL",
            "control: {hostNetwork: true}\ntransfer: {backend: NIXL",
            "control.hostNetwork",
            "leave hostNetwork off, allow only wires that need no port (transfer.wires: [SharedMemory, CudaIPC, NVLink]), or accept",
        ),
        (
            "transfer:",
            "control: {networkPolicy: false}\ntransfer:",
            "control.networkPolicy",
            "leave networkPolicy on, allow only wires that need no port",
        ),
        ("transfer:", "control: [1]\ntransfer:", "control", "give a mapping, not [1]"),
    ],
)
def test_each_fault_names_its_path_and_what_is_wrong(old: str, new: str, path: str, text: str) -> None:
    (fault,) = faults_of(YAML.replace(old, new))
    assert fault.startswith(f"{path}: ")
    assert text in fault


@pytest.mark.parametrize(
    ("control", "wires"),
    [
        ("hostNetwork: true, allowOpenDataPath: true", "[RDMA, TCP]"),
        ("networkPolicy: false, allowOpenDataPath: true", "[]"),
        ("hostNetwork: true", "[SharedMemory]"),
        ("networkPolicy: false", "[CudaIPC, NVLink]"),
        ("hostNetwork: true, bindAddress: 127.0.0.1", "[]"),
        ("networkPolicy: true", "[]"),
        ("httpPort: 1", "[]"),
    ],
)
def test_data_ports_are_allowed_where_there_are_none_or_others_do_not_reach_them(control: str, wires: str) -> None:
    load(YAML.replace("[RDMA, TCP]", wires).replace("transfer:", f"control: {{{control}}}\ntransfer:"))


def test_a_small_pool_is_allowed_where_nothing_is_staged() -> None:
    small = YAML.replace("poolSize: 4Gi", "poolSize: 1Mi")
    load(small.replace("staging: Auto", "staging: Never"))


def test_an_mla_model_may_be_staged() -> None:
    mla = YAML.replace("attention: GQA, layers: 80, kvHeads: 8", "attention: MLA, layers: 61, kvHeads: 1")
    assert load(mla.replace("staging: Auto", "staging: Always")).plans()["kv"].way is Way.STAGED
    assert (
        load(mla.replace("pageOrder: HND", "").replace("pageSize: 16", "pageSize: 64")).plans()["kv"].way
        is Way.CONTIGUOUS
    )


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "[]",
        "{",
        '{"a": 1',
        "a: b: c",
        b"\xff\xfe",
        "\ud800",
        "a: &x [*x]",
        "a: &x 1\nb: *x",
        "<<: {a: 1}",
        "? [a]\n: 1",
        "a: 2020-13-45",
        "!!int ''",
        "!!bool x",
        "!!python/object/apply:os.getpid []",
        "{" * 50_000,
        "[" * 50_000,
        '{"a": ' + "9" * 50_000 + "}",
        " " * (DOCUMENT_BYTES_MAX + 1),
    ],
    ids=lambda junk: repr(junk[:20]),
)
def test_what_is_no_document_is_a_fault_and_never_another_error(junk: str | bytes) -> None:
    assert faults_of(junk)


def test_aliases_and_merges_stand_for_what_they_name() -> None:
    given = "x: &base {a: 1, b: [2]}\ny: {<<: *base, a: 3}\nz: *base\n"
    assert parse(given) == {"x": {"a": 1, "b": [2]}, "y": {"a": 3, "b": [2]}, "z": {"a": 1, "b": [2]}}
    assert getattr(parse("<<: {a: 1}\na: 2\na: 3\n"), "repeated", None) == ["a"]


def test_aliases_that_expand_to_more_than_fits_into_memory_are_refused() -> None:
    levels = "".join(f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 10))
    with pytest.raises(ConfigError, match="its aliases make more than 1000000 values"):
        parse(f"l0: &l0 [x]\n{levels}")


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text("{}[]:,&*!?|>-#%@'\" \n\tabc019._", max_size=60).map(str.encode))
def test_random_bytes_are_a_fault_and_never_another_error(junk: bytes) -> None:
    assert faults_of(junk)


CONFIGS = st.builds(
    AgentConfig,
    deployment=st.just(Deployment(namespace="ml", name="small")),
    model=st.builds(
        Model,
        attention=st.just(Attention.GQA),
        layers=st.integers(8, 100),
        kv_heads=st.just(8),
        head_dim=st.integers(1, 512),
        dtype=st.sampled_from(Dtype),
    ),
    prefill=st.builds(
        Prefill,
        instances=st.none() | st.integers(0, 9),
        tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
        pipeline_parallel=st.integers(1, 4),
        data_parallel=st.integers(1, 4),
        page_size=st.integers(1, 128),
        page_order=st.sampled_from([Order.NHD, Order.HND]),
        staging=st.builds(PrefillStaging, buffer_size=st.integers(1, 1 << 26), lanes=st.integers(1, 8)),
    ),
    decode=st.builds(
        Decode,
        tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
        page_size=st.integers(1, 128),
        staging=st.builds(DecodeStaging, pool_size=st.integers(1 << 33, 1 << 40)),
    ),
    transfer=st.builds(
        Transfer,
        backend=st.sampled_from(Backend),
        staging=st.sampled_from(Staging),
        wires=st.lists(st.sampled_from(Wire), unique=True).map(tuple),
    ),
    control=st.builds(
        Control,
        keys_directory=st.none() | st.just("/keys"),
        bind_address=st.none() | st.just("::1"),
        http_port=st.integers(0, 65535),
    ),
)


@settings(max_examples=100, deadline=None)
@given(config=CONFIGS)
def test_what_is_dumped_is_loaded_back_equal(config: AgentConfig) -> None:
    assert load(dump(config)) == config


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64Mi", 64 << 20),
        ("4Gi", 4 << 30),
        ("1.5Ki", 1536),
        ("4G", 4 * 10**9),
        ("1k", 1000),
        ("17", 17),
        (17, 17),
        ("1e3", 1000),
        ("2.5E3", 2500),
        ("5000e-1", 500),
        ("2Ei", 2 << 60),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str | int, size_bytes: int) -> None:
    assert parse_quantity(text) == size_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "Mi",
        "64MiB",
        "64 Mi",
        "64mi",
        "-1Mi",
        "0",
        0,
        -1,
        "0.3",
        "1.5",
        "100m",
        "1e-3",
        "1e",
        "1e999",
        "٣",
        1.5,
        True,
        None,
        [],
        "9" * 30,
        1 << 63,
        "9000Pi",
    ],
)
def test_what_is_no_whole_positive_number_of_bytes_is_no_quantity(wrong: object) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(wrong)


@given(st.integers(1, 2**63 - 1))
def test_a_formatted_quantity_reads_back_exactly(size_bytes: int) -> None:
    assert parse_quantity(format_quantity(size_bytes)) == size_bytes


def test_a_config_that_was_built_in_code_is_checked_by_the_same_rules() -> None:
    config = msgspec.structs.replace(load(YAML), kind="Other", transfer=Transfer(wires=(Wire.TCP, Wire.TCP)))
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["kind", "transfer.wires"]
