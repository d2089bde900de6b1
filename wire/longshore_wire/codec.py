"""Messages between workers to bytes and back, with limits. Called where such bytes come in; knows no sockets."""

from __future__ import annotations

from longshore_wire.framing import Codec
from longshore_wire.peer_messages import PROTOCOL_VERSION, PeerMessage

# A peer's Attach carries transport metadata of up to 1 MiB. All other messages are much smaller.
PEER_MESSAGE_BYTES_MAX = 2 << 20

PEER: Codec[PeerMessage] = Codec(PROTOCOL_VERSION, PEER_MESSAGE_BYTES_MAX, PeerMessage)
