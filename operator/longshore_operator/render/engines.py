"""Renders the ConfigMap of each role's engines: variables that an engine's pod takes by `envFrom`.

Called by `children`. The client reads two of them (longshore_wire.names); the others are for the pod's arguments, as
`--tensor-parallel-size=$(LONGSHORE_ENGINE_TENSOR_PARALLEL)`. docs/how-to/engine-pods.md has the pod.
"""

from __future__ import annotations

import json

from longshore_operator import kinds, names
from longshore_operator.render.wanted import Body, Wanted, child
from longshore_spec import names as spec_names
from longshore_spec.agent_config import Order, Role
from longshore_wire.names import ENGINE_SOCKET_VARIABLE, INSTANCE_PREFIX_VARIABLE

# The name by which vLLM knows what an engine does with KV.
_VLLM_ROLES = {names.PREFILL: "kv_producer", names.DECODE: "kv_consumer"}

# The option of vLLM's connector by which it registers pages of an order.
_VLLM_PAGES = {Order.OPAQUE: "opaque", Order.HND: "tokens"}


def engine_config_map(wanted: Wanted, role: str) -> Body:
    """Return the ConfigMap for engines of one role, names.PREFILL or names.DECODE."""
    declared: Role = wanted.config.prefill if role == names.PREFILL else wanted.config.decode
    socket = wanted.config.engine_socket
    data = {
        ENGINE_SOCKET_VARIABLE: socket,
        INSTANCE_PREFIX_VARIABLE: f"{wanted.name}-{role}",
        names.ROLE_VARIABLE: role,
        names.TENSOR_PARALLEL_VARIABLE: str(declared.tensor_parallel),
        names.PIPELINE_PARALLEL_VARIABLE: str(declared.pipeline_parallel),
        names.DATA_PARALLEL_VARIABLE: str(declared.data_parallel),
        names.PAGE_SIZE_VARIABLE: str(declared.page_size),
        names.PAGE_ORDER_VARIABLE: declared.page_order.value,
    }
    if wanted.mps is not None:
        data[spec_names.MPS_PIPE_VARIABLE] = wanted.mps.pod
        data[names.MPS_HOST_VARIABLE] = wanted.mps.host
    # vLLM's connector has pages of these orders.
    pages = _VLLM_PAGES.get(declared.page_order)
    if pages is not None:
        data[names.VLLM_CONFIG_VARIABLE] = vllm_config(role, socket, pages)
    labels = {names.ENGINE_LABEL: role}
    return child(wanted, kinds.CONFIG_MAP, {"data": data}, names.engine(wanted.name, role), labels)


def vllm_config(role: str, socket: str, pages: str) -> str:
    """Return the value of vLLM's --kv-transfer-config. Without an engine_id, vLLM draws a new one at each start."""
    config = {
        "kv_connector": "LongshoreConnector",
        "kv_connector_module_path": "longshore_engines.vllm",
        "kv_role": _VLLM_ROLES[role],
        "kv_connector_extra_config": {"socket": socket, "pages": pages},
    }
    return json.dumps(config, separators=(",", ":"))
