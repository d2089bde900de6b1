"""A router for vLLM engines that use LongshoreConnector: sends each prompt to a prefill engine and to a decode engine.

Both get the prompt at once: KV that prefill has computed travels while it computes the rest. Decode needs an earlier answer
of the same prefill engine for that, so the first prompt goes to prefill and then to decode.

    python proxy.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --port 8000

One of the two kinds may be SGLang with the backend `longshore`; 8998 is SGLang's bootstrap port:

    python proxy.py --prefill http://10.0.0.1:8100 --sglang-decode http://10.0.0.2:8200
    python proxy.py --sglang-prefill http://10.0.0.1:8100 8998 --decode http://10.0.0.2:8200

Between engines of two kinds it serves /v1/completions of one prompt, which it passes on as token ids. Otherwise it serves /v1/completions and
/v1/chat/completions; decode alone computes a request for several answers or with several prompts. Answers may stream. An
engine's error reaches the client with its status; after the first tokens, the router closes the stream instead. It uses
several engines of a kind in turn. /v1/models is decode's, /health is good if an engine of each kind is, and all other paths and
methods are refused. No engine gets transfer parameters that a client has written.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

# A queued long prompt takes minutes. An engine that does not accept the connection is down.
TIMEOUT = httpx.Timeout(600.0, connect=5.0)
DISCONNECT_LOOK_S = 0.5
PASSED_ON = ("authorization", "x-request-id")
# Fields about the response, which are removed from the request for prefill's single token.
ANSWER_FIELDS = ("stream_options", "min_tokens", "n", "best_of", "max_completion_tokens")
# The fields that this router reads of a client's request, and those of an engine's answer that it sends on.
OF_REQUEST = {"n": int | float | None, "best_of": int | float | None, "stream": bool | None}
OF_ANSWER = {"kv_transfer_params": dict | None}
# Fields that tell engines where KV is. `vllm_xargs` can hold the first, too.
TRANSFER_FIELDS = ("kv_transfer_params", "custom_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
# What Python raises where JSON has another form than expected, or more levels than it can read.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
OK, BAD_REQUEST, CLIENT_GONE, INTERNAL_ERROR, BAD_GATEWAY, GATEWAY_TIMEOUT = 200, 400, 499, 500, 502, 504
# A vLLM prefill engine's count of the prompt's tokens that its cache had. Decode's own count has those that it was sent.
CACHED = "remote_prefill_cached_tokens"
# Fields of a vLLM prefill engine's answer that decode can use for any prompt.
OF_ANY_PROMPT = ("do_remote_prefill", "do_remote_decode", "longshore", "longshore_life")


class SGLang(NamedTuple):
    """An SGLang engine; a prefill engine has a bootstrap server."""

    url: str
    bootstrap_port: int = 0


Engine = str | SGLang


class Engines(NamedTuple):
    """The engines of each kind in turn, and the transfer parameters that each vLLM prefill engine has answered last."""

    prefill: Iterator[Engine]
    decode: Iterator[Engine]
    told: dict[str, dict[str, Any]]


class EngineError(Exception):
    """An engine failed; becomes the client's response."""

    def __init__(self, status: int, content: bytes | str) -> None:
        super().__init__(content)
        self.status = status
        self.content = _in_openais_form(content) if isinstance(content, bytes) else _error(status, content)


