"""Fixtures of the tests on GPUs."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def torch() -> Any:
    """Return torch, which sees a GPU."""
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return found
