"""Registers the connector's name with vLLM, which calls `register` in all of its processes (`vllm.general_plugins`).

vLLM's MultiConnector looks up its connectors by name, also where the configuration has a module path.
"""

from __future__ import annotations


def register() -> None:
    """Register LongshoreConnector. vLLM loads the connector itself only if it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector("LongshoreConnector", "longshore_engines.vllm", "LongshoreConnector")
