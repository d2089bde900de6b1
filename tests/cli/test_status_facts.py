"""Tests what `longshore status` makes of reports and conditions: rates, the worst fact, and its tables and trees. Starts nothing."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import status_scene
from rich.console import Console

from longshore_agent.status.findings import findings
from longshore_agent.status.snapshot import WorkerSnapshot
from longshore_cli.agent_report import Report, report_of, with_rates
from longshore_cli.arguments import ArgumentsError
from longshore_cli.main import main
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.status import facts, shown
from longshore_cli.status.facts import Agent, Deployment
from longshore_cli.status.reading import Reader
from longshore_cli.status_pages import AgentPageError
from longshore_spec.status import (
    EngineStatus,
    LayoutStatus,
    LeftEngine,
    LeftEngines,
    PeerStatus,
    RingStatus,
    Severity,
    WorkerState,
)

COLUMNS = 80
HOSTILE = "bad\x1b[2J\n[bold]name[/bold]\u202e"
METRICS = """
longshore_rooms_total{worker="p/0/0",half="source",outcome="done",reason="none"} 7
longshore_rooms_total{worker="p/0/0",half="source",outcome="failed",reason="peer_lost"} 2
longshore_rooms_total{worker="p/0/0",half="source",outcome="cancelled",reason="cancelled"} 1
"""


def peer(instance: str = "d", bytes_moved: int = 0, **more: Any) -> PeerStatus:
    fields: dict[str, Any] = {
        "dp_rank": 0,
        "rank": 0,
        "half": "source",
        "state": "attached",
        "wire": "NVLink",
        "epoch": "1",
    }
    return PeerStatus(instance, **fields | {"ways": ("staged",), "bytes_moved": bytes_moved} | more)


def worker(*peers: PeerStatus, **more: Any) -> WorkerSnapshot:
    engine = EngineStatus("p", 0, ("source",), LayoutStatus.of(status_scene.layout(1)), pid=7, connected_s=60.0)
    fields = {"worker": "p/0/0", "epoch": "1", "device": "GPU-1", "engines": (engine,), "peers": peers}
    return status_scene.worker(**fields | more)


def page(*workers: WorkerSnapshot, **more: Any) -> Any:
    """Return an agent's `/v1/status`, decoded."""
    fields = {"deployment": "team/llama", "node": "n", "version": "0.1.0", "self_test": status_scene.PASSED}
    snapshot = status_scene.agent(*workers, **fields | more)
    return msgspec.to_builtins(snapshot.status(findings(snapshot, status_scene.RULES)))


def report(*workers: WorkerSnapshot, uptime_s: float = 100.0, **more: Any) -> Report:
    return report_of("http://a", page(*workers, uptime_s=uptime_s, **more), MetricsPage(METRICS))


def agent(name: str = "node-1", found: Report | None = None, **more: Any) -> Agent:
    return Agent(name=name, roles=("prefill",), report=found or report(worker(peer())), **more)


def body(ready: str = "True", **more: Any) -> dict[str, Any]:
    """Return a DisaggDeployment as the API server gives it."""
    conditions = [{"type": "Ready", "status": ready, "reason": "R", "message": "m"}]
    conditions += [{"type": kind, "status": "True", "reason": "R", "message": "m"} for kind in more.pop("true", ())]
    status = {"agents": {"ready": 1, "desired": 2}, "prefill": {"instances": 1}, "conditions": conditions} | more
    return {
        "metadata": {"namespace": "team", "name": "llama"},
        "spec": {"prefill": {"instances": 2}, "decode": {"instances": 4}},
        "status": status,
    }


