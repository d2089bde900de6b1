"""Tests the example router for vLLM: its requests to the engines, and that no engine's error becomes a success."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

PATH = Path(__file__).parents[2] / "examples" / "vllm" / "proxy.py"
TOLD = {"do_remote_prefill": True, "do_remote_decode": False, "longshore": "opaque", "number": 2**60}


@pytest.fixture(scope="module")
def proxy():
    spec = importlib.util.spec_from_file_location("vllm_proxy", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engines:
    """Both engines: the received requests, and the answers that a test set."""

    def __init__(self, **answers):
        self.heard = []
        self.answers = {
            "prefill": httpx.Response(200, json={"choices": [{"text": "a"}], "kv_transfer_params": TOLD}),
            "decode": httpx.Response(200, json={"choices": [{"text": "answer", "finish_reason": "length"}]}),
            **answers,
        }

    def handle(self, request):
        self.heard.append((request.url.host, request.url.path, json.loads(request.content), dict(request.headers)))
        answer = self.answers[request.url.host.partition("-")[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, proxy, body, path="/v1/completions", **more):
        app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(self.handle))
        with TestClient(app) as client:
            return client.post(path, **({"json": body} if isinstance(body, dict) else {"content": body}), **more)


def stream(*events):
    return httpx.Response(200, content="".join(f"data: {event}\n\n" for event in events).encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_makes_one_token_and_decode_gets_what_prefill_said(proxy, path):
    engines = Engines()
    body = {"model": "m", "prompt": "p", "max_tokens": 40, "min_tokens": 9, "n": 1, "temperature": 0}
    answer = engines.ask(proxy, body, path, headers={"X-Request-Id": "r7", "Authorization": "Bearer t"})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "answer")
    (first, first_path, prompt, headers), (second, second_path, decoded, _) = engines.heard
    assert (first, second, first_path, second_path) == ("prefill", "decode", path, path)
    assert prompt == {
        "model": "m",
        "prompt": "p",
        "temperature": 0,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert decoded == {**body, "kv_transfer_params": TOLD}
    assert (headers["x-request-id"], headers["authorization"]) == ("r7", "Bearer t")


def test_a_stream_is_passed_on_event_by_event(proxy):
    events = ('{"choices": [{"text": "a"}]}', '{"choices": [{"text": "b", "finish_reason": "stop"}]}', "[DONE]")
    answer = Engines(decode=stream(*events)).ask(proxy, {"prompt": "p", "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [line for line in answer.text.splitlines() if line] == [f"data: {event}" for event in events]


@pytest.mark.parametrize("engine", ["prefill", "decode"])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_engines_error_keeps_its_status_and_its_words(proxy, engine, streaming):
    engines = Engines(**{engine: httpx.Response(503, json={"error": {"message": "overloaded"}})})
    answer = engines.ask(proxy, {"prompt": "p", "stream": streaming})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "overloaded")


@pytest.mark.parametrize("engine", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("error", "status"), [(httpx.ConnectError("refused"), 502), (httpx.ReadTimeout("silent"), 504)]
)
def test_an_engine_that_is_away_is_an_error(proxy, engine, error, status):
    answer = Engines(**{engine: error}).ask(proxy, {"prompt": "p"})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize(
    "decode",
    [
        httpx.Response(200, json={"choices": [{"text": "", "finish_reason": "error"}]}),
        httpx.Response(200, json={"error": {"message": "KV load failure"}}),
    ],
)
def test_a_failure_that_an_engine_calls_200_is_an_error(proxy, decode):
    assert Engines(decode=decode).ask(proxy, {"prompt": "p"}).status_code == 502


@pytest.mark.parametrize(
    "events", [(), ('{"error": {"message": "KV load failure"}}',), ('{"choices": [{"finish_reason": "error"}]}',)]
)
def test_a_stream_that_begins_with_a_failure_is_an_error(proxy, events):
    assert Engines(decode=stream(*events)).ask(proxy, {"prompt": "p", "stream": True}).status_code == 502


def test_a_stream_that_fails_on_its_way_breaks_off(proxy):
    events = ('{"choices": [{"text": "a"}]}', '{"error": {"message": "engine died"}}', "[DONE]")
    with pytest.raises(proxy.EngineError):
        Engines(decode=stream(*events)).ask(proxy, {"prompt": "p", "stream": True})


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"5", b'[["prompt", "p"]]', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused_before_an_engine_is_asked(proxy, body):
    engines = Engines()
    assert engines.ask(proxy, body).status_code == 400
    assert engines.heard == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", b"[1]"),
        ("n", b"{}"),
        ("best_of", b"[1]"),
        ("stream", b'"no"'),
        ("temperature", b"NaN"),
        ("temperature", b"1e999"),
        ("prompt", rb'"\ud800"'),
    ],
)
def test_a_field_that_no_engine_can_get_is_named_before_an_engine_is_asked(proxy, field, value):
    engines = Engines()
    answer = engines.ask(proxy, b'{"%s": %s}' % (field.encode(), value))
    assert (answer.status_code, engines.heard) == (400, [])
    assert f": {field}: " in answer.json()["error"]["message"]


def test_json_of_any_depth_is_served_or_refused(proxy):
    app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(Engines().handle))
    with TestClient(app) as client:
        statuses = [
            client.post("/v1/completions", content=b'{"n": 2, "x": ' + b"[" * depth + b"]" * depth + b"}").status_code
            for depth in range(800, 1000)
        ]
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 400}


@pytest.mark.parametrize("header", ["x-request-id", "authorization"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health"])
def test_a_header_that_no_engine_can_get_is_named(proxy, header, path):
    app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(Engines().handle))
    with TestClient(app) as client:
        method = "POST" if path == "/v1/completions" else "GET"
        answer = client.request(method, path, content=b"{}", headers={header: "\xe9t\xe9".encode("latin1")})
    assert (answer.status_code, header in answer.json()["error"]["message"]) == (400, True)


UNREADABLE = (b"hello", b"[]", b"[" * 100_000, b'{"choices": null}', b'{"choices": [null]}')


@pytest.mark.parametrize(
    ("engine", "content"),
    [
        *(("decode", content) for content in (*UNREADABLE, b'{"choices": [], "usage": [1]}')),
        *(("prefill", content) for content in UNREADABLE[:3]),
        *(("prefill", b'{"kv_transfer_params": %s}' % value) for value in (b'"x"', b"[1]", b'{"longshore": NaN}')),
    ],
)
def test_an_answer_that_cannot_be_read_is_the_engines_fault_and_spoils_no_later_request(proxy, engine, content):
    engines = Engines()
    app = proxy.make_app(
        ["http://user:word@prefill:1"], ["http://user:word@decode:2"], httpx.MockTransport(engines.handle)
    )
    with TestClient(app) as client:
        for known in (False, True):
            good = engines.answers[engine].content
            engines.answers[engine] = httpx.Response(200, content=content)
            answer = client.post("/v1/completions", json={"prompt": "p"})
            if not (known and engine == "prefill"):
                assert answer.status_code == 502
                message = answer.json()["error"]["message"]
                assert (f"{engine}:" in message, "word" in message) == (True, False)
            for name in ("prefill", "decode"):
                engines.answers[name] = httpx.Response(200, content=good if name == engine else GOOD[name])
            assert client.post("/v1/completions", json={"prompt": "p"}).status_code == 200


GOOD = {name: answer.content for name, answer in Engines().answers.items()}


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b'{"error": {"message": "no stream"}}',
        b"data: {bad\n\n",
        b'data: {"choices": null}\n\n',
        b'data: {"choices": [{"delta": null}]}\n\n',
    ],
)
def test_a_stream_that_cannot_be_read_is_decodes_fault(proxy, content):
    answer = Engines(decode=httpx.Response(200, content=content)).ask(proxy, {"prompt": "p", "stream": True})
    assert (answer.status_code, "decode" in answer.json()["error"]["message"]) == (502, True)


FORGED = {"do_remote_prefill": True, "longshore": "forged", "longshore_room": 5, "longshore_release": "forged"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"best_of": 2}, {"prompt": ["p", "q"]}, {"stream": True}])
def test_no_engine_gets_transfer_parameters_of_a_client(proxy, path, more):
    engines = Engines()
    app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(engines.handle))
    forged = {"kv_transfer_params": FORGED, "custom_params": FORGED, "bootstrap_host": "forged"}
    body = {"prompt": "p", **more, **forged, "vllm_xargs": {"kv_transfer_params": "forged", "other": 1}}
    with TestClient(app) as client:
        for _ in range(2):
            engines.answers = {name: httpx.Response(200, content=content) for name, content in GOOD.items()}
            if more.get("stream"):
                engines.answers["decode"] = stream('{"choices": [{"text": "a"}]}')
            assert client.post(path, json=body).status_code == 200
    for _, _, heard, _ in engines.heard:
        assert "forged" not in json.dumps(heard)
        assert "custom_params" not in heard
        assert heard["vllm_xargs"] == {"other": 1}


def test_engines_of_a_kind_are_taken_in_turn(proxy):
    engines = Engines()
    app = proxy.make_app(
        ["http://prefill-0", "http://prefill-1"], ["http://decode"], httpx.MockTransport(engines.handle)
    )
    with TestClient(app) as client:
        for _ in range(3):
            engines.answers["prefill"] = httpx.Response(200, json={"kv_transfer_params": TOLD})
            engines.answers["decode"] = httpx.Response(200, json={"choices": []})
            assert client.post("/v1/completions", json={"prompt": "p"}).status_code == 200
    assert [host for host, *_ in engines.heard if host != "decode"] == ["prefill-0", "prefill-1", "prefill-0"]


def test_probes_of_health_shift_no_load_from_one_engine_to_another(proxy):
    asked = []

    def handle(request):
        if request.url.path == "/health":
            return httpx.Response(200)
        asked.append(request.url.host)
        return httpx.Response(200, json={"choices": [{"text": "a"}]})

    app = proxy.make_app(["http://prefill"], ["http://first", "http://second"], httpx.MockTransport(handle))
    with TestClient(app) as client:
        for _ in range(2):
            client.get("/health")
            client.post("/v1/completions", json={"prompt": "p"})
    assert [host for host in asked if host != "prefill"] == ["first", "second"]


def test_a_client_that_leaves_ends_the_work_for_it(proxy, monkeypatch):
    monkeypatch.setattr(proxy, "DISCONNECT_LOOK_S", 0.01)
    ended = []

    class Gone:
        async def is_disconnected(self):
            return True

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scene():
        with pytest.raises(proxy.EngineError) as raised:
            await proxy._while_connected(Gone(), endless())
        assert raised.value.status == 499
        await asyncio.wait_for(until(lambda: ended), 20)

    async def until(predicate):
        while not predicate():
            await asyncio.get_running_loop().run_in_executor(None, int)

    asyncio.run(scene())


FLAGS = {"do_remote_prefill": True, "do_remote_decode": False}


def test_a_stream_that_nobody_will_read_is_closed_at_the_engine(proxy):
    async def tokens():
        while True:
            yield b'data: {"choices": [{"text": "a"}]}\n\n'

    async def scene():
        sent = httpx.Response(200, content=tokens())
        task = asyncio.ensure_future(proxy._streamed(sent, "http://decode"))
        await asyncio.wait({task})
        assert not sent.is_closed
        await proxy._stopped(task)
        assert sent.is_closed

    asyncio.run(scene())


LATER = {**FLAGS, "longshore": "later", "longshore_life": "1"}
EARLIER = {**FLAGS, "longshore": "earlier", "longshore_life": "1"}
ANSWER = httpx.Response(200, json={"choices": [{"text": "answer", "finish_reason": "length"}]})


class EnginesAtOnce:
    """Engines whose answers to the second prompt are coroutines of a test. The first prompt makes the router know prefill."""

    def __init__(self, proxy, *, prefill, decode):
        self.heard, self.begun = [], {name: asyncio.Event() for name in ("prefill", "decode")}
        self._second = {"prefill": prefill, "decode": decode}
        self._app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(self._handle))

    async def _handle(self, request):
        name, body = request.url.host, json.loads(request.content)
        if body["prompt"] != "second":
            counted = {"remote_prefill_cached_tokens": 96}
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": {**EARLIER, **counted}})
        self.heard.append((name, body["kv_transfer_params"]))
        self.begun[name].set()
        return await asyncio.wait_for(self._second[name](self), 20)

    def ask(self, path="/v1/completions", **more):
        """Return the answer to the second prompt."""
        with TestClient(self._app) as client:
            assert client.post("/v1/completions", json={"prompt": "first"}).status_code == 200
            return client.post(path, json={"prompt": "second", **more})


async def when_the_other_has_begun(engines):
    await asyncio.gather(*(event.wait() for event in engines.begun.values()))
    return httpx.Response(200, json={**json.loads(ANSWER.content), "kv_transfer_params": LATER})


async def never(_engines):
    await asyncio.Event().wait()


def test_both_engines_get_a_later_prompt_at_once_and_one_room(proxy):
    engines = EnginesAtOnce(proxy, prefill=when_the_other_has_begun, decode=when_the_other_has_begun)
    assert engines.ask().json()["choices"][0]["text"] == "answer"
    heard = dict(engines.heard)
    room = heard["prefill"].pop("longshore_room")
    assert 0 < room < 2**63
    assert heard == {"prefill": {"do_remote_decode": True}, "decode": {**EARLIER, "longshore_room": room}}


@pytest.mark.parametrize("more", [{"n": 2}, {"best_of": 2}, {"prompt": ["second", "third"]}])
def test_decode_alone_computes_several_prompts_or_answers(proxy, more):
    engines = Engines()
    app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(engines.handle))
    with TestClient(app) as client:
        for body in ({"prompt": "first"}, {"prompt": "second", **more}):
            engines.answers["prefill"] = httpx.Response(200, json={"kv_transfer_params": TOLD})
            engines.answers["decode"] = httpx.Response(200, json={"choices": []})
            assert client.post("/v1/completions", json=body).status_code == 200
    told = [(host, body.get("kv_transfer_params")) for host, _, body, _ in engines.heard]
    assert told == [("prefill", {"do_remote_decode": True}), ("decode", TOLD), ("decode", None)]


USAGE = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 200}}


@pytest.mark.parametrize("streams", [False, True])
def test_the_cached_tokens_of_a_prompt_sent_at_once_are_those_that_prefill_had(proxy, streams):
    """Decode counts the tokens that it was sent."""
    counted = httpx.Response(200, json={"kv_transfer_params": {**TOLD, "remote_prefill_cached_tokens": 64}})
    events = ('{"choices": [{"text": "a"}]}', json.dumps({"choices": [], "usage": USAGE}), "[DONE]")
    answer = stream(*events) if streams else httpx.Response(200, json={"choices": [{"text": "a"}], "usage": USAGE})

    async def decode():
        # Decode ends after prefill.
        await asyncio.gather(*proxy.COMPUTING)
        return answer

    engines = CountingEngines(counted, decode)
    found = engines.ask(proxy, {"prompt": "second", "stream": streams})
    text = found.text if not streams else next(line for line in found.text.splitlines() if "usage" in line)
    usage = json.loads(text.removeprefix("data: "))["usage"]
    assert usage == {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 64}}


class CountingEngines:
    """Engines of which prefill has answered one prompt before."""

    def __init__(self, counted, decode):
        self.counted, self.decode = counted, decode

    async def handle(self, request):
        if request.url.host == "prefill":
            return httpx.Response(200, content=self.counted.content)
        return await self.decode()

    def ask(self, proxy, body):
        app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(self.handle))
        with TestClient(app) as client:
            client.post("/v1/completions", json=body | {"prompt": "first"})
            return client.post("/v1/completions", json=body)


def test_pages_that_load_balancers_and_clients_ask_for_first_are_served(proxy):
    pages = {"/health": httpx.Response(200), "/v1/models": httpx.Response(200, json={"data": [{"id": "m"}]})}

    def handle(request):
        heard.append(request.headers.get("authorization"))
        return httpx.Response(503) if request.url.host in away else pages[request.url.path]

    away, heard = set(), []
    app = proxy.make_app(["http://first", "http://second"], ["http://decode"], httpx.MockTransport(handle))
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        answer = client.get("/v1/models", headers={"Authorization": "Bearer t"})
        assert (answer.json()["data"], heard[-1]) == ([{"id": "m"}], "Bearer t")
        away |= {"first"}
        assert client.get("/health").status_code == 200
        away |= {"second"}
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/responses", json={})
    assert (refused.status_code, "/v1/chat/completions" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/docs"),
        ("GET", "/redoc"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/completions"),
        ("GET", "/v1/models/"),
        ("POST", "/v1/responses"),
        *((method, "/health") for method in ("HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "POST")),
    ],
)
def test_all_other_paths_and_methods_are_refused_with_the_reason(proxy, method, path):
    engines = Engines()
    app = proxy.make_app(["http://prefill"], ["http://decode"], httpx.MockTransport(engines.handle))
    with TestClient(app) as client:
        answer = client.request(method, path, follow_redirects=False)
    assert (answer.status_code, engines.heard) == (400, [])
    assert method == "HEAD" or f"and not {method} {path}" in answer.json()["error"]["message"]


def first(*answers):
    """Return an engine's answers: the first as these make it, and then a right one."""
    left = list(answers)

    async def answer(engines):
        return await left.pop(0)(engines) if left else httpx.Response(200, content=ANSWER.content)

    return answer


