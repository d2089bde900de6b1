"""Messages of the engine link to bytes and back, with limits. Called at both of its ends; knows no sockets.

Engines import it: it must load no module of the data path.
"""

from __future__ import annotations

from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, ToAgent, ToEngine
from longshore_wire.framing import Codec

# A datagram of this size passes through a UNIX socket with default buffers.
ENGINE_MESSAGE_BYTES_MAX = 64 << 10

TO_AGENT: Codec[ToAgent] = Codec(ENGINE_PROTOCOL_VERSION, ENGINE_MESSAGE_BYTES_MAX, ToAgent)
TO_ENGINE: Codec[ToEngine] = Codec(ENGINE_PROTOCOL_VERSION, ENGINE_MESSAGE_BYTES_MAX, ToEngine)
