"""Tests that times of several hosts are read by one clock, and that the remaining uncertainty is told."""

from __future__ import annotations

import itertools

import pytest

from longshore_cli.rooms.clocks import Correction, Exchange, Host, corrections

SHIFT_NS = 7_000_000_000


def exchange(sent_ns: int, there_ns: int, work_ns: int, back_ns: int, *, shift_ns: int = 0) -> Exchange:
    """Return a request whose way there and back take these times, with an agent whose clock is `shift_ns` ahead."""
    received_ns = sent_ns + there_ns
    return Exchange(sent_ns, received_ns + shift_ns, received_ns + work_ns + shift_ns, received_ns + work_ns + back_ns)


def near(sent_ns: int = 100) -> Exchange:
    return exchange(sent_ns, 50, 1000, 50)


def test_hosts_with_one_boot_id_have_one_clock_and_need_no_correction() -> None:
    hosts = [Host("a", [near()]), Host("a", [exchange(900, 1_000_000, 5, 3)])]
    assert corrections(hosts) == [Correction(0, 0), Correction(0, 0)]


@pytest.mark.parametrize(("there_ns", "back_ns"), list(itertools.product([10, 5000, 90_000], repeat=2)))
@pytest.mark.parametrize("shift_ns", [SHIFT_NS, -SHIFT_NS])
def test_a_shifted_clock_is_corrected_within_the_uncertainty_that_is_told(there_ns, back_ns, shift_ns) -> None:
    far = Host("b", [exchange(10**12, there_ns, 300_000, back_ns, shift_ns=shift_ns)])
    first, second = corrections([Host("a", [near()]), far])
    assert first == Correction(0, 0)
    assert abs(second.shift_ns - shift_ns) <= second.uncertainty_ns
    assert second.uncertainty_ns <= (there_ns + back_ns) // 2 + 51


def test_the_shortest_round_trip_of_several_requests_counts_without_the_time_of_the_answers_work() -> None:
    exchanges = [
        exchange(0, 80_000, 10, 10, shift_ns=SHIFT_NS),
        exchange(10**6, 400, 5_000_000, 600, shift_ns=SHIFT_NS),
        exchange(10**7, 10, 10, 70_000, shift_ns=SHIFT_NS),
    ]
    _, found = corrections([Host("a", [near()]), Host("b", exchanges)])
    assert found == Correction(SHIFT_NS - 100, 500 + 50)


def test_agents_of_one_host_share_the_best_request_to_any_of_them() -> None:
    worse = Host("b", [exchange(0, 90_000, 10, 10, shift_ns=SHIFT_NS)])
    better = Host("b", [exchange(0, 20, 10, 20, shift_ns=SHIFT_NS)])
    found = corrections([Host("a", [near()]), worse, better])
    assert found[1] == found[2] == Correction(SHIFT_NS, 70)


def test_hosts_that_tell_no_boot_id_are_not_taken_for_one_host() -> None:
    shifted = Host("", [exchange(0, 20, 10, 20, shift_ns=SHIFT_NS)])
    found = corrections([Host("", [near()]), shifted])
    assert found == [Correction(0, 0), Correction(SHIFT_NS, 70)]
