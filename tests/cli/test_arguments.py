"""Tests that wrong arguments are refused before anything starts; the message has their name and valid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from longshore_cli.main import main

MANIFEST = str(Path(__file__).parents[2] / "examples" / "llama-70b.yaml")
BACKENDS = "invalid choice: 'UCX' (choose from 'NIXL', 'Mooncake', 'Loopback')"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("bench rooms --page-size 0", "--page-size: '0': give a whole number from 1 on"),
        ("bench rooms --tokens many", "--tokens: 'many': give a whole number from 1 on"),
        ("bench rooms --repeats 0", "--repeats: '0': give a whole number from 1 on"),
        ("bench rooms --rooms 1,x", "--rooms: '1,x': give whole numbers from 1 on, separated by commas"),
        ("bench rooms --backend UCX", BACKENDS),
        ("bench transfer --backend UCX", BACKENDS),
        ("bench crossover --backend UCX", BACKENDS),
        ("bench transfer --sizes 0", "--sizes: '0': give whole numbers from 1 on"),
        ("bench transfer --pair 3:1", "--pair: 3:1: give TPs that divide 8 KV heads, such as 4:1"),
        ("bench transfer --pair x", "--pair: x: give TPs that divide 8 KV heads"),
        ("bench transfer --trace /proc/none/t", "--trace: /proc/none/t: there is no such directory"),
        ("bench rooms --json /proc/none/j", "--json: /proc/none/j: there is no such directory"),
        ("bench rooms --plot /proc", "--plot: /proc is a directory: name a file in it"),
        ("bench crossover --write /proc/none/w", "--write: /proc/none/w: there is no such directory"),
        ("demo --pairs x", "--pairs: x: give TPs that divide 12 KV heads, such as 4:1"),
        ("demo --json /proc/none/j", "--json: /proc/none/j: there is no such directory"),
        ("trace room", "the following arguments are required: ID"),
        (
            "trace room x --agent http://a:1",
            "argument ID: 'x': give a number below 2**64, or a name as `longshore rooms` shows it",
        ),
        (f"trace room {2**64} --agent http://a:1", "give a number below 2**64"),
        ("trace room 1 --agent http://a:1 -o /proc/none/t", "-o/--output: /proc/none/t: there is no such directory"),
        ("rooms --agent http://a:1 -o yaml", "invalid choice: 'yaml'"),
        ("rooms --agent http://a:1 --limit 0", "--limit: '0': give a whole number from 1 on"),
        ("verify a --size 0", "--size: '0' is not a whole number of bytes from 1 to"),
        ("verify a --size 5Zi", "--size: '5Zi' is not a size: write a number and one of Ki, Mi"),
        ("verify a --repeats 256", "--repeats: 256: give at most 255"),
        ("verify a --pairs 0", "--pairs: '0': give a whole number from 1 on"),
        ("bench cluster a --sizes 1Mi,x", "--sizes: 'x' is not a size"),
        ("bench cluster a --concurrency 0", "--concurrency: '0': give whole numbers from 1 on"),
        (f"up -f {MANIFEST} --seconds -4", "--seconds: '-4': give seconds from 0 on"),
        (f"up -f {MANIFEST} --seconds nan", "--seconds: 'nan': give seconds from 0 on"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name_with_what_to_give(words, fault, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_told_and_nothing_starts(tmp_path, capsys) -> None:
    taken = tmp_path / "file"
    taken.touch()
    assert main(["up", "-f", MANIFEST, "--directory", str(taken)]) == 1
    assert capsys.readouterr().err == (
        f"longshore up: --directory {taken}: File exists: name one that can be created\n"
    )


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("longshore 0.")


def test_the_keys_directory_is_told_as_agents_need_it_wherever_they_are_started(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "mine"]) == 0
    assert f"LONGSHORE_KEYS_DIRECTORY={tmp_path.resolve()}/mine" in capsys.readouterr().out


def test_an_installation_for_engines_says_what_the_commands_need_beside_it(tmp_path, monkeypatch, capsys) -> None:
    needed = {"keys": (("zmq", "not_there_at_all"), ("agent", "cli", "nixl"))}
    monkeypatch.setattr("longshore_cli.main._NEEDED", needed)
    assert main(["keys", str(tmp_path / "keys")]) == 2
    assert capsys.readouterr().err.startswith(
        "longshore keys: not_there_at_all cannot be imported: pip install 'longshore-kv[agent,cli,nixl]'"
    )
    assert not (tmp_path / "keys").exists()


def test_commands_for_running_agents_need_to_know_which(tmp_path, capsys) -> None:
    for words, code, said in (
        ("verify", 2, "give the NAME of a DisaggDeployment, or --directory"),
        (f"verify a --directory {tmp_path}", 2, "leave out the deployment, or --directory"),
        ("bench cluster", 2, "give the NAME of a DisaggDeployment, or --directory"),
        (f"verify --directory {tmp_path}", 1, "it is no directory of `longshore up`"),
        (f"status --directory {tmp_path}", 1, "it is no directory of `longshore up`"),
        (f"rooms a --directory {tmp_path}", 2, "leave out the deployment, or --directory"),
        (f"trace room 1 --agent http://a --directory {tmp_path}", 2, "--agent and --directory both name agents"),
        ("rooms --token-file none", 2, "--token-file and --authority are for agents without a cluster: give --agent"),
    ):
        assert main(words.split()) == code
        assert said in capsys.readouterr().err
