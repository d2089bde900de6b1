"""Tests that every place states the version of pyproject.toml, and that `.ci/release` sets it in all of them."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from tree_of_files import ROOT, file_paths, project

VERSION = project()["project"]["version"]
# Tags of our images. The changelog and the pages of the past keep theirs.
IMAGE = re.compile(r"longshore-(?:agent|operator):(\d+\.\d+\.\d+)")
PAST = ("CHANGELOG.md", "docs/design/")
NEW = "99.1.0"
PROGRAMS = Path(sys.executable).parent
LIMIT_S = 120.0


def stated(root: Path) -> dict[str, set[str]]:
    """Return the versions that a tree states, by place."""
    chart = yaml.safe_load((root / "charts/longshore/Chart.yaml").read_text())
    found = {f"Chart.yaml: {name}": {str(chart[name])} for name in ("version", "appVersion")}
    for name in ("Dockerfile.agent", "Dockerfile.operator"):
        found[name] = set(re.findall(r"^ARG VERSION=(.*)$", (root / name).read_text(), re.MULTILINE))
    found["README.md"] = set(re.findall(r"^Version (\d+\.\d+\.\d+)", (root / "README.md").read_text(), re.MULTILINE))
    for path in ("crds", "charts/longshore/files", "cli/longshore_cli/analyze"):
        definition = yaml.safe_load((root / path / "disaggdeployments.longshore.dev.yaml").read_text())
        found[f"{path}: CRD"] = {definition["metadata"]["labels"]["app.kubernetes.io/version"]}
    for path in file_paths():
        if not str(path).startswith(PAST) and path != Path("tests/repo/test_versions.py"):
            tags = set(IMAGE.findall((root / path).read_text(errors="replace")))
            found |= {f"{path}: images": tags} if tags else {}
    return found


def test_every_place_states_the_version_of_the_project() -> None:
    found = stated(ROOT)
    assert {place: versions for place, versions in found.items() if versions != {VERSION}} == {}
    # The operator's default, the chart's, the examples' and the pages'.
    assert {f"{path}: images" for path in (
        "operator/longshore_operator/settings.py", "charts/longshore/values.yaml", "examples/engine/pods.yaml", "README.md",
    )} <= found.keys()  # fmt: skip


@pytest.mark.parametrize("program", ["longshore", "kubectl-longshore", "longshore-agent", "longshore-operator"])
def test_every_program_tells_the_version_of_the_project(program: str) -> None:
    done = subprocess.run(
        [str(PROGRAMS / program), "--version"], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == f"{'longshore' if program.startswith('kubectl') else program} {VERSION}\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the tree's files of this moment."""
    root = tmp_path / "tree"
    for path in file_paths():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, root / path)
    # Directly after a release the newest section is empty.
    changelog = root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased\n", "## Unreleased\n\n- A change.\n", 1))
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        git(root, *words)
    return root


def git(root: Path, *words: str) -> str:
    identity = [f"--config-env={name}=WHO" for name in ("user.name", "user.email")]
    return subprocess.run(
        ["git", *identity, *words], cwd=root, env=os.environ | {"WHO": "t"}, check=True, capture_output=True, text=True
    ).stdout


def release(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    names = {f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        [str(root / ".ci/release"), *words],
        env=os.environ | names | {"PYTHON": sys.executable},
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.rest("releases")
@pytest.mark.slow
def test_a_release_has_its_version_everywhere_a_dated_changelog_its_packages_and_a_tag(tree: Path) -> None:
    trial = release(tree, NEW)
    assert trial.returncode == 0, trial.stderr
    built = {path.name for path in (tree / "dist").iterdir()}
    wheel = f"longshore_kv-{NEW}-py3-none-any.whl"
    assert built == {wheel, f"longshore_kv-{NEW}.tar.gz", f"longshore-chart-{NEW}.tgz"}
    # A trial leaves the tree as it was.
    assert (git(tree, "status", "--porcelain"), git(tree, "tag")) == ("", "")
    assert stated(tree) == stated(ROOT)

    days = [dt.datetime.now(dt.UTC).date().isoformat()]
    kept = release(tree, NEW, "--tag")
    days.append(dt.datetime.now(dt.UTC).date().isoformat())
    assert kept.returncode == 0, kept.stderr
    assert {place: versions for place, versions in stated(tree).items() if versions != {NEW}} == {}
    assert git(tree, "tag").split() == [f"v{NEW}"]
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "log", "-1", "--format=%s", f"v{NEW}").strip() == f"Release {NEW}"
    headings = re.findall(r"^## .*$", (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "## Unreleased"
    assert headings[1] in {f"## {NEW} ({day})" for day in days}
    with zipfile.ZipFile(tree / "dist" / wheel) as archive:
        metadata = message_from_bytes(archive.read(f"longshore_kv-{NEW}.dist-info/METADATA"))
        assert any(name.startswith("longshore_engines/") for name in archive.namelist())
    assert metadata["Version"] == NEW
    with tarfile.open(tree / "dist" / f"longshore-chart-{NEW}.tgz") as archive:
        chart = archive.extractfile("longshore/Chart.yaml")
        assert chart is not None
        assert yaml.safe_load(chart)["appVersion"] == NEW
        assert "longshore/files/disaggdeployments.longshore.dev.yaml" in archive.getnames()
    assert "the changelog's newest section is empty" in release(tree, "99.2.0").stderr


@pytest.mark.rest("releases")
@pytest.mark.slow
def test_a_release_that_cannot_be_built_leaves_neither_commit_nor_tag(tree: Path) -> None:
    project_file = tree / "pyproject.toml"
    project_file.write_text(project_file.read_text().replace('readme = "README.md"', 'readme = "none.md"'))
    git(tree, "commit", "--quiet", "--all", "--message", "break the build")
    before = git(tree, "rev-parse", "HEAD")
    done = release(tree, NEW, "--tag")
    assert done.returncode
    assert "none.md" in done.stdout + done.stderr
    assert (git(tree, "rev-parse", "HEAD"), git(tree, "tag"), git(tree, "status", "--porcelain")) == (before, "", "")


def dirty(root: Path) -> None:
    (root / "new.txt").touch()


def tagged(root: Path) -> None:
    git(root, "tag", f"v{NEW}")


def strange(root: Path) -> None:
    changelog = root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## ", "## x", 1))
    git(root, "commit", "--quiet", "--all", "--message", "x")


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no version": ("1.0", lambda _: None, "'1.0' is no version"),
    "a lower one": ("0.0.1", lambda _: None, f"0.0.1 is lower than {VERSION}"),
    "a tree with changes": (NEW, dirty, "the tree has changes"),
    "a tag that exists": (NEW, tagged, f"the tag v{NEW} exists"),
    "a changelog without a new section": (NEW, strange, "begin it with '## Unreleased'"),
}


@pytest.mark.rest("releases")
@pytest.mark.slow
def test_a_release_that_cannot_be_is_refused_with_the_reason_before_anything_changes(tree: Path) -> None:
    for name, (version, spoil, reason) in REFUSED.items():
        head = git(tree, "rev-parse", "HEAD").strip()
        spoil(tree)
        before = git(tree, "log", "-1", "--format=%H")
        refused = release(tree, version, "--tag")
        assert refused.returncode == 1, name
        assert reason in refused.stderr, name
        assert git(tree, "log", "-1", "--format=%H") == before, name
        assert not (tree / "dist").exists(), name
        (tree / "new.txt").unlink(missing_ok=True)
        git(tree, "reset", "--quiet", "--hard", head)
        for tag in git(tree, "tag").split():
            git(tree, "tag", "--delete", tag)
