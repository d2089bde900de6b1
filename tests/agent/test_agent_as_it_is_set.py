"""Compares a real agent whose settings all differ from the defaults with one that has only defaults, from outside."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from agent_fleet import World
from agent_world import START_LIMIT_S, Agent, Request, wait_for

from longshore_agent.control import curve
from longshore_client import Half, HelloRefused
from longshore_spec.agent_config import (
    AgentConfig,
    Attention,
    Control,
    Decode,
    Deployment,
    Dtype,
    Model,
    Prefill,
    PrefillStaging,
    dump,
)
from longshore_wire.addresses import main_address
from longshore_wire.names import room_name

# A loopback address other than an agent's default.
HOST = "127.0.0.2"
ANSWER_LIMIT_S = 60.0
TOKEN = "s3cret"
# An engine that ends when it is refused.
GONE = """
import sys
import longshore_client as ls
layout = ls.KVLayout(ls.ModelShape.kv(layers=4, kv_heads=12, head_dim=32, element_bytes=4), ls.Parallel(), page_size=16)
ls.connect(sys.argv[1], instance=sys.argv[2], layout=layout, roles=(ls.Half.TARGET,))
"""


@dataclass
class Place:
    """Two agents after the same work."""

    world: World
    given: Agent
    default: Agent
    http_port: int
    worker_port: int
    trust: ssl.SSLContext

    def page(self, agent: Agent, path: str, **headers: str) -> httpx.Response:
        verify = self.trust if agent is self.given else True
        with httpx.Client(
            base_url=agent.http, verify=verify, trust_env=False, headers=headers, timeout=ANSWER_LIMIT_S
        ) as client:
            return client.get(path)

    def told(self, agent: Agent, path: str) -> dict:
        return wait_for(lambda: self._answer(agent, path), what=path)

    def _answer(self, agent: Agent, path: str) -> dict | None:
        answer = self.page(agent, path, authorization=f"Bearer {TOKEN}")
        # An answer lacks a worker that got no processor time for a while.
        return answer.json() if answer.status_code == 200 else None


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    for first in range(20_000, 32_000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return first
    raise AssertionError("no ports are free")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("set")
    http_port = free_ports(8)
    worker_port = http_port + 1
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    issued.cert_chain_pems[0].write_to_path(directory / "chain.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    (directory / "token").write_text(TOKEN)
    (directory / "token").chmod(0o600)
    curve.write(curve.generate(), directory)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    world = World(directory, LONGSHORE_KEYS_DIRECTORY=str(directory))
    given = {
        "node": "node-7",
        "bind_host": HOST,
        "http_port": http_port,
        "worker_port": worker_port,
        "http_token_file": directory / "token",
        "http_certificate_file": directory / "chain.pem",
        "http_key_file": directory / "key.pem",
        "log_level": "warning",
        "self_test_bytes": 3 << 20,
        "spans_max": 2,
        "chunk_tokens": 1000,
        "direct": True,
    }
    try:
        agent = world.agent("given", **{f"LONGSHORE_{name.upper()}": str(value) for name, value in given.items()})
        yield Place(world, agent, world.agent("default"), http_port, worker_port, trust)
    finally:
        world.close()


@pytest.mark.shows(
    "agent.node",
    "agent.bind_host",
    "agent.http_port",
    "agent.http_token_file",
    "agent.http_certificate_file",
    "agent.http_key_file",
    "field.agents.httpPort",
)
def test_pages_are_served_by_https_at_the_given_address_to_who_has_the_token(place: Place) -> None:
    assert place.given.http == f"https://{HOST}:{place.http_port}"
    assert place.page(place.given, "/v1/status").status_code == 401
    assert place.told(place.given, "/v1/status")["node"] == "node-7"
    assert place.default.http.startswith("http://127.0.0.1:")
    assert place.page(place.default, "/v1/status").json()["node"] == ""


@pytest.mark.shows("agent.run_directory")
def test_an_agent_says_where_it_is_in_its_run_directory(place: Place) -> None:
    for agent in (place.given, place.default):
        # The file is there once the pages are served.
        http = agent.http
        state = json.loads((agent.directory / "agent.json").read_bytes())
        assert (state["socket"], state["http"]) == (str(agent.directory / "agent.sock"), http)
        assert Path(state["socket"]).is_socket()


@pytest.mark.shows("agent.bind_host", "agent.worker_port", "field.agents.workerPort")
def test_a_worker_listens_at_the_given_address_and_port(place: Place) -> None:
    engine = place.world.engine(place.given, "ported").result()
    (rank,) = engine.endpoint().ranks
    assert main_address(rank.address) == f"{HOST}:{place.worker_port}"


@pytest.mark.shows("agent.self_test_bytes")
def test_the_self_test_moves_as_many_bytes_as_are_set(place: Place) -> None:
    for agent, moved_bytes in ((place.given, 3 << 20), (place.default, 1 << 20)):
        wait_for(lambda agent=agent: place.told(agent, "/v1/status")["self_test"], START_LIMIT_S, "the self-test")
        assert place.told(agent, "/v1/status")["self_test"]["bytes_moved"] == moved_bytes


@pytest.mark.shows("agent.chunk_tokens")
def test_a_plan_counts_the_writes_of_a_chunk_of_the_set_length(place: Place) -> None:
    query = "/v1/plan?layers=80&kv_heads=8&head_dim=128&element_bytes=2&prefill_tp=4&decode_tp=1"
    given, default = place.told(place.given, query), place.told(place.default, query)
    assert given["slices_per_chunk"] * 8192 == default["slices_per_chunk"] * 1000


@pytest.mark.shows("agent.log_level")
def test_lines_below_the_set_level_are_not_logged(place: Place) -> None:
    for agent in (place.given, place.default):
        assert agent.http
        place.world.engine(agent, "logged").result()
    assert " INFO " in place.default.log()
    assert " INFO " not in place.given.log()


def moved(place: Place, agent: Agent, name: str) -> Request:
    """Move a room between two engines of one agent."""
    source, target = (place.world.engine(agent, f"{name}-{end}").result() for end in ("from", "to"))
    each = Request(source, target, 300)
    each.claim()
    each.offer()
    each.arrives()
    return each


@pytest.mark.shows("agent.direct")
def test_engines_of_one_agent_copy_directly_only_where_that_is_set(place: Place) -> None:
    ways = {}
    for agent in (place.given, place.default):
        moved(place, agent, "near")
        text = place.page(agent, "/metrics", authorization=f"Bearer {TOKEN}").text
        ways[agent] = set(re.findall(r'^longshore_slabs_total\{.*way="(\w+)".*\} [1-9]', text, re.MULTILINE))
    assert ways[place.given] == {"direct"}
    assert ways[place.default] and "direct" not in ways[place.default]


@pytest.mark.shows("agent.spans_max")
def test_as_many_spans_are_kept_as_are_set(place: Place) -> None:
    counts = {}
    for agent in (place.given, place.default):
        each = moved(place, agent, "spanned")
        page = f"/v1/rooms/{room_name(each.room)}"
        wait_for(lambda: len(place.told(agent, page)["halves"]) == 2, what="an answer of both workers")  # noqa: B023
        counts[agent] = len(place.told(agent, page)["spans"])
    # Two workers, each of which keeps two.
    assert counts[place.given] <= 4 < counts[place.default]


def test_a_room_whose_first_spans_are_gone_names_the_workers_that_lack_them(place: Place) -> None:
    for agent, lacking in ((place.given, {"cut-from/0/0", "cut-to/0/0"}), (place.default, set())):
        each = moved(place, agent, "cut")
        page = f"/v1/rooms/{room_name(each.room)}"
        wait_for(lambda: len(place.told(agent, page)["halves"]) == 2, what="an answer of both workers")  # noqa: B023
        assert set(place.told(agent, page)["incomplete"]) == lacking


@pytest.mark.shows("agent.config_file")
def test_an_agent_does_what_its_config_file_says(tmp_path: Path, place: Place) -> None:
    config = AgentConfig(
        deployment=Deployment(namespace="tests", name="filed"),
        model=Model(attention=Attention.MHA, layers=4, kv_heads=12, head_dim=32, dtype=Dtype.FLOAT32),
        prefill=Prefill(tensor_parallel=1, page_size=16, staging=PrefillStaging(buffer_size=8 << 20, lanes=3)),
        decode=Decode(tensor_parallel=2, page_size=16),
        control=Control(keys_directory=None, http_port=0),
    )
    (tmp_path / "agent.json").write_text(dump(config))
    # Variables override the file.
    free = {"LONGSHORE_DEPLOYMENT": "", "LONGSHORE_LANE_BYTES": "", "LONGSHORE_SLAB_BYTES_MIN": ""}
    agent = place.world.agent("filed", **free, LONGSHORE_CONFIG_FILE=str(tmp_path / "agent.json"))
    assert agent.http
    assert place.told(agent, "/v1/status")["deployment"] == "tests/filed"
    place.world.engine(agent, "fits", roles=[Half.SOURCE]).result()
    wait_for(lambda: (agent.worker("fits") or {}).get("lanes"), what="its lanes")
    assert len(agent.worker("fits")["lanes"]) == 3
    for _ in range(2):
        with pytest.raises(HelloRefused, match=r"decode\.tensorParallel is 1 at the engine and 2 in the deployment"):
            place.world.engine(agent, "does-not", roles=[Half.TARGET]).result()
    # Who looks from outside sees it too, once: the engine, its host, and the field with both values.
    [finding] = [each for each in place.told(agent, "/v1/status")["findings"] if each["code"] == "EngineRefused"]
    text = (
        f"engine does-not/0/0 (target) of host {os.uname().nodename} is refused: decode.tensorParallel is 1 at the engine and "
        "2 in the deployment"
    )
    assert (finding["text"], finding["severity"]) == (text, "error")
    assert agent.log().count(text) == 1
    # An engine that is started again has another name, and its refusals count once.
    for name in ("gone-1", "gone-2"):
        gone = [sys.executable, "-c", GONE, agent.socket, name]
        assert "HelloRefused" in subprocess.run(gone, check=False, capture_output=True, text=True, timeout=100).stderr

    def refused() -> list[str]:
        found = place.told(agent, "/v1/status")["findings"]
        return [each["text"].split()[1] for each in found if each["code"] == "EngineRefused"]

    assert refused() == ["gone-2/0/0"]
    # Another engine for the role came instead.
    place.world.engine(agent, "fits-too", roles=[Half.TARGET], tp=2).result()
    assert refused() == []
    with pytest.raises(HelloRefused):
        place.world.engine(agent, "does-not", roles=[Half.TARGET]).result()
    # The same engine with the declared layout is welcome, and its refusal is forgotten.
    place.world.engine(agent, "does-not", roles=[Half.SOURCE]).result()
    assert not [each for each in place.told(agent, "/v1/status")["findings"] if each["code"] == "EngineRefused"]
