"""The scripts of the release workflow: the images are pushed to a real registry, and cosign verifies them.

The registry is crane's, on loopback. A key pair replaces the identity of the workflow, which only GitHub gives.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_site import ROOT
from controlplane import binaries
from controlplane.ports import free_port
from controlplane.processes import Process

from longshore_spec import distribution

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
LIMIT_S = 300.0
KEY_PASSWORD = {"COSIGN_PASSWORD": "of the test"}
INSECURE = ("--insecure-ignore-tlog", "--allow-http-registry", "--allow-insecure-registry")


def called(
    *command: str | Path, environment: dict[str, str] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | KEY_PASSWORD | (environment or {}),
    )


pytestmark = [
    pytest.mark.programs("crane", "cosign"),
    pytest.mark.skipif(os.environ.get("E2E_CLUSTER") == "own", reason="publishes the images of `make images`"),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry."""
    address = f"127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("registry")
    process = Process("registry", [binaries.find("crane"), "registry", "serve", "--address", address], folder)
    yield address
    process.stop()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key pair of cosign."""
    folder = tmp_path_factory.mktemp("keys")
    made = called(binaries.find("cosign"), "generate-key-pair", folder=folder)
    assert made.returncode == 0, made.stderr
    return folder


def test_a_published_image_has_a_signature_and_a_signed_sbom(registry: str, keys: Path) -> None:
    cosign, crane = binaries.find("cosign"), binaries.find("crane")
    environment = {
        "COSIGN_KEY": str(keys / "cosign.key"),
        "TLS_VERIFY": "false",
        "VERSION": re.findall(
            r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
        )[0],
        "EXTRAS": "cpu",
        "PATH": f"{cosign.parent}:{os.environ['PATH']}",
    }
    done = called(".ci/publish", f"{registry}/test", environment=environment)
    assert done.returncode == 0, done.stderr
    published = done.stdout.split()
    version = environment["VERSION"]
    assert [name.partition("@")[0] for name in published] == [
        f"{registry}/test/longshore-operator:{version}",
        f"{registry}/test/longshore-agent:{version}-cpu",
    ]
    for name in published:
        assert called(crane, "digest", "--insecure", name.partition("@")[0]).stdout.strip() == name.partition("@")[2]
        check = ("--key", str(keys / "cosign.pub"), *INSECURE, name)
        assert called(cosign, "verify", *check).returncode == 0
        proof = called(cosign, "verify-attestation", "--type=cyclonedx", *check)
        assert proof.returncode == 0, proof.stderr
        statement = json.loads(base64.b64decode(json.loads(proof.stdout.splitlines()[0])["payload"]))
        assert statement["subject"][0]["digest"]["sha256"] == name.rpartition(":")[2]
        purls = {entry["purl"] for entry in statement["predicate"]["components"]}
        assert any(purl.startswith(f"pkg:pypi/{distribution.NAME}@") for purl in purls), purls


def test_an_image_without_a_signature_is_refused(registry: str, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    called("tar", "cf", "layer.tar", "file", folder=tmp_path)
    name = f"{registry}/test/unsigned:1"
    pushed = called(
        binaries.find("crane"), "append", "--insecure", "--new_layer=layer.tar", f"--new_tag={name}", folder=tmp_path
    )
    assert pushed.returncode == 0, pushed.stderr
    refused = called(binaries.find("cosign"), "verify", f"--key={keys / 'cosign.pub'}", *INSECURE, name)
    assert refused.returncode != 0 and "no signatures found" in refused.stderr


def test_the_workflow_calls_scripts_that_exist_with_the_variants_that_they_know() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = {word for run in runs for word in run.split() if word.startswith(".ci/")}
    assert scripts == {".ci/run", ".ci/images", ".ci/publish"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    variants = jobs["image"]["strategy"]["matrix"]["include"]
    known = re.findall(r"^(\w+)\)$", (ROOT / ".ci" / "agent-extras").read_text(encoding="utf-8"), re.MULTILINE)
    assert [each["extras"] for each in variants if each["image"] == "agent"] == known
    # A build of cosign in the workflow is that of the module here.
    assert any(binaries.PROGRAMS["cosign"].package in run for run in runs)
