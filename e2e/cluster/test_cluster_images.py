"""What the images of `make images` contain: read from their archives, which need no node."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_site import ROOT
from controlplane.image_store import images_folder

from longshore_spec import distribution

_OPERATOR_BYTES_MAX = 150_000_000
_SBOM = "opt/longshore/sbom.json"
_TOOL = re.compile(r"(^|/)s?bin/(pip3?|uv|apt-get|dpkg|gcc|cc|perl)$")
_LIBRARY = re.compile(r"site-packages/(pip|uv|torch|triton|nixl_ep\w*)/")


@dataclass(frozen=True)
class Image:
    """One image.

    Attributes:
        config: `User`, `Labels` and others, as the image has them.
        files: paths of all layers, without a leading slash.
        purls: the entries of the SBOM.
    """

    size_bytes: int
    config: dict[str, Any]
    files: frozenset[str]
    purls: frozenset[str]


def _layers(archive: tarfile.TarFile, names: list[str]) -> Iterator[tarfile.TarFile]:
    for name in names:
        with tarfile.open(fileobj=archive.extractfile(name)) as layer:
            yield layer


def _read(path: Path) -> Image:
    with tarfile.open(path) as archive:
        [manifest] = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(archive.extractfile(manifest["Config"]))["config"]  # type: ignore[arg-type]
        files, sbom = set(), {"components": []}
        for layer in _layers(archive, manifest["Layers"]):
            inside = layer.getnames()
            files.update(inside)
            if _SBOM in inside:
                sbom = json.load(layer.extractfile(_SBOM))  # type: ignore[arg-type]
        purls = frozenset(entry["purl"] for entry in sbom["components"])
    return Image(path.stat().st_size, config, frozenset(files), purls)


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    """Both images, by name."""
    if os.environ.get("E2E_CLUSTER") == "own":
        pytest.skip("reads the archives of `make images`, and a tester's own cluster has images of its own")
    return {name: _read(images_folder() / f"longshore-{name}.tar") for name in ("operator", "agent")}


@pytest.mark.shortest
def test_the_operators_image_is_small_and_has_no_tool_that_it_does_not_run(images: dict[str, Image]) -> None:
    image = images["operator"]
    assert image.size_bytes <= _OPERATOR_BYTES_MAX
    assert [path for path in image.files if _TOOL.search(path) or _LIBRARY.search(path)] == []


@pytest.mark.shortest
def test_the_agents_image_for_cpus_has_no_tensor_library_no_compiler_and_one_backend_of_each_kind(
    images: dict[str, Image],
) -> None:
    image = images["agent"]
    assert [path for path in image.files if _LIBRARY.search(path)] == []
    assert "usr/bin/gcc" not in image.files
    for library in ("nixl-cu", "mooncake-transfer-engine"):
        assert len([purl for purl in image.purls if purl.startswith(f"pkg:pypi/{library}")]) == 1, library


@pytest.mark.shortest
def test_the_agents_image_has_the_test_engine_and_nothing_else_of_the_laboratory(images: dict[str, Image]) -> None:
    paths = [path for path in images["agent"].files if "/longshore_lab/" in path and path.endswith(".py")]
    parts = {path.partition("/longshore_lab/")[2].partition("/")[0] for path in paths}
    assert parts == {"__init__.py", "test_engine"}


@pytest.mark.shortest
@pytest.mark.parametrize("name", ["operator", "agent"])
def test_an_image_runs_without_root_and_says_what_it_is(images: dict[str, Image], name: str) -> None:
    config = images[name].config
    assert config["User"] == "10001:10001"
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == f"longshore-{name}"
    assert re.fullmatch(r"[0-9a-f]{40}", labels["revision"])
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None and labels["version"] == version[1]
    assert labels["licenses"] == "Apache-2.0"


@pytest.mark.shortest
@pytest.mark.parametrize("name", ["operator", "agent"])
def test_the_sbom_lists_the_versions_of_the_lock_and_debians_packages(images: dict[str, Image], name: str) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = {f"pkg:pypi/{line.split(' ')[0].replace('==', '@')}" for line in lock.splitlines() if "==" in line}
    ours = {purl for purl in images[name].purls if purl.startswith(f"pkg:pypi/{distribution.NAME}@")}
    python = {purl for purl in images[name].purls if purl.startswith("pkg:pypi/")}
    assert len(ours) == 1
    assert python - ours <= pinned
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in images[name].purls)
