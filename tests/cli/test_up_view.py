"""What `longshore up` shows of agents that answer late, or not at all. Starts nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longshore_cli.local_agents import LocalAgentError
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.up.view import Looker


class Agent:
    """An agent whose process may run without that its pages answer."""

    def __init__(self, *, answers, running):
        self.answers, self.running = answers, running

    def status(self):
        if not self.answers:
            raise LocalAgentError("GET /v1/status: timed out")
        return {"workers": [{"engines": [{"instance": "p"}], "rooms_open": 2}]}

    def metrics(self):
        return MetricsPage("")


def looker(**agents):
    return Looker(SimpleNamespace(agents=agents))


def test_an_agent_that_is_silent_for_a_while_is_shown_and_not_given_up():
    late = Agent(answers=False, running=True)
    view = looker(near=Agent(answers=True, running=True), late=late)
    near, silent = view.rows()
    assert (near.name, near.engines, near.rooms_open) == ("near", "p (1)", 2)
    assert (silent.name, silent.engines) == ("late", "does not answer")
    late.answers = True
    assert [row.engines for row in view.rows()] == ["p (1)", "p (1)"]


def test_an_agent_whose_process_has_ended_is_an_error():
    with pytest.raises(LocalAgentError, match="timed out"):
        looker(gone=Agent(answers=False, running=False)).rows()
