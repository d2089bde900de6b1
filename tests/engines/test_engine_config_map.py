"""Tests the operator's ConfigMap for an engine's pod against its readers: connector, client and agent."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from stand_in_vllm import installed

from longshore_agent.settings import Settings
from longshore_agent.supervisor.reception import Reception
from longshore_client import Half, KVLayout, PageOrder, Parallel, arguments, new_instance
from longshore_engines.vllm_checks import roles_of, setting
from longshore_operator.render.engines import engine_config_map
from longshore_operator.render.wanted import ImageChoice, MpsDirectory, Wanted
from longshore_spec import manifest
from longshore_spec.agent_config import Gpu
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Hello
from longshore_wire.names import AGENT_USER_ID

EXAMPLES = Path(__file__).parents[2] / "examples"
HALVES = {"prefill": Half.SOURCE, "decode": Half.TARGET}


def deployment(name: str) -> Wanted:
    read = manifest.load((EXAMPLES / name).read_text())
    return Wanted(read, read.agent_config(), "uid", ImageChoice("agent", "IfNotPresent"), "keys", "0123")


def variables(wanted: Wanted, role: str) -> dict[str, str]:
    found: dict[str, str] = engine_config_map(wanted, role)["data"]
    assert all(isinstance(value, str) and value for value in found.values())
    return found


def transfer_config(role: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(variables(deployment("vllm/tiny.yaml"), role)["LONGSHORE_ENGINE_VLLM_CONFIG"])
    return found


@pytest.mark.parametrize("role", HALVES)
def test_the_client_finds_the_socket_that_the_agents_make(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = deployment("vllm/tiny.yaml")
    for name, value in variables(wanted, role).items():
        monkeypatch.setenv(name, value)
    made = f"{Settings.from_config(wanted.config).run_directory}/agent.sock"
    assert arguments.engine_socket(None) == made == "/run/longshore/default/vllm-tiny/agent.sock"
    assert setting(transfer_config(role)["kv_connector_extra_config"]).socket == made


@pytest.mark.parametrize("role", HALVES)
def test_an_engine_whose_layout_is_that_of_the_variables_is_admitted(role: str) -> None:
    for name in ("vllm/tiny.yaml", "engine/deployment.yaml", "llama-70b.yaml"):
        wanted = deployment(name)
        given = variables(wanted, role)
        tp, pp, dp = (int(given[f"LONGSHORE_ENGINE_{each}_PARALLEL"]) for each in ("TENSOR", "PIPELINE", "DATA"))
        order = PageOrder[given["LONGSHORE_ENGINE_PAGE_ORDER"].upper()]
        layout = KVLayout(
            wanted.config.model.all_caches[0].shape,
            Parallel(tp=tp, pp=pp, dp=dp),
            int(given["LONGSHORE_ENGINE_PAGE_SIZE"]),
            order,
        )
        instance = "engine"
        hello = Hello(ENGINE_PROTOCOL_VERSION, instance, layout, "cpu", (HALVES[role],))
        assert Reception(Settings(), wanted.config).admit(hello).instance == instance


@pytest.mark.parametrize("role", HALVES)
def test_an_instance_is_named_after_its_deployment_and_role_and_each_start_anew(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = deployment("vllm/tiny.yaml")
    monkeypatch.setenv("LONGSHORE_ENGINE_INSTANCE_PREFIX", variables(wanted, role)["LONGSHORE_ENGINE_INSTANCE_PREFIX"])
    first, second = new_instance(), new_instance()
    assert first != second and first.startswith(f"vllm-tiny-{role}-")
    layout = (wanted.config.prefill if role == "prefill" else wanted.config.decode).layout(wanted.config.model)
    hello = Hello(ENGINE_PROTOCOL_VERSION, first, layout, "cpu", (HALVES[role],))
    assert Reception(Settings(), wanted.config).admit(hello).instance == first
    monkeypatch.delenv("LONGSHORE_ENGINE_INSTANCE_PREFIX")
    assert new_instance().startswith("engine-")


@pytest.mark.parametrize("role", HALVES)
def test_vllm_gets_the_connector_with_its_role_and_draws_a_name_at_each_start(role: str) -> None:
    config = transfer_config(role)
    with installed():
        assert hasattr(importlib.import_module(config["kv_connector_module_path"]), config["kv_connector"])
    flags = SimpleNamespace(
        is_kv_producer=config["kv_role"] in {"kv_producer", "kv_both"},
        is_kv_consumer=config["kv_role"] in {"kv_consumer", "kv_both"},
    )
    assert roles_of(flags) == (HALVES[role],)
    assert "engine_id" not in config


def example_pods(name: str) -> dict[str, dict[str, Any]]:
    found = [entry for entry in yaml.safe_load_all((EXAMPLES / name).read_text()) if entry["kind"] == "Deployment"]
    return {entry["metadata"]["name"].rpartition("-")[2]: entry["spec"]["template"]["spec"] for entry in found}


@pytest.mark.parametrize("role", HALVES)
@pytest.mark.parametrize("folder", ["engine", "vllm"])
def test_the_examples_take_what_the_operator_writes_and_nothing_else_of_the_node(folder: str, role: str) -> None:
    wanted = deployment({"engine": "engine/deployment.yaml", "vllm": "vllm/tiny.yaml"}[folder])
    pod = example_pods(f"{folder}/pods.yaml")[role]
    written = engine_config_map(wanted, role)
    (engine,) = pod["containers"]
    assert engine["envFrom"] == [{"configMapRef": {"name": written["metadata"]["name"]}}]
    used = set(re.findall(r"\$\((\w+)\)", " ".join(engine.get("args", ()))))
    assert used <= set(written["data"])
    assert ("LONGSHORE_ENGINE_VLLM_CONFIG" in used) is (folder == "vllm")
    path = wanted.config.run_directory
    assert [volume for volume in pod["volumes"] if "hostPath" in volume] == [
        {"name": "longshore", "hostPath": {"path": path, "type": "Directory"}}
    ]
    assert {"name": "longshore", "mountPath": path, "readOnly": True} in engine["volumeMounts"]
    assert written["data"]["LONGSHORE_ENGINE_SOCKET"] == f"{path}/agent.sock"
    assert pod["securityContext"]["supplementalGroups"] == [AGENT_USER_ID]
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(pod)
    assert pod["nodeSelector"] == getattr(wanted.manifest.spec, role).node_selector


def test_the_page_names_every_variable_and_no_other() -> None:
    page = (EXAMPLES.parent / "docs" / "how-to" / "engine-pods.md").read_text()
    wanted = deployment("vllm/tiny.yaml")
    spec = msgspec.structs.replace(wanted.manifest.spec, gpu=Gpu(mps=True))
    images = ImageChoice("agent", "IfNotPresent", mps=MpsDirectory("/run/mps", "/mps"))
    manifest_with_mps = msgspec.structs.replace(wanted.manifest, spec=spec)
    written = variables(dataclasses.replace(wanted, manifest=manifest_with_mps, images=images), "prefill")
    assert set(re.findall(r"LONGSHORE_ENGINE_\w+|CUDA_MPS_\w+", page)) == set(written)


@pytest.mark.parametrize("role", HALVES)
def test_sglangs_mode_is_the_role(role: str) -> None:
    assert variables(deployment("sglang/tiny.yaml"), role)["LONGSHORE_ENGINE_ROLE"] == role


def test_vllm_shares_tokens_where_the_deployment_has_pages_of_tokens() -> None:
    text = (EXAMPLES / "sglang/tiny.yaml").read_text().replace("pageSize: 16", "pageSize: 16\n    pageOrder: HND")
    read = manifest.load(text)
    wanted = Wanted(read, read.agent_config(), "uid", ImageChoice("agent", "IfNotPresent"), "keys", "0123")
    config = json.loads(variables(wanted, "prefill")["LONGSHORE_ENGINE_VLLM_CONFIG"])
    assert setting(config["kv_connector_extra_config"]).pages == "tokens"
    assert setting(transfer_config("prefill")["kv_connector_extra_config"]).pages == "opaque"
    assert "LONGSHORE_ENGINE_VLLM_CONFIG" not in variables(wanted, "decode")


MLA = "{attention: MLA, layers: 4, kvHeads: 1, headDim: 576, dtype: bfloat16}"
SEVERAL = "{caches: [{name: a, layers: 1, dtype: int8, planes: [{heads: 4, width: 8}]}, {name: b, layers: 1, dtype: int8, planes: [{heads: 4, width: 8}]}]}"


@pytest.mark.parametrize("model", [MLA, SEVERAL])
def test_a_deployment_of_any_model_has_vllms_config(model: str) -> None:
    text = (EXAMPLES / "vllm/tiny.yaml").read_text()
    read = manifest.load(re.sub(r"model: .*", f"model: {model}", text))
    wanted = Wanted(read, read.agent_config(), "uid", ImageChoice("agent", "IfNotPresent"), "keys", "0123")
    assert "LONGSHORE_ENGINE_VLLM_CONFIG" in variables(wanted, "prefill")


def test_a_deployment_whose_pages_vllm_does_not_have_says_nothing_of_vllm() -> None:
    assert "LONGSHORE_ENGINE_VLLM_CONFIG" not in variables(deployment("llama-70b.yaml"), "prefill")
