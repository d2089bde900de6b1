"""Imports and runs SGLang for `nursery`, in SGLang's interpreter."""

from __future__ import annotations

from collections.abc import Sequence


def import_engine() -> None:
    """Import the modules that all processes of an engine need, without starting a thread."""
    import sglang.launch_server
    import sglang.srt.disaggregation.decode
    import sglang.srt.entrypoints.http_server
    import sglang.srt.layers.attention.torch_native_backend
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.qwen3  # noqa: F401


def run(arguments: Sequence[str]) -> None:
    """Do what `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(list(arguments)))