def make_app(
    prefill: Sequence[Engine], decode: Sequence[Engine], transport: httpx.AsyncBaseTransport | None = None
) -> FastAPI:
    """Return the router for these engines; a vLLM engine is its address. Tests pass a `transport`."""
    engines = Engines(itertools.cycle(prefill), itertools.cycle(decode), {})
    client = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), transport=transport)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    # A path with a slash too many is refused, too.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        """Send the prompt to prefill and to decode; return decode's answer."""
        return await _served(_while_connected(request, _complete(client, request, engines)))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Return decode's models."""
        return await _served(_page(client, request, decode))

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Return 200 if an engine of each kind is healthy."""

        async def look() -> Response:
            await _page(client, request, prefill)
            return await _page(client, request, decode)

        return await _served(look())

    @app.exception_handler(HTTPException)
    async def other(request: Request, _: Exception) -> Response:
        """Refuse what this router does not know how to divide between two engines."""
        served = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models and GET /health"
        text = f"this router serves {served}, and not {request.method} {request.url.path}"
        return Response(_error(BAD_REQUEST, text), BAD_REQUEST, media_type="application/json")

    async def _served(work: Awaitable[Response]) -> Response:
        try:
            return await work
        except EngineError as error:
            return Response(error.content, error.status, media_type="application/json")
        except httpx.HTTPError as error:
            status = GATEWAY_TIMEOUT if isinstance(error, httpx.TimeoutException) else BAD_GATEWAY
            text = f"{_name(error.request.url)} is away or silent: {error!r}"
            return Response(_error(status, text), status, media_type="application/json")
        except RecursionError as error:
            # httpx has some levels of the stack less for the client's JSON than `_of_client` had.
            return Response(_error(BAD_REQUEST, str(error)), BAD_REQUEST, media_type="application/json")

    return app


async def _page(client: httpx.AsyncClient, request: Request, engines: Sequence[Engine]) -> Response:
    """Return the page of the first engine that has it. It takes no turn of an engine, so that probes shift no load."""
    failure: Exception = EngineError(BAD_GATEWAY, "there is no engine")
    for engine in engines:
        url = (engine.url if isinstance(engine, SGLang) else engine).rstrip("/") + request.url.path
        try:
            answer = await client.get(url, headers=_passed_on(request))
        except httpx.HTTPError as error:
            failure = error
            continue
        if answer.status_code == OK:
            return Response(answer.content, media_type=answer.headers.get("content-type"))
        failure = EngineError(answer.status_code, answer.content)
    raise failure


def _passed_on(request: Request) -> dict[str, str]:
    """Return the headers of a request that engines get, too."""
    found = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    for name, value in found.items():
        if not value.isascii():
            raise EngineError(BAD_REQUEST, f"{name}: this header has a character that is not ASCII")
    return found


def _sendable(content: bytes, types: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object that can be sent on and whose fields have these types. Raises one of MISFITS, which names the field."""
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError("this is no JSON object")
    for name, value in found.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except MISFITS as error:
            raise ValueError(f"{name}: {error}") from error
        if not isinstance(value, types.get(name, object)):
            raise TypeError(f"{name}: it is {value!r:.60} and not of type {types[name]}")
    return found


@contextmanager
def _reading(engine: str) -> Iterator[None]:
    """Name the engine whose answer has not the form that this router reads."""
    try:
        yield
    except MISFITS as error:
        text = f"{_name(engine)} has answered what this router cannot read: {type(error).__name__}: {error}"
        raise EngineError(BAD_GATEWAY, text) from error


def _name(url: str | httpx.URL) -> str:
    """Return an engine's host and port. Its address may hold a password."""
    return httpx.URL(url).netloc.decode()


def _of_engine(answer: httpx.Response, engine: str) -> dict[str, Any]:
    """Return an engine's answer, of which parts are sent to another engine."""
    if answer.status_code != OK:
        raise EngineError(answer.status_code, answer.content)
    with _reading(engine):
        return _sendable(answer.content, OF_ANSWER)


def _of_client(content: bytes) -> dict[str, Any]:
    """Return a client's request without transfer parameters, which only this router may write."""
    try:
        body = _sendable(content, OF_REQUEST)
    except MISFITS as error:
        raise EngineError(BAD_REQUEST, f"the request's body cannot be served: {error}") from error
    for holder in (body, body.get("vllm_xargs")):
        for name in TRANSFER_FIELDS if isinstance(holder, dict) else ():
            holder.pop(name, None)
    return body


async def _complete(client: httpx.AsyncClient, request: Request, engines: Engines) -> Response:
    body = _of_client(await request.body())
    call = Call(client, request.url.path, _passed_on(request))
    prefill, decode = next(engines.prefill), next(engines.decode)
    is_mixed = isinstance(prefill, SGLang) or isinstance(decode, SGLang)
    if is_mixed and (not call.path.endswith("/v1/completions") or body.get("n", 1) != 1):
        raise EngineError(BAD_REQUEST, "between engines of two kinds only /v1/completions with n=1 is served")
    prompt = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    prompt |= {"max_tokens": 1, "stream": False}
    if isinstance(prefill, SGLang):
        assert isinstance(decode, str)
        return await _from_sglang(call, prompt, body, prefill, decode)
    prompt |= {"kv_transfer_params": {"do_remote_decode": True}}
    if isinstance(decode, SGLang):
        # SGLang's decode engines compute no token of a prompt.
        whole = {"kv_transfer_params": prompt["kv_transfer_params"] | {"longshore_whole": True}}
        answer = await call.post(prefill, prompt | whole | {"return_token_ids": True})
        with _reading(prefill):
            handed = _for_sglang(answer, prefill)
        return await call.answer(decode.url, body | handed)
    if not _is_one_prompt(body):
        # Each of its prompts and answers would need a room of its own.
        return await call.answer(decode, body)
    if prefill in engines.told:
        return await _at_once(call, prompt, body, prefill, decode, engines.told)
    # Only decode reads prefill's parameters. If there are none, prefill's agent is away and decode computes the prompt.
    told = await _told(call, prompt, prefill, engines.told)
    return await call.answer(decode, body | {"kv_transfer_params": told})


