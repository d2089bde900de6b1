"""Tests the file by which other programs find an agent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from longshore_agent.main import STATE_FILE, AgentState, write_state


def test_who_reads_it_while_it_is_written_sees_all_of_it_or_what_was_there_before(tmp_path: Path) -> None:
    state = AgentState(1, "/run/engines.sock", "http://127.0.0.1:80")
    path = tmp_path / STATE_FILE
    path.write_bytes(b"of a life before")
    with path.open("rb") as reader:
        assert write_state(state, tmp_path) == path
        assert reader.read() == b"of a life before", "a reader would see a part of it"
    assert msgspec.json.decode(path.read_bytes(), type=AgentState) == state
    assert [each.name for each in tmp_path.iterdir()] == [STATE_FILE]