async def fails(_engines):
    return httpx.Response(503, json={"error": {"message": "KV load failure"}})


def answers_when_decode_has_begun(told):
    async def answer(engines):
        await engines.begun["decode"].wait()
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": told})

    return answer


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        pytest.param(fails, LATER, id="decode fails"),
        pytest.param(never, {**LATER, "longshore_life": "2"}, id="prefill was restarted"),
        pytest.param(never, None, id="prefill's agent is away"),
    ],
)
def test_decode_gets_what_prefill_answers_if_it_cannot_have_the_prompt_otherwise(proxy, decode, told):
    engines = EnginesAtOnce(proxy, prefill=answers_when_decode_has_begun(told), decode=first(decode))
    assert engines.ask().json()["choices"][0]["text"] == "answer"
    assert engines.heard[-1] == ("decode", told)
    assert [name for name, _ in engines.heard].count("decode") == 2


def test_if_decode_cannot_have_the_room_again_prefill_makes_another_one(proxy):
    again = {**LATER, "longshore": "again"}
    prefill = first(answers_when_decode_has_begun(LATER), answers_when_decode_has_begun(again))
    engines = EnginesAtOnce(proxy, prefill=prefill, decode=first(fails, fails))
    assert engines.ask().json()["choices"][0]["text"] == "answer"
    assert engines.heard[2:] == [("decode", LATER), ("prefill", {"do_remote_decode": True}), ("decode", again)]


