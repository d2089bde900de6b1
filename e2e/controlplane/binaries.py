"""Finds the control plane's programs, or builds them from their Go modules into a cache outside the tree.

Called by `cluster`, `nodes` and `python -m controlplane build`. Order: KUBEBUILDER_ASSETS, the cache, the PATH, a build.
A build needs Go 1.21 or newer (it fetches the toolchain that a module asks for) and takes about 13 minutes on two cores.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.34.4"
PROMETHEUS_VERSION = "3.16.0"
MODULES = Path(__file__).parent / "go"
# The longest build took 3 minutes on two idle cores. CI builds at a low priority beside tests that use both.
BUILD_LIMIT_S = 3600.0
_KUBERNETES_FLAGS = " ".join(
    [
        f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
        f"-X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES_VERSION}",
    ]
)
_PROMETHEUS_FLAGS = f"-X github.com/prometheus/common/version.Version={PROMETHEUS_VERSION}"
# Programs of which the PATH often has another version. Only the pinned version is valid here.
_NEVER_FROM_PATH = frozenset(
    {"kubectl", "helm", "kwok", "kube-score", "prometheus", "promtool", "check-dashboard", "crane", "lws", "cosign"}
)


class MissingProgramError(RuntimeError):
    """A program was not found and cannot be built; names what to install or set."""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        module: folder below `go/` that pins its version.
        package: Go package to build.
        first: `python -m controlplane build` builds it. The others are built by the test that needs them.
        tags: Go's build tags.
    """

    name: str
    module: str
    package: str
    linker_flags: str = ""
    first: bool = True
    tags: str = ""


PROGRAMS = {
    program.name: program
    for program in (
        *(
            Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS)
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubectl",
                "kubelet",
                "kube-proxy",
            )
        ),
        Program("etcd", "etcd", "."),
        Program("pause", "pause", "."),
        Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Program("helm", "helm", "helm.sh/helm/v3/cmd/helm"),
        Program("kube-score", "kube-score", "github.com/zegl/kube-score/cmd/kube-score"),
        *(
            # Of the kinds of service discovery, only that of Kubernetes: those of clouds need many more packages.
            Program(
                name,
                "prometheus",
                f"github.com/prometheus/prometheus/cmd/{name}",
                _PROMETHEUS_FLAGS,
                tags="remove_all_sd,enable_kubernetes_sd",
            )
            for name in ("prometheus", "promtool")
        ),
        Program("check-dashboard", "dashboard", "."),
        Program("crane", "crane", "github.com/google/go-containerregistry/cmd/crane", first=False),
        Program("lws", "lws", "sigs.k8s.io/lws/cmd", first=False),
        Program("cosign", "cosign", "github.com/sigstore/cosign/v3/cmd/cosign", first=False),
    )
}


def find(name: str) -> Path:
    """Return the path of a program; build it if it is not found.

    Raises:
        MissingProgramError: the program and Go were not found, or the build failed.
    """
    program = PROGRAMS[name]
    cached = cache_folder(program.module) / name
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    candidates = [Path(assets) / name] if assets else []
    candidates.append(cached)
    if name not in _NEVER_FROM_PATH and (on_path := shutil.which(name)):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    return _build(program, cached)


def cache_folder(module: str) -> Path:
    """Return the cache folder of a module's programs. Its name depends on everything that the module pins."""
    digest = hashlib.sha256()
    folder = MODULES / module
    for path in sorted([*folder.glob("go.*"), *folder.glob("*.go")]):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "longshore" / "controlplane" / f"{module}-{digest.hexdigest()[:12]}"


def module_folder(module: str, package: str) -> Path:
    """Return the folder of a module's source in Go's cache, for its files that are no code."""
    go = _go(package)
    done = subprocess.run(
        [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", package],
        cwd=MODULES / module,
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
    )
    if not done.stdout.strip():
        subprocess.run([go, "mod", "download", package], cwd=MODULES / module, check=True, timeout=BUILD_LIMIT_S)
        return module_folder(module, package)
    return Path(done.stdout.strip())


def _go(wanted_for: str) -> str:
    found = shutil.which("go")
    if found is None:
        raise MissingProgramError(
            f"{wanted_for} is not here and has to be built: install Go 1.21 or newer (.ci/install-go does), or set "
            f"KUBEBUILDER_ASSETS to a folder with {', '.join(PROGRAMS)}"
        )
    return found


def _build(program: Program, target: Path) -> Path:
    go = _go(program.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"controlplane: building {program.name}; it is kept in {target.parent}\n")
    # Built under a temporary name and renamed, so that concurrent or interrupted runs leave no partial program.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    command = [
        go,
        "build",
        "-mod=readonly",
        "-trimpath",
        f"-tags={program.tags}",
        f"-ldflags=-s -w {program.linker_flags}",
        "-o",
        str(partial),
    ]
    try:
        done = subprocess.run(
            [*command, program.package],
            cwd=MODULES / program.module,
            env=os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": os.environ.get("GOTOOLCHAIN") or "auto"},
            check=False,
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT_S,
        )
        if done.returncode:
            raise MissingProgramError(f"{program.name} cannot be built:\n{done.stderr[-4000:]}")
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return target
