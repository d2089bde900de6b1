"""Tests `rooms`, `trace room` and `status` of the command with real agents, whose pages need a token and have a certificate."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
import trustme
from agent_fleet import World
from agent_world import Agent, Engine, Request, wait_for

from longshore_cli.main import main
from longshore_cli.status_pages import AgentPages
from longshore_wire.names import room_name

HOST, TOKEN = "127.0.0.1", "a-token-of-this-test"
SHIFT_NS = 7_000_000_000
STEP = re.compile(r"^ *[\d.]+ +[\d.]+  (?P<process>\w+ \w+ \d) +(?P<step>.*)$")
# A step of each worker. An answer lacks a worker that got no processor for a while.
STEPS_LAST = {f"{worker}: send DONE" for worker in ("prefill worker 0", "prefill worker 1", "decode worker 0")}
TRANSFER = re.compile(r"decode's DONE: ([\d.]+) us")


@dataclass
class Place:
    """Two agents, their engines, and a room that has moved between these."""

    directory: Path
    agents: list[Agent]
    source: Engine
    target: Engine
    room: int

    def move(self, total: int) -> int:
        """Move a room; return its number."""
        request = Request(self.source, self.target, total)
        request.claim()
        request.offer()
        request.arrives()
        return request.room

    def words(self, command: str, *agents: str) -> list[str]:
        """Return a command with what the agents' pages need."""
        urls = agents or tuple(agent.http for agent in self.agents)
        named = [word for url in urls for word in ("--agent", url)]
        more = ["--token-file", str(self.directory / "token"), "--authority", str(self.directory / "authority.pem")]
        return [*command.split(), *named, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("traced")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    issued.cert_chain_pems[0].write_to_path(directory / "chain.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))
    (directory / "token").write_text(f"{TOKEN}\n")
    (directory / "token").chmod(0o600)
    world = World(
        directory,
        LONGSHORE_CLIENT_SPANS="true",
        LONGSHORE_HTTP_TOKEN_FILE=str(directory / "token"),
        LONGSHORE_HTTP_CERTIFICATE_FILE=str(directory / "chain.pem"),
        LONGSHORE_HTTP_KEY_FILE=str(directory / "key.pem"),
    )
    try:
        agents = [world.agent("prefill"), world.agent("decode")]
        starts = [world.engine(agent, f"traced-{tp}", tp) for agent, tp in zip(agents, (2, 1), strict=True)]
        source, target = (start.result() for start in starts)
        found = Place(directory, agents, source, target, 0)
        found.room = found.move(300)
        found.move(20)  # its answers come after all messages of the first
        yield found
    finally:
        world.close()


class Shifted(ThreadingHTTPServer):
    """An agent's answer on one room, as a host would give it whose clock is `SHIFT_NS` ahead."""

    def __init__(self, detail: dict) -> None:
        super().__init__((HOST, 0), _Answer)
        for span in detail["spans"]:
            for name in ("start_ns", "end_ns", "woken_ns"):
                span[name] += SHIFT_NS if span[name] else 0
        self.detail, self.body = detail, b""
        self.url = f"http://{HOST}:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        now_ns = time.monotonic_ns() + SHIFT_NS
        clock = {"boot_id": "another host", "received_ns": now_ns, "answered_ns": now_ns}
        body = self.server.body or json.dumps(self.server.detail | {"clock": clock}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def traced(place: Place, capsys: pytest.CaptureFixture[str], *agents: str) -> str:
    """Return the timeline that the command prints, once each worker answers in time."""

    def asked() -> str:
        assert main(place.words(f"trace room {place.room}", *agents)) == 0
        text = capsys.readouterr().out
        return text if set(steps_of(text)) >= STEPS_LAST and TRANSFER.search(text) else ""

    return wait_for(asked, what="an answer of all workers")


def steps_of(text: str) -> list[str]:
    """Return process and step of each line of a printed timeline."""
    found = [match for line in text.splitlines() if (match := STEP.match(line))]
    return [f"{match['process']}: {match['step']}" for match in found]


@pytest.mark.slow
def test_a_rooms_timeline_has_its_engines_and_workers_in_causal_order_and_is_written_for_perfetto(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    text = traced(place, capsys)
    steps = steps_of(text)
    for rank in (0, 1):
        places = [
            steps.index(step)
            for step in (
                f"prefill engine {rank}: send",
                f"prefill worker {rank}: Offer",
                f"prefill worker {rank}: gather {rank}→0 slab 0",
                f"prefill worker {rank}: write {rank}→0 slab 0",
                f"decode worker 0: SlabReady {rank}→0 slab 0",
                f"decode worker 0: scatter {rank}→0 slab 0",
                "decode worker 0: send DONE",
                "decode engine 0: DONE (until the engine takes it)",
            )
        ]
        assert places == sorted(places), text
    assert steps.index("decode engine 0: receive") < steps.index("decode worker 0: Receive")
    assert "all times are of one clock" in text
    assert "nothing, until" in text
    path = place.directory / "trace.json"
    assert main([*place.words(f"trace room {place.room}"), "-o", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {
        "prefill engine 0",
        "prefill engine 1",
        "prefill worker 0",
        "prefill worker 1",
        "decode worker 0",
        "decode engine 0",
    }
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


@pytest.mark.slow
def test_a_host_with_another_clock_is_aligned_and_the_uncertainty_is_told(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_us = float(TRANSFER.search(traced(place, capsys))[1])
    prefill, decode = (agent.http for agent in place.agents)
    with AgentPages.at(decode, token=TOKEN, authority=place.directory / "authority.pem") as pages:
        detail = wait_for(lambda: whole_page(pages, place.room), what="an answer of decode's worker")
    with Shifted(detail) as other:
        text = traced(place, capsys, prefill, other.url)
    told = re.search(r"traced-1/0/0 was aligned by ([\d.]+) us, and is at most ([\d.]+) us wrong", text)
    assert told is not None, text
    shift_us, wrong_us = map(float, told.groups())
    assert abs(shift_us - SHIFT_NS / 1000) <= wrong_us + 1
    assert abs(float(TRANSFER.search(text)[1]) - plain_us) <= wrong_us + 1


def whole_page(pages: AgentPages, room: int) -> dict | None:
    found = pages.page(f"/v1/rooms/{room_name(room)}")
    assert found is not None
    return found[0] if found[0]["spans"] else None


@pytest.mark.slow
def test_rooms_of_all_agents_are_listed_as_a_table_and_as_json(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> list[dict]:
        assert main([*place.words("rooms --ended true"), "-o", "json"]) == 0
        entries = json.loads(capsys.readouterr().out)
        return entries if len(entries) == 6 else []  # two rooms, at two ranks of prefill and one of decode

    entries = wait_for(listed, what="all halves")
    assert {(entry["agent"], entry["room"]["half"]) for entry in entries} == {
        (place.agents[0].http, "source"),
        (place.agents[1].http, "target"),
    }

    def table() -> bool:
        assert main(place.words("rooms")) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        assert header.split() == ["room", "instance", "half", "state", "age", "s", "bytes", "reason", "agent", "worker"]
        return any(line.split()[:4] == [room_name(place.room), "traced-2", "target", "done"] for line in lines)

    wait_for(table, what="the room at decode")

    def none_open() -> bool:
        assert main(place.words("rooms --ended false")) == 0
        return capsys.readouterr().out == "no rooms\n"

    wait_for(none_open, what="no open room")


HOSTILE = "prefill-0\x1b]0;owned\x07\x9b2J\u202e\n4  another  room"


def test_no_text_of_an_agent_reaches_the_terminal_with_characters_that_it_obeys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = {"room": "4", "instance": HOSTILE, "half": "source", "state": HOSTILE, "reason": HOSTILE}
    entry = {"room": room | {"age_s": 1.0, "bytes_moved": 4}, "ended": False, "worker": HOSTILE}
    with Shifted({"spans": []}) as service:
        service.body = json.dumps({"rooms": [entry], "next": "", HOSTILE: {}}).encode()
        for words, lines in (["rooms"], 2), (["rooms", "-o", "json"], None):
            assert main([*words, "--agent", service.url]) == 0
            out = capsys.readouterr().out
            assert "prefill-0" in out
            assert out.replace("\n", "").isprintable()
            assert lines is None or len(out.splitlines()) == lines
        assert main(["trace", "room", "4", "--agent", service.url]) == 1
        assert capsys.readouterr().err.replace("\n", "").isprintable()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"ok"', b"<html>"])
def test_a_service_that_is_no_agent_is_named(capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    with Shifted({"spans": []}) as service:
        service.body = body
        for words in (["rooms"], ["trace", "room", "4"]):
            assert main([*words, "--agent", service.url]) == 1
            assert "is an agent of this release there?" in capsys.readouterr().err


@pytest.mark.slow
def test_an_agent_that_is_named_twice_counts_once(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    once = steps_of(traced(place, capsys))
    twice = [f"{agent.http}{end}" for end in ("", "/") for agent in place.agents]
    assert len(steps_of(traced(place, capsys, *twice))) == len(once)


@pytest.mark.slow
def test_agents_in_a_directory_are_asked_with_their_token_and_authority(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    for agent, member in zip(place.agents, ("prefill-0", "decode-0"), strict=True):
        (tmp_path / member).symlink_to(agent.directory)
    given = ["--directory", str(tmp_path), *place.words("rooms")[-4:]]
    assert main(["rooms", *given]) == 0
    assert main(["rooms", *given[:2], "--authority", str(place.directory / "authority.pem")]) == 1
    assert "the agent at decode-0 wants its token: give --token-file" in capsys.readouterr().err


@pytest.mark.slow
def test_each_failure_names_its_cause_and_the_way_out(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    url = place.agents[0].http
    authority = ["--authority", str(place.directory / "authority.pem")]
    for words, said in (
        (place.words("trace room 4"), f"room 4 is unknown to {url}, "),
        (["trace", "room", "4", "--agent", url, *authority], f"the agent at {url} wants its token: give --token-file"),
        (["rooms", "--agent", url], "give --authority"),
        (["rooms", "--agent", f"http://{HOST}:1"], f"the agent at http://{HOST}:1 cannot be reached"),
        (["rooms", "--agent", "node-7"], "'node-7' is no agent: give http://HOST:PORT"),
        (["rooms", "--agent", f"http://{HOST}:port"], "is no agent: give http://HOST:PORT"),
        (
            ["rooms", "--agent", url, "--token-file", "/dev/null"],
            "--token-file /dev/null is empty or has several lines",
        ),
        (["rooms", "--agent", url, "--token-file", "/proc/none"], "--token-file /proc/none"),
        (["rooms", "--agent", url, "--authority", "/proc/none"], "--authority /proc/none"),
        (["rooms", "--agent", "http://a..b:80"], "the agent at http://a..b:80 cannot be reached"),
        ([*place.words("trace room 4"), "--instance", "\udcff"], "cannot be reached"),
    ):
        assert main(words) == (2 if "--token-file /" in said else 1)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"longshore {words[0]}: ")
        assert said in err


def statuses(place: Place, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    """Return exit status and the deployment that `longshore status -o json` prints."""
    code = main([*place.words("status --interval 0.3 -o json"), *more])
    (found,) = json.loads(capsys.readouterr().out)["deployments"]
    return code, found


def ends_of(found: dict) -> dict[str, dict[tuple[str, str], int]]:
    """Return the bytes that each pair has moved, by half and pair."""
    ends: dict[str, dict[tuple[str, str], int]] = {"source": {}, "target": {}}
    for agent in found["agents"]:
        for worker in agent["report"]["workers"]:
            for peer in worker["peers"]:
                assert (peer["state"], peer["ways"], peer["wire"]) == ("attached", ["staged"], "Loopback")
                key = worker["worker"], f"{peer['instance']}/{peer['dp_rank']}/{peer['rank']}"
                ends[peer["half"]][key] = peer["bytes_moved"]
            (engine,) = worker["engines"]
            assert engine["connected_s"] > 0 and engine["pid"] > 0
    return ends


@pytest.mark.slow
def test_status_shows_each_pair_with_its_bytes_at_both_ends_and_the_rate_of_a_moving_room(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    mover = threading.Thread(target=lambda: [place.move(300) for _ in iter(over.is_set, True)])

    def moved() -> bool:
        code, found = statuses(place, capsys)
        assert (code, found["ready"], found["agents_ready"], found["engines_registered"]) == (0, "True", 2, 2)
        return found["gb_per_s"] > 0

    mover.start()
    try:
        wait_for(moved, what="a rate above 0")
    finally:
        over.set()
        mover.join()

    def still() -> dict[str, dict[tuple[str, str], int]] | None:
        """Return the bytes of each pair at both ends, once they are the same and nothing moves."""
        code, found = statuses(place, capsys)
        assert (code, found["worst"]) == (0, "")
        ends = ends_of(found)
        same = ends["source"] == {(mine, other): count for (other, mine), count in ends["target"].items()}
        return ends if same and found["gb_per_s"] == 0 else None

    ends = wait_for(still, what="the last bytes at both ends")
    assert sorted(ends["source"]) == [("traced-2/0/0", "traced-1/0/0"), ("traced-2/0/1", "traced-1/0/0")]
    assert min(ends["source"].values()) > 0
    assert main(place.words("status --interval 0.1")) == 0
    text = capsys.readouterr().out
    for line in ("worker traced-2/0/1: ready", "engine traced-1 rank 0: TP 1", "to traced-1/0/0: staged over Loopback"):
        assert line in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_a_room_that_waits_and_an_agent_that_is_silent_are_shown_and_the_latter_fails(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    request = Request(place.source, place.target, 64)
    request.claim()

    def waits() -> dict:
        code, found = statuses(place, capsys, "--agent", f"http://{HOST}:1")
        assert (code, found["ready"], found["agents_ready"], found["agents_wanted"]) == (1, "False", 2, 3)
        assert found["worst"].startswith(
            f"agent on http://{HOST}:1 is silent: the agent at http://{HOST}:1 cannot be reached"
        )
        rooms = [
            room
            for agent in found["agents"]
            if agent["report"]
            for w in agent["report"]["workers"]
            for room in w["oldest_rooms"]
        ]
        return next((room for room in rooms if (room["room"], room["half"]) == (room_name(request.room), "target")), {})

    room = wait_for(waits, what="the claimed room")
    assert (room["instance"], room["state"], room["tokens_wanted"]) == ("traced-2", "open", 64)
    request.offer()
    request.arrives()


@pytest.mark.slow
@pytest.mark.parametrize("output", ["json", "table"])
def test_watching_prints_one_snapshot_after_the_other_until_it_is_interrupted(place: Place, output: str) -> None:
    words = place.words(f"status --watch --interval 0.1 -o {output}")
    with subprocess.Popen(
        [sys.executable, "-m", "longshore_cli.main", *words], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        if output == "json":
            for line in (run.stdout.readline() for _ in range(2)):
                assert len(json.loads(line)["deployments"][0]["agents"]) == 2
        else:
            shown = "".join(iter(run.stdout.readline, "\n"))
            assert run.stdout.readline().split(":")[0] == shown.split(":")[0]
        run.send_signal(signal.SIGINT)
        run.stdout.read()
    assert run.returncode == 0
