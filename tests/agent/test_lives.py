"""Ports and epochs of ranks, kept for the next life of a worker or of a killed agent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from longshore_agent.supervisor.lives import FILE_NAME, PORTS_MAX, Lives
from longshore_wire.effects import PeerId

PORT = b'{"epoch":0,"ports":[["one",0,0,%d]]}'
ONE, TWO = PeerId("one", 0, 0), PeerId("two", 0, 3)


def test_the_next_life_gives_a_rank_the_port_that_it_had(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 0)
    assert lives.choose_port(ONE, ()) == 0
    lives.note_port(ONE, 41000)
    lives.note_port(TWO, 41001)
    lives.note_port(TWO, 41002)
    after = Lives(tmp_path, 0)
    assert (after.choose_port(ONE, ()), after.choose_port(TWO, ())) == (41000, 41002)


def test_a_port_at_which_nobody_could_listen_is_not_given_again(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 0)
    lives.note_port(ONE, 41000)
    lives.forget_port(ONE)
    assert lives.choose_port(ONE, ()) == Lives(tmp_path, 0).choose_port(ONE, ()) == 0


def test_the_lowest_port_that_no_other_rank_has_is_given_where_a_first_one_is_set(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 7000)
    assert lives.choose_port(ONE, ()) == 7000
    lives.note_port(ONE, 7000)
    assert lives.choose_port(TWO, [ONE]) == 7001


def test_epochs_grow_over_lives_of_the_agent_although_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path, 0)
    before_ns = time.time_ns()
    first = lives.next_epoch()
    assert before_ns <= first <= time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: first - 86_400_000_000_000)
    second = lives.next_epoch()
    after = Lives(tmp_path, 0)
    assert first < second < after.next_epoch() < after.next_epoch()


@pytest.mark.parametrize(
    "junk", [b"", b"[", b"\xff\xfe", b"{}", PORT % 99999, PORT % -1, b'{"epoch":-1}', b'{"epoch":1e30}']
)
def test_a_file_that_says_nothing_of_use_is_as_none(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(junk)
    lives = Lives(tmp_path, 0)
    assert lives.choose_port(ONE, ()) == 0
    assert lives.next_epoch() <= time.time_ns()


def test_the_oldest_ports_are_forgotten_first(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 0)
    lives.note_port(ONE, 41000)
    for rank in range(PORTS_MAX):
        lives._ports[PeerId("many", 0, rank)] = 1
    lives.note_port(TWO, 41001)
    assert (lives.choose_port(ONE, ()), lives.choose_port(TWO, ())) == (0, 41001)
