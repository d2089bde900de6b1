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


def register() -> None:
    """Hook the receiver of the connector under test."""
    if os.environ.get(SWITCH):
        HookRegistry.register("longshore_engines.sglang_decode.LongshoreReceiver._look", _look, HookType.AROUND)


def _look(original: Any, receiver: Any) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    found = original(receiver)
    if found[0] == KVPoll.Success and Path(os.environ[SWITCH]).exists():
        manager = receiver.kv_mgr
        pages = {each.cache: each.pages for each in receiver._others}
        named = [(manager.pools.kv, receiver._pages), *((pool, pages[1]) for pool in manager.pools.others)]
        for pool, own in named:
            # Of a slot each tensor has one row.
            rows = 1 if hasattr(pool, "mamba_cache") else manager.kv_args.page_size
            for tensor in type(manager.pools)(pool).tensors:
                for page in own:
                    tensor[page * rows : (page + 1) * rows] = 0
    return found
