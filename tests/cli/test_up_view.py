"""Tests the view of `longshore up` for agents that answer late or not at all. Starts nothing."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import status_scene
from rich.console import Console

from longshore_cli.local_agents import LocalAgentError
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.up import view
from longshore_cli.up.view import Looker, watch
from longshore_spec.status import EngineStatus, LayoutStatus, PeerStatus


class Agent:
    """An agent whose process may run while its pages do not answer."""

    def __init__(self, *, answers, running, error=""):
        self.answers, self.running, self.error = answers, running, error

    def status(self):
        if not self.answers:
            raise LocalAgentError("GET /v1/status: timed out")
        peers = tuple(PeerStatus("d", 0, 0, "attached", "TCP", "1", error) for error in ("", self.error))
        engines = (EngineStatus("p", 0, ("source",), LayoutStatus.of(status_scene.layout(1))),)
        worker = status_scene.worker("p/0/0", engines=engines, rooms_open=2, peers=peers)
        return msgspec.to_builtins(status_scene.agent(worker).status())

    def metrics(self):
        return MetricsPage("")


def looker(**agents):
    return Looker(SimpleNamespace(agents=agents))


def test_an_agent_that_is_silent_for_a_while_is_shown_and_not_given_up():
    late = Agent(answers=False, running=True)
    looks = looker(near=Agent(answers=True, running=True), late=late)
    near, silent = looks.rows()
    assert (near.name, near.engines, near.rooms_open) == ("near", "p (1)", 2)
    assert (silent.name, silent.engines) == ("late", "does not answer")
    late.answers = True
    assert [row.engines for row in looks.rows()] == ["p (1)", "p (1)"]


def test_an_agent_whose_process_has_ended_is_an_error():
    with pytest.raises(LocalAgentError, match="timed out"):
        looker(gone=Agent(answers=False, running=False)).rows()


HOSTILE = "p reaches\x1b[2J\n[/d]\u202e"


def test_no_text_of_an_agent_controls_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(view, "_LINE_S", 0.0)
    looks = looker(one=Agent(answers=True, running=True, error=HOSTILE))
    times = iter(range(3))
    monkeypatch.setattr(view.time, "monotonic", lambda: next(times))
    watch(looks, 2)
    out = capsys.readouterr().out
    assert "p reaches [2J [/d]" in out and out.replace("\n", "").isprintable()
    with (console := Console(width=200)).capture() as drawn:
        console.print(view._table(looks.rows()))
    # Markup is shown as text.
    assert "p reaches [2J [/d]" in drawn.get()


def test_a_peer_that_an_agent_refuses_is_told_once_however_many_say_so(capsys, monkeypatch):
    monkeypatch.setattr(view, "_LINE_S", 0.0)
    one, other = (Agent(answers=True, running=True, error="p reaches d over TCP") for _ in range(2))
    looks = looker(one=one, other=other)
    times = iter(range(3))

    def rows() -> list[view.Row]:
        if next(times) == 2:
            raise LocalAgentError("it has ended")
        return Looker.rows(looks)

    monkeypatch.setattr(looks, "rows", rows)
    with pytest.raises(LocalAgentError, match="ended"):
        watch(looks, None)
    assert capsys.readouterr().out.count("p reaches d over TCP") == 1