def _is_one_prompt(body: dict[str, Any]) -> bool:
    """Whether an engine makes one request of it, so that one room is enough."""
    prompt = body.get("prompt", "")
    answers = {body.get("n"), body.get("best_of")}
    return (isinstance(prompt, str) or _is_ids(prompt)) and answers <= {None, 1}


def _is_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids."""
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


async def _told(call: Call, prompt: dict[str, Any], prefill: str, all_told: dict[str, dict[str, Any]]) -> Any:
    """Let vLLM compute the prompt; return the transfer parameters that it answers, and keep them for later prompts."""
    told = (await call.post(prefill, prompt)).get("kv_transfer_params")
    if told:
        all_told[prefill] = told
    else:
        all_told.pop(prefill, None)
    return told


async def _at_once(
    call: Call,
    prompt: dict[str, Any],
    body: dict[str, Any],
    prefill: str,
    decode: str,
    all_told: dict[str, dict[str, Any]],
) -> Response:
    """Let decode take the prompt while prefill computes it. If that fails, give decode what prefill has answered."""
    room = {"longshore_room": _new_room()}
    # vLLM adds counts of the earlier prompt to the others.
    earlier = {name: value for name, value in all_told[prefill].items() if name in OF_ANY_PROMPT}
    computed = asyncio.create_task(
        _told(call, prompt | {"kv_transfer_params": prompt["kv_transfer_params"] | room}, prefill, all_told)
    )
    COMPUTING.add(computed)
    computed.add_done_callback(_end)
    answered = asyncio.create_task(call.answer(decode, body | {"kv_transfer_params": earlier | room}, computed))
    try:
        await asyncio.wait({computed, answered}, return_when=asyncio.FIRST_COMPLETED)
        if answered.done() and (answer := await _unless_failed(answered)) is not None:
            return answer
        told = await computed
        # Prefill or its agent was restarted if it now answers another life: decode would wait for the former one.
        is_there = told and told.get("longshore_life") == earlier.get("longshore_life")
        if (is_there or answered.done()) and (answer := await _unless_failed(answered)) is not None:
            return answer
        await _stopped(answered)
        if told:
            # It is another room if prefill has preempted the prompt. Decode cannot have the same one twice.
            answer = await _unless_failed(call.answer(decode, body | {"kv_transfer_params": told}))
            if answer is not None:
                return answer
            told = await _told(call, prompt, prefill, all_told)
        return await call.answer(decode, body | {"kv_transfer_params": told})
    except BaseException:
        computed.cancel()
        await _stopped(answered)
        raise


async def _unless_failed(answer: Awaitable[Response]) -> Response | None:
    """Return an engine's answer; None: the engine has failed. Raises EngineError if it refuses the request."""
    try:
        return await answer
    except EngineError as error:
        if error.status < INTERNAL_ERROR:
            raise
        return None


async def _stopped(task: asyncio.Task[Any]) -> None:
    """Cancel a request to an engine, and wait until it has ended. Close the stream of an answer that has come."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Stream):
        await task.result().sent.aclose()


class Call(NamedTuple):
    """A client's request, as the engines get it."""

    client: httpx.AsyncClient
    path: str
    headers: dict[str, str]

    async def post(self, url: str, body: dict[str, Any], path: str = "") -> dict[str, Any]:
        """Return an engine's answer."""
        answer = await self.client.post(url.rstrip("/") + (path or self.path), json=body, headers=self.headers)
        return _of_engine(answer, url)

    async def answer(self, url: str, body: dict[str, Any], computed: asyncio.Task[Any] | None = None) -> Response:
        """Return decode's answer for the client, with the count of `computed`, prefill's answer, of cached tokens."""
        request = self.client.build_request("POST", url.rstrip("/") + self.path, json=body, headers=self.headers)
        sent = await self.client.send(request, stream=True)
        return await _answered(sent, url, computed, is_stream=bool(body.get("stream")))


