"""Tests what `longshore dump` writes: all that can be read, why the rest is missing, and no secret."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import signal
import stat
import tarfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import check_scene as scene
import pytest
from api_scene import CRD, DEPLOYMENTS, LEASE, NAME, OWN, PODS, api_server, lease, operator

from longshore_cli.dump import clean, reading
from longshore_cli.main import main

# Each place has another one, so that none is removed only because another was. One search finds all.
SECRET = "s3cr3t-9f8e7d6c5b4a"
REPEATED = f"{SECRET}-that-a-log-repeats"
_NUMBERS = itertools.count(100)


def secret() -> str:
    return f"{SECRET}-{next(_NUMBERS)}"


NODE = "n-0"
AGENT = f"{scene.NAME}-agent-prefill-{NODE}"
LIST = "/api/v1/namespaces/team"
OWNER = {"kind": "DisaggDeployment", "name": scene.NAME}
CHILDREN = {
    "daemonsets": "/apis/apps/v1/namespaces/team/daemonsets",
    "configmaps": f"{LIST}/configmaps",
    "services": f"{LIST}/services",
    "serviceaccounts": f"{LIST}/serviceaccounts",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies",
}
HIDDEN_ENV = [
    {"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": f"authorization=Bearer {secret()}"},
    {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": f"https://user:{secret()}@collector"},
    {"name": "HF_TOKEN", "value": REPEATED},
    {"name": "TEAM_NAMESPACE_OF_SERVING", "value": AGENT},
    {"name": "NAMESPACE_OF_OPERATOR", "value": "longshore-system"},
    {"name": "LONGSHORE_LOG_LEVEL", "value": "debug"},
    {"name": "UCX_TLS", "value": "rc,cuda_copy"},
    {"name": "FROM_SECRET", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "one"}}},
]


def named(name: str, **more: Any) -> dict[str, Any]:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": secret(), "longshore.dev/keys": "abcd"}
    fields = [{"manager": "kubectl", "fieldsV1": {f"f:{secret()}": {}}}]
    metadata = {"name": name, "namespace": scene.SPACE, "annotations": annotations, "managedFields": fields}
    return {"metadata": metadata | more.pop("metadata", {})} | more


def containers(name: str) -> dict[str, Any]:
    probe = {
        "httpGet": {"httpHeaders": [{"name": "Authorization", "value": secret()}]},
        "exec": {"command": ["x", secret()]},
    }
    container = {
        "name": name, "image": "registry/image:1", "env": HIDDEN_ENV, "args": ["serve", f"--api-key={secret()}"],
        "command": ["sh", "-c", secret()], "livenessProbe": probe, "ports": [{"name": "http", "containerPort": 9470}],
    }  # fmt: skip
    csi = {"driver": "d", "volumeAttributes": {"password": secret()}}
    flexible, repository = {"driver": "d", "options": {"key": secret()}}, {"repository": f"https://u:{secret()}@git"}
    volumes = [{"name": "a", "csi": csi}, {"name": "b", "flexVolume": flexible}, {"name": "c", "gitRepo": repository}]
    return {
        "nodeName": NODE,
        "containers": [container],
        "volumes": [*volumes, {"name": "k", "secret": {"secretName": "k"}}],
    }


def pod(name: str, labels: Mapping[str, str], container: str = "agent") -> dict[str, Any]:
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": f"failed with {secret()}"}}
    states = [{"name": container, "restartCount": 1, "state": {"running": {}}, "lastState": ended}]
    return named(name, metadata={"labels": labels, "uid": name}, spec=containers(container)) | {
        "status": {
            "phase": "Running", "containerStatuses": states, "conditions": [{"type": "Ready", "status": "True"}],
        }
    }  # fmt: skip


def event(about: str, message: str) -> dict[str, Any]:
    return named(f"{about}.1") | {
        "involvedObject": {"name": about},
        "type": "Warning",
        "reason": "R",
        "message": message,
    }


def answers() -> dict[str, Any]:
    """A cluster with one deployment, and a secret at each place that may have one."""
    agents = {"env": HIDDEN_ENV, "annotations": {"vault": secret()}, "volumes": containers("a")["volumes"]}
    body = scene.served(scene.deployment(agents=agents))
    body["metadata"] |= named(scene.NAME)["metadata"]
    child = {"ownerReferences": [OWNER]}
    (installed,) = operator()["items"]
    installed["metadata"]["annotations"] |= {"kubectl.kubernetes.io/last-applied-configuration": secret()}
    installed["spec"] |= {"selector": {"matchLabels": {"app": "operator"}}}
    installed["spec"]["template"]["spec"]["containers"][0]["env"] += HIDDEN_ENV
    objects = {path: {"items": [named(kind, metadata=child)]} for kind, path in CHILDREN.items()}
    objects[CHILDREN["daemonsets"]]["items"][0]["spec"] = {"template": {"spec": containers("agent")}}
    # Of another owner: the label is anyone's.
    objects[CHILDREN["configmaps"]]["items"].append(named("foreign") | {"data": {"password": secret()}})
    proxy = f"{PODS}/{AGENT}:9470/proxy"
    agent, engine, other = (
        pod(AGENT, {"longshore.dev/deployment": scene.NAME}),
        pod("engine-1", {"longshore.dev/inject": f"{scene.NAME}.prefill"}, "engine"),
        pod("engine-2", {"longshore.dev/inject": "another.prefill"}, "engine"),
    )
    system = "/api/v1/namespaces/longshore-system"
    operator_pod = pod("operator-1", {"app": "operator"}, "operator")
    operator_pod["metadata"]["namespace"] = "longshore-system"
    node = scene.node(NODE, "prefill")
    node["metadata"]["annotations"] = {"cloud": secret()}
    return objects | {
        "/version": {"gitVersion": "v1.34.4"},
        CRD: scene.definition(),
        OWN: {"items": [body]},
        f"{OWN}/{scene.NAME}": body,
        f"{PODS}?limit=500&labelSelector=longshore.dev/deployment": {"items": [agent]},
        f"{PODS}?limit=500&labelSelector=longshore.dev/deployment={scene.NAME}": {"items": [agent]},
        f"{PODS}?limit=500&labelSelector=longshore.dev/inject": {"items": [engine, other]},
        f"{LIST}/events": {"items": [event(AGENT, f"exec {REPEATED}: not found"), event("stranger", secret()), event("llama-agent-old", "gone")]},
        "/api/v1/nodes": {"items": [node]},
        DEPLOYMENTS: {"items": [installed]},
        LEASE: partial(lease, 3),
        f"{system}/pods": {"items": [operator_pod]},
        f"{system}/events": {"items": []},
        f"{system}/pods/operator-1/log": "the operator's log\n",
        f"{PODS}/{AGENT}/log": f"the agent's log with {REPEATED}\n",
        f"{PODS}/{AGENT}/log?container=agent&tailLines=5000&limitBytes=2097152&previous=true": "its previous log\n",
        f"{proxy}/v1/status": scene.page(scene.worker("a")),
        f"{proxy}/v1/rooms": {"rooms": []},
        f"{proxy}/metrics": "longshore_rooms_total 1\n",
        # Never asked for. The test would find their texts.
        f"{LIST}/secrets": {"items": [named("keys") | {"data": {"curve.json": secret()}}]},
    }  # fmt: skip


def dumped(objects: Mapping[str, Any], folder: Path, *words: str, token: str = "") -> tuple[int, dict[str, str], Path]:
    """Return the exit status, the files by their path below the bundle's folder, and the bundle."""
    path = folder / "found.tar.gz"
    with api_server(objects, folder / "kubeconfig", token) as config:
        status = main(["dump", *words, "--kubeconfig", config, "-o", str(path)])
    return status, files(path), path


