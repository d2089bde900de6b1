"""Makes one cluster's certificates, its key for ServiceAccount tokens, and kubeconfigs. Called by `cluster` alone."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_RSA_BITS = 2048
_VALID = dt.timedelta(days=30)


class Authority:
    """One certificate authority, with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "controlplane")])
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate_path = folder / "ca.crt"
        self.certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, user: str, group: str | None = None) -> tuple[Path, Path]:
        """Return certificate and key files for `user`, a member of `group`, valid for the server names `hosts`."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if group is not None:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(x509.Name(attributes), self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        certificate_path, key_path = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(_private_pem(key))
        key_path.chmod(0o600)
        return certificate_path, key_path

    def kubeconfig(self, name: str, server: str, user: str, group: str | None = None) -> Path:
        """Return a kubeconfig for `user` at the API server `server`."""
        certificate, key = self.issue(name, user=user, group=group)
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": server, "certificate-authority-data": _base64(self.certificate_path)}
        return write_kubeconfig(
            path, cluster, {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
        )

    def token_keys(self) -> tuple[Path, Path]:
        """Return the private and the public key that sign and check ServiceAccount tokens."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=_RSA_BITS)
        private, public = self.folder / "tokens.key", self.folder / "tokens.pub"
        pem = serialization.Encoding.PEM
        private.write_bytes(_private_pem(key))
        private.chmod(0o600)
        public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
        return private, public


def write_kubeconfig(path: Path, cluster: dict[str, str], user: dict[str, str], namespace: str = "default") -> Path:
    """Write a kubeconfig with one context as JSON, which is valid YAML."""
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                "current-context": "c",
            }
        )
    )
    path.chmod(0o600)
    return path


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Stays valid if the clock is set back a little.
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _VALID)
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
