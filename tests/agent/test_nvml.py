"""Tests that NVLink counts as joining two GPUs only if NVML reports it for both. NVML is simulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NoReturn

import pytest
from fake_nvml import NAMES, FakeNVML

from longshore_agent.transports import nvml

STRANGER = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNVML]:
    """NVML of a host where NVLink joins the first two of three GPUs."""
    fake = FakeNVML({frozenset((0, 1))})
    monkeypatch.setattr(ctypes, "CDLL", fake.load)
    nvml._library.cache_clear()
    yield fake
    nvml._library.cache_clear()


def test_gpus_are_joined_by_nvlink_where_nvml_says_so_in_either_order(played: FakeNVML) -> None:
    assert nvml.joined_by_nvlink(NAMES[0], NAMES[1])
    assert nvml.joined_by_nvlink(NAMES[1], NAMES[0])
    assert not nvml.joined_by_nvlink(NAMES[0], NAMES[2])
    assert played.asked.count("load") == played.asked.count("nvmlInit_v2") == 1


@pytest.mark.parametrize(
    "pair",
    [(NAMES[0], NAMES[0]), ("", NAMES[1]), (NAMES[0], ""), (NAMES[0], "cpu"), (NAMES[0] + "\0", NAMES[1])],
    ids=["one GPU", "own unknown", "peer's unknown", "no GPU", "no name"],
)
def test_nvml_is_not_even_loaded_where_there_is_nothing_to_ask(pair: tuple[str, str], played: FakeNVML) -> None:
    assert not nvml.joined_by_nvlink(*pair)
    assert played.asked == []


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetP2PStatus"])
def test_a_call_that_nvml_refuses_means_no_and_is_tried_again_later(
    call: str, played: FakeNVML, caplog: pytest.LogCaptureFixture
) -> None:
    played.fails[call] = 999
    with caplog.at_level("INFO"):
        assert not nvml.joined_by_nvlink(NAMES[0], NAMES[1])
    assert f"{call} says 999" in caplog.text
    played.fails.clear()
    assert nvml.joined_by_nvlink(NAMES[0], NAMES[1])


def test_a_gpu_that_nvml_does_not_know_is_joined_to_none(played: FakeNVML) -> None:
    assert not nvml.joined_by_nvlink(NAMES[0], STRANGER)
    assert played.asked[-1] == "nvmlDeviceGetHandleByUUID"


def test_a_host_without_nvml_or_with_one_too_old_has_no_nvlink(
    played: FakeNVML, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del played.library.nvmlDeviceGetP2PStatus
    with caplog.at_level("INFO"):
        assert not nvml.joined_by_nvlink(NAMES[0], NAMES[1])

        def missing(name: str) -> NoReturn:
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(ctypes, "CDLL", missing)
        assert not nvml.joined_by_nvlink(NAMES[0], NAMES[1])
    assert "nvmlDeviceGetP2PStatus" in caplog.text
    assert "cannot open shared object file" in caplog.text
