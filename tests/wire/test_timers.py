"""Tests the sessions' timers against the plain rule: a key is due at the last time that was set for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.timers import Timers

KEYS = st.integers(0, 3)
TIMES = st.integers(0, 12)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TIMES),
        st.tuples(st.just("clear"), KEYS, st.just(0)),
        st.tuples(st.just("pop"), st.just(0), TIMES),
    ),
    max_size=40,
)


@given(CALLS)
def test_a_key_is_due_at_the_last_time_set_for_it_and_once(calls: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    plain: dict[int, int] = {}
    for name, key, time in calls:
        if name == "set":
            timers.set(key, time)
            plain[key] = time
        elif name == "clear":
            timers.clear(key)
            plain.pop(key, None)
        else:
            popped = timers.pop(time)
            times = [plain[each] for each in popped]
            assert times == sorted(times)
            assert sorted(popped) == sorted(each for each, due in plain.items() if due <= time)
            for each in popped:
                del plain[each]
        assert len(timers) == len(plain)
        assert timers.next_ns() == min(plain.values(), default=None)


def test_deadlines_that_are_cleared_and_set_again_leave_nothing_behind() -> None:
    timers: Timers[int] = Timers()
    for count in range(10_000):
        timers.set(1, count)
        timers.clear(1)
        timers.set(2, 10_000 + count)
    assert len(timers._heap) < 100
    assert timers.pop(30_000) == [2]
