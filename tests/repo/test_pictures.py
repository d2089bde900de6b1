"""Tests that the drawn pictures of pages agree with the code, and that each can be read without seeing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from tree_of_files import ROOT, file_paths, text_files

from longshore_wire import states

PICTURES = [path for path in file_paths() if path.suffix == ".svg"]
NAMESPACE = "{http://www.w3.org/2000/svg}"


def steps(table: Mapping[tuple[Any, Any], Enum], name: str) -> set[str]:
    return {f"{name}: {state.value}, {event.value}, {after.value}" for (state, event), after in table.items()}


def words(picture: Path) -> set[str]:
    root = ET.parse(ROOT / picture).getroot()
    return {"".join(element.itertext()) for element in root.iter(f"{NAMESPACE}text")}


def test_the_picture_of_rooms_has_every_transition_of_the_tables_and_no_other() -> None:
    root = ET.parse(ROOT / "docs/images/room-states.svg").getroot()
    drawn = {element.get("data-step") for element in root.iter() if element.get("data-step")}
    assert drawn == steps(states.SOURCE_ROOM, "source") | steps(states.TARGET_ROOM, "target")
    shown = words(Path("docs/images/room-states.svg"))
    assert {state.value for kind in (states.SourceRoomState, states.TargetRoomState) for state in kind} <= shown


def test_the_picture_of_a_slab_has_the_states_of_one_that_arrives() -> None:
    source = ["WAITING", "WRITING", "WRITTEN", "ACKED"]
    target = ["WANTED", "GRANTED", "LANDED", "DONE"]
    named = {states.SourceSlab[name].value for name in source} | {states.TargetSlab[name].value for name in target}
    assert named <= words(Path("docs/images/slab-life.svg"))
    for table, kind, names in (
        (states.SOURCE_SLAB, states.SourceSlab, source),
        (states.TARGET_SLAB, states.TargetSlab, target),
    ):
        edges = {(before.name, after.name) for (before, _), after in table.items() if isinstance(before, kind)}
        assert set(pairwise(names)) <= edges


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_a_description_needs_no_network_and_is_shown(picture: Path) -> None:
    text = (ROOT / picture).read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert all((root.findtext(f"{NAMESPACE}{name}") or "").strip() for name in ("title", "desc"))
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text
    assert any(f"images/{picture.name})" in page for path, page in text_files() if path.suffix == ".md")