def test_a_request_that_decode_refuses_is_not_repeated(proxy):
    async def refuses(_engines):
        return httpx.Response(400, json={"error": {"message": "no such model"}})

    engines = EnginesAtOnce(proxy, prefill=never, decode=refuses)
    answer = engines.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such model")
    assert [name for name, _ in engines.heard].count("decode") == 1


def test_an_error_behind_the_role_of_a_chats_stream_is_an_early_one(proxy):
    role = '{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}'
    token = '{"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}'

    async def fails_late(_engines):
        return stream(role, '{"error": {"message": "KV load failure"}}')

    async def streams(_engines):
        return stream(role, token, "[DONE]")

    engines = EnginesAtOnce(proxy, prefill=answers_when_decode_has_begun(LATER), decode=first(fails_late, streams))
    answer = engines.ask("/v1/chat/completions", stream=True)
    assert answer.status_code == 200
    assert [line for line in answer.text.splitlines() if line] == [f"data: {each}" for each in (role, token, "[DONE]")]
    alone = Engines(decode=stream(role)).ask(proxy, {"prompt": "p", "stream": True}, "/v1/chat/completions")
    assert (alone.status_code, "without an answer" in alone.text) == (502, True)


def test_an_error_of_prefill_ends_decodes_request_too(proxy):
    ended = []

    async def waits(_engines):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def refuses(engines):
        await engines.begun["decode"].wait()
        return httpx.Response(400, json={"error": {"message": "too long"}})

    engines = EnginesAtOnce(proxy, prefill=refuses, decode=waits)
    answer = engines.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")
    assert ended == [True]


