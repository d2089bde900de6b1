"""Counts the metrics of one process, and renders those of all processes for Prometheus.

Each worker and the supervisor has one `Metrics`, which is thread-safe. A worker sends its `snapshot()` to the
supervisor, and the supervisor makes one page of all snapshots with `render`. No I/O.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product

import msgspec

from longshore_agent.status.metric_table import FINDINGS, NO_WIRE, READY, SHOWN_AT_ONCE, TABLE, Kind, Metric
from longshore_spec.findings import CODES
from longshore_spec.status import Finding

# The content type of `render`'s text.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The table bounds the labels. A metric with more series than this has an unbounded label.
SERIES_MAX = 1024
# Metrics with at most this many combinations of labels show all of them from the start, so that rates begin at 0.
_SERIES_SHOWN_AT_ONCE = 8

_ROWS: Mapping[str, Metric] = {row.name: row for row in TABLE}
# More calls than a turn makes.
_KEPT_MAX = 4096
_PROCESS_CPU = "longshore_process_cpu_seconds_total"


def _row(name: str, kind: Kind) -> Metric:
    row = _ROWS.get(name)
    assert row is not None, f"the table has no metric {name}"
    assert row.kind is kind, f"{name} is a {row.kind.value}, not a {kind.value}"
    return row


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One metric with one combination of labels.

    Attributes:
        labels: values in the order of the table's labels.
        value: the value of a counter or gauge; the sum of a histogram.
        buckets: observations in each bucket (not cumulative); the last one is above all bounds. Histograms only.
    """

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


class MetricsSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All series of one process at one moment."""

    series: tuple[Series, ...] = ()

    def value(self, name: str, **labels: str) -> float:
        """Return a counter's or gauge's value, or a histogram's sum; 0 if it was never changed.

        The sum covers all values of labels that are not given.
        """
        return sum(series.value for series in self._matching(name, labels))

    def count(self, name: str, **labels: str) -> int:
        """Return a histogram's number of observations over all values of labels that are not given."""
        return sum(sum(series.buckets) for series in self._matching(name, labels))

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[Series]:
        row = _ROWS[name]
        assert labels.keys() <= set(row.labels), f"{name} has the labels {row.labels}, not {tuple(labels)}"
        wanted = [(index, labels[label]) for index, label in enumerate(row.labels) if label in labels]
        for series in self.series:
            if series.name == name and all(series.labels[index] == value for index, value in wanted):
                yield series


# Counts a value in one series.
Count = Callable[[float], None]


def judged(findings: Iterable[Finding], worker: str, *, ready: bool | None = None) -> Iterator[Series]:
    """Yield the gauges of the findings about one worker. Those about no single worker come with all codes and the agent's readiness.

    Args:
        worker: empty: those about no single worker.
        ready: only for these.
    """
    counts = Counter(finding.code for finding in findings if finding.worker == worker)
    if ready is not None:
        yield Series(READY, (), float(ready))
        counts.update(dict.fromkeys(CODES, 0))
    for code, count in sorted(counts.items()):
        yield Series(FINDINGS, (code,), float(count))


