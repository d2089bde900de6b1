"""`--devices`: invalid or missing GPUs are refused with the remedy, and ranks are assigned round-robin."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from longshore_cli.main import main
from longshore_lab import devices
from longshore_lab.devices import DevicesError, Placement, check, device_of, place
from longshore_lab.engine.config import RankOptions

COMMANDS = (["demo"], ["bench", "rooms"], ["bench", "transfer"], ["bench", "crossover"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("text", ["cuda", "gpu:0", "cuda:-1", "cuda:01", "cuda:0;cuda:1", "cuda:0,", "", "cpu"])
def test_what_is_no_name_of_a_gpu_is_refused(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--devices", text])
    assert "give GPUs by number, such as cuda:0,cuda:1" in capsys.readouterr().err


def test_a_gpu_that_is_named_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--devices", "cuda:1,cuda:1"])
    assert "each GPU once" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_gpu_that_the_machine_does_not_have_is_refused_and_what_is_there_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ("One", "Two"))
    assert main([*command, "--devices", "cuda:0,cuda:2,cuda:3"]) == (2 if command == ["demo"] else 1)
    said = capsys.readouterr().err
    assert "cuda:2, cuda:3" in said
    assert "2 GPUs, cuda:0 to cuda:1" in said
    assert "leave --devices out" in said


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_transport_that_moves_no_memory_of_gpus_is_refused_by_name(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ("One",))
    assert main([*command, "--devices", "cuda:0", "--backend", "Loopback"]) != 0
    assert "Loopback" in capsys.readouterr().err


def test_without_a_driver_the_error_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> object:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(devices, "gpu_names", devices.gpu_names.__wrapped__)
    with pytest.raises(DevicesError, match=r"libcuda.so.1: cannot open.*leave --devices out"):
        check(("cuda:0",), ["NIXL"])


class Driver:
    """The four calls of CUDA's driver that are made."""

    def __init__(self, names: tuple[str, ...], init: int = 0, count: int = 0) -> None:
        self._names, self._init, self._count = names, init, count

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return self._init

    def cuDeviceGetCount(self, found: Any) -> int:  # noqa: N802
        found._obj.value = len(self._names)
        return self._count

    def cuDeviceGet(self, found: Any, index: ctypes.c_int) -> int:  # noqa: N802
        found._obj.value = index.value + 40
        return 0

    def cuDeviceGetName(self, found: Any, length: ctypes.c_int, device: ctypes.c_int) -> int:  # noqa: N802
        found.value = self._names[device.value - 40].encode()
        return 0


def test_the_driver_is_asked_for_the_names_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(("H200", "L4")))
    asked = devices.gpu_names.__wrapped__
    assert asked() == ("H200", "L4")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver((), init=100))
    assert asked() == ()
    for broken in (Driver(("H200",), init=3), Driver(("H200",), count=3)):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, broken=broken: broken)
        with pytest.raises(DevicesError, match="error 3"):
            asked()


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ())
    with pytest.raises(DevicesError, match="sees no GPU"):
        check(("cuda:0",), ["NIXL"])


def test_prefill_has_the_first_half_of_the_devices_and_one_device_is_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(("cuda:0",)) == Placement(("cuda:0",), ("cuda:0",))
    assert place(("cuda:1", "cuda:0")) == Placement(("cuda:1",), ("cuda:0",))
    four = tuple(f"cuda:{index}" for index in range(4))
    assert place(four) == Placement(four[:2], four[2:])
    assert place(four[:3]) == Placement(four[:2], four[2:3])
    monkeypatch.setattr(devices, "gpu_names", lambda: ("H200",) * 4)
    assert check(four, ["NIXL"]) == place(four)
    assert devices.describe(place(four)) == (
        "KV in GPU memory: prefill on cuda:0, cuda:1, decode on cuda:2, cuda:3 (H200)"
    )


def test_ranks_are_dealt_to_devices_in_order_and_again_from_the_first() -> None:
    assert [device_of(("cuda:2", "cuda:5"), rank) for rank in range(4)] == ["cuda:2", "cuda:5", "cuda:2", "cuda:5"]
    assert device_of((), 3) == "cpu"
    assert [RankOptions(tp=3, tp_rank=rank, devices=("cuda:0", "cuda:1")).device for rank in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert RankOptions().device == "cpu"


def test_without_devices_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(devices, "gpu_names")
    assert check((), ["Mooncake"]) == Placement()


def test_ways_that_gpus_do_not_have_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ("One",))
    for way in ("contiguous", "slices"):
        assert main(["bench", "transfer", "--devices", "cuda:0", "--ways", f"staged,{way}"]) == 1
        said = capsys.readouterr().err
        assert repr(way) in said
        assert "use staged, staged-equal, direct, direct-equal" in said


def test_a_crossover_file_is_not_written_from_gpus_where_agents_have_nothing_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    assert main(["bench", "crossover", "--devices", "cuda:0", "--write", str(path)]) == 1
    assert "leave --write out" in capsys.readouterr().err
    assert not path.exists()


def test_the_ways_of_gpus_are_staged_and_direct_between_unequal_and_equal_layouts() -> None:
    from longshore_lab.bench.transfer import _courses

    assert [course.name for course in _courses(None, place(("cuda:0",)), 4, 2)] == [
        "staged 4→2",
        "staged 2→2",
        "direct 4→2",
        "direct 2→2",
    ]
    assert [course.way for course in _courses(None, Placement(), 4, 2)] == ["Staged", "Direct", "Contiguous", "Slices"]