IDS = [5, 6, 7]
FOR_SGLANG = {
    "choices": [
        {"text": "a", "token_ids": [40], "prompt_token_ids": IDS, "logprobs": {"token_logprobs": [-0.5]}},
    ],
    "kv_transfer_params": TOLD,
}


class MixedEngines(Engines):
    """Engines of two kinds, by name: prefill, decode and bootstrap answer as a test set."""

    def __init__(self, **answers):
        super().__init__(
            tokenize=httpx.Response(200, json={"tokens": IDS}), bootstrap=httpx.Response(200, json=TOLD), **answers
        )
        self.places = {}

    async def handle(self, request):
        name = {"/tokenize": "tokenize", "/longshore/handover": "bootstrap"}.get(request.url.path, request.url.host)
        body = json.loads(request.content) if request.content else dict(request.url.params)
        self.heard.append((name, body))
        if name == "prefill" and "bootstrap" in self.places:
            # SGLang answers when decode has the prompt.
            await self.places["bootstrap"].wait()
        answer = self.answers[name]
        if name == "decode":
            self.places.get("bootstrap", asyncio.Event()).set()
        return answer

    def ask(self, proxy, body, *, to_sglang, path="/v1/completions"):
        if to_sglang:
            sides = ["http://prefill:8100"], [proxy.SGLang("http://decode")]
        else:
            sides = [proxy.SGLang("http://prefill", 8998)], ["http://decode"]
        app = proxy.make_app(*sides, httpx.MockTransport(self.handle))
        with TestClient(app) as client:
            return client.post(path, json=body)


