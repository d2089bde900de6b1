"""Imports and runs vLLM for `nursery`, in vLLM's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def import_engine() -> None:
    """Import the modules that all processes of an engine need, without starting a thread."""
    import vllm.distributed.kv_transfer.kv_connector.v1
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.routers
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


def run(arguments: Sequence[str]) -> None:
    """Run the command line of `vllm`."""
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *arguments]
    vllm_main()
