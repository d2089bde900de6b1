"""Reads and writes CURVE keys of the control protocol, seals endpoints, and runs the ZAP handler that checks client keys.

A CURVE server without such a handler accepts every client key. Keys are Z85 text in one JSON file, `curve.json`,
which the operator keeps in a Secret. During a rotation of keys, `previous.json` beside it holds those of the previous
revision, so that agents of both revisions know each other's server keys and accept each other's clients.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from longshore_agent.files import read_secret
from longshore_spec.names import KEYS_FILE, PREVIOUS_KEYS_FILE
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import ConfigError, LongshoreError, Reason

_KEY_CHARACTERS = 40  # Z85 of 32 bytes
_FINGERPRINT_CHARACTERS = 16
_SEAL_LABEL, _ENGINES_LABEL, _SEAL_BYTES = b"longshore endpoint", b"longshore engines", 16


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment's keys. Every worker is a server for its peers and a client of them."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    accepted: tuple[str, ...]

    def __repr__(self) -> str:
        """Show only the public half, so that keys never reach a log."""
        return f"CurveKeys(server_public={self.server_public!r}, accepted={len(self.accepted)})"

    def check(self) -> None:
        """Raise ConfigError naming every invalid key."""
        names = ("server_public", "server_secret", "client_public", "client_secret")
        faults = [f"{KEYS_FILE}: {name} is not a key of 40 Z85 characters" for name in names if not _is_key(self, name)]
        faults += [
            f"{KEYS_FILE}: accepted[{index}] is not a key of 40 Z85 characters"
            for index, key in enumerate(self.accepted)
            if len(key) != _KEY_CHARACTERS
        ]
        if faults:
            raise ConfigError(faults)

    def seal(self, data: bytes) -> bytes:
        """Return the seal of data, by a key that is derived from the server's secret key."""
        key = hmac.digest(self.server_secret.encode(), _SEAL_LABEL, "sha256")
        return hmac.digest(key, data, "sha256")[:_SEAL_BYTES]

    @property
    def engines(self) -> bytes:
        """The key of the deployment's engines, from which no key of its agents can be derived."""
        return hmac.digest(self.server_secret.encode(), _ENGINES_LABEL, "sha256")

    @property
    def fingerprint(self) -> str:
        """A short name of the server key, which distinguishes revisions."""
        return hashlib.sha256(self.server_public.encode()).hexdigest()[:_FINGERPRINT_CHARACTERS]


class KeyRing(msgspec.Struct, frozen=True):
    """The keys of one agent: those of its revision, and during a rotation those of the previous one."""

    current: CurveKeys
    previous: CurveKeys | None = None

    @property
    def revisions(self) -> tuple[CurveKeys, ...]:
        """All keys, the newest first."""
        return (self.current,) if self.previous is None else (self.current, self.previous)

    @property
    def accepted(self) -> frozenset[bytes]:
        """Accepted client keys: those that the newest revision accepts, and the clients of both revisions."""
        clients = {*self.current.accepted, *(keys.client_public for keys in self.revisions)}
        return frozenset(key.encode() for key in clients)

    def named(self, fingerprint: str) -> CurveKeys | None:
        """Return the keys whose server key has this fingerprint, or None."""
        return next((keys for keys in self.revisions if keys.fingerprint == fingerprint), None)

    def sealed(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint with the seals by which other agents of the deployment know that one of them gave it."""
        data = _sealed_fields(endpoint)
        return msgspec.structs.replace(endpoint, seals=tuple(keys.seal(data) for keys in self.revisions))

    def check_sealed(self, endpoint: Endpoint) -> None:
        """Raise LongshoreError unless an agent of the deployment gave this endpoint."""
        own = self.sealed(endpoint).seals
        if not any(hmac.compare_digest(known, seal) for known in own for seal in endpoint.seals):
            raise LongshoreError(
                f"no agent of this deployment gave the endpoint of {endpoint.instance}: pass on the endpoint of the prefill engine "
                "unchanged; agents of both sides need keys of one revision",
                reason=Reason.AUTHENTICATION,
            )


def _sealed_fields(endpoint: Endpoint) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(endpoint, seals=()))


def _is_key(keys: CurveKeys, name: str) -> bool:
    value: str = getattr(keys, name)
    return len(value) == _KEY_CHARACTERS


def generate() -> CurveKeys:
    """Return new keys for a deployment."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    return CurveKeys(server_public, server_secret, client_public, client_secret, (client_public,))


def write(keys: CurveKeys, directory: Path) -> None:
    """Write the keys of one deployment into `directory`, readable only by their owner."""
    path = directory / KEYS_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(keys))


def read(directory: Path) -> CurveKeys:
    """Return the keys in `directory`. Raises ConfigError naming the file and its fault."""
    return _read(directory, KEYS_FILE)


def read_ring(directory: Path) -> KeyRing:
    """Return the keys in `directory`, with those of the previous revision if present. Raises the errors of `read`."""
    has_previous = (directory / PREVIOUS_KEYS_FILE).exists()
    return KeyRing(read(directory), _read(directory, PREVIOUS_KEYS_FILE) if has_previous else None)


def _read(directory: Path, name: str) -> CurveKeys:
    path = directory / name
    try:
        keys = msgspec.json.decode(read_secret(path), type=CurveKeys)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}: make keys with `longshore keys {directory}`"]) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError([f"{path}: {error}"]) from error
    keys.check()
    return keys


class Gatekeeper:
    """The ZAP handler of one ZeroMQ context, with its own thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyRing) -> None:
        # It loads asyncio and ssl, a sixth of a worker's start, which workers without keys need not.
        from zmq.auth.thread import ThreadAuthenticator

        self._accepted = keys.accepted
        self._lock = threading.Lock()
        self._refused_count = 0
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain="*", credentials_provider=self)

    @property
    def refused_count(self) -> int:
        """Number of connections refused because their client key is not of this deployment."""
        with self._lock:
            return self._refused_count

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether to accept one connection. Called by the handler's thread."""
        del domain
        accepted = key in self._accepted
        if not accepted:
            with self._lock:
                self._refused_count += 1
        return accepted

    def stop(self) -> None:
        """Stop the thread."""
        self._thread.stop()


def main() -> int:
    """Write new keys into the directory of the first argument; refuse to overwrite existing keys."""
    if len(sys.argv) != 2:  # noqa: PLR2004
        sys.stderr.write("usage: python -m longshore_agent.control.curve DIRECTORY\n")
        return 2
    directory = Path(sys.argv[1])
    if (directory / KEYS_FILE).exists():
        sys.stderr.write(f"{directory / KEYS_FILE} is there already: agents may use it; choose another directory\n")
        return 1
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(generate(), directory)
    except OSError as error:
        sys.stderr.write(f"{directory}: {error.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
