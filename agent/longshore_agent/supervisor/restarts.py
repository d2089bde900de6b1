"""Counts the lives of each rank's worker, and computes how long the rank waits for the next one after a crash.

Called by the supervisor, which refuses an engine with the wait as a hint. Pure: time is an argument. The first restart
after a crash comes at once. A crash loop waits longer each time, because a start costs processor time and, on a
GPU, a context and staging memory besides the engine's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from longshore_agent.status.snapshot import LATELY_S
from longshore_wire.effects import PeerId

# A worker that served its engine for this long is not in a crash loop: it served far longer than it started.
STEADY_S = 10.0
# After this many deaths within a minute, the agent is unready until the last death is a minute old.
DEATHS_MAX = 3
DYING_S = 60.0
# Ranks kept; the rank whose worker died first is dropped first.
RANKS_MAX = 4096
# Restarts of the last LATELY_S that are counted.
LATELY_MAX = 1000


@dataclass(slots=True)
class _Rank:
    count: int = 0
    crash_count: int = 0  # in a row
    waits_until_s: float = 0.0
    why: str = ""
    deaths_s: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS_MAX))
    is_dying: bool = False


class Restarts:
    """The restarts of all ranks. `wait_min_s`: wait after the second crash in a row, doubled up to `wait_max_s`."""

    def __init__(self, *, wait_min_s: float, wait_max_s: float) -> None:
        self._wait_min_s = wait_min_s
        self._wait_max_s = wait_max_s
        self._ranks: dict[PeerId, _Rank] = {}
        self._lately_s: deque[float] = deque(maxlen=LATELY_MAX)
        self.total = 0

    def replaced(self, key: PeerId, now_s: float) -> None:
        """Count a worker that ended on purpose so that another one takes its place."""
        self.total += 1
        self._lately_s.append(now_s)
        self._rank(key).count += 1

    def died(self, key: PeerId, served_s: float, why: str, now_s: float) -> None:
        """Count a worker that died after it had served its engine for `served_s`."""
        self.replaced(key, now_s)
        self.not_started(key, why, now_s, served_s)
        deaths_s = self._rank(key).deaths_s
        deaths_s.append(now_s)
        if len(deaths_s) == DEATHS_MAX and now_s - deaths_s[0] <= DYING_S:
            self._rank(key).is_dying = True

    def not_started(self, key: PeerId, why: str, now_s: float, served_s: float = 0.0) -> None:
        """Let the rank wait: its worker could not start, or died after it had served its engine for `served_s`."""
        rank = self._rank(key)
        rank.crash_count = 1 if served_s >= STEADY_S else rank.crash_count + 1
        rank.why = why
        doublings = min(rank.crash_count - 2, 32)
        wait_s = min(self._wait_min_s * 2**doublings, self._wait_max_s) if doublings >= 0 else 0.0
        rank.waits_until_s = now_s + wait_s

    def starting(self, key: PeerId, now_s: float) -> None:
        """Forget the crashes of a rank whose engine stayed away for longer than any wait."""
        found = self._ranks.get(key)
        if found is not None and now_s - found.waits_until_s >= self._wait_max_s:
            found.crash_count = 0

    def count(self, key: PeerId) -> int:
        """Return how many workers of a rank had a successor."""
        found = self._ranks.get(key)
        return found.count if found is not None else 0

    def lately(self, now_s: float) -> int:
        """Return how many workers were restarted in the last LATELY_S."""
        while self._lately_s and now_s - self._lately_s[0] > LATELY_S:
            self._lately_s.popleft()
        return len(self._lately_s)

    def dying(self, now_s: float) -> tuple[str, ...]:
        """Return a text for each rank whose workers die again and again."""
        for rank in self._ranks.values():
            rank.is_dying = rank.is_dying and now_s - rank.deaths_s[-1] <= DYING_S
        return tuple(
            f"the worker of {key.instance} rank {key.rank} has died {DEATHS_MAX} times within a minute, last because {rank.why}"
            for key, rank in self._ranks.items()
            if rank.is_dying
        )

    def wait_s(self, key: PeerId, now_s: float) -> float:
        """Return how long to wait before the next worker of a rank starts; 0: start one now."""
        found = self._ranks.get(key)
        return max(0.0, found.waits_until_s - now_s) if found is not None else 0.0

    def told(self, key: PeerId, now_s: float) -> str:
        """Return the text for an engine that has to wait."""
        rank = self._ranks[key]
        return (
            f"the worker of {key.instance} rank {key.rank} ended {rank.crash_count} times in a row ({rank.why}): "
            f"the next one starts in {self.wait_s(key, now_s):.1f} s"
        )

    def _rank(self, key: PeerId) -> _Rank:
        rank = self._ranks.pop(key, None) or _Rank()
        self._ranks[key] = rank
        while len(self._ranks) > RANKS_MAX:
            del self._ranks[next(iter(self._ranks))]
        return rank