def files(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            member = archive.extractfile(entry)
            assert member is not None, entry.name
            found[entry.name] = member.read().decode()
    assert {name.partition("/")[0] for name in found} == {path.name.removesuffix(".tar.gz")}
    return {name.partition("/")[2]: text for name, text in found.items()}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_RATES_S", 0.01)


def test_it_has_all_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, path = dumped(answers(), tmp_path)
    here, agent, system = "namespaces/team", f"namespaces/team/agents/{AGENT}", f"operators/{NAME}"
    assert status == 0
    assert found.keys() == {
        "README.txt", "versions.json", "nodes.json", "status.json", "check.json",
        *(f"{here}/{kind}.json" for kind in (*CHILDREN, "disaggdeployments", "agent-pods", "engine-pods", "events")),
        *(f"{agent}/{name}" for name in ("log.txt", "previous-log.txt", "status.json", "rooms.json", "metrics.txt")),
        *(f"{system}/{name}" for name in ("deployment.json", "lease.json", "pods.json", "events.json")),
        f"{system}/operator-1/log.txt", f"{system}/operator-1/previous-log.txt",
    }  # fmt: skip
    assert found[f"{agent}/previous-log.txt"] == "its previous log\n"
    assert found[f"{system}/operator-1/log.txt"] == "the operator's log\n"
    assert json.loads(found["status.json"])["deployments"][0]["agents"][0]["pod"] == AGENT
    assert "version" in {line["check"] for line in json.loads(found["check.json"])}
    versions = json.loads(found["versions.json"])
    assert versions["kubernetes"]["gitVersion"] == "v1.34.4"
    assert versions["definition"]["content"] == versions["definition"]["annotation"]
    events = json.loads(found[f"{here}/events.json"])
    assert [each["involvedObject"]["name"] for each in events] == [AGENT, "llama-agent-old"]
    (node,) = json.loads(found["nodes.json"])
    assert node["metadata"]["labels"] == {"role": "prefill"} and node["status"]["conditions"]
    assert "(none)" in found["README.txt"].partition("Not read:")[2]
    assert all(name in found["README.txt"] for name in found.keys() - {"README.txt"})
    said = capsys.readouterr().out
    assert said == f"wrote {path}: {len(found) - 1} files, without Secrets, keys and tokens\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.partial"))


