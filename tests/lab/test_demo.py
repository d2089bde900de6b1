"""Tests `longshore demo`: its results are true, it fails at any difference, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from left_behind import marked

from longshore_cli.main import main
from longshore_lab.demo.compare import check_bytes, check_control, check_digests, check_tokens, whole_rows
from longshore_lab.demo.counts import Counts, PairResult, Transfer, wires_of
from longshore_lab.demo.errors import DifferenceError
from longshore_lab.demo.prompts import Request
from longshore_lab.demo.table import rendered
from longshore_lab.engine.commands import Dumped, HeadDigest

# An agent drains for some seconds at most, on idle cores.
END_S = 300
DEMO = ["-m", "longshore_cli.main", "demo", "--quick"]
# Alters one token's KV on decode's side after everything has arrived, as a fault of a transport would.
TAMPERED = """
import sys
from longshore_lab.demo.pair import PairRun
from longshore_cli.main import main
honest = PairRun._arrived
def tampered(self, way, rooms):
    honest(self, way, rooms)
    total = rooms[1].request.total
    self._decode.zero(rooms[1].decode_pages, total - 1, total)
PairRun._arrived = tampered
sys.exit(main(["demo", "--quick", "--backend", "Loopback"]))
"""
# Alters one byte of a recurrent state at decode, before it is compared.
TAMPERED_STATE = """
import sys
from longshore_lab.test_engine.instance import Instance
from longshore_cli.main import main
honest = Instance._compared
def tampered(self, *room):
    state = next(pool for pool in self._ranks[0].pools if pool.layout.name == "ssm")
    place = state.geometry.planes[3].offset
    state.memory.write(place, bytes([state.memory.read(place, 1)[0] ^ 1]))
    return honest(self, *room)