def test_sglang_decode_gets_vllms_handover_its_first_token_and_the_prompts_ids(proxy):
    engines = MixedEngines(prefill=httpx.Response(200, json=FOR_SGLANG))
    answer = engines.ask(proxy, {"model": "m", "prompt": "p", "max_tokens": 9, "logprobs": 0}, to_sglang=True)
    assert answer.status_code == 200
    (_, prompt), (_, decoded) = engines.heard
    assert (prompt["return_token_ids"], prompt["max_tokens"], prompt["logprobs"]) == (True, 1, 0)
    assert prompt["kv_transfer_params"] == {"do_remote_decode": True, "longshore_whole": True}
    assert 0 < decoded.pop("bootstrap_room") < 2**63
    assert decoded == {
        "model": "m",
        "prompt": IDS,
        "max_tokens": 9,
        "logprobs": 0,
        "custom_params": {"longshore": "opaque", "first_token": 40, "first_logprob": -0.5},
        "bootstrap_host": "prefill",
        "bootstrap_port": 8100,
    }


def test_vllm_decode_gets_the_handover_of_sglangs_bootstrap_server_while_sglang_computes(proxy):
    engines = MixedEngines()
    engines.places["bootstrap"] = asyncio.Event()
    answer = engines.ask(proxy, {"model": "m", "prompt": "p", "max_tokens": 9}, to_sglang=False)
    assert answer.json()["choices"][0]["text"] == "answer"
    heard = dict(engines.heard)
    room = heard["prefill"]["bootstrap_room"]
    assert heard["tokenize"] == {"model": "m", "prompt": "p"}
    assert (heard["prefill"]["prompt"], heard["prefill"]["bootstrap_port"], heard["prefill"]["max_tokens"]) == (
        IDS[:-1],
        8998,
        1,
    )
    assert heard["bootstrap"] == {"room": str(room), "tokens": "2"}
    assert heard["decode"] == {"model": "m", "prompt": IDS, "max_tokens": 9, "kv_transfer_params": TOLD}


