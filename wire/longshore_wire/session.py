"""The protocol core of a worker, in two halves: `SourceSession` of prefill and `TargetSession` of decode. Read this first.

The worker gives a half the requests of its engine, the messages of its peers, the ends of its slabs, and the time. The half
changes its state and returns effects, messages among them, in the order in which the worker must carry them out. It has no
socket, loop, clock or log, so that the simulator in `tests/sim` runs it as it is.

A room is the transfer of one request, a pair is the part of one of its caches between one source rank and one target rank, and
a slab is one piece of a pair. The steps of a room whose slabs are staged:

1. `claim` at decode plans the pairs (`plan`), decides their ways as far as it can (`ways`), and dials their sources.
2. `Links.dial` sends an Attach. The source answers with its own, and both transports connect.
3. The target sends each source its Claim, after the way has been chosen.
4. The source cuts the claim into slabs (`claims.grid`) and answers with a Demand, and again when more slabs are ready. A
   slab is ready when `offer` at prefill has given all of its tokens.
5. The target grants ring memory to slabs (`granting`). The source emits StartWrite for each slab that is ready, has its
   grant and may use its wire. The worker answers with `write_done`.
6. The slab has landed: a SlabReady message or the transport's notice says so. The target emits StartScatter, and
   `scatter_done` frees the memory and sends a SlabAck.
7. After the last slab each half emits RoomEnded, for its engine, and RoomReleased: nothing accesses the pages any more.

Pages that are written in place or copied directly need no grant and, without digests, no scatter.

`_fail` ends a room at any step. It sends an Abort to all peers of the room. Memory that a source may still write is in
quarantine until that source confirms with an EndAck, or its life has ended for certain (`TargetSession._writer_dead`).
Messages may get lost, late or repeated. Each half repeats what a peer has not answered, and ignores what belongs to another
life, another grant or no room.

Each half owns all of its parts and calls them. No part calls a half:

| part | keeps |
|---|---|
| `links.Links` | the peers, their lives, heartbeats and wires; the effects |
| `room.RoomTable` | the open rooms with their pairs and slabs, the outcomes of ended ones, the lease of the engine |
| `timers.Deadlines` | when to repeat a message, to look at a peer, to end a room |
| `granting.Granter` | at a target: the ring and the queue of pairs for it |

`states` has the transition tables of rooms, pairs and slabs. `ways` decides how bytes move.
"""

from __future__ import annotations

from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

Session = SourceSession | TargetSession
