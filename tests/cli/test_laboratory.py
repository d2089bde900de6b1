"""Tests that `longshore demo` and `longshore bench` run the laboratory, and name its extra if it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longshore_cli import laboratory
from longshore_cli.laboratory import LaboratoryMissingError
from longshore_cli.main import main
from longshore_wire.errors import Reason

# Makes keys although the laboratory cannot be imported, and lists its loaded modules.
KEYS = """
import sys
sys.modules["longshore_lab"] = None
from longshore_cli.main import main
assert main(["keys", sys.argv[1]]) == 0
print([name for name in sys.modules if name.startswith("longshore_lab.")])
"""


@pytest.mark.parametrize("words", ["demo", "demo --quick", "demo --help", "bench", "bench rooms --rooms 1"])
@pytest.mark.parametrize("missing", ["longshore_lab", "matplotlib", "torch", "zmq"])
def test_without_the_extra_one_sentence_names_it(
    words: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python's own mark for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"longshore {words.split(maxsplit=1)[0]}: {missing} cannot be imported: "
        "pip install 'longshore-kv[agent,cli,lab,nixl]', or '.[agent,cli,lab,nixl]' in a checkout; "
        "in place of nixl, mooncake serves too\n"
    )


def test_a_missing_laboratory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "longshore_lab", None)
    with pytest.raises(LaboratoryMissingError, match=r"longshore-kv\[agent,cli,lab,nixl\]") as caught:
        laboratory._parts("demo")
    assert caught.value.reason is Reason.UNSUPPORTED


def test_other_commands_work_without_the_laboratory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEYS, str(tmp_path / "keys")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "keys" / "curve.json").is_file()


def test_rooms_are_shown_without_the_modules_of_an_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in ("fastapi", "numpy", "uvicorn", "zmq"):
        monkeypatch.setitem(sys.modules, missing, None)
    for words in (["rooms"], ["trace", "room", "7"]):
        assert main([*words, "--agent", "http://127.0.0.1:1"]) == 1
        assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert main(["keys", "nowhere"]) == 2


def test_running_agents_are_measured_without_the_laboratory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "longshore_lab", None)
    assert main(["bench", "cluster", "--directory", str(tmp_path)]) == 1
    assert "it is no directory of `longshore up`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("demo", "usage: longshore demo [-h] [--pairs PAIRS]"),
        ("bench", "usage: longshore bench [-h] QUESTION"),
        ("bench rooms", "usage: longshore bench rooms [-h]"),
        ("bench cluster", "usage: longshore bench cluster [-h]"),
    ],
)
def test_the_laboratorys_commands_show_their_own_arguments(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize("words", ["demo --teleport", "bench rooms --teleport", "keys here --teleport"])
def test_an_argument_that_a_command_does_not_know_is_refused_by_its_name(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert "unrecognized arguments: --teleport" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
