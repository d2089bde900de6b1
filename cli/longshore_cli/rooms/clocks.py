"""Aligns the monotonic clocks of several hosts, from requests to their agents. Pure: reads no clock.

A request and its answer bound the offset of the agent's clock to ours. The exchange with the shortest round trip has
the narrowest bounds. Hosts with one boot id have one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """One request: sent and got by our clock, received and answered by the agent's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    got_ns: int

    @property
    def offset_ns(self) -> int:
        """The agent's clock minus ours, in the middle of its bounds."""
        return (self.received_ns - self.sent_ns + self.answered_ns - self.got_ns) // 2

    @property
    def uncertainty_ns(self) -> int:
        """The true offset is at most this far from `offset_ns`: half of the time on the way."""
        return -(-(self.got_ns - self.sent_ns - (self.answered_ns - self.received_ns)) // 2)


class Host(NamedTuple):
    """The clock of one agent's host, and exchanges with that agent."""

    boot_id: str
    exchanges: Sequence[Exchange]


class Correction(NamedTuple):
    """How to read another host's times by the first host's clock.

    Attributes:
        shift_ns: subtract this.
        uncertainty_ns: the result is at most this far from the truth; 0: both are one clock.
    """

    shift_ns: int
    uncertainty_ns: int


def corrections(hosts: Sequence[Host]) -> list[Correction]:
    """Return the correction of each host to the first one's clock. Each has an exchange."""
    first = hosts[0]
    own, *others = [_best(_of(hosts, host)) for host in hosts]
    found = [Correction(0, 0)]
    for host, theirs in zip(hosts[1:], others, strict=True):
        if host.boot_id and host.boot_id == first.boot_id:
            found.append(Correction(0, 0))
        else:
            shift_ns = theirs.offset_ns - own.offset_ns
            found.append(Correction(shift_ns, theirs.uncertainty_ns + own.uncertainty_ns))
    return found


def _of(hosts: Sequence[Host], host: Host) -> Iterable[Exchange]:
    """Return all exchanges with the clock of a host; those of hosts that tell no boot id are their own."""
    same = [each for each in hosts if each is host or (host.boot_id and each.boot_id == host.boot_id)]
    return [exchange for each in same for exchange in each.exchanges]


def _best(exchanges: Iterable[Exchange]) -> Exchange:
    return min(exchanges, key=lambda exchange: exchange.uncertainty_ns)
