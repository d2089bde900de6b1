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

    from longshore_engines.sglang_pools import _tensors, found_pool

    found = original(receiver)
    if found[0] == KVPoll.Success and Path(os.environ[SWITCH]).exists():
        args = receiver.kv_mgr.kv_args
        for tensor in _tensors(found_pool(args.kv_data_ptrs)):
            for page in receiver._pages:
                tensor[page * args.page_size : (page + 1) * args.page_size] = 0
    return found
