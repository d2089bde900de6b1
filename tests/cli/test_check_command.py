"""Tests the arguments of `longshore check`, its exit statuses, and what it says without a cluster."""

from __future__ import annotations

import json
import textwrap
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_scene as scene
import pytest
import yaml

from longshore_cli import agents, threads
from longshore_cli.check import command, reading
from longshore_cli.cluster import CONNECTIONS
from longshore_cli.main import main
from longshore_cli.status_pages import AgentPageError, AgentPages, Page


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ("--pre llama", "leave out NAME and -A, or --pre"),
        ("--pre -A", "leave out NAME and -A, or --pre"),
        ("-f some.yaml", "give --pre, or leave it out"),
        ("-A llama", "leave out NAME and -n, or -A"),
        ("-A -n team", "leave out NAME and -n, or -A"),
        ("--pre -f missing.yaml", "missing.yaml: No such file"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    words: str, about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words.split()]) == 2
    assert about in capsys.readouterr().err


def test_a_file_may_have_several_documents_of_several_kinds(tmp_path: Path) -> None:
    other = scene.deployment()
    other["metadata"] = {"name": "second"}
    broken = scene.deployment(transfer={"wires": ["Pigeon"]})
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}}
    path = tmp_path / "many.yaml"
    path.write_text(yaml.safe_dump_all([space, scene.deployment(), other, broken]))
    found = command._documents(path)
    assert [(one.namespace, one.name, one.spec is None) for one in found] == [
        ("team", "llama", False), ("", "second", False), ("team", "llama", True),
    ]  # fmt: skip
    assert "spec.transfer.wires" in found[2].faults[0]
    path.write_text(json.dumps(scene.deployment()))
    assert [one.name for one in command._documents(path)] == ["llama"]
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [scene.deployment()]}))
    assert [one.name for one in command._documents(path)] == ["llama"]
    path.write_text("kind: DisaggDeployment\nmetadata: [")
    (unreadable,) = command._documents(path)
    assert unreadable.spec is None and unreadable.faults[0].startswith(f"{path}: ")


def test_a_file_without_a_deployment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n---\nkind: Namespace\n")
    assert main(["check", "--pre", "-f", str(path)]) == 2
    assert "has no DisaggDeployment" in capsys.readouterr().err


def test_agents_that_do_not_answer_in_time_are_given_up_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = threading.Event()

    def wait_from_the_first_answer(futures: list[Future[int]], limit_s: float) -> None:
        """On a busy machine the thread that is answered may begin late."""
        futures[0].result()
        wait(futures, limit_s)

    monkeypatch.setattr(threads, "wait", wait_from_the_first_answer)

    def silent(_: str) -> Page:
        end.wait()
        raise OSError("the test has ended")

    def fetch(_: str) -> Page:
        return Page(200, b"{}")

    hanging = [AgentPages(f"silent-{number}", silent) for number in range(CONNECTIONS + 1)]
    try:
        # The last one is never asked, because those that hang occupy all connections.
        found = agents.answers([AgentPages("good", fetch), *hanging], lambda one: one.ask("/v1/status").status, 0.5)
    finally:
        end.set()
    assert found[0] == 200
    assert all(f"silent-{n} has not answered within 0.5 s" in str(error) for n, error in enumerate(found[1:]))


def test_only_warnings_about_pods_and_daemon_sets_are_causes() -> None:
    kinds = {"DaemonSet": "quota", "Service": "no endpoints", "Pod": "no volume"}
    told = [
        {"reason": "Failed", "message": text, "involvedObject": {"kind": kind, "name": "llama-agent", "uid": kind}}
        for kind, text in kinds.items()
    ]
    cluster: Any = SimpleNamespace(listed=lambda *_: told)
    assert reading._warnings(cluster, "team") == {"llama-agent": "Failed: quota", "Pod": "Failed: no volume"}


def test_an_agent_of_another_release_that_tells_less_is_named() -> None:
    for field in ("version", "findings"):
        body = scene.page(scene.worker("one"))
        assert reading._status(answering(body)).workers[0].worker == "one/0"
        del body[field]
        with pytest.raises(AgentPageError, match=rf"team/llama-agent-0.*{field}.*is an agent of this release there"):
            reading._status(answering(body))


@pytest.mark.parametrize("workers", [None, 7, [None], [{"worker": 7}]])
def test_a_page_with_workers_of_another_kind_is_refused(workers: Any) -> None:
    with pytest.raises(AgentPageError, match=r"team/llama-agent-0/v1/status: .*workers"):
        reading._status(answering(scene.page() | {"workers": workers}))


def answering(body: dict[str, Any]) -> AgentPages:
    """Return the pages of an agent that answers this."""
    return AgentPages("team/llama-agent-0", lambda _: Page(200, json.dumps(body).encode()))


def test_a_cluster_that_does_not_answer_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    text = """
        apiVersion: v1
        kind: Config
        current-context: one
        contexts: [{name: one, context: {cluster: one, user: one}}]
        clusters: [{name: one, cluster: {server: "https://127.0.0.1:1"}}]
        users: [{name: one, user: {}}]
    """
    kubeconfig.write_text(textwrap.dedent(text))
    for words in (["--pre"], []):
        assert main(["check", *words, "--kubeconfig", str(kubeconfig), "-o", "json"]) == 1
        (line,) = json.loads(capsys.readouterr().out)
        assert (line["check"], line["state"]) == ("connection", "error")
        assert "127.0.0.1:1 cannot be reached" in line["message"]
    assert main(["check", "--kubeconfig", str(tmp_path / "none")]) == 1
    assert "no cluster is known" in capsys.readouterr().out