def condition(kind: str, status: str, reason: str, message: str = "why") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def drawn(found: Deployment, *, every: bool = False) -> list[str]:
    console = Console(width=COLUMNS, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(shown.tree(found, every=every))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_rates_are_differences_by_the_agents_own_clock_and_those_of_another_life_are_unknown() -> None:
    before = report(worker(peer(bytes_moved=1_000_000_000), peer("e", 5_000_000_000)))
    # The pair with `e` was lost and has attached again; `f` is new.
    after = report(
        worker(peer(bytes_moved=4_000_000_000), peer("e", 1_000_000_000), peer("f", 500_000_000)), uptime_s=102
    )
    (found,) = with_rates(after, before).workers
    assert [pair.gb_per_s for pair in found.peers] == [1.5, 0.5, 0.25]
    assert (found.sent_gb_per_s, found.received_gb_per_s) == (2.25, 0.0)
    restarted = msgspec.structs.replace(after, started_unix_s=9.0)
    for other in (with_rates(after, None), with_rates(restarted, before), with_rates(before, before)):
        assert [pair.gb_per_s for pair in other.workers[0].peers if pair.instance == "d"] == [None]
    (replaced,) = with_rates(report(worker(peer(), epoch="2"), uptime_s=103), before).workers
    assert replaced.sent_gb_per_s is None


def test_ended_rooms_are_counted_by_outcome_and_failures_by_reason() -> None:
    found = report(worker())
    assert (found.rooms_done, found.rooms_failed, found.failures) == (7, 2, {"peer_lost": 2})


def test_a_page_that_is_none_of_an_agent_is_refused_with_the_field() -> None:
    with pytest.raises(AgentPageError, match=r"http://a/v1/status: .*workers\[0\]\.worker"):
        report_of("http://a", page() | {"workers": [{"worker": 7}]}, MetricsPage(""))
    untold = page()
    del untold["findings"]
    with pytest.raises(AgentPageError, match=r"missing required field `findings`: is an agent of this release there"):
        report_of("http://a", untold)
    # An agent of a newer release has more fields, states and severities.
    newer = page(worker()) | {"news": 1, "findings": [FOUND]}
    newer["workers"] = [newer["workers"][0] | {"state": "resting", "news": 1}]
    known = report_of("http://a", newer)
    assert (known.workers[0].state, known.findings[0].severity) == (WorkerState.UNKNOWN, Severity.WARNING)


# Children of a process that has converted nothing yet. Each crashes in two of three runs if nothing prepares the types.
RACES = """
import json, os, sys, threading
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.agent_report import report_of

PAGE = json.loads(sys.argv[1])

def race():
    start = threading.Barrier(64)

    def convert():
        start.wait()
        report_of("agent", PAGE, MetricsPage(""))

    threads = [threading.Thread(target=convert) for _ in range(64)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

sys.setswitchinterval(1e-6)
for _ in range(20):
    child = os.fork()
    if not child:
        race()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def test_many_threads_may_make_the_first_reports_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACES, json.dumps(page(worker(peer())))], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"] * 20, done.stderr


FOUND = {"code": "New", "severity": "grave", "text": "t", "way_out": "w", "link": "l"}
LOST = worker(peer(state="lost", error="was silent"))


@pytest.mark.parametrize(
    ("status", "agents", "worst"),
    [
        ({}, [agent()], ""),
        (
            {"ready": "False", "conditions": [condition("Ready", "False", "AgentsNotReady"), condition("AgentsReady", "False", "NoNodes", "no node")]},
            [agent(silent="refused", found=None)],
            "AgentsReady: NoNodes: no node",
        ),
        ({"conditions": []}, [], "Ready: Unknown: no operator has served it"),
        (
            {},
            [agent("node-1", report(LOST)), Agent(name="node-2", silent="timed out")],
            "agent on node-2 is silent: timed out",
        ),
        ({}, [agent(found=report(LOST, draining=True))], "agent on node-1: Draining: the agent stops and takes no new engines or rooms"),
        ({}, [agent(found=report(LOST))], "agent on node-1: PeerLost: worker p/0/0: d/0/0 is lost: was silent"),
        (
            {},
            [agent(found=report(worker(ring=RingStatus(100, 0, 11, 1))))],
            "agent on node-1: QuarantineHigh: worker p/0/0: more than 10% of its ring is in quarantine",
        ),
        (
            {"conditions": [condition("Ready", "True", "Ready"), condition("EnginesConnected", "Unknown", "NoEngines")]},
            [agent()],
            "EnginesConnected: NoEngines: why",
        ),
        (
            {"conditions": [condition("Ready", "True", "Ready"), condition("Progressing", "False", "Blocked")]},
            [agent()],
            "Progressing: Blocked: why",
        ),
        (
            {"conditions": [condition("Ready", "True", "Ready"), condition("NodesShared", "False", "NodesOwn"), condition("Progressing", "False", "Settled")]},
            [agent(found=report(worker(rooms=(msgspec.structs.replace(status_scene.room(9), age_s=61.0),))))],
            "agent on node-1: RoomOld: worker p/0/0: room 9 of p is open for more than 60 s",
        ),
    ],
)  # fmt: skip
def test_the_worst_fact_comes_first(status: dict[str, Any], agents: list[Agent], worst: str) -> None:
    assert facts.of_cluster(body(**status), agents).worst == worst


def test_one_line_tells_a_deployment_and_only_readiness_and_silence_fail() -> None:
    fine = facts.of_cluster(body(), [agent(found=report(LOST))])
    silent = facts.of_cluster(body(), [Agent(name="node-2", silent=HOSTILE)])
    hostile = shown.table([msgspec.structs.replace(fine, name=HOSTILE, ready=HOSTILE)], with_namespace=True)
    assert hostile.replace("\n", "").isprintable() and len(hostile.splitlines()) == 2
    assert [each.well for each in (fine, silent, facts.of_cluster(body("False"), []))] == [True, False, False]
    header, one, other = shown.table([fine, silent], with_namespace=True).splitlines()
    assert header.split() == ["NAMESPACE", "NAME", "READY", "AGENTS", "ENGINES", "ROOMS", "GB/S", "WORST", "FACT"]
    assert one.split()[:7] == ["team", "llama", "True", "1/2", "1/6", "0", "-"]
    assert one.endswith("d/0/0 is lost: was silent")
    assert other.isprintable()
    assert shown.table([], with_namespace=False) == "no deployments"


def test_two_hundred_agents_are_folded_to_those_with_faults_and_all_shows_each() -> None:
    members = [agent(f"node-{number}") for number in range(198)]
    members += [agent("node-198", report(LOST)), Agent(name="node-199", roles=("prefill",), silent="timed out")]
    found = facts.of_cluster(body(), members)
    lines = drawn(found)
    assert len(lines) < 24
    text = "\n".join(lines)
    assert "198 healthy agents: 198 engine ranks, 198 pairs staged over NVLink" in text
    for name in (
        "node-198: ready",
        "PeerLost: worker p/0/0: d/0/0 is lost: was silent",
        "to d/0/0: lost",
        "node-199: silent",
    ):
        assert name in text
    assert "node-7:" not in text
    whole = drawn(found, every=True)
    assert all(any(f"node-{number}: " in line for line in whole) for number in range(200))
    assert max(map(len, lines + whole)) <= COLUMNS
    few = drawn(facts.of_cluster(body(), members[:2]))
    assert sum("node-" in line for line in few) == 2


def test_engines_that_have_left_are_shown_and_their_rooms_count() -> None:
    last = tuple(LeftEngine(f"p-{number}/0/0", ("source",), 60.0 * number, number, 1, 10**6) for number in range(5))
    found = report(worker(), left=LeftEngines(7, 40, 2, 10**9, last))
    assert (found.rooms_done, found.rooms_failed) == (47, 4)
    text = "\n".join(drawn(facts.of_agents([agent(found=found)])[0]))
    assert "left 60 s ago: p-1/0/0, rooms 1 done, 1 failed, 1 MB moved" in text
    assert "4 more engine ranks left before (--all shows the last ones)" in text
    assert "p-4/0/0" not in text
    assert "p-4/0/0" in "\n".join(drawn(facts.of_agents([agent(found=found)])[0], every=True))


def test_many_agents_with_one_fault_are_folded_too_and_so_are_many_pairs() -> None:
    silent = [Agent(name=f"node-{number}", roles=("decode",), silent="timed out") for number in range(100)]
    lines = drawn(facts.of_cluster(body(), silent))
    assert len(lines) < 40
    assert any("88 more agents with faults" in line for line in lines)
    peers = [peer(f"d{number}", 10**9) for number in range(63)]
    (line,) = [line for line in drawn(facts.of_agents([agent(found=report(worker(*peers)))])[0]) if " pairs: " in line]
    assert "63 pairs: staged over NVLink, 63 GB" in line


def test_a_tree_shows_conditions_with_the_reason_of_untrue_ones_and_no_text_controls_the_terminal() -> None:
    untrue = condition("AgentsReady", "False", "AgentsNotReady", HOSTILE)
    status = {
        "conditions": [
            condition("Ready", "False", "AgentsNotReady"),
            untrue,
            condition("Compatible", "True", "PlanMade"),
        ]
    }
    lines = drawn(facts.of_cluster(body(**status), [agent(HOSTILE, report(worker(peer(HOSTILE))))]))
    text = "\n".join(lines)
    assert lines[0] == "team/llama: not Ready, agents 1/2, engines 1/6, 0 open rooms, - B/s"
    assert "Compatible True" in text and "PlanMade" not in text
    assert "AgentsReady False AgentsNotReady: bad" in text
    # Markup is shown as text.
    assert "[bold]name[/bold]" in text
    assert all(line.isprintable() for line in lines)


def test_agents_without_a_cluster_are_grouped_by_the_deployment_that_they_name() -> None:
    other = msgspec.structs.replace(report(worker()), deployment="team/other")
    found = facts.of_agents([agent(), agent("node-2", other), Agent(name="http://b", silent="timed out")])
    assert [(each.full_name, each.ready, len(each.agents)) for each in found] == [
        ("team/llama", "False", 2),
        ("team/other", "True", 1),
    ]
    (alone,) = facts.of_agents([Agent(name="http://b", silent="timed out")])
    assert (alone.name, alone.ready, alone.well) == ("(no deployment)", "False", False)


@pytest.mark.parametrize(
    "more",
    [{"deployment": "llama"}, {"namespace": "team"}, {"agent": ["http://127.0.0.1:1"]}, {"directory": Path("none")}],
    ids=str,
)
def test_all_namespaces_with_one_of_them_is_refused(more: dict[str, Any]) -> None:
    words = {"deployment": "", "namespace": None, "context": None, "kubeconfig": None, "agent": []}
    words |= {"directory": None, "token_file": None, "authority": None, "all_namespaces": True}
    chosen = argparse.Namespace(**words | more)
    with ExitStack() as stack, pytest.raises(ArgumentsError, match="--all-namespaces lists deployments: leave out"):
        Reader(chosen, stack)


def test_an_interval_that_is_too_short_is_an_invalid_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--interval", "0"])
    assert ended.value.code == 2
    assert "give seconds from 0.1 on" in capsys.readouterr().err
