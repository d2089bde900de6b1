"""Tests the log of real agents as JSON: every line of every process, and the fields of lines on rooms and workers."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pytest
from agent_fleet import World
from agent_world import DEPLOYMENT, EVENT_LIMIT_S, Agent, Engine, Request, wait_for
from refused_start import refused_start

from longshore_agent.logs import _JsonFormatter
from longshore_client import Half
from longshore_spec.log_lines import FIELDS
from longshore_wire.names import room_name

ALWAYS = {"time", "level", "logger", "process", "message"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
Line = dict[str, Any]


class Place(NamedTuple):
    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    world = World(tmp_path_factory.mktemp("logs"), LONGSHORE_LOG_FORMAT="json", LONGSHORE_HEARTBEAT_S="0.1")
    try:
        agents = [world.agent(name) for name in ("prefill", "decode")]
        engines = [world.engine(agent, f"logged-{tp}", tp) for agent, tp in zip(agents, (2, 1), strict=True)]
        yield Place(*agents, *(each.result() for each in engines))
    finally:
        world.close()


def lines(agent: Agent) -> list[Line]:
    """Return the complete lines of an agent's log; each must be one JSON object."""
    text = agent.log()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def logged(agent: Agent, **fields: str) -> Line:
    """Wait for a line with these fields."""

    def found() -> Line | None:
        return next((line for line in lines(agent) if fields.items() <= line.items()), None)

    return wait_for(found, what=f"a line with {fields}")


@pytest.mark.shows("agent.log_format")
@pytest.mark.slow
def test_a_failed_room_is_logged_with_room_instance_peers_and_reason(place: Place) -> None:
    each = Request(place.source, place.target, 40)
    each.claim()

    def claimed() -> bool:
        status, body = place.prefill.ask(f"/v1/rooms/{room_name(each.room)}")
        return status == 200 and len(json.loads(body)["halves"]) == 2

    wait_for(claimed, what="the claim at both prefill ranks")
    place.target.client.cancel(each.room, Half.TARGET, instance="logged-2")
    place.target.client.wait(each.room, Half.TARGET, "logged-2", timeout_s=EVENT_LIMIT_S)
    room = {"room": room_name(each.room), "instance": "logged-2", "reason": "CANCELLED", "deployment": DEPLOYMENT}
    at_decode = logged(place.decode, process="logged-1/0/0", **room)
    assert at_decode["peer"] == "logged-2/0/0,logged-2/0/1"
    assert (at_decode["level"], at_decode["logger"]) == ("warning", "longshore_agent.worker.loop")
    assert room_name(each.room) in at_decode["message"]
    for rank in (0, 1):
        assert logged(place.prefill, process=f"logged-2/0/{rank}", **room)["peer"] == "logged-1/0/0"


def test_lines_on_workers_carry_their_instance_and_reason(place: Place) -> None:
    worker = place.decode.worker("logged-1")
    assert worker is not None
    started = logged(place.decode, process="supervisor", worker="logged-1/0/0", instance="logged-1", level="info")
    assert "reason" not in started
    os.kill(worker["pid"], signal.SIGKILL)
    logged(place.decode, process="supervisor", worker="logged-1/0/0", reason="WORKER_LOST", level="error")


def test_a_line_of_the_http_server_is_one_object_too(place: Place) -> None:
    host = place.prefill.http.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=EVENT_LIMIT_S)
    connection.connect()
    assert connection.sock is not None
    connection.sock.sendall(b"no request\r\n\r\n")
    assert connection.sock.recv(64).startswith(b"HTTP/1.1 400")
    connection.close()
    assert logged(place.prefill, logger="uvicorn.error")["process"] == "supervisor"


def test_every_line_of_every_process_is_one_object_with_time_level_logger_process_and_message(place: Place) -> None:
    for agent in (place.prefill, place.decode):
        for line in lines(agent):
            assert line.keys() >= ALWAYS, line
            assert line.keys() <= ALWAYS | {*FIELDS, "exception"}, line
            assert TIME.fullmatch(line["time"]), line
            assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert {line["process"] for line in lines(agent)} >= {"supervisor"}


def test_an_agent_that_cannot_start_says_why_in_the_form_that_was_asked_for() -> None:
    settings = {"LONGSHORE_LOG_FORMAT": "json", "LONGSHORE_BACKEND": "Nothing", "LONGSHORE_NODES": "x"}
    said = [json.loads(line) for line in refused_start(settings).splitlines()]
    assert [line["message"].partition(":")[0] for line in said] == ["LONGSHORE_BACKEND", "LONGSHORE_NODES"]
    assert {line["level"] for line in said} == {"error"}


def test_a_traceback_is_a_field_and_text_that_is_no_unicode_or_has_ends_of_lines_stays_on_one_line() -> None:
    try:
        raise ValueError("two\nlines \udcff")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", 40, "f", 1, "bad \udcff\n%s", ("1",), sys.exc_info())
    text = _JsonFormatter("p", "").format(record)
    assert "\n" not in text
    assert text.isascii()
    line = json.loads(text)
    assert line["message"] == "bad \udcff\n1"
    assert line["exception"].startswith("Traceback")
    assert "deployment" not in line


def test_text_of_a_peer_ends_no_line_and_commands_no_terminal() -> None:
    code = (
        "import logging; from longshore_agent import logs; from longshore_agent.settings import Settings; "
        "logs.begin(Settings(), 'd/0/0'); "
        "logging.getLogger('x').warning('room 1 failed: %s', 'no\\n2026-01-01 agent ERROR forged \\x1b[2J \\udcff')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    (line,) = done.stderr.splitlines()
    assert line.endswith("d/0/0 WARNING room 1 failed: no\\n2026-01-01 agent ERROR forged \\x1b[2J \\udcff")
