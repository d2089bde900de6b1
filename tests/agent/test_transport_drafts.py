"""Tests the contract for a write between its draft and its start, for each transport, with a second process as the peer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from agent_fleet import over
from transport_pair import KINDS, POISON, REGION_BYTES, Pair
from transport_peer import finish

from longshore_agent.errors import TransportError
from longshore_agent.transports import nixl
from longshore_agent.transports.base import Pieces, Selection, Write, WriteState
from longshore_agent.transports.state import Regions

SIZE = 4096
UNTOUCHED = bytes([POISON]) * SIZE


@pytest.fixture(params=over(*sorted(KINDS, key=lambda kind: kind != "nixl-shm")))
def fresh(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A separate pair for each test; its target is poisoned everywhere."""
    pair = Pair(request.param, f"shared-{request.param}")
    yield pair
    pair.close()


def pieces(pair: Pair, place: int = 0, target: int | None = None) -> Pieces:
    """Return the piece number `place`, of one page, to the same place of the target."""
    offset = place * SIZE
    return Pieces.one(pair.source.ctypes.data + offset, (pair.target if target is None else target) + offset, SIZE)


def draft(pair: Pair, place: int = 0, notice: bytes = b"") -> Write:
    return pair.transport.draft(pair.name, pieces(pair, place), notice)


def assert_failed_untouched(pair: Pair, write: Write, why: str) -> None:
    """Check that a write has ended and the target has none of its bytes."""
    assert pair.transport.state(write) is WriteState.FAILED
    assert why in write.error
    assert pair.transport.release(write)
    assert pair.peer.read(0, 0, SIZE) == UNTOUCHED


def test_drafts_land_with_their_notices_once_they_are_started_and_one_that_is_given_back_never_does(
    fresh: Pair,
) -> None:
    drafts = [draft(fresh, place, f"slab {place}".encode()) for place in range(6)]
    assert [fresh.transport.state(each) for each in drafts] == [WriteState.DRAFT] * 6
    given_back = drafts.pop()
    assert fresh.transport.release(given_back)
    assert fresh.transport.release(given_back)
    assert fresh.transport.state(given_back) is WriteState.FAILED
    assert fresh.peer.read(0, 0, 6 * SIZE) == 6 * UNTOUCHED
    for each in drafts:
        fresh.transport.start(each)
    assert [finish(fresh.transport, each) for each in drafts] == [WriteState.DONE] * 5
    assert all(fresh.transport.release(each) for each in drafts)
    assert sorted(fresh.notices(5)) == fresh.told(*(f"slab {place}".encode() for place in range(5)))
    assert fresh.peer.read(0, 0, 6 * SIZE) == fresh.source[: 5 * SIZE].tobytes() + UNTOUCHED


def test_a_draft_that_is_never_started_holds_up_neither_other_writes_nor_a_probe_nor_the_end(fresh: Pair) -> None:
    draft(fresh)
    fresh.transport.probe_wire(fresh.name, fresh.source.ctypes.data + SIZE, fresh.target + SIZE, SIZE)
    assert fresh.write(2 * SIZE, fresh.target + 2 * SIZE, SIZE) is WriteState.DONE
    assert fresh.peer.read(0, 0, SIZE) == UNTOUCHED
    fresh.transport.close()


def test_a_write_is_started_once(fresh: Pair) -> None:
    write = draft(fresh)
    fresh.transport.start(write)
    with pytest.raises(AssertionError):
        fresh.transport.start(write)
    assert finish(fresh.transport, write) is WriteState.DONE
    with pytest.raises(AssertionError):
        fresh.transport.start(write)
    assert fresh.transport.release(write)


def test_bytes_are_those_that_are_there_at_the_start(fresh: Pair) -> None:
    write = draft(fresh)
    fresh.source[:SIZE] = 7
    fresh.transport.start(write)
    assert finish(fresh.transport, write) is WriteState.DONE
    assert fresh.peer.read(0, 0, SIZE) == bytes([7]) * SIZE


