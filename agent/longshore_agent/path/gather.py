"""Stage one: the slices of a slab from the engine's pages into a lane's buffer, with the trailer behind them."""

from __future__ import annotations

from longshore_agent.kernels.gather.launch import Gathering, prepare_gather
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.jobs import WriteJob, trailer_of
from longshore_wire.slabs import region_bytes


def begin_gather(job: WriteJob, buffer: StagingBuffer) -> Gathering:
    """Return the gather of a slab and its trailer into the beginning of `buffer`.

    Raises:
        PoolError: the engine has let its pages go.
    """
    effect, layout = job.effect, job.pool.layout
    return prepare_gather(
        job.pool,
        job.pages.of_tokens(*effect.tokens, layout.page_size),
        effect.tokens,
        effect.route.local_layers(layout),
        effect.route.local_heads(layout),
        buffer.view(0, region_bytes(effect.payload_bytes)),
        trailer_of(effect),
    )
