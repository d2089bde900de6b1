"""Adds the agents' logs to the report of a failed test, since their directories may not be accessible afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator

import own_network
import pytest
from agent_fleet import Fleet, start_fleet
from agent_world import living_agents
from fault_judge import SceneJudge, WrongJudge
from fault_table import Scene
from half_worker import Halves


@pytest.fixture(scope="session")
def fleet_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Fleet]]:
    """Yield a function that returns the fleet of a backend. It starts once, since that takes longer than all of its tests."""
    with contextlib.ExitStack() as worlds:

        @functools.cache
        def fleet(backend: str) -> Fleet:
            return start_fleet(backend, tmp_path_factory.mktemp(backend), worlds)

        yield fleet


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[SceneJudge | WrongJudge]:
    """Yield the judge of a test's row in the fault table. The test fails unless it has compared the whole row."""
    row, transport = request.param
    found = SceneJudge(row, transport) if isinstance(row, Scene) else WrongJudge(row)
    with _compared_by(request, found):
        yield found


@pytest.fixture
def judges(request: pytest.FixtureRequest) -> Iterator[dict[str, SceneJudge]]:
    """Yield the judges of a test's scene by transport, as `judge` does."""
    scene, transports = request.param
    found = {transport: SceneJudge(scene, transport) for transport in transports}
    with _compared_by(request, *found.values()):
        yield found


@contextlib.contextmanager
def _compared_by(request: pytest.FixtureRequest, *judges: SceneJudge | WrongJudge) -> Iterator[None]:
    """Check after a test that passes that it has compared everything."""
    failed_count = request.session.testsfailed
    yield
    if request.session.testsfailed == failed_count:
        assert not any(judge.left() for judge in judges), "the test has not compared its whole row"


@pytest.fixture
def make() -> Iterator[Callable[..., Halves]]:
    """Yield a function that makes both halves of a worker, from faults of the loopback transport and settings."""
    made: list[Halves] = []

    def build(*faults: dict[str, object], **settings: object) -> Halves:
        made.append(Halves(list(faults), **settings))
        return made[-1]

    yield build
    for halves in made:
        halves.close()


# Lines of each agent's log: enough for a traceback, but the logs of several agents must not hide the failure.
_LOG_CHARACTERS_MAX = 2000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each agent's log to the report of a test that failed."""
    report = yield
    if report.failed:
        for agent in living_agents:
            report.sections.append((f"log of the agent in {agent.directory}", agent.log()[-_LOG_CHARACTERS_MAX:]))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_network` in its own network namespace."""
    if pyfuncitem.get_closest_marker("own_network") is None or own_network.inside():
        return None
    own_network.run(pyfuncitem)
    return True
