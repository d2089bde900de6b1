"""Stage one: the slices of a slab from the engine's pages into a lane's buffer, with the trailer behind them."""

from __future__ import annotations

from longshore_agent.kernels.gather.launch import gather_slices
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.jobs import WriteJob, sealed_trailer
from longshore_wire.slabs import region_bytes


def gather_slab(job: WriteJob, buffer: StagingBuffer) -> int:
    """Fill the beginning of `buffer` with the slab and its trailer; return how many bytes must travel.

    Raises:
        PoolError: the engine has let its pages go.
    """
    effect, layout = job.effect, job.pool.layout
    length_bytes = region_bytes(effect.payload_bytes)
    gather_slices(
        job.pool,
        job.pages.of_tokens(*effect.tokens, layout.page_size),
        effect.tokens,
        effect.route.local_layers(layout),
        effect.route.local_heads(layout),
        buffer.view(0, length_bytes),
        sealed_trailer(job),
    )
    return length_bytes
