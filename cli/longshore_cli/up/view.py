"""Shows the agents of `longshore up`: their addresses, connections, rooms and rates. Starts nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longshore_cli.agent_report import Report, report_of, with_rates
from longshore_cli.local_agents import LocalAgentError
from longshore_cli.status import live
from longshore_cli.up.fleet import Fleet, Member
from longshore_cli.words import plain
from longshore_spec.agent_config import AgentConfig
from longshore_spec.status import ATTACHED
from longshore_wire.errors import LongshoreError
from longshore_wire.plan import Summary

if TYPE_CHECKING:
    from rich.table import Table

# Interval between two drawings on a terminal, and between two lines without one.
_DRAW_S = 1.0
_LINE_S = 5.0
SILENT = "does not answer"


@dataclass(frozen=True)
class Row:
    """One agent at one moment. Rates cover the time since the last query.

    Attributes:
        refusals: the agent's reasons why rooms with a peer fail: the peer is lost, refused, or uses a wire that is not allowed.
    """

    name: str
    engines: str
    peers: int
    rooms_open: int
    rooms_done: int
    rooms_failed: int
    sent_gb_per_s: float
    refusals: tuple[str, ...] = ()

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        counts = (self.peers, self.rooms_open, self.rooms_done, self.rooms_failed)
        return [self.name, self.engines or "none yet", *map(str, counts), f"{self.sent_gb_per_s:.2f}"]


HEADER = ("agent", "engines", "peers", "rooms open", "done", "failed", "GB/s sent")


class Looker:
    """Queries all agents, and keeps their last reports to compute rates."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before: dict[str, Report] = {}

    def rows(self) -> list[Row]:
        """Return the current state. Raises LocalAgentError if an agent has ended."""
        return [self._row(name) for name in self._fleet.agents]

    def _row(self, name: str) -> Row:
        agent = self._fleet.agents[name]
        try:
            found = report_of(name, agent.status(), agent.metrics())
        except LocalAgentError:
            # On a busy machine a page may exceed the time limit. The agents must keep running.
            if agent.running:
                return Row(name, SILENT, 0, 0, 0, 0, 0.0)
            raise
        workers = with_rates(found, self._before.get(name)).workers
        self._before[name] = found
        engines = [engine for worker in workers for engine in worker.engines]
        ranks = Counter(each.instance + (" in host memory" if each.memory == "host" else "") for each in engines)
        pairs = [pair for worker in workers for pair in worker.peers]
        return Row(
            name,
            ", ".join(f"{instance} ({count})" for instance, count in sorted(ranks.items())),
            sum(pair.state == ATTACHED for pair in pairs),
            found.rooms_open,
            found.rooms_done,
            found.rooms_failed,
            sum(worker.sent_gb_per_s or 0.0 for worker in workers),
            tuple(sorted({plain(pair.error) for pair in pairs} - {""})),
        )


def shown(fleet: Fleet, members: list[Member]) -> str:
    """Return all addresses, and the layouts that engines must declare."""
    config = fleet.config
    lines = [
        f"{config.deployment.full_name}: {len(members)} agents, all ready",
        _plan(config),
        "",
    ]
    width = max(len(member.name) for member in members)
    for member in members:
        agent = fleet.agents[member.name]
        lines.append(f"  {member.name:<{width}}  status {agent.http}/v1/status   engines {agent.socket_path}")
    roles = (("prefill", config.prefill), ("decode", config.decode))
    wanted = "; ".join(
        f"{name} engines: TP {role.tensor_parallel}, pages of {role.page_size} tokens" for name, role in roles
    )
    lines += [
        "",
        wanted,
        "An engine's rank calls longshore_client.connect(<socket>, ...). Ctrl-C ends everything.",
    ]
    return "\n".join(lines)


def _plan(config: AgentConfig) -> str:
    try:
        summary = Summary.of_all(tuple(config.summaries().values()))
    except LongshoreError as error:
        return f"plan: none: {error}"
    return (
        f"plan: {summary.pairs} pairs of ranks, {summary.way.lower()}; {summary.writes_per_chunk} writes for a chunk of "
        f"{config.transfer.chunk_tokens} tokens, {summary.slices_per_chunk} slice by slice"
    )


def watch(looker: Looker, until_s: float | None) -> None:
    """Show the agents until `until_s` (time.monotonic), or until the caller is interrupted.

    Raises:
        LocalAgentError: an agent has ended.
    """
    if sys.stdout.isatty():
        live.draw(lambda: _table(looker.rows()), _DRAW_S, until_s)
        return
    last: list[list[str]] = []
    told: set[str] = set()
    while until_s is None or time.monotonic() < until_s:
        rows = looker.rows()
        for text in refusals(rows):
            if text not in told:
                print(text, flush=True)
        told = set(refusals(rows))
        cells = [row.cells() for row in rows]
        if cells != last:
            print("; ".join(f"{each[0]}: {_told(each)}" for each in cells), flush=True)
            last = cells
        time.sleep(live.pause(_LINE_S, until_s))


def refusals(rows: list[Row]) -> list[str]:
    """Return the refusals of all rows, without duplicates: both ends of a pair report the same."""
    return sorted({text for row in rows for text in row.refusals})


def _told(cells: list[str]) -> str:
    _, engines, peers, opened, done, failed, rate = cells
    return f"engines {engines}, peers {peers}, rooms {opened} open, {done} done, {failed} failed, {rate} GB/s"


def _table(rows: list[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table()
    for index, name in enumerate(HEADER):
        made.add_column(name, justify="left" if index < 2 else "right")  # noqa: PLR2004
    for row in rows:
        made.add_row(*row.cells())
    # Markup is shown as text.
    made.caption = Text("\n".join(refusals(rows))) or None
    return made