def test_no_byte_of_a_secret_is_in_it(tmp_path: Path) -> None:
    # The user's own token, too.
    _, found, path = dumped(answers(), tmp_path, token=f"{SECRET}-of-the-user")
    assert SECRET not in "".join([*found, *found.values()])
    assert SECRET.encode() not in gzip.decompress(path.read_bytes())
    # The reader sees that there was a value, and the harmless ones.
    (daemon_set,) = json.loads(found["namespaces/team/daemonsets.json"])
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    shown = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert shown == {
        "OTEL_EXPORTER_OTLP_HEADERS": clean.REMOVED,
        "OTEL_EXPORTER_OTLP_ENDPOINT": clean.REMOVED,
        "HF_TOKEN": clean.REMOVED,
        "TEAM_NAMESPACE_OF_SERVING": clean.REMOVED,
        "NAMESPACE_OF_OPERATOR": clean.REMOVED,
        "LONGSHORE_LOG_LEVEL": "debug",
        "UCX_TLS": "rc,cuda_copy",
        "FROM_SECRET": {"secretKeyRef": {"name": "tokens", "key": "one"}},
    }
    (configured,) = json.loads(found["namespaces/team/configmaps.json"])
    assert configured["metadata"]["name"] == "configmaps"
    assert configured["metadata"]["annotations"]["longshore.dev/keys"] == "abcd"
    engine, _ = json.loads(found["namespaces/team/engine-pods.json"])
    assert engine["status"]["containerStatuses"][0]["lastState"]["terminated"] == {"exitCode": 1, "reason": "Error"}
    # A name that is also a variable's value stays readable.
    assert AGENT in found["status.json"] and NAME in found["check.json"]