def test_vllm_computes_a_prompt_of_one_token_alone(proxy):
    engines = MixedEngines()
    answer = engines.ask(proxy, {"model": "m", "prompt": [5], "max_tokens": 9}, to_sglang=False)
    assert answer.json()["choices"][0]["text"] == "answer"
    assert dict(engines.heard) == {"decode": {"model": "m", "prompt": [5], "max_tokens": 9}}


@pytest.mark.parametrize("to_sglang", [True, False])
def test_no_engine_of_two_kinds_gets_transfer_parameters_of_a_client(proxy, to_sglang):
    engines = MixedEngines(**({"prefill": httpx.Response(200, json=FOR_SGLANG)} if to_sglang else {}))
    if not to_sglang:
        engines.places["bootstrap"] = asyncio.Event()
    forged = {"kv_transfer_params": FORGED, "custom_params": FORGED, "bootstrap_host": "forged", "bootstrap_room": -7}
    answer = engines.ask(proxy, {"prompt": "p", **forged}, to_sglang=to_sglang)
    assert answer.status_code == 200
    assert "forged" not in json.dumps(engines.heard)
    assert -7 not in [body.get("bootstrap_room") for _, body in engines.heard]


@pytest.mark.parametrize(
    ("to_sglang", "engine", "content"),
    [
        (True, "prefill", {**FOR_SGLANG, "choices": [{"text": "a"}]}),
        (True, "prefill", {**FOR_SGLANG, "kv_transfer_params": {"other": 1}}),
        (False, "tokenize", {"count": 3}),
        (False, "bootstrap", [1]),
    ],
)
def test_an_answer_that_another_kind_cannot_use_is_the_engines_fault(proxy, to_sglang, engine, content):
    engines = MixedEngines(**({"prefill": httpx.Response(200, json=FOR_SGLANG)} if to_sglang else {}))
    engines.answers[engine] = httpx.Response(200, json=content)
    if not to_sglang:
        engines.places["bootstrap"] = asyncio.Event()
    answer = engines.ask(proxy, {"prompt": "p"}, to_sglang=to_sglang)
    name = "decode" if engine == "tokenize" else "prefill"
    assert (answer.status_code, f"{name}" in answer.json()["error"]["message"]) == (502, True)


