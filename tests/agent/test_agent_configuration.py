"""An agent with an invalid configuration reports all faults at once, by the names of the settings, and does not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refused_start import refused_start

from longshore_agent.control import curve
from longshore_agent.main import main
from longshore_spec import names

MANIFEST = Path(__file__).parents[2] / "examples" / "llama-70b.yaml"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Start an agent with these settings; return the lines of its refusal."""
    for name in [name for name in os.environ if name.startswith("LONGSHORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LONGSHORE_RUN_DIRECTORY", str(tmp_path / "run"))

    def start(**settings: object) -> list[str]:
        for name, value in settings.items():
            monkeypatch.setenv(f"LONGSHORE_{name.upper()}", str(value))
        assert main([]) == 2
        return capsys.readouterr().err.splitlines()

    return start


def test_files_that_settings_name_and_that_are_not_there_are_told_at_once_by_their_variables(refused, tmp_path) -> None:
    (tmp_path / "file").touch()
    none = tmp_path / "none"
    said = refused(
        run_directory=tmp_path / "file" / "run",
        keys_directory=none,
        http_token_file=none,
        crossover_file=none,
        loopback_faults="junk",
    )
    wanted = ["RUN_DIRECTORY", "KEYS_DIRECTORY", "HTTP_TOKEN_FILE", "CROSSOVER_FILE", "LOOPBACK_FAULTS"]
    assert [line.split()[1].rstrip(":") for line in said] == [f"LONGSHORE_{name}" for name in wanted]
    assert f"{none}/curve.json: No such file or directory: make keys with `longshore keys {none}`" in said[1]
    assert not (tmp_path / "run").exists()


def test_an_empty_token_file_does_not_open_the_pages_to_everyone(refused, tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    path.chmod(0o600)
    assert refused(http_token_file=path) == [
        f"longshore-agent: LONGSHORE_HTTP_TOKEN_FILE: {path} is empty: write the token into it, or name no file"
    ]


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Yield keys of two revisions and a token, mounted like a kubelet does: names are links through a link to a folder."""
    data = tmp_path / "mounted" / "..2026"
    data.mkdir(parents=True)
    curve.write(curve.generate(), data)
    (data / names.KEYS_FILE).rename(data / names.PREVIOUS_KEYS_FILE)
    curve.write(curve.generate(), data)
    (data / "token").write_text("s3cret")
    (data.parent / "..data").symlink_to("..2026")
    for path in data.iterdir():
        (data.parent / path.name).symlink_to(f"..data/{path.name}")
        path.chmod(0o440)
    return data.parent


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("KEYS_DIRECTORY", names.KEYS_FILE),
        ("KEYS_DIRECTORY", names.PREVIOUS_KEYS_FILE),
        ("HTTP_TOKEN_FILE", "token"),
    ],
)
def test_a_secret_that_every_user_can_read_is_refused_by_its_file(refused, mounted, setting, name) -> None:
    (mounted / name).chmod(0o444)
    # A second, unknown setting, so that the agent does not start even if the first one is accepted.
    said = refused(keys_directory=mounted, http_token_file=mounted / "token", loopback_faults="junk")
    assert f"longshore-agent: LONGSHORE_{setting}: {mounted}/{name}: every user of this machine can read it" in said[0]
    assert f"`chmod 600 {mounted}/{name}`" in said[0]
    assert "defaultMode: 0440" in said[0]
    assert len(said) == 2


def test_secrets_that_the_pod_s_group_can_read_are_taken_as_a_secret_volume_mounts_them(refused, mounted) -> None:
    (fault,) = refused(keys_directory=mounted, http_token_file=mounted / "token", loopback_faults="junk")
    assert "LOOPBACK_FAULTS" in fault


def test_faults_of_the_config_file_and_of_the_environment_are_told_together(refused, tmp_path) -> None:
    missing = tmp_path / "none.json"
    assert refused(config_file=missing, lane_count=0) == [
        f"longshore-agent: LONGSHORE_CONFIG_FILE: {missing}: No such file or directory",
        "longshore-agent: LONGSHORE_LANE_COUNT: 0 is out of range: give 1 to 64",
    ]


def test_a_manifest_given_in_the_config_files_place_is_told_as_such(refused) -> None:
    (line,) = refused(config_file=MANIFEST)
    assert f"{MANIFEST}: kind: DisaggDeployment is for the operator and `longshore up`" in line
    assert "this agent reads AgentConfig" in line


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"HTTP_CERTIFICATE_FILE": "none.pem", "HTTP_KEY_FILE": "none.key"},
            "LONGSHORE_HTTP_CERTIFICATE_FILE, LONGSHORE_HTTP_KEY_FILE: none.pem with none.key: No such file",
        ),
        # 203.0.113.0/24 is for documentation: no machine has an address of it.
        (
            {"BIND_HOST": "203.0.113.9", "NETWORK_POLICY": "true"},
            "LONGSHORE_BIND_HOST, LONGSHORE_HTTP_PORT: cannot listen on 203.0.113.9:0: Cannot assign",
        ),
    ],
)
def test_what_keeps_the_pages_from_being_served_is_told_by_its_variables(settings, fault, tmp_path) -> None:
    assert fault in _refusal(tmp_path, **settings)


def test_a_token_may_come_through_a_pipe_which_can_be_read_only_once(tmp_path) -> None:
    # It fails only at its address, so it has accepted the token.
    said = _refusal(tmp_path, HTTP_TOKEN_FILE="/dev/stdin", BIND_HOST="203.0.113.9", NETWORK_POLICY="true")
    assert "cannot listen on" in said
    assert "HTTP_TOKEN_FILE" not in said
    assert "/dev/stdin" not in said


def _refusal(directory: Path, **settings: str) -> str:
    """Run an agent with keys, and a token in its standard input; it must end with 2; return its message."""
    curve.write(curve.generate(), directory)
    settings |= {"RUN_DIRECTORY": str(directory / "run"), "KEYS_DIRECTORY": str(directory)}
    return refused_start({f"LONGSHORE_{name}": value for name, value in settings.items()}, stdin="s3cret\n")


def test_a_setting_that_lacks_its_other_half_is_shown_as_empty(refused) -> None:
    (line,) = refused(http_certificate_file="a.pem")
    assert "LONGSHORE_HTTP_KEY_FILE is empty: give both, or neither" in line
