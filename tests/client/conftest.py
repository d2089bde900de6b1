"""What the client's tests share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_earlier_tests() -> None:
    """Close the descriptors that earlier tests' garbage still holds, because some tests here compare all open ones."""
    gc.collect()
