"""A router for vLLM engines that use LongshoreConnector: sends each prompt to a prefill engine, then to a decode engine.

    python proxy.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --port 8000

Serves /v1/completions and /v1/chat/completions, also streaming. An engine's error reaches the client with its status; after
the first tokens, the router closes the stream instead. It uses several engines of a kind in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

# A queued long prompt takes minutes. An engine that does not accept the connection is down.
TIMEOUT = httpx.Timeout(600.0, connect=5.0)
DISCONNECT_LOOK_S = 0.5
PASSED_ON = ("authorization", "x-request-id")
# Fields about the response, which are removed from the request for prefill's single token.
ANSWER_FIELDS = ("stream_options", "min_tokens", "n", "best_of", "max_completion_tokens")
OK, BAD_REQUEST, CLIENT_GONE, BAD_GATEWAY, GATEWAY_TIMEOUT = 200, 400, 499, 502, 504


class EngineError(Exception):
    """An engine failed; becomes the client's response."""

    def __init__(self, status: int, content: bytes | str) -> None:
        super().__init__(content)
        self.status = status
        self.content = content if isinstance(content, bytes) else _error(status, content)


def make_app(prefill: list[str], decode: list[str], transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """Return the router for these engines' addresses. Tests pass a `transport`."""
    engines = itertools.cycle(prefill), itertools.cycle(decode)
    client = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), transport=transport)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(title="Longshore example router", lifespan=lifespan)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        """Send the prompt to prefill, and prefill's answer with it to decode."""
        try:
            return await _while_connected(request, _complete(client, request, engines))
        except EngineError as error:
            return Response(error.content, error.status, media_type="application/json")
        except httpx.HTTPError as error:
            status = GATEWAY_TIMEOUT if isinstance(error, httpx.TimeoutException) else BAD_GATEWAY
            return Response(
                _error(status, f"an engine is away or silent: {error!r}"), status, media_type="application/json"
            )

    return app


async def _complete(
    client: httpx.AsyncClient, request: Request, engines: tuple[Iterator[str], Iterator[str]]
) -> Response:
    try:
        body = dict(json.loads(await request.body()))
    except (ValueError, TypeError) as error:
        raise EngineError(BAD_REQUEST, f"the body is no JSON object: {error}") from error
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    prefill, decode = (next(each).rstrip("/") + request.url.path for each in engines)

    prompt = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    prompt |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    answer = await client.post(prefill, json=prompt, headers=headers)
    if answer.status_code != OK:
        raise EngineError(answer.status_code, answer.content)
    # Only decode reads prefill's parameters. If there are none, prefill's agent is away and decode computes the prompt.
    body["kv_transfer_params"] = answer.json().get("kv_transfer_params")
    sent = await client.send(client.build_request("POST", decode, json=body, headers=headers), stream=True)
    if sent.status_code != OK or not body.get("stream"):
        content = await sent.aread()
        if sent.status_code != OK or _has_failed(json.loads(content)):
            raise EngineError(sent.status_code if sent.status_code != OK else BAD_GATEWAY, content)
        return Response(content, media_type="application/json")
    return await _streamed(sent)


async def _streamed(sent: httpx.Response) -> StreamingResponse:
    """Return a stream after its first event, if that is no error, so that an early failure keeps its own status."""
    lines = sent.aiter_lines()
    first = await anext(lines, "")
    if _event_failed(first) or not first:
        await sent.aclose()
        raise EngineError(BAD_GATEWAY, first.removeprefix("data:").strip() or "decode ended without an answer")

    async def events() -> AsyncIterator[str]:
        try:
            yield first + "\n"
            async for line in lines:
                yield line + "\n"
                if _event_failed(line):
                    raise EngineError(BAD_GATEWAY, line)
        finally:
            await sent.aclose()

    return StreamingResponse(events(), media_type="text/event-stream")


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
    finally:
        task.cancel()


def _error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "RouterError", "code": status}}).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="a prefill engine; repeatable")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="a decode engine; repeatable")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    uvicorn.run(make_app(chosen.prefill, chosen.decode), host=chosen.host, port=chosen.port, log_level="warning")
