"""Imports archives of images into a containerd store, which real nodes start with.

Called by `real_cluster` and `real_node`. The import takes most of a cluster's start, so it runs once for a set of
archives, in the cache outside the tree. Each node gets hard links to the store's files. Containers write into their own
layers and do not change these files.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from controlplane import binaries
from controlplane.processes import Process
from controlplane.waiting import until

PAUSE = "localhost/pause:1"
_IMPORT_LIMIT_S = 600.0
_START_LIMIT_S = 60.0
# Snapshotters other than overlayfs would only log that they do not work.
UNUSED_PLUGINS = [f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")]
_SETTINGS = f"version = 2\ndisabled_plugins = {json.dumps(['io.containerd.grpc.v1.cri', *UNUSED_PLUGINS])}\n"


def images_folder() -> Path:
    """Return the folder in which `.ci/images` saves archives."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longshore" / "images"


def cluster_folder() -> Path:
    """Return the folder of stores and of running clusters in the cache."""
    folder = images_folder().with_name("cluster")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_store(archives: Sequence[Path]) -> Path:
    """Return a store with the images of `archives` and the image of a pod's sandbox. Older stores are removed."""
    digest = hashlib.sha256(binaries.find("pause").read_bytes())
    for archive in archives:
        # `.ci/images` writes the image's id beside it.
        digest.update(archive.with_name(f"{archive.name}.id").read_bytes())
    store = cluster_folder() / f"store-{digest.hexdigest()[:12]}"
    with (cluster_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            for old in cluster_folder().glob("store-*"):
                shutil.rmtree(old)
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cluster_folder()))
            try:
                _import(partial, archives)
                (partial / "root").rename(store)
            finally:
                shutil.rmtree(partial)
    return store


def copy_store(store: Path, target: Path) -> None:
    """Fill a node's folder with the content of a store."""
    target.parent.mkdir(parents=True)
    subprocess.run(["cp", "--archive", "--link", store, target], check=True)
    # containerd writes to its databases.
    for path in [*target.rglob("*.db")]:
        if "snapshots" not in path.relative_to(target).parts:
            path.unlink()
            shutil.copy2(store / path.relative_to(target), path)


def _import(folder: Path, archives: Sequence[Path]) -> None:
    settings, socket = folder / "settings.toml", folder / "containerd.sock"
    settings.write_text(_SETTINGS)
    # Its mounts of layers must not appear on this machine.
    command = ["unshare", "--mount", "containerd", f"--config={settings}", f"--root={folder / 'root'}"]
    process = Process("containerd", [*command, f"--state={folder / 'state'}", f"--address={socket}"], folder)
    control = ["ctr", f"--address={socket}", "--namespace=k8s.io"]
    try:
        until(lambda: process.check() and socket.exists() and _answers(control), "containerd answers", _START_LIMIT_S)
        for archive in [_pause_archive(folder), *archives]:
            done = subprocess.run(
                [*control, "images", "import", archive],
                check=False,
                capture_output=True,
                text=True,
                timeout=_IMPORT_LIMIT_S,
            )
            assert done.returncode == 0, f"{archive}: {done.stderr}"
    finally:
        process.stop()


def _answers(control: list[str]) -> bool:
    return subprocess.run([*control, "version"], check=False, capture_output=True).returncode == 0


def _pause_archive(folder: Path) -> Path:
    """Return an archive with the image of a pod's sandbox, in the form of `docker save`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(binaries.find("pause"), "pause")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    path = folder / "pause.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path
