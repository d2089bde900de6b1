"""Makes the CURVE keys of one deployment, as `longshore_agent.control.curve` reads them. Called by `reconcile`.

A CURVE key pair is an X25519 pair encoded in Z85. Nothing here logs, and the repr of `Keys` omits the secrets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

# The current and the previous key, so that agents of two revisions accept each other during a rollout.
ACCEPTED_MAX = 2
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_NAME_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one revision. `text` is the file with the secret halves."""

    accepted: tuple[str, ...]
    text: str = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """A short name derived from the public half."""
        return fingerprint(self.accepted[0])


def make(previously_accepted: Sequence[str] = ()) -> Keys:
    """Return new keys that still accept the clients of `previously_accepted`, newest first."""
    (server_public, server_secret), (client_public, client_secret) = _pair(), _pair()
    accepted = (client_public, *previously_accepted)[:ACCEPTED_MAX]
    entries = {
        "server_public": server_public,
        "server_secret": server_secret,
        "client_public": client_public,
        "client_secret": client_secret,
        "accepted": accepted,
    }
    return Keys(accepted, json.dumps(entries))


def fingerprint(public_key: str) -> str:
    """Return a short name of a public key, valid in names of objects."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:_NAME_CHARACTERS]


def _pair() -> tuple[str, str]:
    secret = X25519PrivateKey.generate()
    private = secret.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return z85(public), z85(private)


def z85(data: bytes) -> str:
    """Return `data`, whose length is a multiple of 4, in ZeroMQ's base 85."""
    assert len(data) % 4 == 0, len(data)
    text = ""
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        text += "".join(_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text
