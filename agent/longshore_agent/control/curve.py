"""CURVE keys of the control protocol, and the ZAP handler that knows which client keys belong to the deployment.

A CURVE server without such a handler lets every client key in. Keys are Z85 text in one JSON file, `curve.json`,
that the operator keeps in a Secret. While keys are rotated, the file `previous.json` beside it holds those of the revision
before: agents of both revisions then know each other's server keys and have clients that the others let in.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from longshore_agent.secret_file import read_secret
from longshore_wire.errors import ConfigError

KEYS_FILE = "curve.json"
PREVIOUS_FILE = "previous.json"
_KEY_CHARACTERS = 40  # Z85 of 32 bytes
_FINGERPRINT_CHARACTERS = 16


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment's keys: every worker is a server to its peers and a client of theirs."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    accepted: tuple[str, ...]

    def __repr__(self) -> str:
        """Name the public half only: keys never reach a log."""
        return f"CurveKeys(server_public={self.server_public!r}, accepted={len(self.accepted)})"

    def check(self) -> None:
        """Raise ConfigError naming every key that is none."""
        names = ("server_public", "server_secret", "client_public", "client_secret")
        faults = [f"{KEYS_FILE}: {name} is not a key of 40 Z85 characters" for name in names if not _is_key(self, name)]
        faults += [
            f"{KEYS_FILE}: accepted[{index}] is not a key of 40 Z85 characters"
            for index, key in enumerate(self.accepted)
            if len(key) != _KEY_CHARACTERS
        ]
        if faults:
            raise ConfigError(faults)

    @property
    def fingerprint(self) -> str:
        """A short name of the server key, by which peers tell revisions apart."""
        return hashlib.sha256(self.server_public.encode()).hexdigest()[:_FINGERPRINT_CHARACTERS]


class KeyRing(msgspec.Struct, frozen=True):
    """The keys of one agent: those of its revision, and those of the one before while agents of it may still be there."""

    current: CurveKeys
    previous: CurveKeys | None = None

    @property
    def revisions(self) -> tuple[CurveKeys, ...]:
        """All keys, the newest first."""
        return (self.current,) if self.previous is None else (self.current, self.previous)

    @property
    def accepted(self) -> frozenset[bytes]:
        """Client keys that are let in. Whom the previous revision still let in is out."""
        clients = {*self.current.accepted, *(keys.client_public for keys in self.revisions)}
        return frozenset(key.encode() for key in clients)

    def named(self, fingerprint: str) -> CurveKeys | None:
        """Return the keys of the revision whose server key has this fingerprint, if it is one of ours."""
        return next((keys for keys in self.revisions if keys.fingerprint == fingerprint), None)


def _is_key(keys: CurveKeys, name: str) -> bool:
    value: str = getattr(keys, name)
    return len(value) == _KEY_CHARACTERS


def generate() -> CurveKeys:
    """Return new keys for a deployment."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    return CurveKeys(server_public, server_secret, client_public, client_secret, (client_public,))


def write(keys: CurveKeys, directory: Path) -> None:
    """Write the keys for one deployment into `directory`, readable by its owner only."""
    path = directory / KEYS_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(keys))


def read(directory: Path) -> CurveKeys:
    """Return the keys in `directory`. Raises ConfigError naming the file and what is wrong with it."""
    return _read(directory, KEYS_FILE)


def read_ring(directory: Path) -> KeyRing:
    """Return the keys in `directory` and those of the revision before, if they are there. Raises ConfigError as `read`."""
    has_previous = (directory / PREVIOUS_FILE).exists()
    return KeyRing(read(directory), _read(directory, PREVIOUS_FILE) if has_previous else None)


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
    """The ZAP handler of one ZeroMQ context, in a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyRing) -> None:
        self._accepted = keys.accepted
        self._lock = threading.Lock()
        self._refused_count = 0
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain="*", credentials_provider=self)

    @property
    def refused_count(self) -> int:
        """Connections refused so far because their client key is not of this deployment."""
        with self._lock:
            return self._refused_count

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide on one connection; called by the handler's thread."""
        del domain
        accepted = key in self._accepted
        if not accepted:
            with self._lock:
                self._refused_count += 1
        return accepted

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()


def main() -> int:
    """Write new keys into the directory that the first argument names; keys that are there already are kept."""
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
