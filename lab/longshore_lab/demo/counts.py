"""Reads the agents' counters for one pair and computes its results from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longshore_cli.metrics_page import MetricsPage
from longshore_wire.ways import needs_wire


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of one prefill instance's workers, for one way."""

    slabs: int
    writes: int
    pieces: int

    @classmethod
    def of(cls, page: MetricsPage, instance: str, way: str) -> Counts:
        """Return the counters in the prefill agent's metrics."""
        return cls(
            round(of_instance(page, instance, "longshore_slabs_total", way=way, half="source")),
            round(of_instance(page, instance, "longshore_writes_total", way=way)),
            round(of_instance(page, instance, "longshore_write_pieces_total", way=way)),
        )

    def since(self, before: Counts) -> Counts:
        """Return the difference to an earlier state."""
        return Counts(self.slabs - before.slabs, self.writes - before.writes, self.pieces - before.pieces)


@dataclass(frozen=True, slots=True)
class Transfer:
    """All rooms of a pair, or that of a request, moved one way several times. Counts are those of one time.

    Attributes:
        seconds: from the first accepted send to the last DONE, for each time; of a request from its claim.
        wires: the wires that carried the bytes, as the agents found; empty if one agent's engines copied directly.
    """

    way: str
    rooms: int
    counts: Counts
    payload_bytes: int
    seconds: tuple[float, ...]
    wires: tuple[str, ...]

    @property
    def median_s(self) -> float:
        """Median time in seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Rate in GB/s at the median time."""
        return self.payload_bytes / self.median_s / 1e9


@dataclass(frozen=True, slots=True)
class Result:
    """The transfers of one pair, or of one request of several caches, with one transport.

    Attributes:
        name: of the pair or request.
    """

    name: str
    backend: str
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class PairResult(Result):
    """The result of one pair with one transport.

    Attributes:
        ring_rounds: how often the ring of each decode rank wrapped.
        lane_shares: for each prefill rank, the smallest share of its bytes that one lane wrote.
    """

    ring_rounds: tuple[int, ...]
    lane_shares: tuple[float, ...]
    bytes_compared: int
    tokens_compared: int


def wires_of(workers: Sequence[dict[str, Any]], instance: str) -> tuple[str, ...]:
    """Return the wires of an instance's workers to peers that a transport serves. Wires to other peers are unused.

    Of ranks with the same heads, one may have sent all: a peer that has sent nothing has no way.

    Args:
        workers: the workers in `/v1/status`.
    """
    mine = [worker for worker in workers if worker["worker"].startswith(f"{instance}/")]
    peers = [peer for worker in mine for peer in worker["peers"] if peer["ways"] and needs_wire(peer["ways"])]
    return tuple(sorted({peer["wire"] for peer in peers}))


def of_instance(page: MetricsPage, instance: str, name: str, **labels: str) -> float:
    """Return the sum of a metric over the workers of one engine instance."""
    by_worker = page.by("worker", name, **labels)
    return sum(value for worker, value in by_worker.items() if worker.startswith(f"{instance}/"))


def ring_rounds(page: MetricsPage, instance: str) -> tuple[int, ...]:
    """Return how often the ring of each worker of a decode instance wrapped."""
    by_worker = page.by("worker", "longshore_ring_rounds_total")
    return tuple(round(rounds) for worker, rounds in sorted(by_worker.items()) if worker.startswith(f"{instance}/"))


def lane_shares(page: MetricsPage, instance: str) -> tuple[float, ...]:
    """Return, for each worker of a prefill instance, the smallest share of its bytes that one of its lanes wrote."""
    workers = [
        worker for worker in page.by("worker", "longshore_lane_bytes_total") if worker.startswith(f"{instance}/")
    ]
    lanes = [page.by("lane", "longshore_lane_bytes_total", worker=worker) for worker in sorted(workers)]
    return tuple(min(by_lane.values()) / sum(by_lane.values()) for by_lane in lanes)
