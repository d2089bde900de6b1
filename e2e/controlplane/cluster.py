"""Starts and stops one control plane. Used by the fixtures, the benchmark and `python -m controlplane up`."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from controlplane import binaries
from controlplane.certificates import Authority
from controlplane.ports import HOST, free_port
from controlplane.processes import Process
from controlplane.waiting import until

# The start takes 3 s on idle cores. The limit is 40 times as much, for a loaded machine.
READY_LIMIT_S = 120.0
KUBECTL_LIMIT_S = 120.0
_ETCD_QUOTA_BYTES = 4 << 30


class ControlPlane:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler, with their files in `folder`.

    `start` returns when the API server is ready and the controllers work; `stop` ends all started programs by their ids.

    Args:
        host: the API server's address. Real kubelets reach it if it is not a loopback address.
        node_grace_s: a node is NotReady if it is silent for this long. The default is longer than KWOK takes to renew its
            nodes' leases, see `nodes`.
    """

    def __init__(self, folder: Path, *, host: str = HOST, node_grace_s: int = 200) -> None:
        self.folder = folder
        self.host = host
        self.port = free_port()
        self.server = f"https://{host}:{self.port}"
        self._node_grace_s = node_grace_s
        self.authority = Authority(folder / "pki")
        self.kubeconfig = self.authority.kubeconfig("admin", self.server, "admin", "system:masters")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the programs in the order of their dependencies."""
        etcd = self._start_etcd()
        api = self._start_api_server(etcd)
        until(
            lambda: api.check() and self.kubectl("get", "--raw", "/readyz") == "ok", "API server ready", READY_LIMIT_S
        )
        controllers = self._start_controllers()
        until(
            lambda: all(c.check() for c in controllers) and self.kubectl("get", "serviceaccount", "default"),
            "the default ServiceAccount, which the controller-manager makes",
            READY_LIMIT_S,
        )

    def stop(self) -> None:
        """End everything, last started first."""
        self._stack.close()

    def run(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        """Start a program that ends with this control plane."""
        process = Process(name, arguments, self.folder, environment)
        # Nothing outlives the cluster. An API server that is told to end would wait for its watches.
        self._stack.callback(process.stop, signal.SIGKILL)
        return process

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as the cluster's administrator and return its output.

        Raises:
            AssertionError: kubectl failed; has its error output.
        """
        done = self.try_kubectl(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout.strip()

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return its completed process."""
        return subprocess.run(
            [binaries.find("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments],
            check=False,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=KUBECTL_LIMIT_S,
            env=os.environ | {"KUBECACHEDIR": str(self.folder / "kubectl-cache")},
        )

    def _start_etcd(self) -> str:
        client, peer = (f"http://{HOST}:{free_port()}" for _ in range(2))
        self.run(
            "etcd",
            str(binaries.find("etcd")),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            f"--quota-backend-bytes={_ETCD_QUOTA_BYTES}",
        )
        return client

    def _start_api_server(self, etcd: str) -> Process:
        pki = self.authority
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", self.host, "10.96.0.1")
        certificate, key = pki.issue("apiserver", *names, user="kube-apiserver")
        private, public = pki.token_keys()
        kubelets = ["--endpoint-reconciler-type=none"]
        if self.host != HOST:
            client, client_key = pki.issue("apiserver-client", user="kube-apiserver", group="system:masters")
            kubelets = [
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={client}",
                f"--kubelet-client-key={client_key}",
            ]
        return self.run(
            "kube-apiserver",
            str(binaries.find("kube-apiserver")),
            f"--etcd-servers={etcd}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            f"--secure-port={self.port}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # For the chart's inject.enabled; off by default in this version.
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
            "--allow-privileged=true",
            f"--client-ca-file={pki.certificate_path}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={private}",
            *kubelets,
            "--max-requests-inflight=2000",
            "--max-mutating-requests-inflight=1000",
        )

    def _start_controllers(self) -> list[Process]:
        pki = self.authority
        manager = pki.kubeconfig("controller-manager", self.server, "system:kube-controller-manager")
        scheduler = pki.kubeconfig("scheduler", self.server, "system:kube-scheduler")
        return [
            self.run(
                "kube-controller-manager",
                str(binaries.find("kube-controller-manager")),
                f"--kubeconfig={manager}",
                f"--bind-address={HOST}",
                f"--secure-port={free_port()}",
                "--use-service-account-credentials=true",
                f"--root-ca-file={pki.certificate_path}",
                f"--service-account-private-key-file={pki.folder / 'tokens.key'}",
                "--leader-elect=false",
                f"--node-monitor-grace-period={self._node_grace_s}s",
                "--kube-api-qps=300",
                "--kube-api-burst=500",
                "--concurrent-gc-syncs=10",
            ),
            self.run(
                "kube-scheduler",
                str(binaries.find("kube-scheduler")),
                f"--kubeconfig={scheduler}",
                f"--bind-address={HOST}",
                f"--secure-port={free_port()}",
                "--leader-elect=false",
                "--kube-api-qps=500",
                "--kube-api-burst=800",
            ),
        ]
