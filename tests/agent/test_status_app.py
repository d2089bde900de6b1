"""Tests the agent's HTTP pages over real sockets, and the checks behind them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trustme
from agent_pages import ANSWER_LIMIT_S
from agent_world import wait_for
from prometheus_client.parser import text_string_to_metric_families
from status_scene import BIG_ROOM, MODEL, RULES, Source, agent, layout, room, worker

from longshore_agent.status.app import create_app
from longshore_agent.status.server import StatusServer, serve
from longshore_agent.status.spans import Span
from longshore_agent.supervisor.snapshots import Snapshots
from longshore_spec import status as structs
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.errors import ConfigError, LongshoreError, Reason
from longshore_wire.layout import PageOrder
from longshore_wire.names import room_name
from longshore_wire.plan import plan


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Source, httpx.Client]]:
    """One server for all tests of pages; each test sets the state that it shows."""
    source = Source()
    server = serve(create_app(source, RULES), "127.0.0.1", 0)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=ANSWER_LIMIT_S) as client:
        yield source, client
    server.stop()


@pytest.fixture
def source(served: tuple[Source, httpx.Client]) -> Source:
    served[0].state, served[0].absent = agent(worker()), None
    return served[0]


@pytest.fixture
def client(served: tuple[Source, httpx.Client], source: Source) -> httpx.Client:
    assert source is served[0]
    return served[1]


def test_metrics_are_those_of_the_supervisor_and_of_each_worker(client: httpx.Client, source: Source) -> None:
    source.state = agent(worker(), worker("d/1"))
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    writes = {
        sample.labels["worker"]: sample.value
        for sample in families["longshore_writes"].samples
        if sample.labels["way"] == "staged"
    }
    assert writes == {"supervisor": 0, "d/0": 3, "d/1": 3}


def test_status_shows_workers_with_their_engines_but_neither_rooms_nor_metrics(
    client: httpx.Client, source: Source
) -> None:
    engine = structs.EngineStatus("d", 0, ("target",), structs.LayoutStatus.of(layout(2)))
    source.state = agent(
        worker(engines=(engine,), rooms=(room(1),), rooms_open=1, ring=structs.RingStatus(100, 10, 5, 3))
    )
    body = client.get("/v1/status").json()
    (shown,) = body["workers"]
    assert (body["deployment"], body["node"], shown["rooms_open"], shown["state"]) == ("demo", "n1", 1, "ready")
    assert shown["ring"] == {"capacity_bytes": 100, "used_bytes": 10, "held_bytes": 5, "rounds": 3}
    assert shown["engines"][0]["layout"]["tp"] == 2
    assert shown["epoch"] == "9223372036854775809"
    assert not {"rooms", "metrics", "spans"} & shown.keys()


def test_status_shows_the_oldest_open_rooms_of_a_worker_without_their_pairs(
    client: httpx.Client, source: Source
) -> None:
    ages = {1: 0.5, 2: 9.0, 3: 0.1, 4: 3.0, 5: 2.0}
    rooms = tuple(msgspec.structs.replace(room(number), age_s=age_s) for number, age_s in ages.items())
    source.state = agent(worker(rooms=rooms, rooms_open=5, ended=(room(7),)))
    (shown,) = client.get("/v1/status").json()["workers"]
    assert [(each["room"], each["age_s"]) for each in shown["oldest_rooms"]] == [("2", 9.0), ("4", 3.0), ("5", 2.0)]
    assert {len(each["pairs"]) for each in shown["oldest_rooms"]} == {0}


def test_the_web_page_is_one_file_whose_script_and_style_alone_its_policy_allows(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    wanted = {"default-src": "'none'", "connect-src": "'self'", "base-uri": "'none'", "frame-ancestors": "'none'"}
    assert wanted.items() <= policy.items()
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    # The browser test shows that a hostile name stays text. These would be the ways to code.
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", " src=", " href=", "eval("):
        assert word not in answer.text


def test_the_web_page_names_each_agent_differently(client: httpx.Client, source: Source) -> None:
    other = serve(create_app(source, RULES), "127.0.0.1", 0)
    urls = ["/", "/", f"http://127.0.0.1:{other.port}/"]
    first, again, others = [client.head(url).headers["longshore-agent"] for url in urls]
    other.stop()
    assert first == again != others


@pytest.mark.parametrize("shared", [True, False, None])
def test_status_says_of_each_worker_whether_its_gpu_is_shared_by_mps(
    client: httpx.Client, source: Source, *, shared: bool | None
) -> None:
    source.state = agent(worker(device="GPU-1", mps=shared))
    (shown,) = client.get("/v1/status").json()["workers"]
    assert (shown["device"], shown["mps"]) == ("GPU-1", shared)


def test_rooms_come_in_pages_that_neither_miss_nor_repeat_one(client: httpx.Client, source: Source) -> None:
    numbers = [5, 3, BIG_ROOM, 2**63, 2**53 + 1, 2**53]
    source.state = agent(
        worker(rooms=tuple(room(number) for number in numbers[:3]), rooms_open=3),
        worker("p/0", rooms=tuple(room(n, half="source") for n in numbers[3:]), ended=(room(3),), rooms_ended=9),
    )
    seen: list[str] = []
    after = ""
    for _ in range(10):
        body = client.get("/v1/rooms", params={"limit": 2, "after": after}).json()
        assert (body["open_count"], body["ended_count"]) == (3, 9)
        seen += [entry["room"]["room"] for entry in body["rooms"]]
        assert all(entry["room"]["pairs"] == [] for entry in body["rooms"])
        after = body["next"]
        if not after:
            break
    # Those that can be guessed come first, by their numbers.
    assert seen == ["3", "3", "5", *sorted(map(room_name, (2**53, 2**53 + 1, 2**63, BIG_ROOM)))]
    assert len(client.get("/v1/rooms", params={"half": "source"}).json()["rooms"]) == 3
    assert [e["worker"] for e in client.get("/v1/rooms", params={"ended": "true"}).json()["rooms"]] == ["p/0"]


def test_a_room_is_shown_with_all_its_halves_pairs_and_spans_whatever_its_id(
    client: httpx.Client, source: Source
) -> None:
    spans = (
        Span("write", "p", room_name(BIG_ROOM), 0, 0, 0, 0, 0, 20, 30),
        Span("gather", "p", "7", 0, 0, 0, 0, 0, 1, 2),
    )
    late = (Span("scatter", "p", room_name(BIG_ROOM), 0, 0, 0, 0, 0, 35, 40),)
    source.state = agent(
        worker(rooms=(room(BIG_ROOM), room(7)), spans=late),
        worker("p/0", ended=(room(BIG_ROOM, half="source"),), spans=spans),
    )
    body = client.get(f"/v1/rooms/{room_name(BIG_ROOM)}").json()
    assert source.asked == room_name(BIG_ROOM)
    assert body["room"] == room_name(BIG_ROOM)
    assert [(e["worker"], e["room"]["half"], e["ended"]) for e in body["halves"]] == [
        ("p/0", "source", True),
        ("d/0", "target", False),
    ]
    assert body["halves"][0]["room"]["pairs"][0]["way"] == "staged"
    assert [span["stage"] for span in body["spans"]] == ["write", "scatter"]


def test_an_unknown_room_is_404_with_a_typed_body(client: httpx.Client, source: Source) -> None:
    source.state = agent(worker(rooms=(room(7),)))
    answer = client.get("/v1/rooms/8")
    assert answer.status_code == 404
    assert answer.json() == {"reason": "UnknownRoom", "text": "no worker of this agent knows room 8", "faults": []}
    assert client.get("/v1/rooms/7", params={"instance": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "status", "named"),
    [
        ("/v1/rooms/x", 422, "room"),
        (f"/v1/rooms/{2**64}", 422, "room"),
        ("/v1/rooms/-1", 422, "room"),
        ("/v1/rooms?limit=0", 422, "limit"),
        ("/v1/rooms?limit=1001", 422, "limit"),
        ("/v1/rooms?after=%21%21", 422, "after"),
        ("/v1/rooms?after=gaN4", 422, "after"),
        ("/v1/rooms?half=both", 422, "half"),
        ("/v1/plan?decode_pt=2", 422, "decode_pt"),
        ("/v1/plan?prefill_tp=0&kv_heads=x", 422, "kv_heads"),
        ("/v1/plan?element_bytes=3", 422, "element_bytes"),
        ("/v1/plan?prefill_tp=3&kv_heads=8", 422, "parallel.tp is 3"),
        ("/v1/plan?prefill_tp=1024&prefill_pp=128&layers=4096", 422, "tp * pp"),
        ("/v1/plan?source=nobody&target=p", 404, "nobody"),
        ("/v2", 404, ""),
    ],
)
def test_bad_requests_get_a_typed_body_that_names_the_fault(
    client: httpx.Client, path: str, status: int, named: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"reason", "text", "faults"}
    assert named in body["text"]


def test_nothing_can_be_changed_over_http(client: httpx.Client) -> None:
    for path in ("/v1/status", "/v1/rooms", "/v1/rooms/1", "/v1/plan", "/metrics"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["reason"]) == (405, "MethodNotAllowed")


def test_a_plan_from_a_query_is_the_planners(client: httpx.Client) -> None:
    query = {"layers": 4, "kv_heads": 8, "head_dim": 64, "element_bytes": 2, "prefill_tp": 4, "decode_tp": 2, "prefill_page_size": 16,
             "decode_page_size": 16, "chunk_tokens": 256, "slab_bytes": 65536}  # fmt: skip
    body = client.get("/v1/plan", params=query).json()
    expected = plan(layout(4), layout(2))
    assert [(pair["source_rank"], pair["target_rank"]) for pair in body["pairs"]] == [
        (pair.source_rank, pair.target_rank) for pair in expected.pairs
    ]
    summary = expected.summary(256, 65536)
    assert body["writes_per_chunk"] == summary.writes_per_chunk
    assert body["slices_per_chunk"] == summary.slices_per_chunk
    assert body["bytes_per_token"] == MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 2 * 2
    assert body["way"] == "Staged"


def test_a_plan_between_registered_instances_needs_only_their_names(client: httpx.Client, source: Source) -> None:
    ranks, near = (RankAddress(0, "10.0.0.1:5000", 7),), {0: ("cpu", "life")}
    instances = tuple(
        structs.InstanceStatus.of(Endpoint(name, layout(tp), ranks, "life"), (), near)
        for name, tp in (("p", 4), ("d", 1))
    )
    source.state = agent(worker(), instances=instances)
    body = client.get("/v1/plan", params={"source": "p", "target": "d"}).json()
    assert len(body["pairs"]) == 4
    # Both are registered at one agent, and may write each other's pages.
    assert body["way"] == "Direct"
    answer = client.get("/v1/plan", params={"source": "p"})
    assert (answer.status_code, answer.json()["reason"]) == (404, "UnknownInstance")


def test_bootstrap_lists_instances_so_that_their_endpoints_can_be_made_again(
    client: httpx.Client, source: Source
) -> None:
    ranks = (RankAddress(0, "10.0.0.1:5000", 2**63 + 7), RankAddress(1, "10.0.0.1:5001", 3))
    endpoints = [
        Endpoint("p", layout(2), ranks, "life"),
        Endpoint("q", msgspec.structs.replace(layout(2), layer_range=(0, 4)), ranks[:1]),
        Endpoint("r", msgspec.structs.replace(layout(2), stage_layers=(MODEL.layers,)), ranks[:1]),
        Endpoint("s", msgspec.structs.replace(layout(2), order=PageOrder.OPAQUE, blob_bytes=77), ranks[:1]),
    ]
    source.state = agent(instances=tuple(structs.InstanceStatus.of(endpoint, ("source",)) for endpoint in endpoints))
    answer = client.get("/v1/bootstrap")
    shown = answer.json()["instances"]
    assert [instance["complete"] for instance in shown] == [True, False, False, False]
    first = {"rank": 0, "address": "10.0.0.1:5000", "epoch": "9223372036854775815", "device": "cpu"}
    assert shown[0]["ranks"][0] == first | {"near": "", "host": ""}
    made = [structs_of(instance).endpoint() for instance in shown]
    assert made == endpoints


def structs_of(instance: dict[str, Any]) -> structs.InstanceStatus:
    return msgspec.convert(instance, structs.InstanceStatus)


def test_no_number_in_any_answer_is_too_large_for_a_json_reader(client: httpx.Client, source: Source) -> None:
    ranks = (RankAddress(0, "h:1", 2**64 - 1),)
    source.state = agent(
        worker(rooms=(room(BIG_ROOM),), peers=(structs.PeerStatus("p", 0, 0, "attached", "TCP", str(2**64 - 1)),)),
        instances=(structs.InstanceStatus.of(Endpoint("p", layout(1), ranks)),),
    )

    def integer(text: str) -> int:
        assert abs(int(text)) < 2**53, text
        return int(text)

    for path in ("/v1/status", "/v1/rooms", f"/v1/rooms/{room_name(BIG_ROOM)}", "/v1/bootstrap"):
        json.loads(client.get(path).text, parse_int=integer)


PAGES = ["/healthz", "/readyz", "/metrics", "/v1/status", "/v1/rooms", "/v1/rooms/7", "/v1/plan", "/v1/bootstrap"]


@pytest.mark.parametrize(("why", "word"), [(Reason.SHUTTING_DOWN, "ShuttingDown"), (Reason.INTERNAL, "LoopHangs")])
@pytest.mark.parametrize("path", PAGES)
def test_an_agent_that_has_no_state_to_tell_any_more_says_so_with_503_and_logs_nothing(
    client: httpx.Client, source: Source, caplog: pytest.LogCaptureFixture, path: str, why: Reason, word: str
) -> None:
    source.absent = LongshoreError("the agent is stopping", reason=why)
    answer = client.get(path)
    assert answer.status_code == 503
    body = answer.json()
    if path in ("/healthz", "/readyz"):
        assert not body["ok"]
        assert [(check["reason"], check["message"]) for check in body["checks"]] == [(word, "the agent is stopping")]
    else:
        assert body == {"reason": word, "text": "the agent is stopping", "faults": []}
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_questions_before_and_after_the_loop_has_ended_are_refused_and_wake_nobody_after_it() -> None:
    woken: list[str] = []
    snapshots = Snapshots(lambda: woken.append("while open"))
    with ThreadPoolExecutor(1) as asking:
        early = asking.submit(snapshots.ask, None)
        wait_for(lambda: snapshots.waiting, what="the question")
        snapshots.close()
        with pytest.raises(LongshoreError, match="stopping"):
            early.result()
    with pytest.raises(LongshoreError, match="stopping"):
        snapshots.ask(None)
    assert woken == ["while open"]


def test_whoever_asks_wakes_the_loop_before_it_can_end() -> None:
    ended = threading.Event()

    def close() -> None:
        snapshots.close()
        ended.set()

    def wake() -> None:
        closer.start()
        # The loop's end must wait for this call, because it closes the descriptor next.
        assert not ended.wait(0.1)

    snapshots = Snapshots(wake)
    closer = threading.Thread(target=close)
    with pytest.raises(LongshoreError, match="stopping"):
        snapshots.ask(None)
    assert ended.wait(30)


def test_the_openapi_page_describes_every_path_and_every_body(client: httpx.Client) -> None:
    page = client.get("/openapi.json").json()
    assert set(page["paths"]) == {
        "/healthz", "/readyz", "/metrics", "/v1/status", "/v1/rooms", "/v1/rooms/{room}", "/v1/plan", "/v1/bootstrap",
    }  # fmt: skip
    known = {f"#/components/schemas/{name}" for name in page["components"]["schemas"]}
    text = json.dumps(page)
    used = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert used <= known
    for path, methods in page["paths"].items():
        answer = methods["get"]["responses"]["200"]["content"]
        assert methods["get"]["summary"], path
        assert "503" in methods["get"]["responses"], path
        if path != "/metrics":
            assert answer["application/json"]["schema"]["$ref"] in known, path
    assert (
        "ErrorBody"
        in page["paths"]["/v1/rooms/{room}"]["get"]["responses"]["404"]["content"]["application/json"]["schema"]["$ref"]
    )


def test_a_token_is_asked_for_everywhere_but_on_the_probes_and_the_page_without_data(source: Source) -> None:
    server = serve(create_app(source, RULES), "127.0.0.1", 0, token="s3cret-ü")
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=ANSWER_LIMIT_S
        ) as client:
            for path in ("/metrics", "/v1/status", "/openapi.json", "/v1/rooms", "/nowhere"):
                answer = client.get(path)
                assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
            wrong = {"Authorization": "Bearer s3cret"}
            assert client.get("/v1/status", headers=wrong).status_code == 401
            right = {"Authorization": "Bearer s3cret-ü".encode()}
            assert client.get("/v1/status", headers=right).status_code == 200  # type: ignore[arg-type]
            for path in ("/readyz", "/healthz", "/"):
                assert client.get(path).status_code == 200
    finally:
        server.stop()


def test_https_serves_the_certificate_that_it_was_given(source: Source, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    server = serve(create_app(source, RULES), "127.0.0.1", 0, certificate_file=str(certificate), key_file=str(key))
    try:
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{server.port}", verify=trust, trust_env=False, timeout=ANSWER_LIMIT_S
        ) as client:
            assert client.get("/readyz").status_code == 200
    finally:
        server.stop()


def test_a_certificate_that_cannot_be_read_is_a_configuration_error(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LONGSHORE_HTTP_CERTIFICATE_FILE"):
        serve(create_app(source), "127.0.0.1", 0, certificate_file=str(tmp_path / "no"), key_file=str(tmp_path / "no"))


def test_a_port_that_is_taken_is_a_configuration_error_that_names_it(source: Source) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve(create_app(source), "127.0.0.1", port)


def test_a_stopped_server_leaves_no_thread_and_no_port_behind(source: Source) -> None:
    before = set(threading.enumerate())
    server: StatusServer = serve(create_app(source), "127.0.0.1", 0)
    port = server.port
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=ANSWER_LIMIT_S) as client:
        assert client.get("/healthz").status_code == 200
        server.stop()
    server.stop()
    assert [t for t in threading.enumerate() if t not in before and t.name == "http"] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
