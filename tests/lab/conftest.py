"""Provides one run of `longshore bench transfer` with real agents for all tests, since its start is slow."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longshore_lab.bench import add_arguments, run

# Slabs so small that a request has several in every lane.
_SETTINGS = ("--set", "slab_bytes_min=128Ki", "--set", "lane_bytes=1Mi")


@dataclass(frozen=True)
class MeasuredRun:
    """The run's output: its table, its numbers, and the timeline of one further request."""

    said: str
    numbers: dict[str, Any]
    trace: Path


@pytest.fixture(scope="session")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    """Return the run, which starts when a test first uses it."""
    directory = tmp_path_factory.mktemp("measured")
    numbers, trace, said = directory / "numbers.json", directory / "trace.json", io.StringIO()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["transfer", "--sizes", "1,8", "--repeats", "1", "--json", str(numbers), "--trace", str(trace), *_SETTINGS]
    with contextlib.redirect_stdout(said):
        assert run(parser.parse_args(words)) == 0
    return MeasuredRun(said.getvalue(), json.loads(numbers.read_text()), trace)