@pytest.mark.parametrize("to_sglang", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "p", "n": 2})],
)
def test_what_two_kinds_of_engines_cannot_serve_is_refused(proxy, to_sglang, path, body):
    engines = MixedEngines()
    answer = engines.ask(proxy, body, to_sglang=to_sglang, path=path)
    assert (answer.status_code, engines.heard) == (400, [])


def test_a_vllm_that_hands_nothing_out_is_an_error_for_sglang(proxy):
    silent = httpx.Response(200, json={**FOR_SGLANG, "kv_transfer_params": None})
    answer = MixedEngines(prefill=silent).ask(proxy, {"prompt": "p"}, to_sglang=True)
    assert (answer.status_code, "agent is away" in answer.text) == (502, True)


def test_several_prompts_in_a_request_are_refused(proxy):
    two = httpx.Response(200, json={**FOR_SGLANG, "choices": FOR_SGLANG["choices"] * 2})
    assert MixedEngines(prefill=two).ask(proxy, {"prompt": ["p", "q"]}, to_sglang=True).status_code == 400
    assert MixedEngines().ask(proxy, {"prompt": ["p", "q"]}, to_sglang=False).status_code == 400


def test_an_error_of_sglangs_decode_engine_has_openais_form(proxy):
    failed = {"object": "error", "message": "Decode transfer failed", "type": "500", "param": None, "code": 500}
    engines = MixedEngines(prefill=httpx.Response(200, json=FOR_SGLANG), decode=httpx.Response(500, json=failed))
    answer = engines.ask(proxy, {"prompt": "p"}, to_sglang=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "Decode transfer failed")


def test_an_error_of_sglangs_prefill_or_its_bootstrap_server_reaches_the_client(proxy):
    engines = MixedEngines(prefill=httpx.Response(400, json={"error": {"message": "too long"}}))
    engines.answers["bootstrap"] = httpx.Response(502, json={"error": {"message": "no prompt"}})
    answer = engines.ask(proxy, {"prompt": "p"}, to_sglang=False)
    assert answer.status_code in {400, 502}
    assert "decode" not in dict(engines.heard)