def test_starting_a_draft_looks_nothing_up_again(fresh: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        raise AssertionError

    chosen = pieces(fresh)
    write = fresh.transport.draft(fresh.name, chosen, b"")
    for each in chosen:
        each[:] = 0
    monkeypatch.setattr(Regions, "stray", look_up)
    monkeypatch.setattr(nixl, "rows_of", look_up)
    with pytest.raises(AssertionError):
        draft(fresh, 1)
    fresh.transport.start(write)
    assert finish(fresh.transport, write) is WriteState.DONE
    assert fresh.peer.read(0, 0, SIZE) == fresh.source[:SIZE].tobytes()


def test_parts_of_a_list_are_drafted_without_another_look_up(fresh: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        raise AssertionError

    columns = [np.concatenate(each) for each in zip(*(pieces(fresh, place) for place in range(4)), strict=True)]
    prepared = fresh.transport.prepare(fresh.name, Pieces(*columns))
    monkeypatch.setattr(Regions, "stray", look_up)
    monkeypatch.setattr(nixl, "rows_of", look_up)
    write = fresh.transport.draft(fresh.name, Selection(prepared, np.array([1, 3], dtype=np.int32)), b"")
    assert fresh.peer.read(0, 0, 4 * SIZE) == 4 * UNTOUCHED
    fresh.transport.start(write)
    assert finish(fresh.transport, write) is WriteState.DONE
    assert fresh.transport.release(write)
    fresh.transport.release_prepared(prepared)
    source = fresh.source[: 4 * SIZE].tobytes()
    landed = UNTOUCHED + source[SIZE : 2 * SIZE] + UNTOUCHED + source[3 * SIZE :]
    assert fresh.peer.read(0, 0, 4 * SIZE) == landed


def test_a_part_of_a_list_that_was_released_or_made_for_another_life_is_refused(fresh: Pair) -> None:
    selection = Selection(fresh.transport.prepare(fresh.name, pieces(fresh)), np.array([0], dtype=np.int32))
    again = fresh.start_peer(f"shared-{fresh.kind}-peer")
    target = again.ask("register", length=REGION_BYTES, fill=POISON)
    assert fresh.transport.connect(again.metadata()) == fresh.name
    with pytest.raises(TransportError, match="another life"):
        fresh.transport.draft(fresh.name, selection, b"")
    prepared = fresh.transport.prepare(fresh.name, pieces(fresh, target=target))
    fresh.transport.release_prepared(prepared)
    with pytest.raises(TransportError, match="released"):
        fresh.transport.draft(fresh.name, Selection(prepared, selection.indices), b"")
    assert again.read(0, 0, SIZE) == UNTOUCHED


def test_a_draft_whose_peer_was_disconnected_fails_when_it_is_started_also_if_it_is_back(fresh: Pair) -> None:
    gone, back = draft(fresh), draft(fresh)
    fresh.transport.disconnect(fresh.name)
    fresh.transport.start(gone)
    assert_failed_untouched(fresh, gone, "disconnected")
    fresh.transport.connect(fresh.peer.metadata())
    fresh.transport.start(back)
    assert_failed_untouched(fresh, back, "disconnected")
    assert fresh.write(0, fresh.target, SIZE) is WriteState.DONE
    assert fresh.peer.read(0, 0, SIZE) == fresh.source[:SIZE].tobytes()


def test_a_draft_of_a_closed_transport_fails_when_it_is_started_and_can_be_given_back(fresh: Pair) -> None:
    started, given_back = draft(fresh), draft(fresh)
    # UCX prints a line if its peer goes while the two still connect.
    assert fresh.write(SIZE, fresh.target + SIZE, SIZE) is WriteState.DONE
    fresh.transport.close()
    fresh.transport.start(started)
    assert_failed_untouched(fresh, started, "closed")
    assert fresh.transport.release(given_back)
    assert fresh.transport.state(given_back) is WriteState.FAILED


def test_a_draft_from_before_its_peers_newer_metadata_lands_where_it_belongs(fresh: Pair) -> None:
    write = draft(fresh)
    more = fresh.peer.ask("register", length=SIZE, fill=POISON)
    assert fresh.transport.connect(fresh.peer.metadata()) == fresh.name
    fresh.transport.start(write)
    assert finish(fresh.transport, write) is WriteState.DONE
    assert fresh.transport.release(write)
    assert fresh.peer.read(0, 0, SIZE) == fresh.source[:SIZE].tobytes()
    assert fresh.write(SIZE, more, SIZE) is WriteState.DONE