def _for_sglang(answer: Any, prefill: str) -> dict[str, Any]:
    """Return what an SGLang decode engine needs of vLLM's answer to a prompt."""
    parameters, choices, place = answer.get("kv_transfer_params"), answer["choices"], urlsplit(prefill)
    if not parameters:
        raise EngineError(BAD_GATEWAY, "vLLM did not hand the prompt out: its agent is away")
    if len(choices) != 1:
        raise EngineError(BAD_REQUEST, "between engines of two kinds only one prompt a request is served")
    logprobs = (choices[0].get("logprobs") or {}).get("token_logprobs") or [None]
    return {
        "prompt": choices[0]["prompt_token_ids"],
        "custom_params": {
            "longshore": parameters["longshore"],
            "first_token": choices[0]["token_ids"][0],
            "first_logprob": logprobs[0],
        },
        # SGLang asks this address for /health while it waits for the prompt.
        "bootstrap_host": place.hostname,
        "bootstrap_port": place.port or 80,
        "bootstrap_room": _new_room(),
    }


async def _from_sglang(
    call: Call, prompt: dict[str, Any], body: dict[str, Any], prefill: SGLang, decode: str
) -> Response:
    """Let SGLang compute the prompt while vLLM waits for it."""
    tokens, host, room = prompt.get("prompt"), urlsplit(prefill.url).hostname, _new_room()
    if isinstance(tokens, str):
        found = await call.post(decode, {"model": prompt.get("model"), "prompt": tokens}, "/tokenize")
        with _reading(decode):
            tokens = found["tokens"]
    if not _is_ids(tokens):
        raise EngineError(BAD_REQUEST, "between engines of two kinds the prompt is one text, or its token ids")
    # vLLM computes a prompt's last token itself. A recurrent state that has taken it in cannot give it back.
    moved = tokens[:-1]
    if not moved:
        return await call.answer(decode, body | {"prompt": tokens})
    place = {"bootstrap_host": host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
    computed = asyncio.create_task(call.post(prefill.url, prompt | {"prompt": moved} | place))
    COMPUTING.add(computed)
    computed.add_done_callback(_end)
    try:
        asked = asyncio.create_task(
            call.client.get(
                f"http://{host}:{prefill.bootstrap_port}/longshore/handover",
                params={"room": room, "tokens": len(moved)},
            )
        )
        # Prefill answers when decode has the prompt, so an earlier answer is an error.
        await asyncio.wait({computed, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            await computed
            raise EngineError(BAD_GATEWAY, "prefill answered before decode had the prompt")
        told = _of_engine(asked.result(), prefill.url)
        return await call.answer(decode, body | {"prompt": tokens, "kv_transfer_params": told})
    except BaseException:
        # SGLang then frees the prompt's pages.
        computed.cancel()
        raise


# Requests to SGLang's prefill engines, which end after decode has begun to answer.
COMPUTING: set[asyncio.Task[Any]] = set()


def _end(computed: asyncio.Task[Any]) -> None:
    COMPUTING.discard(computed)
    if not computed.cancelled():
        # Decode's answer says what went wrong.
        computed.exception()


def _new_room() -> int:
    """Return a number that SGLang takes for a prompt's room: not 0."""
    return secrets.randbelow(2**63 - 1) + 1


async def _answered(
    sent: httpx.Response, engine: str, computed: asyncio.Task[Any] | None, *, is_stream: bool
) -> Response:
    if sent.status_code == OK and is_stream:
        return await _streamed(sent, engine, computed)
    content = await sent.aread()
    if sent.status_code != OK:
        raise EngineError(sent.status_code, content)
    with _reading(engine):
        found = json.loads(content)
        if _has_failed(found):
            raise EngineError(BAD_GATEWAY, content)
        counted = _with_prefills_count(found, computed)
        return Response(content if counted is None else json.dumps(counted), media_type="application/json")


def _with_prefills_count(answer: Any, computed: asyncio.Task[Any] | None) -> Any:
    """Return an answer of decode with prefill's count of cached tokens; None: it has no count, or prefill said none."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    if not details or computed is None or not computed.done() or computed.cancelled() or computed.exception():
        return None
    count = (computed.result() or {}).get(CACHED)
    if count is None:
        return None
    details["cached_tokens"] = count
    return answer


class Stream(StreamingResponse):
    """A stream of decode, `sent`, which is closed at its end, or by `_stopped` if nobody reads it."""

    sent: httpx.Response


async def _streamed(sent: httpx.Response, engine: str, computed: asyncio.Task[Any] | None = None) -> Stream:
    """Return a stream after its first token, if that is no error, so that an early failure keeps its own status."""
    lines, held = sent.aiter_lines(), list[str]()
    try:
        with _reading(engine):
            async for line in lines:
                held.append(line)
                if not _tells_nothing(line):
                    break
            last = held[-1] if held else ""
            if _tells_nothing(last) or _event_failed(last):
                said = "" if _tells_nothing(last) else last.removeprefix("data:").strip()
                raise EngineError(BAD_GATEWAY, said or f"{_name(engine)} ended without an answer")
    except BaseException:
        await sent.aclose()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            for line in held:
                yield line + "\n"
            async for line in lines:
                counted = None
                with _reading(engine):
                    has_failed = _event_failed(line)
                    if '"prompt_tokens_details"' in line and line.startswith("data: {"):
                        counted = _with_prefills_count(json.loads(line.removeprefix("data: ")), computed)
                yield (line if counted is None else f"data: {json.dumps(counted)}") + "\n"
                if has_failed:
                    raise EngineError(BAD_GATEWAY, line)
        finally:
            await sent.aclose()

    stream = Stream(events(), media_type="text/event-stream")
    stream.sent = sent
    return stream


def _tells_nothing(line: str) -> bool:
    """Whether a line of a stream has no data, or only names the role of a chat's answer."""
    text = line.removeprefix("data:").strip()
    if not line.startswith("data:") or not text.startswith("{"):
        return not line.startswith("data:") or not text
    found = json.loads(text)
    deltas = [each.get("delta", {}) for each in found.get("choices", ()) if not each.get("finish_reason")]
    return bool(deltas) and len(deltas) == len(found["choices"]) and all(_is_role(delta) for delta in deltas)


def _is_role(delta: dict[str, Any]) -> bool:
    return "role" in delta and not any(value for name, value in delta.items() if name != "role")


def _event_failed(line: str) -> bool:
    text = line.removeprefix("data:").strip()
    return line.startswith("data:") and text.startswith("{") and _has_failed(json.loads(text))


def _has_failed(answer: Any) -> bool:
    return bool(answer.get("error")) or any(each.get("finish_reason") == "error" for each in answer.get("choices", ()))


async def _while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Do the work. If the client disconnects, cancel it, which also cancels the request at the engine."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=DISCONNECT_LOOK_S))[0]:
            if await request.is_disconnected():
                raise EngineError(CLIENT_GONE, "the client has left")
        return task.result()
    except BaseException:
        await _stopped(task)
        raise


def _in_openais_form(content: bytes) -> bytes:
    """Return an engine's error. SGLang puts the fields of an error where OpenAI's API has them below `error`."""
    try:
        found = json.loads(content)
    except MISFITS:
        return content
    is_sglangs = isinstance(found, dict) and found.get("object") == "error" and "error" not in found
    return json.dumps({"error": found}).encode() if is_sglangs else content


def _error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "RouterError", "code": status}}).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    many = {"action": "append", "default": []}
    parser.add_argument("--prefill", **many, metavar="URL", help="a vLLM prefill engine; repeatable")
    parser.add_argument("--decode", **many, metavar="URL", help="a vLLM decode engine; repeatable")
    parser.add_argument(
        "--sglang-prefill", **many, nargs=2, metavar=("URL", "PORT"), help="SGLang, and its bootstrap port; repeatable"
    )
    parser.add_argument("--sglang-decode", **many, metavar="URL", help="an SGLang decode engine; repeatable")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    prefill_engines = [*chosen.prefill, *(SGLang(url, int(port)) for url, port in chosen.sglang_prefill)]
    decode_engines = [*chosen.decode, *(SGLang(url) for url in chosen.sglang_decode)]
    if not prefill_engines or not decode_engines:
        parser.error("name at least one prefill engine and one decode engine")
    if chosen.sglang_prefill and chosen.sglang_decode:
        parser.error("for SGLang on both sides use SGLang's own router")
    uvicorn.run(make_app(prefill_engines, decode_engines), host=chosen.host, port=chosen.port, log_level="warning")
