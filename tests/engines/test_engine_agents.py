"""Tests the roles under which an engine registers if its deployment declares its layout for only one of them."""

from __future__ import annotations

import logging

import pytest
from fake_agent import FakeAgent
from scene import LAYOUT

from longshore_client import ArgumentError, Half, HelloRefused, PoolGeometry, Reason
from longshore_engines.agents import registered
from longshore_engines.tensors import SharedCaches
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Refused, Welcome

LOG = logging.getLogger("longshore.test")
BOTH = (Half.SOURCE, Half.TARGET)
SHARED = SharedCaches(LAYOUT, (PoolGeometry(1, (1,), ()),), (), "cpu")


def greeting(allowed, reason=Reason.LAYOUT_MISMATCH):
    def greet(hello):
        if set(hello.roles) <= set(allowed):
            return Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", 60_000_000_000)
        return Refused(0, reason, "decode.tensorParallel is 2 at the engine and 1 in the deployment")

    return greet


@pytest.mark.parametrize(
    ("allowed", "wanted"), [(BOTH, BOTH), ((Half.SOURCE,), (Half.SOURCE,)), ((Half.TARGET,), (Half.TARGET,))]
)
def test_an_engine_for_both_takes_the_roles_that_its_deployment_has_for_its_layout(tmp_path, allowed, wanted):
    with FakeAgent(str(tmp_path / "s"), greet=greeting(allowed)):
        client, roles = registered(str(tmp_path / "s"), "engine", SHARED, BOTH, 20.0, LOG)
        client.close()
    assert roles == wanted


@pytest.mark.parametrize("reason", [Reason.LAYOUT_MISMATCH, Reason.UNKNOWN_VERSION])
def test_an_engine_that_fits_no_role_is_refused_with_the_agents_words(tmp_path, reason):
    with (
        FakeAgent(str(tmp_path / "s"), greet=greeting((), reason)),
        pytest.raises(HelloRefused, match=r"decode\.tensorParallel"),
    ):
        registered(str(tmp_path / "s"), "engine", SHARED, BOTH, 20.0, LOG)


def test_an_engine_with_the_name_of_a_test_engine_is_refused_before_it_asks_an_agent(tmp_path):
    with pytest.raises(ArgumentError, match=r"instance is 'longshore.test-a': .* give another name"):
        registered(str(tmp_path / "no-agent"), "longshore.test-a", SHARED, BOTH, 0.2, LOG)