Instance._compared = tampered
sys.exit(main(["demo", "--quick", "--backend", "Loopback"]))
"""


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_the_demo_moves_kv_over_both_transports_compares_it_and_leaves_nothing(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    with marked([*DEMO, "--pairs", "2:3", "--json", str(found)]) as run:
        said = run.read_rest()
        assert run.process.returncode == 0, said
        assert run.left() == []
    results = json.loads(found.read_bytes())
    nixl, mooncake = results["pairs"]
    assert [(pair["name"], pair["backend"]) for pair in (nixl, mooncake)] == [
        ("TP2 -> TP3", "NIXL"),
        ("TP2 -> TP3", "Mooncake"),
    ]
    for pair, rooms, wire in ((nixl, 3, "SharedMemory"), (mooncake, 2, "TCP")):
        assert len(pair["ring_rounds"]) == 3
        assert min(pair["ring_rounds"]) >= 3
        # Two float32 values for each of 6 layers, 12 heads and 64 elements.
        assert pair["bytes_compared"] == (911 - 37) * 2 * 6 * 12 * 64 * 4
        assert pair["tokens_compared"] == rooms * 8
        staged, slices, *host = pair["transfers"]
        # Decode's host memory is shown with the first transport.
        assert [transfer["way"] for transfer in host] == (["host"] if pair is nixl else [])
        assert all(transfer["payload_bytes"] == staged["payload_bytes"] for transfer in host)
        assert (staged["way"], slices["way"]) == ("staged", "slices")
        assert staged["rooms"] == rooms
        assert staged["payload_bytes"] == slices["payload_bytes"] > 30e6
        assert staged["counts"]["writes"] == staged["counts"]["pieces"] == staged["counts"]["slabs"]
        assert slices["counts"]["pieces"] > 100 * staged["counts"]["pieces"]
        assert staged["wires"] == slices["wires"] == [wire]
    for name, (first, further) in (("hybrid 2 -> 1", results["requests"][:2]), ("MLA 4 -> 1", results["requests"][2:])):
        assert [(one["name"], one["backend"]) for one in (first, further)] == [(name, "NIXL"), (name, "Mooncake")]
        staged, slices, further_staged = first["transfers"] + further["transfers"]
        assert [one["way"] for one in (staged, slices, further_staged)] == ["staged", "slices", "staged"]
        assert staged["payload_bytes"] == slices["payload_bytes"] == further_staged["payload_bytes"] > 10e6
        assert staged["counts"]["writes"] == staged["counts"]["pieces"] < slices["counts"]["pieces"]
        assert (staged["wires"], further_staged["wires"]) == (["SharedMemory"], ["TCP"])
        assert re.search(f"^{name} +NIXL +staged +1 ", said, re.MULTILINE)
    assert "Everything is equal" in said
    assert "in 3 chunks" in said


@pytest.mark.rest("benches")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (TAMPERED, "room 2: pages of tokens [16, 128) differ in 144 of 144 places"),
        (
            TAMPERED_STATE,
            "hybrid 2 -> 1 by Loopback, staged: room 1: bytes differ at rank 0, cache 'ssm', layer 3, page 1 of 2 of the room, byte 0",
        ),
    ],
)
def test_the_demo_fails_and_names_the_room_where_one_token_or_byte_differs(code: str, fault: str) -> None:
    with marked(["-c", code]) as run:
        said = run.read_rest()
        assert run.process.returncode == 1
        assert f"FAILED: {fault}" in said
        assert "Everything is equal" not in said
        assert run.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment", "status"),
    [
        pytest.param(signal.SIGINT, "prefill begins", 130, marks=pytest.mark.rest("benches")),
        (signal.SIGTERM, "starting 3 agents (Loopback", 143),
    ],
)
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, moment: str, status: int) -> None:
    with marked([*DEMO, "--backend", "Loopback"]) as run:
        run.read_until(moment)
        if number is signal.SIGINT:
            # As from a terminal: every process of the group gets it.
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        said = run.read_rest()
        assert run.process.returncode == status, said
        assert "interrupted" in said
        assert run.left() == []


@pytest.mark.slow
@pytest.mark.rest("benches")
@pytest.mark.parametrize("part", ["agent", "worker"])
def test_a_demo_names_the_agent_or_worker_that_was_killed_and_leaves_nothing(part: str) -> None:
    with marked([*DEMO, "--backend", "Loopback"]) as run:
        run.read_until("prefill begins")
        (path,) = run.directory.glob("*/loopback/decode/agent.json")
        state = json.loads(path.read_bytes())
        with urllib.request.urlopen(f"{state['http']}/v1/status", timeout=END_S) as answer:
            worker = json.load(answer)["workers"][0]
        os.kill(state["pid"] if part == "agent" else worker["pid"], signal.SIGKILL)
        said, _ = run.process.communicate(timeout=END_S)
        assert run.process.returncode == 1, said
        wanted = r"the agent in \S+/decode ended with -9" if part == "agent" else f"the worker {worker['worker']} of"
        assert re.search(f"longshore demo: FAILED: {wanted}", said), said
        assert "Traceback" not in said
        assert run.left() == []


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys, longshore_cli.main, longshore_lab.bench, longshore_lab.demo; print('torch' in sys.modules)"
    with marked(["-c", code]) as run:
        assert run.read_rest().strip() == "False"


def test_pairs_that_cannot_work_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for pairs, said in (("5:1", "divide 12 KV heads"), ("2:2", "unequal"), ("4", "such as 4:1"), ("0:1", "divide")):
        with pytest.raises(SystemExit, match="2"):
            main(["demo", "--pairs", pairs])
        assert said in capsys.readouterr().err


def test_backends_that_are_unknown_or_named_twice_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for backends in ("Pigeon", "NIXL,NIXL", "NIXL,"):
        with pytest.raises(SystemExit, match="2"):
            main(["demo", "--backend", backends])
        assert "NIXL, Mooncake, Loopback" in capsys.readouterr().err


def test_a_prompt_is_cut_into_chunks_that_cover_it() -> None:
    assert Request((0,) * 10, 0, 4).chunks == [(0, 4), (4, 8), (8, 10)]
    assert Request((0,) * 8, 0, 4).chunks == [(0, 4), (4, 8)]
    assert Request((0,) * 3, 0, 3).chunks == [(0, 3)]


class Held:
    """A fake engine with the methods that comparisons use."""

    def __init__(self, digests: list[HeadDigest], dumps: list[Dumped]) -> None:
        self._digests, self._dumps = digests, dumps

    def digest(self, pages: list[int], first: int, end: int) -> list[HeadDigest]:
        return self._digests

    def dump(self, pages: list[int], first: int, end: int) -> list[Dumped]:
        return self._dumps


def dumped(*rows: bytes) -> Dumped:
    return Dumped([2, 2, 1, 1], b"".join(rows))


def test_dumps_of_any_number_of_ranks_come_to_the_same_rows() -> None:
    one = [dumped(b"aaAA", b"bbBB", b"ccCC", b"ddDD")]
    two = [dumped(b"aa", b"bb", b"cc", b"dd"), dumped(b"AA", b"BB", b"CC", b"DD")]
    three = [dumped(b"aaA", b"bbB", b"ccC", b"ddD"), dumped(b"A", b"B", b"C", b"D")]
    assert whole_rows(one) == whole_rows(two) == whole_rows(three) == b"aaAAbbBBccCCddDD"


def test_a_difference_of_one_byte_or_one_head_is_found() -> None:
    digests = [HeadDigest(0, values, head, b"x") for values in (False, True) for head in range(2)]
    near = Held(digests, [dumped(b"aa", b"bb", b"cc", b"dd")])
    check_digests(7, near, [], near, [], (0, 2))
    assert check_bytes(7, near, [], near, [], (0, 2)) == 8
    wrong = [*digests[:3], HeadDigest(0, True, 1, b"y")]
    far = Held(wrong, [dumped(b"aa", b"bb", b"cc", b"dx")])
    with pytest.raises(DifferenceError, match=r"room 7: .* differ in 1 of 4 places; the first is layer 0, V of head 1"):
        check_digests(7, near, [], far, [], (0, 2))
    with pytest.raises(DifferenceError, match="room 7"):
        check_digests(7, near, [], Held(digests[:3], []), [], (0, 2))
    with pytest.raises(DifferenceError, match="room 7"):
        check_bytes(7, near, [], far, [], (0, 2))


def test_other_tokens_fail_and_so_does_a_control_that_changes_nothing() -> None:
    check_tokens(7, [1, 2], (1, 2))
    check_control(7, [1, 3], (1, 2))
    with pytest.raises(DifferenceError, match="room 7"):
        check_tokens(7, [1, 3], (1, 2))
    with pytest.raises(DifferenceError, match="proves nothing"):
        check_control(7, [1, 2], (1, 2))


def test_what_was_copied_directly_went_over_no_wire_whatever_a_probe_said_of_one() -> None:
    def worker(name: str, wire: str, *ways: str) -> dict[str, Any]:
        return {"worker": name, "peers": [{"wire": wire, "ways": list(ways)}]}

    assert wires_of([worker("decode-1/0/0", "Unknown", "direct")], "decode-1") == ()
    assert wires_of([worker("decode-1/0/0", "NVLink", "direct")], "decode-1") == ()
    assert wires_of([worker("decode-1/0/0", "NVLink")], "decode-1") == ()
    status = [worker("decode-1/0/0", "Unknown", "staged"), worker("decode-1/0/1", "NVLink", "direct", "staged")]
    assert wires_of([*status, worker("decode-11/0/0", "TCP", "staged")], "decode-1") == ("NVLink", "Unknown")
    direct = Transfer("direct", 6, Counts(10, 10, 0), 2_000_000_000, (1.0,), ())
    lines = rendered([PairResult("TP4 -> TP1", "Mooncake", (direct,), (3,), (0.2,), 1, 1)]).splitlines()
    assert lines[2].split()[-1] == "none"


def test_the_table_shows_rates_of_the_middle_time_and_the_speed_against_slices() -> None:
    staged = Transfer("staged", 6, Counts(10, 10, 10), 2_000_000_000, (9.0, 1.0, 0.5), ("RDMA",))
    slices = Transfer("slices", 6, Counts(10, 20, 40_000), 2_000_000_000, (4.0,), ("RDMA", "TCP"))
    lines = rendered([PairResult("TP4 -> TP1", "NIXL", (staged, slices), (3,), (0.2,), 1, 1)]).splitlines()
    assert " ".join(lines[0].split()) == "pair backend way rooms slabs writes pieces MB seconds GB/s vs slices wire"
    assert " ".join(lines[2].split()) == "TP4 -> TP1 NIXL staged 6 10 10 10 2000.0 1.000 2.00 4.0x RDMA"
    assert lines[3].split()[-5:] == ["4.000", "0.50", "1.0x", "RDMA,", "TCP"]
