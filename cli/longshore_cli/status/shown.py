"""Renders the facts of deployments for a terminal: one line each, or one as a tree. Pure; rich draws the tree.

Texts of engines and peers are shown as they are, without characters that a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longshore_cli.agent_report import SOURCE, Pair, Report, Worker
from longshore_cli.aligned import aligned
from longshore_cli.status.facts import Agent, Condition, Deployment, oldest_room
from longshore_cli.words import count, plain
from longshore_spec.status import EngineStatus, Severity, WorkerState

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

# More agents of a role, or pairs of a worker, are folded to one line if they are healthy.
FOLDED_FROM = 9
# Agents of a role with faults that are shown without --all. More of them have one cause.
FAULTY_MAX = 12
# Engine ranks that have left an agent, without --all.
_LEFT_SHOWN = 3
_GOOD, _BAD, _WORRYING, _FAINT = "green", "red", "yellow", "dim"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000.0
_ROLE_ORDER = ("prefill", "decode")


def table(found: Sequence[Deployment], *, with_namespace: bool) -> str:
    """Return one line for each deployment."""
    if not found:
        return "no deployments"
    header = ["NAMESPACE", "NAME", "READY", "AGENTS", "ENGINES", "ROOMS", "GB/S", "WORST FACT"]
    rows = [
        [
            each.namespace,
            each.name,
            each.ready,
            _of(each.agents_ready, each.agents_wanted),
            _of(each.engines_registered, each.engines_expected),
            str(each.rooms_open),
            _number(each.gb_per_s),
            each.worst or "-",
        ]
        for each in found
    ]
    shown = [row if with_namespace else row[1:] for row in [header, *rows]]
    last = len(shown[0]) - 1
    left = frozenset({0, last - 5, last} | ({1} if with_namespace else set()))
    return "\n".join(map(plain, aligned(shown, left)))


def tree(found: Deployment, *, every: bool) -> Tree:
    """Return the tree of one deployment: its conditions, and for each role agents, workers, engines, pairs and a room.

    Args:
        every: show each healthy agent and pair, however many there are.
    """
    from rich.tree import Tree

    counts = f"agents {_of(found.agents_ready, found.agents_wanted)}, engines {_of(found.engines_registered, found.engines_expected)}"
    rooms = f"{count(found.rooms_open, 'open room')}, {rate(found.gb_per_s)}"
    root = Tree(
        _line(
            (found.full_name, "bold"),
            ": ",
            _verdict("Ready", "not Ready", good=found.ready == "True"),
            f", {counts}, {rooms}",
        )
    )
    if found.operator is not None and found.operator.state != "on":
        state = found.operator.state
        root.add(_line("operator: ", (state, _BAD if state == "off" else _FAINT), f": {found.operator.text}"))
    if found.conditions:
        branch = root.add("conditions")
        for condition in found.conditions:
            branch.add(_condition(condition))
    for role in sorted({agent.roles for agent in found.agents}, key=_order):
        members = [agent for agent in found.agents if agent.roles == role]
        _add_role(root.add(_role(role, members)), members, every=every)
    return root


def _add_role(branch: Tree, members: Sequence[Agent], *, every: bool) -> None:
    folds = not every and len(members) >= FOLDED_FROM
    faulty = [agent for agent in members if agent.faults()]
    healthy = [agent for agent in members if not agent.faults()]
    for agent in faulty[:FAULTY_MAX] if folds else members:
        _add_agent(branch.add(_agent(agent)), agent, every=every)
    if folds and len(faulty) > FAULTY_MAX:
        branch.add(
            _line((f"{len(faulty) - FAULTY_MAX} more agents with faults", _BAD), (" (--all shows each)", _FAINT))
        )
    if folds and healthy:
        branch.add(
            _line(f"{count(len(healthy), 'healthy agent')}: {_totals(healthy)}", (" (--all shows each)", _FAINT))
        )


def _add_agent(branch: Tree, agent: Agent, *, every: bool) -> None:
    if agent.report is None:
        branch.add(_line((agent.silent, _BAD)))
        return
    _add_findings(branch, agent.report, "")
    if agent.report.failures:
        reasons = ", ".join(f"{number} {reason}" for reason, number in agent.report.failures.items())
        branch.add(_line(f"failed rooms: {reasons}"))
    for worker in agent.report.workers:
        under = branch.add(_worker(worker))
        _add_findings(under, agent.report, worker.worker)
        _add_worker(under, worker, every=every)
    _add_left(branch, agent.report, every=every)
    if (room := oldest_room(agent)) is not None:
        branch.add(
            _line(f"oldest room {room.room} of {room.instance}: {room.half}, {room.state} for {age(room.age_s)}, ")
            + _line(f"{room.tokens_done}/{room.tokens_wanted} tokens")
        )


def _add_left(branch: Tree, report: Report, *, every: bool) -> None:
    """Add the engine ranks that have left last."""
    shown = report.left.last if every else report.left.last[:_LEFT_SHOWN]
    for engine in shown:
        rooms = f"{engine.rooms_done} done, {engine.rooms_failed} failed"
        branch.add(
            _line(f"left {age(engine.left_s)} ago: {engine.worker}, rooms {rooms}, {size(engine.bytes_moved)} moved")
        )
    if report.left.count > len(shown):
        more = count(report.left.count - len(shown), "more engine rank")
        branch.add(_line(f"{more} left before", ("" if every else " (--all shows the last ones)", _FAINT)))


def _add_findings(branch: Tree, report: Report, worker: str) -> None:
    """Add the findings about one worker; about the agent if its name is empty."""
    for finding in report.findings:
        if finding.worker == worker:
            branch.add(_line((str(finding), _WORRYING if finding.severity is Severity.WARNING else _BAD)))


def _add_worker(branch: Tree, worker: Worker, *, every: bool) -> None:
    for engine in worker.engines:
        branch.add(_engine(engine))
    if (ring := worker.ring) is not None:
        branch.add(
            _line(
                f"ring {size(ring.capacity_bytes)}: {_percent(ring.used_share)} in use, {_percent(ring.held_share)} in quarantine"
            )
        )
    folds = not every and len(worker.peers) >= FOLDED_FROM
    for pair in worker.peers:
        if not (folds and pair.healthy):
            branch.add(_pair(pair))
    healthy = [pair for pair in worker.peers if pair.healthy]
    if folds and healthy:
        moved = size(sum(pair.bytes_moved for pair in healthy))
        branch.add(_line(f"{len(healthy)} pairs: {_paths(healthy)}, {moved}", (" (--all shows each)", _FAINT)))


def _condition(condition: Condition) -> Text:
    if condition.good:
        return _line(f"{condition.type} ", (condition.status, _GOOD))
    return _line(f"{condition.type} ", (condition.status, _BAD), f" {condition.reason}: {condition.message}")


def _role(role: Sequence[str], members: Sequence[Agent]) -> Text:
    ready = sum(agent.ready for agent in members)
    totals = f", {_totals(members)}" if any(agent.report for agent in members) else ""
    return _line((" and ".join(role) or "no role yet", "bold"), f": {_of(ready, len(members))} agents ready{totals}")


def _totals(members: Sequence[Agent]) -> str:
    workers = [worker for agent in members if agent.report for worker in agent.report.workers]
    ranks = sum(len(worker.engines) for worker in workers)
    pairs = [pair for worker in workers for pair in worker.peers]
    paths = _paths([pair for pair in pairs if pair.healthy and pair.ways])
    rooms = sum(worker.rooms_open for worker in workers)
    return f"{count(ranks, 'engine rank')}, {count(len(pairs), 'pair')}{f' {paths}' if paths else ''}, {count(rooms, 'open room')}, {_rates(workers)}"


def _agent(agent: Agent) -> Text:
    pod = [f"pod {agent.pod}, {count(agent.pod_restarts, 'restart')}"] if agent.pod else []
    if agent.report is None:
        return _line(agent.name, ": ", ("silent", _BAD), "".join(f", {each}" for each in pod))
    report = agent.report
    told = [f"version {report.version}", f"up {age(report.uptime_s)}", count(report.restarts, "worker restart"), *pod]
    state = ("draining", _BAD) if report.draining else _verdict("ready", "not ready", good=agent.ready)
    return _line(agent.name, ": ", state, f", {', '.join(told)}, {_rooms(report)}")


def _rooms(report: Report) -> str:
    return f"rooms {report.rooms_open} open, {report.rooms_done} done, {report.rooms_failed} failed"


def _worker(worker: Worker) -> Text:
    silence = f", silent for {age(worker.silent_s)}" if worker.silent_s >= 1 else ""
    restarts = f", {count(worker.restarts, 'restart')}" if worker.restarts else ""
    return _line(
        f"worker {worker.worker}: ",
        (worker.state.value, _GOOD if worker.state is WorkerState.READY else _BAD),
        (silence, _BAD),
        f", {worker.device}, {count(worker.rooms_open, 'open room')}, {_rates([worker])}{restarts}",
    )


def _engine(engine: EngineStatus) -> Text:
    layout = engine.layout
    parts = [f"TP {layout.tp}", *([f"PP {layout.pp}"] * (layout.pp > 1)), *([f"DP {layout.dp}"] * (layout.dp > 1))]
    held = size(sum(pool.total_bytes for pool in engine.pools))
    memory = " in host memory" if engine.memory == "host" else ""
    # Of an engine in another PID namespace the kernel tells no PID.
    pid = f", pid {engine.pid}" if engine.pid else ""
    return _line(
        f"engine {engine.instance} rank {engine.rank}: {', '.join(parts)}, {_caches(engine)}, "
        f"{held}{memory}{pid}, since {age(engine.connected_s)}"
    )


def _caches(engine: EngineStatus) -> str:
    """Return the pages of each cache, with its name if there are several."""
    pages = {pool.pool: pool.page_count for pool in engine.pools}
    layouts = (engine.layout, *engine.layout.others)
    return ", ".join(
        f"{f'{layout.name}: ' if len(layouts) > 1 else ''}{pages.get(index, 0)} {layout.layout().pages_text}"
        for index, layout in enumerate(layouts)
    )


def _pair(pair: Pair) -> Text:
    name = f"{'to' if pair.half == SOURCE else 'from'} {pair.name}"
    if not pair.healthy:
        # A finding about the worker says why.
        return _line(f"{name}: ", (pair.state, _BAD))
    return _line(f"{name}: {_paths([pair])}, {size(pair.bytes_moved)}, {rate(pair.gb_per_s)}")


def _paths(pairs: Sequence[Pair]) -> str:
    """Return the ways and wires of pairs, without repetition."""
    return ", ".join(sorted({_path(pair) for pair in pairs}))


def _path(pair: Pair) -> str:
    # Direct copies use no wire.
    return "direct" if pair.ways == ("direct",) else f"{' and '.join(pair.ways) or 'no way yet'} over {pair.wire}"


def _rates(workers: Sequence[Worker]) -> str:
    """Return what is sent and received now, without a direction in which nothing moves."""
    sums = {
        "sent": [worker.sent_gb_per_s for worker in workers if worker.sent_gb_per_s is not None],
        "received": [worker.received_gb_per_s for worker in workers if worker.received_gb_per_s is not None],
    }
    moving = [f"{word} {rate(sum(known))}" for word, known in sums.items() if sum(known)]
    return ", ".join(moving) or rate(0.0 if any(sums.values()) or not workers else None)


def size(count_bytes: float) -> str:
    """Return a number of bytes with a decimal unit."""
    index = 0
    while count_bytes >= _STEP and index < len(_UNITS) - 1:
        count_bytes, index = count_bytes / _STEP, index + 1
    return f"{count_bytes:.3g} {_UNITS[index]}" if count_bytes < _STEP / 10 else f"{count_bytes:.0f} {_UNITS[index]}"


def age(seconds: float) -> str:
    """Return a duration with one unit."""
    for limit, divisor, unit in ((10, 1, ".1f s"), (120, 1, ".0f s"), (7200, 60, ".0f min"), (172_800, 3600, ".0f h")):
        if seconds < limit:
            number, _, word = unit.partition(" ")
            return f"{seconds / divisor:{number}} {word}"
    return f"{seconds / 86_400:.0f} d"


def rate(gb_per_s: float | None) -> str:
    """Return a rate; `-` if it is not known."""
    return "- B/s" if gb_per_s is None else f"{size(gb_per_s * 1e9)}/s"


def _number(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else f"{gb_per_s:.2f}"


def _percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")  # noqa: PLR2004


def _of(number: int, wanted: int | None) -> str:
    return str(number) if wanted is None else f"{number}/{wanted}"


def _verdict(yes: str, no: str, *, good: bool) -> tuple[str, str]:
    return (yes, _GOOD) if good else (no, _BAD)


def _order(role: Sequence[str]) -> tuple[int, ...]:
    return tuple(_ROLE_ORDER.index(each) if each in _ROLE_ORDER else len(_ROLE_ORDER) for each in role) or (9,)


def _line(*parts: str | tuple[str, str]) -> Text:
    from rich.text import Text

    return Text.assemble(*(plain(part) if isinstance(part, str) else (plain(part[0]), part[1]) for part in parts))
