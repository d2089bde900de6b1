"""Tests settings: valid and invalid variables, and that the reference page agrees with the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from longshore_agent import settings as module
from longshore_agent.settings import Settings
from longshore_agent.worker.config import WorkerConfig
from longshore_spec import agent_config
from longshore_spec.agent_config import AgentConfig, Backend
from longshore_spec.environment import format_bytes, format_value, parse_bytes, unit_of, variable
from longshore_wire.effects import SessionConfig
from longshore_wire.engine_messages import Half
from longshore_wire.errors import ConfigError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.names import Wire
from longshore_wire.ways import Staging, Way

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

# An address that other hosts reach, as for an agent without an operator.
OUTSIDE = {"BIND_HOST": "10.0.0.1", "KEYS_DIRECTORY": "/keys"}


def faults(**env: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment(env)
    return caught.value.faults


def test_an_empty_environment_gives_the_defaults_of_the_design() -> None:
    settings = Settings.from_environment({"PATH": "/bin", "LONGSHORE": "x"})
    assert settings == Settings()
    assert (settings.ring_bytes, settings.ring_extent_bytes) == (4 << 30, 64 << 20)
    assert (settings.lane_count, settings.lane_bytes) == (4, 64 << 20)
    assert settings.backend is Backend.NIXL
    assert (settings.lease_ns, settings.chunk_tokens, settings.slices_batch) == (60 * 10**9, 8192, 1000)


def test_the_defaults_are_those_of_the_protocol_core() -> None:
    core = {field.name: field.default for field in dataclasses.fields(SessionConfig)}
    given = Settings().for_core()
    assert {"ring_bytes", "lease_ns", "retry_ns", "rooms_max", "grant_window", "force_way"} <= set(given)
    assert given == {name: core[name] for name in given} | {"deployment": ""}


def test_each_type_of_value_is_read() -> None:
    settings = Settings.from_environment(
        {
            "LONGSHORE_RING_BYTES": "256Mi",
            "LONGSHORE_LANE_BYTES": "16777216",
            "LONGSHORE_DIRECT": "off",
            "LONGSHORE_LEASE_S": "0.5",
            "LONGSHORE_WIRES": "tcp, SharedMemory,TCP",
            "LONGSHORE_STAGING": "always",
            "LONGSHORE_FORCE_WAY": "Staged",
            "LONGSHORE_BACKEND": "mooncake",
            "LONGSHORE_NODE": " a ",
            "LONGSHORE_RETRY_MS": "",
        }
    )
    assert (settings.ring_bytes, settings.lane_bytes, settings.direct) == (256 << 20, 16 << 20, False)
    assert (settings.lease_ns, settings.wires) == (500_000_000, (Wire.TCP, Wire.SHARED_MEMORY))
    assert (settings.staging, settings.force_way, settings.backend) == (Staging.ALWAYS, Way.STAGED, Backend.MOONCAKE)
    assert (settings.node, settings.retry_ms) == ("a", 200)


def test_an_unknown_variable_is_an_error_that_names_the_nearest_known_one() -> None:
    assert faults(LONGSHORE_RING_BYTE="1Gi") == [
        "LONGSHORE_RING_BYTE: there is no such setting; the nearest is LONGSHORE_RING_BYTES"
    ]
    assert "LONGSHORE_LANE_COUNT" in faults(LONGSHORE_LANES_COUNT="1")[0]


def test_the_variables_of_engines_are_left_to_them() -> None:
    Settings.from_environment({"LONGSHORE_ENGINE_SOCKET": "/run/longshore/agent.sock"})


def test_all_faults_are_reported_at_once_each_with_its_variable() -> None:
    found = faults(
        LONGSHORE_RING_BYTES="lots",
        LONGSHORE_LANE_COUNT="0",
        LONGSHORE_WIRES="TCP,Unknown",
        LONGSHORE_DIRECT="maybe",
        LONGSHORE_LEASE_S="nan",
        LONGSHORE_STAGING="Sometimes",
        LONGSHORE_TYPO="1",
        LONGSHORE_BIND_HOST="10.0.0.1",
        LONGSHORE_NETWORK_POLICY="true",
    )
    expected = ["BIND_HOST", "DIRECT", "LANE_COUNT", "LEASE_S", "RING_BYTES", "STAGING", "TYPO", "WIRES"]
    assert sorted(line.split(":")[0] for line in found) == [f"LONGSHORE_{name}" for name in expected]
    assert any("'lots' is not a size" in line for line in found)
    assert any("give 1 to 64" in line for line in found)
    assert any("Auto, Always, Never" in line for line in found)


@pytest.mark.shows(
    "agent.host_network",
    "agent.network_policy",
    "agent.allow_open_data_path",
    "field.agents.{hostNetwork,allowOpenDataPath}",
)
@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"LANE_BYTES": "1Mi"}, "SLAB_BYTES_MIN"),
        ({"RING_BYTES": "2Mi"}, "SLAB_BYTES_MIN"),
        ({"HEARTBEAT_S": "5"}, "PEER_TIMEOUT_S"),
        ({"LEASE_S": "0.1", "RETRY_MS": "100"}, "LEASE_S"),
        ({"RESTART_BACKOFF_MAX_S": "0.1"}, "RESTART_BACKOFF_MIN_S"),
        ({"HTTP_KEY_FILE": "/k"}, "HTTP_CERTIFICATE_FILE"),
        ({"STAGING": "Never", "FORCE_WAY": "Staged"}, "FORCE_WAY"),
        ({"STAGING": "Always", "FORCE_WAY": "Slices"}, "FORCE_WAY"),
        ({"BIND_HOST": "0.0.0.0", "NETWORK_POLICY": "true"}, "KEYS_DIRECTORY"),
        (OUTSIDE, "NETWORK_POLICY"),
        (OUTSIDE, "BIND_HOST is 10.0.0.1"),
        (OUTSIDE | {"BACKEND": "Mooncake"}, "ALLOW_OPEN_DATA_PATH"),
        (OUTSIDE | {"WIRES": "SharedMemory,TCP"}, "WIRES=SharedMemory,CudaIPC,NVLink"),
        (OUTSIDE | {"WIRES": "RDMA"}, "ALLOW_OPEN_DATA_PATH"),
        (OUTSIDE | {"WIRES": "NVLink", "GPU_STAGING_MEMORY": "cuMemCreate"}, "ALLOW_OPEN_DATA_PATH"),
        (OUTSIDE | {"BACKEND": "Mooncake", "WIRES": "NVLink"}, "ALLOW_OPEN_DATA_PATH"),
        (OUTSIDE | {"NETWORK_POLICY": "true", "HOST_NETWORK": "true"}, "HOST_NETWORK is True"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(env: dict[str, str], named: str) -> None:
    (fault,) = faults(**{f"LONGSHORE_{name}": value for name, value in env.items()})
    assert f"LONGSHORE_{named}" in fault


@pytest.mark.shows(
    "agent.host_network",
    "agent.network_policy",
    "agent.allow_open_data_path",
    "field.agents.{hostNetwork,allowOpenDataPath}",
)
@pytest.mark.parametrize(
    "env",
    [
        {"BACKEND": "Mooncake", "HOST_NETWORK": "true"},
        {"BIND_HOST": "127.0.0.9", "HOST_NETWORK": "true"},
        OUTSIDE | {"ALLOW_OPEN_DATA_PATH": "true"},
        OUTSIDE | {"BACKEND": "Mooncake", "HOST_NETWORK": "true", "ALLOW_OPEN_DATA_PATH": "true"},
        OUTSIDE | {"NETWORK_POLICY": "true"},
        OUTSIDE | {"NETWORK_POLICY": "true", "BACKEND": "Mooncake"},
        OUTSIDE | {"WIRES": "SharedMemory"},
        OUTSIDE | {"WIRES": "NVLink,CudaIPC", "HOST_NETWORK": "true"},
        OUTSIDE | {"BACKEND": "Loopback"},
    ],
)
def test_data_ports_are_taken_where_nobody_else_reaches_them_or_somebody_accepts_it(env: dict[str, str]) -> None:
    Settings.from_environment({f"LONGSHORE_{name}": value for name, value in env.items()})


@pytest.mark.parametrize("host", ["::1", "[::1]", "fd77::1", "::", "::ffff:10.0.0.1"])
def test_an_ipv6_address_is_refused_by_name_wherever_it_was_said(host: str) -> None:
    told = Settings.from_config(config(control=agent_config.Control(bind_address=host)))
    for env, base in (({"LONGSHORE_BIND_HOST": host}, None), ({}, told)):
        with pytest.raises(ConfigError) as caught:
            Settings.from_environment(env, base)
        (fault,) = caught.value.faults
        assert fault.startswith(f"LONGSHORE_BIND_HOST: {host} is an IPv6 address")
        assert "give the pod's IPv4 address" in fault


def test_what_the_file_says_of_the_network_is_what_counts() -> None:
    told = agent_config.Control(host_network=True, allow_open_data_path=True, network_policy=True)
    made = Settings.from_config(config(control=told))
    assert (made.host_network, made.allow_open_data_path, made.network_policy) == (True, True, True)
    assert not Settings.from_config(config(control=agent_config.Control())).network_policy


def test_a_contradiction_is_not_reported_on_a_value_that_did_not_parse() -> None:
    assert faults(LONGSHORE_LANE_BYTES="1Mi", LONGSHORE_SLAB_BYTES_MIN="x")[0].startswith("LONGSHORE_SLAB_BYTES_MIN")
    assert len(faults(LONGSHORE_LANE_BYTES="1Mi", LONGSHORE_SLAB_BYTES_MIN="x")) == 1


def test_settings_made_in_code_are_checked_like_those_of_the_environment() -> None:
    Settings(ring_bytes=0).check()
    with pytest.raises(ConfigError) as caught:
        Settings(lane_count=65, lane_bytes=1 << 16).check()
    assert [line.split(":")[0] for line in caught.value.faults] == ["LONGSHORE_LANE_COUNT", "LONGSHORE_LANE_BYTES"]


def test_an_environment_made_of_settings_gives_them_back() -> None:
    settings = Settings(
        ring_bytes=123_456_789,
        wires=(Wire.TCP, Wire.RDMA),
        direct=False,
        lease_s=1.25,
        peer_timeout_s=1.0625,
        staging=Staging.NEVER,
        force_way=Way.SLICES,
        node="n",
    )
    assert Settings.from_environment(settings.environment()) == settings
    assert Settings().environment() == {}
    for row in dataclasses.fields(Settings):
        name, value = variable(row.name), getattr(Settings(), row.name)
        text = format_value(value, unit_of(row.name))
        assert getattr(Settings.from_environment({name: text}), row.name) == value


def test_a_worker_gets_the_settings_of_its_agent_whatever_they_are() -> None:
    settings = Settings(
        deployment="ns/llama", wires=(Wire.TCP, Wire.RDMA), lease_s=3, backend=Backend.MOONCAKE, force_way=Way.SLICES
    )
    layout = KVLayout(ModelShape.kv(4, 8, 64, 2), Parallel(), 16)
    orders = WorkerConfig("d/0/0", "d", 7, layout, (Half.TARGET,), settings, port=0)
    assert WorkerConfig.from_bytes(orders.to_bytes()) == orders
    assert (orders.session_config().deployment, orders.session_config().lease_ns) == ("ns/llama", 3 * 10**9)


def config(**changes: object) -> AgentConfig:
    fields: dict[str, object] = {
        "deployment": agent_config.Deployment(namespace="ns", name="llama"),
        "model": agent_config.Model(
            attention=agent_config.Attention.GQA, layers=4, kv_heads=8, head_dim=64, dtype=agent_config.Dtype.FLOAT16
        ),
        "prefill": agent_config.Prefill(tensor_parallel=4, page_size=16),
        "decode": agent_config.Decode(tensor_parallel=1, page_size=16),
    }
    return AgentConfig(**fields | changes)  # type: ignore[arg-type]


def test_a_config_file_that_says_nothing_gives_the_defaults_of_the_table() -> None:
    made = Settings.from_config(config())
    expected = Settings(
        deployment="ns/llama",
        run_directory="/run/longshore/ns/llama",
        keys_directory="/etc/longshore/keys",
        http_port=9470,
    )
    assert made == expected


def test_every_field_of_the_config_file_that_an_agent_acts_on_is_in_the_table() -> None:
    parts = {
        "prefill.staging": agent_config.PrefillStaging,
        "decode.staging": agent_config.DecodeStaging,
        "transfer": agent_config.Transfer,
        "control": agent_config.Control,
        "integrity": agent_config.Integrity,
        "gpu": agent_config.Gpu,
    }
    declared = {f"{path}.{name}" for path, part in parts.items() for name in part.__struct_fields__} | {"decode.target"}
    linked = {row.metadata["file"] for row in dataclasses.fields(Settings)} - {""}
    # The agent also finds its socket's folder if the file names none.
    assert linked == declared - {"control.run_directory"} | {"run_directory", "deployment.full_name"}


@pytest.mark.parametrize(("buffer_bytes", "pool_bytes"), [(8 << 20, 16 << 20), (64 << 20, 0), (1 << 40, 16 << 20)])
def test_the_smallest_staging_that_a_manifest_may_ask_for_makes_an_agent_that_starts(buffer_bytes, pool_bytes) -> None:
    prefill = agent_config.Prefill(
        tensor_parallel=1, page_size=16, staging=agent_config.PrefillStaging(buffer_size=buffer_bytes)
    )
    decode = agent_config.Decode(
        tensor_parallel=1, page_size=16, staging=agent_config.DecodeStaging(pool_size=pool_bytes)
    )
    made = Settings.from_config(config(prefill=prefill, decode=decode))
    made.check()
    assert made.contradictions() == []
    assert 4 * made.slab_bytes_min <= buffer_bytes


def test_variables_count_more_than_the_config_file() -> None:
    wires = (Wire.TCP, Wire.RDMA)
    staging = Staging.ALWAYS
    transfer = agent_config.Transfer(wires=wires, staging=staging, chunk_tokens=4096)
    base = Settings.from_config(config(transfer=transfer, control=agent_config.Control(network_policy=True)))
    assert (base.wires, base.staging) == ((Wire.TCP, Wire.RDMA), Staging.ALWAYS)
    made = Settings.from_environment({"LONGSHORE_CHUNK_TOKENS": "512", "LONGSHORE_BIND_HOST": "10.0.0.1"}, base)
    assert made == dataclasses.replace(base, chunk_tokens=512, bind_host="10.0.0.1")


def test_sizes_keep_every_byte() -> None:
    assert [parse_bytes(text) for text in ("0", "7", "3k", "64Mi", "4Gi", "1Ti")] == [
        0, 7, 3000, 64 << 20, 4 << 30, 1 << 40,
    ]  # fmt: skip
    assert [format_bytes(size) for size in (0, 1000, 1024, 64 << 20, (1 << 30) + 1)] == [
        "0", "1000", "1Ki", "64Mi", "1073741825",
    ]  # fmt: skip
    for text in ("", "-1", "1.0000001Ki", "1KiB", "Mi", "1 Mi", "9" * 20):
        with pytest.raises(ValueError, match=r"not a size|not a whole number"):
            parse_bytes(text)


def test_every_setting_has_a_meaning_and_every_number_its_bounds_and_its_unit_last_in_its_name() -> None:
    for row in dataclasses.fields(Settings):
        assert row.metadata["meaning"].endswith("."), row.name
        if type(row.default) in (int, float):
            assert row.metadata["low"] is not None
            assert row.metadata["high"] is not None
        if unit := unit_of(row.name):
            assert isinstance(row.default, float if unit == "s" else int), row.name
            assert row.name.removesuffix("_min").removesuffix("_max").endswith(f"_{unit}"), row.name


def test_the_reference_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == module.reference()
