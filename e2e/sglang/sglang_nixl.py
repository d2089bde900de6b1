"""Lets SGLang's own NIXL backend move KV in host memory, for benchmarks. SGLang loads it in every process, as a plug-in.

The backend tells NIXL that all KV is GPU memory, which NIXL refuses for engines on CPUs. Where E2E_SGLANG_NIXL is set, NIXL
takes it for host memory. Nothing else of the backend changes.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SWITCH = "E2E_SGLANG_NIXL"


def register() -> None:
    """Hook the backend's manager."""
    if os.environ.get(SWITCH):
        path = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
        HookRegistry.register(path, _made, HookType.AROUND)


def _made(original: Any, manager: Any, *arguments: Any, **named: Any) -> None:
    from nixl._api import nixl_agent

    make = nixl_agent.__init__

    def in_host_memory(agent: Any, *options: Any, **more: Any) -> None:
        make(agent, *options, **more)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    nixl_agent.__init__ = in_host_memory
    try:
        original(manager, *arguments, **named)
    finally:
        nixl_agent.__init__ = make
