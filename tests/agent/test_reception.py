"""Tests the refusal of an engine with another layout: the message names every wrong field."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from longshore_agent.settings import Settings
from longshore_agent.supervisor.reception import Reception
from longshore_client import (
    Half,
    KVLayout,
    LayoutError,
    LongshoreError,
    ModelShape,
    PageOrder,
    Parallel,
    Reason,
)
from longshore_spec import manifest
from longshore_spec.agent_config import Target
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Hello
from longshore_wire.layout import TargetMemory

CONFIG = manifest.load((Path(__file__).parents[2] / "examples" / "llama-70b.yaml").read_bytes()).agent_config()
MODEL = ModelShape.kv(layers=80, kv_heads=8, head_dim=128, element_bytes=2)


def hello(layout: KVLayout) -> Hello:
    return Hello(ENGINE_PROTOCOL_VERSION, "engine", layout, "cpu", (Half.SOURCE,))


def test_only_memory_of_a_gpu_is_refused_to_a_worker_with_the_engines_pid() -> None:
    engine = replace(hello(KVLayout(MODEL, Parallel(tp=4), 64)), device="GPU-1", pid=77)
    Reception.check_pid(engine, [("other/0/0", 78)])
    Reception.check_pid(replace(engine, device="cpu"), [("other/0/0", 77)])
    Reception.check_pid(replace(engine, pid=0), [("other/0/0", 77)])
    with pytest.raises(LongshoreError, match=r"PID 77.*other/0/1") as caught:
        Reception.check_pid(engine, [("other/0/0", 78), ("other/0/1", 77)])
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize(("target", "other"), [("Device", "HOST"), ("Host", "DEVICE")])
def test_page_size_and_order_are_declared_for_decodes_target_and_free_in_its_other_memory(
    target: str, other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("longshore_agent.supervisor.reception._DRIVER_FILE", tmp_path)
    config = replace(CONFIG, decode=replace(CONFIG.decode, target=Target(target)))
    reception, declared = Reception(Settings(), config), CONFIG.decode.layout(CONFIG.model)
    for memory in TargetMemory:
        device = "cpu" if memory is TargetMemory.HOST else f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}"
        layout = replace(declared, page_size=1)
        engine = replace(hello(layout), roles=(Half.TARGET,), memory=memory, device=device)
        if memory.name == other:
            assert reception.admit(engine).memory is memory
            assert reception.admit(replace(engine, layout=replace(declared, order=PageOrder.HND))).memory is memory
        else:
            with pytest.raises(LayoutError, match=r"decode\.pageSize is 1 at the engine and \d+ in the deployment"):
                reception.admit(engine)
        with pytest.raises(LayoutError, match=r"decode\.tensorParallel"):
            reception.admit(replace(engine, layout=replace(declared, parallel=Parallel(tp=8))))


@pytest.mark.parametrize(
    "changes",
    [{"device": f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}"}, {"roles": (Half.SOURCE,)}, {"roles": tuple(Half)}],
)
def test_pages_in_host_memory_are_those_of_claims_and_of_no_gpu(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("longshore_agent.supervisor.reception._DRIVER_FILE", tmp_path)
    engine = replace(hello(KVLayout(MODEL, Parallel(tp=4), 64)), roles=(Half.TARGET,), memory=TargetMemory.HOST)
    reception = Reception(Settings(), None)
    assert reception.admit(engine).path == "engine/0/0/host"
    with pytest.raises(LongshoreError, match="for pages in host memory: give 'cpu' and TARGET alone"):
        reception.admit(replace(engine, **changes))


def test_an_engine_of_another_layout_is_told_of_every_field_that_differs() -> None:
    reception = Reception(Settings(), CONFIG)
    reception.admit(hello(KVLayout(MODEL, Parallel(tp=4), 64)))
    other = KVLayout(ModelShape.kv(80, 4, 128, 4), Parallel(tp=2), 32, PageOrder.HND)
    with pytest.raises(LayoutError) as caught:
        reception.admit(hello(other))
    assert str(caught.value).split("; ") == [
        "model.kv_heads is 4 at the engine and 8 in the deployment",
        "model.element_bytes is 4 at the engine and 2 in the deployment",
        "prefill.tensorParallel is 2 at the engine and 4 in the deployment",
        "prefill.pageSize is 32 at the engine and 64 in the deployment",
        "prefill.pageOrder is HND at the engine and NHD in the deployment",
    ]
