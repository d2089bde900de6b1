"""Tests the end of an agent's loop: events after it have no effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from longshore_agent.settings import Settings
from longshore_agent.supervisor.loop import Supervisor
from longshore_wire.errors import LongshoreError, Reason


def test_a_second_signal_and_a_late_question_after_the_end_of_the_loop_harm_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(dataclasses.replace(Settings(), run_directory=str(tmp_path)))
    supervisor.stop()
    supervisor.run()
    supervisor.stop()
    with pytest.raises(LongshoreError) as refused:
        supervisor.snapshot()
    assert refused.value.reason is Reason.SHUTTING_DOWN
