"""A switch for negative controls. SGLang loads it in every process of an engine under test, as a plug-in.

While the file that E2E_SGLANG_ZERO names exists, a decode rank overwrites the KV that a request has received with zeros.
The tokens must then differ from those of a single engine. Otherwise the tests would prove nothing about the transfer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SWITCH = "E2E_SGLANG_ZERO"
# The word in the file that limits it to recurrent states and windows.
STATE = "state"


def register() -> None:
    """Hook the receiver of the connector under test."""
    if os.environ.get(SWITCH):
        HookRegistry.register("longshore_engines.sglang_decode.LongshoreReceiver._look", _look, HookType.AROUND)


def _look(original: Any, receiver: Any) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    found = original(receiver)
    if found[0] == KVPoll.Success and Path(os.environ[SWITCH]).exists():
        manager = receiver.kv_mgr
        pools, rows = manager.pools, manager.kv_args.page_size
        meant = [] if Path(os.environ[SWITCH]).read_text() == STATE else [(pools.kv, rows, receiver._pages)]
        # Of a slot each tensor has one row.
        meant += [(pool, rows, receiver._others[0].pages) for pool in pools.windows]
        meant += [(pool, 1, receiver._others[0].pages) for pool in pools.states]
        for pool, count, pages in meant:
            for tensor in type(pools)(pool).tensors:
                for page in pages:
                    tensor[page * count : (page + 1) * count] = 0
    return found
