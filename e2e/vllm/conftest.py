"""Fixtures: the nursery, the models and the oracle, created once for a run of `make e2e-vllm`. No test needs a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_model
from engines import Nursery
from prompts import Family, Oracle
from tiny_model import TinyModel

# Names the environment into which .ci/install-vllm installed vLLM.
VENV_VARIABLE = "E2E_VLLM_VENV"


def pytest_configure(config: pytest.Config) -> None:
    """Register our mark."""
    config.addinivalue_line("markers", "shortest: what .ci/run tests, a pair of dense engines and one with MLA")


@pytest.fixture(scope="session", autouse=True)
def _ends_in_order() -> Iterator[None]:
    """Turn SIGTERM into an interrupt, so that pytest also unwinds fixtures then."""

    def interrupt(*_ignored: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that starts engines."""
    assert os.environ.get(VENV_VARIABLE), f"{VENV_VARIABLE} is not set: run `make e2e-vllm`"
    with Nursery(Path(os.environ[VENV_VARIABLE]), tmp_path_factory.mktemp("engines")) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model with 4 KV heads."""
    return tiny_model.make(tmp_path_factory.mktemp("model"), 4)


@pytest.fixture(scope="session", params=["dense", "windows", "states"])
def family(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """K and V, windows beside them, and recurrent states beside them: what rooms of other caches must do, too."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        found: Family = request.getfixturevalue("dense")
        return found
    model = {"windows": tiny_model.make_windowed, "states": tiny_model.make_mamba}[request.param](directory, 4)
    # With a prefix cache of states, vLLM's kernels for CPUs need other blocks.
    extra = ("--no-enable-prefix-caching",) if request.param == "states" else ()
    return Family(model, Oracle(nursery, model), extra, held_back=1)


@pytest.fixture(scope="session")
def narrow_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model with 2 KV heads, of which ranks of TP4 hold copies."""
    return tiny_model.make(tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="session")
def dense(nursery: Nursery, model: TinyModel) -> Family:
    """The model with K and V per head alone."""
    return Family(model, Oracle(nursery, model))


@pytest.fixture(scope="session")
def alone(dense: Family) -> Oracle:
    """The answers of a single engine."""
    return dense.alone


@pytest.fixture(scope="session")
def narrow_alone(nursery: Nursery, narrow_model: TinyModel) -> Oracle:
    """The answers of a single engine with 2 KV heads."""
    return Oracle(nursery, narrow_model)
