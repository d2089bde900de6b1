"""Tests that the answer to an unknown path lists all pages."""

from __future__ import annotations

import asyncio

import httpx

from longshore_agent.status.app import create_app


class Source:
    def snapshot(self, room: int | None = None) -> None:
        raise AssertionError("the state is not needed")


def asked(method: str, *paths: str) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(Source()))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            return [await client.request(method, path) for path in paths]

    return asyncio.run(ask())


def test_a_path_that_no_page_has_is_answered_with_those_that_there_are() -> None:
    paths = ("/livez", "/v1", "/v1/")
    for path, answer in zip(paths, asked("GET", *paths), strict=True):
        assert (answer.status_code, answer.json()["reason"]) == (404, "UnknownPath")
        text = answer.json()["text"]
        assert text.startswith(f"no page has the path {path}: there are /, /healthz, /readyz, /metrics, /v1/status, ")
        for page in ("/v1/rooms/{room}", "/v1/plan", "/v1/bootstrap", "/openapi.json"):
            assert page in text


def test_a_page_that_is_written_to_says_that_it_is_only_read() -> None:
    (answer,) = asked("POST", "/v1/status")
    assert (answer.status_code, answer.json()["text"]) == (405, "POST is not for /v1/status: pages are read by GET")
