"""Tests the command `longshore analyze`: files, exit statuses, output, plan, sizes and warnings."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from manifest_cases import BASE, Body, changed

from longshore_agent.files import read_crossover
from longshore_agent.settings import Settings
from longshore_agent.status.plans import PlanDefaults, PlanQuery
from longshore_agent.status.plans import answer as plan_page
from longshore_agent.worker.config import WorkerConfig
from longshore_cli.analyze.inspect_manifests import Analysis
from longshore_cli.analyze.report import table
from longshore_cli.analyze.sizes import GPU, Sizes, limits_of, pair_slabs, sizes
from longshore_cli.main import main
from longshore_spec.manifest import DisaggDeployment, read
from longshore_wire.claims import grid, route
from longshore_wire.engine_messages import Half
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PROTOCOL_VERSION, Attach, Claim, PairKey, RegionInfo, RoomKey
from longshore_wire.ways import Way

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/llama-70b.yaml"


def analyze(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    status = main(["analyze", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def file_of(folder: Path, *bodies: Body, name: str = "manifests.yaml") -> Path:
    path = folder / name
    path.write_text("# manifests\n" + "".join(f"---\n{json.dumps(body)}\n" for body in bodies))
    return path


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# -- files and exit statuses ---------------------------------------------------------------------------------------


def test_an_example_is_fine_and_its_numbers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, fault = analyze(capsys, "-f", EXAMPLE)
    assert (status, fault) == (0, "")
    assert "a chunk of 8192 tokens needs 44 slabs (2.5 GiB) of a decode rank's ring" in text
    assert "the ring (4 GiB) holds 1 room of 8192 tokens (2.5 GiB each)" in text
    assert "1 analyzed: 0 errors, 0 warnings" in text


def test_several_files_and_documents_are_analyzed_and_other_kinds_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "all.yaml"
    other = "kind: ConfigMap\napiVersion: v1\ndata: &a {b: c}\nmore: *a\n"
    listed = {"kind": "List", "apiVersion": "v1", "items": [BASE, {"kind": "Pod"}]}
    first.write_text(f"{EXAMPLE.read_text()}---\n{other}---\n# nothing\n---\n{json.dumps(listed)}\n")
    standard_input(monkeypatch, json.dumps(changed(decode__tensorParallel=0)))
    status, text, fault = analyze(capsys, "-f", first, "-f", "-", "-o", "json")
    found = json.loads(text)
    assert (status, fault) == (1, "")
    assert [each["name"] for each in found["deployments"]] == ["llama-70b", "llama", "llama"]
    assert [bool(each["findings"]) for each in found["deployments"]] == [False, False, True]
    lines = EXAMPLE.read_text().count("\n")
    assert [note.rpartition("/")[2] for note in found["notes"]] == [
        f"all.yaml:{lines + 1}: ConfigMap is left out",
        f"all.yaml:{lines + 8} items[1]: Pod is left out",
        f"all.yaml:{lines + 8} items[0]: kubectl applies both, and the later one holds",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not YAML"),
        ("kind: DisaggDeployment\napiVersion: apps/v1\n", "write longshore.dev/v1alpha1"),
        ("kind: Pod\n", "there is no DisaggDeployment to analyze; "),
        ("kind: Pod\n", "bad.yaml: Pod is left out"),
        ("kind: DisagDeployment\n", "kind is 'DisagDeployment': did you mean DisaggDeployment?"),
        ("kind: DisaggDeployment\nspec: {{ .Values.spec }}\n", "render templates first, as with `helm template`"),
        ("", "there is no DisaggDeployment to analyze"),
        ("\xff", "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_status_2(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    status, _, fault = analyze(capsys, "-f", path)
    assert (status, expected in fault) == (2, True), fault


HOSTILE = "a\x1b]0;owned\x07\x9b2J\u202e\n2 analyzed: 0 errors"


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize(
    "body",
    [
        BASE | {"metadata": {"name": HOSTILE}},
        BASE | {"metadata": {"name": "a", "namespace": HOSTILE}},
        BASE | {HOSTILE: 1},
        BASE | {"kind": HOSTILE},
        BASE | {"kind": f"Disagg{HOSTILE[1:8]}Deployment"},
        BASE | {"apiVersion": HOSTILE},
        changed(prefill__nodeSelector={HOSTILE: HOSTILE}),
        changed(prefill__pageOrder=HOSTILE),
    ],
)
def test_no_text_of_a_manifest_controls_the_terminal_or_starts_a_line(
    body: Body, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, body)
    for words in (["-f", path], ["-f", EXAMPLE, "--running", path]):
        _, text, fault = analyze(capsys, *words, "-o", output)
        assert (text + fault).replace("\n", "").isprintable()
        assert not any(line.startswith("2 analyzed") for line in (text + fault).splitlines())


def test_a_missing_file_and_two_standard_inputs_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(capsys, "-f", "/no/such/file")[0] == 2
    status, _, fault = analyze(capsys, "-f", "-", "--running", "-")
    assert (status, "more than once" in fault) == (2, True)
    with pytest.raises(SystemExit, match="2"):
        main(["analyze"])


def test_the_line_of_a_fault_is_that_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(EXAMPLE.read_text() + "---\nkind: DisaggDeployment\nspec: [\n")
    lines = EXAMPLE.read_text().count("\n")
    status, _, fault = analyze(capsys, "-f", path)
    assert status == 2
    assert f"line {lines + 4}" in fault


def test_warnings_fail_only_with_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, changed(agents={"hostIPC": True}))
    assert analyze(capsys, "-f", path)[0] == 0
    assert analyze(capsys, "-f", path, "--strict")[0] == 1


def test_a_fault_that_only_the_operator_finds_is_told_as_its(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, changed(agents={"env": [{"name": "LONGSHORE_NODE", "value": "a"}]}))
    status, text, _ = analyze(capsys, "-f", path)
    assert status == 1
    assert "Error spec.agents.env: the operator refuses it: LONGSHORE_NODE is no setting" in text


def test_the_values_of_the_chart_that_a_manifest_needs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = {"image": "other:2", "annotations": {"a/b": "c"}, "env": [{"name": "UCX_TLS", "value": "all"}]}
    path = file_of(tmp_path, changed(agents=agents))
    status, text, _ = analyze(capsys, "-f", path)
    assert status == 0
    assert "permission by these values of the chart: allow.image: true; allow.annotations: [a/b=c]\n" in text
    _, text, _ = analyze(capsys, "-f", path, "-o", "json")
    assert json.loads(text)["deployments"][0]["needs"] == ["allow.image: true", "allow.annotations: [a/b=c]"]
    _, text, _ = analyze(capsys, "-f", file_of(tmp_path, changed()))
    assert "permission" not in text


# -- the running deployment ----------------------------------------------------------------------------------------


def test_a_change_tells_what_it_replaces_and_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = copy.deepcopy(BASE)
    running["metadata"] |= {"uid": "1", "generation": 3, "managedFields": []}
    running["status"] = {"observedGeneration": 3}
    path = file_of(tmp_path, changed(prefill__staging={"lanes": 8}))
    standard_input(monkeypatch, json.dumps({"kind": "List", "apiVersion": "v1", "items": [running]}))
    status, text, _ = analyze(capsys, "-f", path, "--running", "-")
    assert status == 0
    assert "agents of prefill: replaced (because of spec.prefill.staging.lanes)" in text
    assert "agents of decode" not in text

    path = file_of(tmp_path, changed(model__layers=81))
    was = file_of(tmp_path, running, name="was.yaml")
    status, text, _ = analyze(capsys, "-f", path, "--running", was)
    assert (status, "make a new DisaggDeployment" in text) == (1, True)


def test_a_running_deployment_of_another_name_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, fault = analyze(capsys, "-f", EXAMPLE, "--running", file_of(tmp_path, BASE))
    assert status == 2
    assert "give the running deployment of the same name" in fault


# -- plan and sizes ------------------------------------------------------------------------------------------------


def deployment(**paths: Any) -> DisaggDeployment:
    return read(changed(**paths))


def told(found: DisaggDeployment, device: str, tokens: int = 8192) -> Sizes:
    devices = dict.fromkeys(("prefill", "decode"), device)
    return sizes(found.spec, found.agent_config(), tokens, read_crossover(""), devices)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"prefill__tensorParallel": 16},
    {"prefill__pipelineParallel": 3, "decode__tensorParallel": 8},
    {"model__kvHeads": 24, "prefill__tensorParallel": 3, "decode__tensorParallel": 2},
    {"prefill__pageSize": 48, "decode__pageSize": 16, "decode__pageOrder": "HND"},
    {"prefill__pageOrder": "Opaque", "decode__pageOrder": "Opaque", "transfer__staging": "Always"},
    {"prefill__staging": {"bufferSize": "8Mi", "lanes": 3}, "decode__staging": {"poolSize": "100Mi"}},
]


@pytest.mark.parametrize("device", ["CPU", GPU])
@pytest.mark.parametrize("tokens", [100, 8192, 100_000])
@pytest.mark.parametrize("paths", LAYOUTS, ids=lambda paths: ",".join(paths) or "base")
def test_slabs_are_those_that_a_worker_cuts(
    paths: dict[str, Any], tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore_agent.worker.config.reached_by_all", lambda name: True)
    found = deployment(**paths)
    config = found.agent_config()
    settings = Settings.from_config(config)
    source, target = config.prefill.layout(config.model), config.decode.layout(config.model)
    plans = config.plans()
    plan = plans["kv"]
    pair = plan.pairs[-1]
    worker = WorkerConfig("w", "P", 1, source.at(pair.source_rank), (Half.SOURCE,), settings, 0, device=device.lower())
    key = PairKey(RoomKey("P", 1), pair.source_rank, pair.target_rank, 1, 1, "D")
    claim, taken = Claim(key, 0, tokens, Way.STAGED), route((plan,), pair.source_rank, pair.target_rank, 0)
    limits = limits_of(found.spec, device)
    page = max(config.prefill.page_size, config.decode.page_size)
    cut = grid(worker.session_config(), attached(target, settings.ring_bytes), claim, taken, {})
    assert pair_slabs([plan], pair, tokens, limits, page) == cut


def attached(layout: KVLayout, ring_bytes: int) -> Attach:
    return Attach(PROTOCOL_VERSION, "d", "D", 1, layout, "NIXL", b"", RegionInfo(0, ring_bytes), (), 0)


@pytest.mark.parametrize("wire", ["SharedMemory", "TCP", "RDMA"])
@pytest.mark.parametrize("tensor_parallel", [1, 4, 16])
def test_the_plan_is_that_of_an_agent(wire: str, tensor_parallel: int) -> None:
    found = deployment(prefill__tensorParallel=tensor_parallel, transfer={"wires": [wire]})
    defaults = PlanDefaults.of(Settings.from_config(found.agent_config()), read_crossover(""))
    page = plan_page(PlanQuery(prefill_tp=tensor_parallel, wire=wire), (), defaults)
    shown = told(found, "CPU")
    assert [(way.way, way.why) for way in shown.ways] == [(page.pairs[0].way, page.pairs[0].why)]
    assert shown.idle_sources == page.idle_sources
    assert [
        (each.source_rank, each.target_rank, each.layers, each.heads, each.bytes_per_token) for each in shown.pairs
    ] == [
        (
            each.source_rank,
            each.target_rank,
            (each.first_layer, each.end_layer),
            (each.first_head, each.end_head),
            each.bytes_per_token,
        )
        for each in page.pairs
    ]


@pytest.mark.shows("field.model.caches.window")
def test_sizes_are_of_all_caches_with_the_window_of_one_and_the_states_of_another() -> None:
    planes = [{"heads": 8, "width": 128}] * 2
    caches: list[dict[str, Any]] = [
        {"name": "kv", "layers": 10, "dtype": "bfloat16", "planes": planes},
        {"name": "window", "layers": 30, "dtype": "bfloat16", "planes": planes, "window": 256},
        {"name": "ssm", "layers": 5, "unit": "Slot", "dtype": "float32", "planes": [{"heads": 8, "width": 4096}]},
    ]
    found = deployment(model={"caches": caches})
    shown = told(found, "CPU", tokens=4096)
    token_bytes, state_bytes = 2 * 8 * 128 * 2, 5 * 8 * 4096 * 4
    assert (shown.bytes_per_token, shown.slot_bytes) == (40 * token_bytes, state_bytes)
    assert shown.ring is not None
    # Each slab has 64 bytes of trailer.
    moved_bytes = (10 * 4096 + 30 * 256) * token_bytes + state_bytes
    assert shown.ring.room_bytes == moved_bytes + 64 * shown.ring.room_slabs
    assert shown.ring.room_slabs == sum(pair.room_slabs for pair in shown.pairs)
    lines = table([Analysis(namespace="d", name="n", place="here", findings=(), sizes=shown)], []).splitlines()
    assert f"    {40 * token_bytes} bytes a token, 640 KiB of states a request; " in "\n".join(lines)
    assert {line.split()[0] for line in lines if line.split()[1:3] == ["0", "0"]} == {"kv", "window", "ssm"}
    caches[1]["window"] = 0
    whole = told(deployment(model={"caches": caches}), "CPU", tokens=4096).ring
    assert whole is not None
    assert whole.room_bytes > 3 * shown.ring.room_bytes


def test_a_room_of_too_many_slabs_is_an_error_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planes = [{"heads": 8, "width": 16384}] * 2
    caches = [{"name": "kv", "layers": 16, "dtype": "bfloat16", "planes": planes}]
    body = changed(model={"caches": caches}, prefill__tensorParallel=1, transfer__staging="Always")
    file = tmp_path / "big.json"
    file.write_text(json.dumps(body))
    assert main(["analyze", "-f", str(file), "--tokens", str(1 << 24)]) == 1
    assert "slabs between two ranks, of at most" in capsys.readouterr().out


def test_the_ring_holds_as_many_rooms_as_their_slabs_fit() -> None:
    ring = told(deployment(), "CPU", tokens=1024).ring
    assert ring is not None
    # 1,024 tokens of 327,680 bytes, and 64 bytes of trailer for each slab.
    assert ring.room_bytes == 1024 * 327_680 + 64 * ring.room_slabs
    assert ring.rooms == (4 << 30) // ring.room_bytes == 12


def test_engines_of_one_agent_copy_directly_where_a_node_has_both_roles() -> None:
    apart, one = deployment(), deployment(decode__nodeSelector={"longshore.dev/role": "prefill"})
    assert [way.between for way in told(apart, GPU).ways] == ["two agents"]
    assert [(way.between, way.way) for way in told(one, GPU).ways] == [
        ("two agents", "Staged"),
        ("engines of one agent", "Direct"),
    ]


def test_latents_are_staged_between_gpus_of_two_agents() -> None:
    latent = {"attention": "MLA", "layers": 61, "kvHeads": 1, "headDim": 576, "dtype": "bfloat16"}
    found = told(deployment(model=latent), GPU)
    assert [(way.between, way.way, way.why) for way in found.ways] == [("two agents", "Staged", "staging")]


# -- warnings ------------------------------------------------------------------------------------------------------

WARNED: dict[str, tuple[dict[str, Any], str]] = {
    "a ring below a room": ({"decode__staging": {"poolSize": "1Gi"}}, "spec.decode.staging.poolSize"),
    "a ring of nothing": ({"transfer__staging": "Never"}, "spec.decode.staging.poolSize"),
    "many slabs": (
        {"prefill__staging": {"bufferSize": "8Mi"}, "decode__staging": {"poolSize": "64Mi"}, "model__layers": 1000},
        "spec.prefill.staging.bufferSize",
    ),
    "no staging between GPUs": (
        {"transfer__staging": "Never", "agents": {"gpuAccess": "CDI"}},
        "spec.transfer.staging",
    ),
    "Mooncake into host memory": (
        {"transfer__backend": "Mooncake", "decode__target": "Host", "agents": {"gpuAccess": "CDI"}},
        "spec.decode.target",
    ),
    "a share for OnDelete": (
        {"agents": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 2}}}},
        "spec.agents.updateStrategy.rollingUpdate",
    ),
    "labels of no monitor": ({"agents": {"podMonitorLabels": {"a": "b"}}}, "spec.agents.podMonitorLabels"),
    "nothing open": ({"agents": {"allowOpenDataPath": True}}, "spec.agents.allowOpenDataPath"),
    "the node's IPC": ({"agents": {"hostIPC": True}}, "spec.agents.hostIPC"),
    "every node": ({"decode__nodeSelector": None}, "spec.decode.nodeSelector"),
    "no prefill engine": ({"prefill__instances": 0, "decode__instances": 2}, "spec.prefill.instances"),
    "little memory": (
        {"decode__agents": {"resources": {"limits": {"memory": "1Gi"}}}},
        "spec.decode.agents or agents.resources.limits.memory",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_names_its_field_and_is_not_given_without_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, field = WARNED[name]
    status, text, _ = analyze(capsys, "-f", file_of(tmp_path, changed(**paths)))
    assert status == 0, text
    assert f"Warning {field}: " in text
    assert f"Warning {field}: " not in analyze(capsys, "-f", file_of(tmp_path, BASE))[1]


def test_a_slab_that_holds_no_token_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = changed(
        model={"attention": "MHA", "layers": 4096, "kvHeads": 8, "headDim": 8192, "dtype": "float32"},
        prefill__staging={"bufferSize": "8Mi"},
        decode__staging={"poolSize": "64Mi"},
        transfer={"staging": "Always"},
    )
    status, text, _ = analyze(capsys, "-f", file_of(tmp_path, body))
    assert status == 1
    assert "enlarge staging.bufferSize of prefill" in text
