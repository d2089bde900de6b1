"""Stage one: the slices of a slab from the engine's pages into a lane's buffer, with the trailer behind them."""

from __future__ import annotations

from longshore_agent.kernels.cpu_copy import copy
from longshore_agent.kernels.view import slab_view
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.jobs import WriteJob, sealed_trailer
from longshore_wire.slabs import region_bytes


def gather_slab(job: WriteJob, buffer: StagingBuffer) -> int:
    """Fill the beginning of `buffer` with the slab and its trailer; return how many bytes must travel.

    Raises:
        PoolError: the engine has let its pages go.
    """
    source, tokens = job.source(), job.effect.tokens
    length_bytes = region_bytes(job.effect.payload_bytes)
    copy(source, slab_view(buffer.view(0, length_bytes), source, tokens), tokens, sealed_trailer(job))
    return length_bytes