class Metrics:
    """The counts of one process. Asserts that metrics, labels and their values are in the table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[Callable[..., None], tuple[object, ...], dict[str, str | int]]] = deque()
        # By name and labels. Checking them takes longer than counting.
        self._counters: dict[tuple[object, ...], Count] = {}
        self._histograms: dict[tuple[object, ...], Count] = {}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._buckets: dict[str, dict[tuple[str, ...], list[int]]] = {}
        for row in TABLE:
            self._values[row.name] = {}
            self._buckets[row.name] = {}
            combinations = list(product(*row.domains))
            counted = row.kind is not Kind.HISTOGRAM and row.name != READY
            if counted and 0 < len(combinations) <= _SERIES_SHOWN_AT_ONCE:
                self._values[row.name] = dict.fromkeys(combinations, 0)
        for name, shown in SHOWN_AT_ONCE.items():
            self._values[name] = dict.fromkeys(shown, 0)
        # Peers that copy directly have no wire.
        del self._values["longshore_peer_wires"][NO_WIRE,]

    def add(self, name: str, value: float = 1, **labels: str | int) -> None:
        """Add `value`, which is not negative, to a counter."""
        self.counter(name, **labels)(value)

    def counter(self, name: str, **labels: str | int) -> Count:
        """Return what adds a value, which is not negative, to one series of a counter."""
        found = self._counters.get((name, *labels.items()))
        if found is not None:
            return found
        row, lock, values = _row(name, Kind.COUNTER), self._lock, self._values[name]
        with lock:
            key = self._key(row, values, labels)

        def add(value: float) -> None:
            assert value >= 0, f"{name} += {value}"
            with lock:
                values[key] = values.get(key, 0) + value

        self._counters[name, *labels.items()] = add
        return add

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Set a gauge."""
        row = _row(name, Kind.GAUGE)
        with self._lock:
            values = self._values[name]
            values[self._key(row, values, labels)] = value

    def advance(self, name: str, value: float, **labels: str | int) -> None:
        """Raise a counter to `value`, which is counted elsewhere: the ring's rounds, our CPU time."""
        row = _row(name, Kind.COUNTER)
        with self._lock:
            values = self._values[name]
            key = self._key(row, values, labels)
            values[key] = max(values.get(key, 0), value)

    def observe(self, name: str, value: float, **labels: str | int) -> None:
        """Add one observation to a histogram."""
        self.histogram(name, **labels)(value)

    def histogram(self, name: str, **labels: str | int) -> Count:
        """Return what adds an observation to one series of a histogram."""
        found = self._histograms.get((name, *labels.items()))
        if found is not None:
            return found
        row, lock, values = _row(name, Kind.HISTOGRAM), self._lock, self._values[name]
        with lock:
            key = self._key(row, values, labels)
            buckets = self._buckets[name].setdefault(key, [0] * (len(row.buckets) + 1))

        def observe(value: float) -> None:
            with lock:
                values[key] = values.get(key, 0.0) + value
                buckets[bisect_left(row.buckets, value)] += 1

        self._histograms[name, *labels.items()] = observe
        return observe

    def later(self, count: Callable[..., None], *arguments: object, **labels: str | int) -> None:
        """Keep a call of `add` or `observe`, or of a function that makes some, because peers wait for this thread now."""
        if len(self._kept) >= _KEPT_MAX:
            self.settle(1)
        self._kept.append((count, arguments, labels))

    def settle(self, count: int = _KEPT_MAX) -> None:
        """Make at most `count` of the calls that `later` has kept, oldest first."""
        while self._kept and count > 0:
            record, arguments, labels = self._kept.popleft()
            record(*arguments, **labels)
            count -= 1

    def snapshot(self) -> MetricsSnapshot:
        """Return all current counts, with this process' CPU time. Called in the thread that calls `later`, if any."""
        self.settle()
        self.advance(_PROCESS_CPU, time.process_time())
        with self._lock:
            return MetricsSnapshot(
                tuple(
                    Series(name, key, value, tuple(self._buckets[name].get(key, ())))
                    for name, values in self._values.items()
                    for key, value in values.items()
                )
            )

    def _key(
        self, row: Metric, values: Mapping[tuple[str, ...], float], labels: Mapping[str, str | int]
    ) -> tuple[str, ...]:
        """Return the values of `labels` in the table's order. Only a new combination is checked completely."""
        assert len(labels) == len(row.labels), f"{row.name} has the labels {row.labels}, not {tuple(labels)}"
        key = tuple([str(labels[label]) for label in row.labels]) if labels else ()
        if key not in values:
            for label, value, domain in zip(row.labels, key, row.domains, strict=True):
                assert not domain or value in domain, f"{row.name}: {label} is {value!r}, not one of {domain}"
            assert len(values) < SERIES_MAX, f"{row.name} has {len(values)} series: a label of it is not bounded"
        return key


def render(snapshots: Mapping[str, MetricsSnapshot]) -> str:
    """Return the Prometheus text (format 0.0.4) of all processes.

    Args:
        snapshots: by process name, which becomes the label `worker`.
    """
    by_name: dict[str, list[tuple[str, Series]]] = {}
    for worker, snapshot in snapshots.items():
        for series in snapshot.series:
            by_name.setdefault(series.name, []).append((worker, series))
    lines: list[str] = []
    for row in TABLE:
        found = by_name.get(row.name)
        if found:
            lines += (f"# HELP {row.name} {row.help}", f"# TYPE {row.name} {row.kind.value}")
            for worker, series in found:
                lines += _series_lines(row, worker, series)
    return "\n".join(lines) + "\n" if lines else ""


def _series_lines(row: Metric, worker: str, series: Series) -> Iterable[str]:
    labels = ",".join(
        f'{label}="{_escape(value)}"'
        for label, value in zip(("worker", *row.labels), (worker, *series.labels), strict=True)
    )
    if row.kind is not Kind.HISTOGRAM:
        yield f"{row.name}{{{labels}}} {_number(series.value)}"
        return
    total = 0
    for bound, count in zip((*row.buckets, float("inf")), series.buckets, strict=True):
        total += count
        yield f'{row.name}_bucket{{{labels},le="{_number(bound)}"}} {total}'
    yield f"{row.name}_sum{{{labels}}} {_number(series.value)}"
    yield f"{row.name}_count{{{labels}}} {total}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)


def reference() -> str:
    """Return the reference page, in Markdown."""
    lines = [
        "# Metrics of the agent",
        "",
        "Generated from the table in `longshore_agent.status.metric_table` by `python -m longshore_agent.status.metrics`;",
        "do not edit.",
        "",
        "`GET /metrics` returns Prometheus' text format 0.0.4. Each series has the label `worker` in addition to those",
        "below: the name of the worker, or `supervisor`. Counters restart at 0 with their worker.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for row in TABLE:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.kind.value} | {labels} | {row.help} |")
    lines += ["", "| label | values |", "|---|---|"]
    domains = {label: domain for row in TABLE for label, domain in zip(row.labels, row.domains, strict=True)}
    for label, domain in sorted(domains.items()):
        lines.append(f"| `{label}` | {', '.join(domain) or _OPEN_LABELS[label]} |")
    return "\n".join(lines) + "\n"


# Descriptions of labels whose values the table does not list.
_OPEN_LABELS: Mapping[str, str] = {
    "cache": "the cache's index in the engine's layout",
    "lane": "the lane's index",
    "message": "the message's type",
}


if __name__ == "__main__":
    sys.stdout.write(reference())
