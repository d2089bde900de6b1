"""The client's ledger of open halves."""

from __future__ import annotations

from scene import DONE, FAILED, RELEASED, event

from longshore_client import (
    Half,
)
from longshore_client.ledger import HalfKey, Ledger
from longshore_wire.engine_messages import (
    Offer,
)


def key_of(room, half=Half.SOURCE):
    return HalfKey(half, "prefill-0", room, 0)


def offer_of(request, room, first_token):
    return (Offer(request, room, 0, first_token, first_token + 4, last=False, pages=b"\0\0\0\0"),)


def test_the_ledger_replays_what_was_accepted_in_order_and_nothing_else():
    ledger = Ledger()
    for request, room in enumerate([1, 2, 1, 3]):
        ledger.sent(key_of(room), request, offer_of(request, room, 4 * request))
    for request, accepted in enumerate([True, False, True]):
        ledger.answered(request, accepted=accepted)
    assert ledger.replay() == [(key_of(1), offer_of(0, 1, 0)), (key_of(1), offer_of(2, 1, 8))]
    assert ledger.get(key_of(2)) is None
    assert len(ledger) == 2
    ledger.gave_up(3)
    assert [e.kind for e in ledger.agent_replaced()] == [FAILED, RELEASED]
    assert len(ledger) == 1


def test_the_ledger_keeps_no_pages_of_what_has_ended_and_nothing_of_what_was_released():
    ledger = Ledger()
    ledger.sent(key_of(1), 1, offer_of(1, 1, 0))
    assert ledger.take_event(event(DONE, 1))  # before the answer to the call
    ledger.answered(1, accepted=True)
    assert ledger.replay() == []
    assert not ledger.take_event(event(FAILED, 1))
    assert ledger.take_event(event(RELEASED, 1))
    assert not ledger.take_event(event(RELEASED, 1))
    assert (len(ledger), len(ledger._requests), ledger.stale_event_count) == (0, 0, 2)
