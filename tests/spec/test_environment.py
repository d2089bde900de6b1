"""Tests that the agent and the operator read their settings alike, each by its own table."""

from __future__ import annotations

import pytest

from longshore_agent.settings import Settings as AgentSettings
from longshore_operator.settings import Settings as OperatorSettings
from longshore_wire.errors import ConfigError

SERVICE = {
    "LONGSHORE_WEB_SERVICE_HOST": "10.0.0.1",
    "LONGSHORE_WEB_SERVICE_PORT": "80",
    "LONGSHORE_WEB_SERVICE_PORT_HTTP": "80",
    "LONGSHORE_WEB_PORT": "tcp://10.0.0.1:80",
    "LONGSHORE_WEB_PORT_80_TCP": "tcp://10.0.0.1:80",
    "LONGSHORE_WEB_PORT_80_TCP_ADDR": "10.0.0.1",
}

both = pytest.mark.parametrize("table", [AgentSettings, OperatorSettings], ids=["agent", "operator"])


@both
def test_variables_that_kubernetes_makes_of_services_and_those_of_engines_are_ignored(
    table: type[AgentSettings | OperatorSettings],
) -> None:
    engines = {"LONGSHORE_ENGINE_SOCKET": "/run/longshore/agent.sock"}
    assert table.from_environment(SERVICE | engines) == table()


@both
@pytest.mark.parametrize("name", ["LONGSHORE_HTP_PORT", "LONGSHORE_WEBS_PORT", "LONGSHORE_WEB_HTTP_PORT"])
def test_a_misspelt_port_is_not_taken_for_a_variable_of_a_service(
    table: type[AgentSettings | OperatorSettings], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        table.from_environment(SERVICE | {name: "80"})
    (fault,) = caught.value.faults
    assert fault.startswith(f"{name}: there is no such setting; the nearest is LONGSHORE_")


@both
@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("LONGSHORE_HTTP_PORT", "eighty", "'eighty' is no whole number"),
        ("LONGSHORE_LEASE_S", "nan", "'nan' is no number"),
        ("LONGSHORE_LOG_LEVEL", "loud", "'loud' is none of debug, info, warning, error"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(
    table: type[AgentSettings | OperatorSettings], name: str, text: str, fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        table.from_environment({name: text})
    assert caught.value.faults == [f"{name}: {fault}"]


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("On", True), ("1", True), ("no", False), ("OFF", False)])
def test_both_know_the_same_words_for_true_and_false(text: str, *, value: bool) -> None:
    assert AgentSettings.from_environment({"LONGSHORE_DIRECT": text}).direct is value
    assert OperatorSettings.from_environment({"LONGSHORE_WATCH_NODES": text}).watch_nodes is value
