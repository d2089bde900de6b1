"""Tests `--wait` of `longshore status` and `longshore check`: until all is well, until the time is over, and its end by Ctrl-C."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import check_scene as scene
import pytest
from api_scene import CRD, DEPLOYMENTS, LEASE, OWN, PODS, api_server, lease, operator

from longshore_cli.check import command
from longshore_cli.main import main

EVENTS = f"/api/v1/namespaces/{scene.SPACE}/events"


def not_ready(message: str = "0 of 2 agents are ready") -> dict[str, Any]:
    body = scene.served(agents={"desired": 2, "ready": 0})
    for condition in body["status"]["conditions"][:3:2]:
        condition |= {"status": "False", "reason": "AgentsNotReady", "message": message}
    return body


def ready() -> dict[str, Any]:
    return scene.served(agents={"desired": 0, "ready": 0}, keys={})


def answers(*bodies: dict[str, Any] | tuple[int, dict[str, Any]]) -> Callable[[], Any]:
    """Return what answers one after the other, and the last again and again."""
    rest = itertools.chain(bodies, itertools.repeat(bodies[-1]))
    return lambda: next(rest)


def cluster(found: Callable[[], Any]) -> dict[str, Any]:
    return {
        f"{OWN}/{scene.NAME}": found,
        OWN: lambda: {"items": [found()]},
        PODS: {"items": []},
        DEPLOYMENTS: operator(),
        LEASE: partial(lease, 3),
        CRD: scene.definition(),
        EVENTS: {"items": []},
        "/version": {"gitVersion": "v1.34.4"},
    }


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_WAIT_EVERY_S", 0.01)


WORDS = {"status": ["status", scene.NAME, "--interval", "0.1"], "check": ["check", scene.NAME]}


def results(kind: str, out: str) -> list[Any]:
    """Return what a run has printed: the statuses of Ready, or the checks with an error."""
    found = json.loads(out)
    if kind == "status":
        return [each["ready"] for each in found["deployments"]]
    return [line["check"] for line in found if line["state"] == "error" and line["check"] != "pods"]


@pytest.mark.parametrize(("kind", "last"), [("status", ["True"]), ("check", [])])
def test_it_waits_until_all_is_well_and_prints_that_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, last: list[Any]
) -> None:
    no_answer = (503, {"kind": "Status", "message": "etcd is away"})
    bodies = (not_ready(), no_answer, not_ready("1 of 2 agents are ready"), scene.served())
    agents = {PODS: {"items": []}}
    if kind == "check":
        agents = {PODS: {"items": [pod("n-0"), pod("n-1")]}}
    with api_server(cluster(answers(*bodies)) | agents, tmp_path / "kubeconfig") as path:
        words = [*WORDS[kind], "--kubeconfig", path, "-o", "json"]
        assert main([*words, "--wait", "60"]) == 0
    found = capsys.readouterr()
    assert (results(kind, found.out), found.err) == (last, "")


def pod(node: str) -> dict[str, Any]:
    """The pod of an agent without pages."""
    body = scene.pod(node).body
    body["metadata"]["labels"] = {"longshore.dev/deployment": scene.NAME}
    body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return body


@pytest.mark.parametrize(("kind", "last"), [("status", ["False"]), ("check", ["AgentsReady"])])
def test_after_the_time_it_prints_the_last_result_once_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, last: list[Any]
) -> None:
    with api_server(cluster(not_ready), tmp_path / "kubeconfig") as path:
        began_s = time.monotonic()
        assert main([*WORDS[kind], "--kubeconfig", path, "-o", "json", "--wait", "0.5"]) == 1
        assert time.monotonic() - began_s >= 0.5
    assert results(kind, capsys.readouterr().out) == last


@pytest.mark.parametrize("kind", WORDS)
def test_a_terminal_sees_what_it_waits_for_when_that_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first, second = "0 of 2 agents\x1b[2J", "1 of 2 agents"
    bodies = (*[not_ready(first)] * 3, *[not_ready(second)] * 2, ready())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with api_server(cluster(answers(*bodies)), tmp_path / "kubeconfig") as path:
        main([*WORDS[kind], "--kubeconfig", path, "--wait", "0.5" if kind == "check" else "60"])
    said = [line for line in capsys.readouterr().err.splitlines() if "of 2 agents" in line]
    subject = f"waiting: {scene.SPACE}/{scene.NAME}: AgentsReady"
    assert [line.startswith(subject) for line in said] == [True, True]
    assert "0 of 2 agents [2J" in said[0] and "1 of 2 agents" in said[1]


@pytest.mark.parametrize("kind", WORDS)
def test_an_interrupt_ends_it_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    asked = itertools.count()

    def found() -> dict[str, Any]:
        if next(asked) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return not_ready()

    with api_server(cluster(found), tmp_path / "kubeconfig") as path:
        assert main([*WORDS[kind], "--kubeconfig", path, "--wait", "60"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "status", "about"),
    [
        ("status --watch --wait 5", 2, "leave out --watch, or --wait"),
        ("check --pre --wait 5", 2, "leave out --wait, or --pre"),
        ("status --wait 5 --interval 0.1 --kubeconfig {}", 1, "there is no DisaggDeployment to wait for"),
        ("status other --wait 5 --interval 0.1 --kubeconfig {}", 1, "has no DisaggDeployment other: it has llama"),
    ],
)
def test_it_does_not_wait_for_what_cannot_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, status: int, about: str
) -> None:
    there = cluster(ready) | {f"{OWN}/other": (404, {"kind": "Status", "message": "not found"})}
    if "other" not in words:
        there[OWN] = {"items": []}
    with api_server(there, tmp_path / "kubeconfig") as path:
        assert main(words.format(path).split()) == status
    assert about in capsys.readouterr().err


def test_an_api_server_that_stays_away_is_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with api_server({}, tmp_path / "kubeconfig") as path:
        pass
    assert main(["status", "--kubeconfig", path, "--wait", "0.3", "--interval", "0.1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_a_time_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--wait", "0"])
    assert "give seconds above 0" in capsys.readouterr().err
