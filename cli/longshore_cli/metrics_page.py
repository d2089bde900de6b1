"""Parses an agent's `/metrics` page: the subset of Prometheus's text format that agents write. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


class MetricsPage:
    """All samples of one page. Agents count from their start, so a period is the difference of two pages."""

    def __init__(self, text: str) -> None:
        self.samples = tuple(_samples(text))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of `name` with these labels; 0 if there is none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the sums of `name` for each value of `label`."""
        sums: dict[str, float] = {}
        for sample in self._matching(name, labels):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


def _samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line) if not line.startswith("#") else None
        if found is not None:
            labels = {pair["name"]: _plain(pair["value"]) for pair in _LABEL.finditer(found["labels"] or "")}
            yield Sample(found["name"], labels, float(found["value"]))


def _plain(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