def test_a_secret_that_a_log_repeats_is_removed_there() -> None:
    removed: set[str] = set()
    clean.cleaned(
        {"env": [{"name": "A", "value": 'quoted "pass word" of someone'}, {"name": "B", "value": "1"}]}, removed
    )
    assert clean.masked('x quoted "pass word" of someone 1', removed) == "x (removed) 1"
    assert clean.masked(json.dumps('quoted "pass word" of someone'), removed) == '"(removed)"'


def test_an_agent_with_a_token_and_missing_rights_are_named_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = answers()
    objects[f"{PODS}/{AGENT}:9470/proxy/v1/status"] = (401, {"token": SECRET})
    for path in ("/version", CRD, DEPLOYMENTS, "/api/v1/nodes", CHILDREN["configmaps"], f"{LIST}/events"):
        del objects[path]
    status, found, path = dumped(objects, tmp_path)
    missing = found["README.txt"].partition("Not read:\n")[2]
    reasons = dict(line.strip().partition(": ")[::2] for line in missing.splitlines())
    assert status == 0
    assert reasons.keys() == {
        "operators/", "nodes.json", "namespaces/team/configmaps.json", "namespaces/team/events.json",
        f"namespaces/team/agents/{AGENT}/status.json, rooms.json, metrics.txt",
    }  # fmt: skip
    assert "no right to get this: /api/v1/nodes" in reasons["nodes.json"]
    assert "wants its token" in reasons[f"namespaces/team/agents/{AGENT}/status.json, rooms.json, metrics.txt"]
    assert SECRET not in str(found)
    assert "no right to get this" in str(json.loads(found["versions.json"])["definition"])
    assert f"namespaces/team/agents/{AGENT}/log.txt" in found and "status.json" in found and "check.json" in found
    assert capsys.readouterr().out.endswith("5 parts could not be read: README.txt in it says why\n")


def test_one_deployment_has_its_engines_alone(tmp_path: Path) -> None:
    for words, engines in (([], ["engine-1", "engine-2"]), ([scene.NAME, "-n", scene.SPACE], ["engine-1"])):
        _, found, _ = dumped(answers(), tmp_path, *words)
        listed = json.loads(found["namespaces/team/engine-pods.json"])
        assert [each["metadata"]["name"] for each in listed] == engines
        assert ("of DisaggDeployment llama of namespace team" in found["README.txt"]) == bool(words)


def test_a_deployment_that_is_not_there_and_an_api_server_that_is_away_leave_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = answers() | {f"{OWN}/other": (404, {"kind": "Status", "message": "not found"})}
    status, found, _ = dumped(there, tmp_path, "other")
    assert (status, found) == (1, {})
    assert "has no DisaggDeployment other: it has llama" in capsys.readouterr().err
    assert main(["dump", "--kubeconfig", str(tmp_path / "kubeconfig"), "-o", str(tmp_path / "found.tar.gz")]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["kubeconfig"]


def test_an_interrupt_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> str:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return "log"

    objects = answers() | {f"{PODS}/{AGENT}/log": interrupt}
    status, found, _ = dumped(objects, tmp_path)
    assert (status, found, capsys.readouterr()) == (130, {}, ("", ""))
    assert [each.name for each in tmp_path.iterdir()] == ["kubeconfig"]


def test_the_file_has_the_date_in_the_current_folder_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with api_server(answers(), tmp_path / "kubeconfig") as config:
        assert main(["dump", "--kubeconfig", config]) == 0
    (made,) = tmp_path.glob("*.tar.gz")
    assert re.fullmatch(r"longshore-dump-\d{8}-\d{6}\.tar\.gz", made.name)
    assert f"wrote {made.name}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "about"),
    [("-A llama", "leave out NAME and -n, or -A"), ("-A -n team", "leave out NAME and -n, or -A"), ("-o /no/such/x", "no such directory")],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_refused(words: str, about: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["dump", *words.split()])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert (status, about in capsys.readouterr().err) == (2, True)
