"""Ports of ranks, which the next life of a killed agent must find again."""

from __future__ import annotations

from pathlib import Path

import pytest

from longshore_agent.supervisor.ports import FILE_NAME, PORTS_MAX, Ports
from longshore_agent.supervisor.slots import SlotKey

ONE, TWO = SlotKey("one", 0, 0), SlotKey("two", 0, 3)


def test_the_next_life_gives_a_rank_the_port_that_it_had(tmp_path: Path) -> None:
    ports = Ports(tmp_path, 0)
    assert ports.choose(ONE, ()) == 0
    ports.note(ONE, 41000)
    ports.note(TWO, 41001)
    ports.note(TWO, 41002)
    after = Ports(tmp_path, 0)
    assert (after.choose(ONE, ()), after.choose(TWO, ())) == (41000, 41002)


def test_a_port_at_which_nobody_could_listen_is_not_given_again(tmp_path: Path) -> None:
    ports = Ports(tmp_path, 0)
    ports.note(ONE, 41000)
    ports.forget(ONE)
    assert ports.choose(ONE, ()) == Ports(tmp_path, 0).choose(ONE, ()) == 0


def test_the_lowest_port_that_no_other_rank_has_is_given_where_a_first_one_is_set(tmp_path: Path) -> None:
    ports = Ports(tmp_path, 7000)
    assert ports.choose(ONE, ()) == 7000
    ports.note(ONE, 7000)
    assert ports.choose(TWO, [ONE]) == 7001


def test_an_agent_that_ends_in_order_leaves_no_file(tmp_path: Path) -> None:
    ports = Ports(tmp_path, 0)
    ports.note(ONE, 41000)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    ports.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("junk", [b"", b"[", b"\xff\xfe", b"{}", b'[["one",0,0,99999]]', b'[["one",0,0,-1]]'])
def test_a_file_that_says_nothing_of_use_is_as_none(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(junk)
    assert Ports(tmp_path, 0).choose(ONE, ()) == 0


def test_the_oldest_ports_are_forgotten_first(tmp_path: Path) -> None:
    ports = Ports(tmp_path, 0)
    ports.note(ONE, 41000)
    for rank in range(PORTS_MAX):
        ports._ports[SlotKey("many", 0, rank)] = 1
    ports.note(TWO, 41001)
    assert (ports.choose(ONE, ()), ports.choose(TWO, ())) == (0, 41001)
