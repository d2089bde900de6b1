"""A failed test shows what the agents have logged: on another machine nobody can look into their directories."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from agent_world import living_agents

# Of each agent: enough for the lives of some workers and a traceback.
_LOG_CHARACTERS_MAX = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each agent's log to the report of a test that failed."""
    report = yield
    if report.failed:
        for agent in living_agents:
            report.sections.append((f"log of the agent in {agent.directory}", agent.log()[-_LOG_CHARACTERS_MAX:]))
    return report
