"""Lets SGLang run gated delta rules on CPUs, by plain torch. SGLang loads it in every process of an engine under test, as a plug-in.

SGLang has these kernels for processors with AMX alone. Where E2E_SGLANG_GATED is set, these functions take their place. They
compute token by token, so that chunks and single tokens round alike.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

SWITCH = "E2E_SGLANG_GATED"


def register() -> None:
    """Put the functions where SGLang looks for its kernels."""
    if not os.environ.get(SWITCH):
        return
    kernels = ModuleType("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(kernels, function.__name__, function)
    sys.modules["sgl_kernel.mamba"] = kernels
    torch.ops.__dict__["sgl_kernel"] = _Operators(torch.ops.sgl_kernel)
    from sglang.kernels.ops.attention.fla import layernorm_gated

    layernorm_gated.rms_norm_gated = rms_norm_gated


class _Operators:
    """Stands for torch.ops.sgl_kernel: these functions first, then SGLang's operators."""

    def __init__(self, others: Any) -> None:
        self._others = others
        for function in (
            fused_gdn_gating_cpu,
            fused_qk_gemma_rmsnorm_cpu,
            fused_qk_gemma_rmsnorm_with_gate_cpu,
            fused_qkvzba_split_reshape_cat_contiguous_cpu,
            fused_sigmoid_gating_delta_rule_update_cpu,
            fused_sigmoid_mul_cpu,
        ):
            setattr(self, function.__name__, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def rms_norm_gated(*, x: Any, weight: Any, eps: float, z: Any, **_unused: Any) -> Any:
    """Norm each row, and multiply it by its gate."""
    rows = x.float()
    found = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (found * functional.silu(z.reshape(x.shape).float())).to(x.dtype)


def fused_sigmoid_mul_cpu(values: Any, gates: Any) -> None:
    """Multiply values by the sigmoid of their gates, in place."""
    values.mul_(gates.reshape(values.shape).float().sigmoid().to(values.dtype))


def _normed(values: Any, weight: Any, epsilon: float, width: int) -> Any:
    """Return [tokens * heads, width], normed by Gemma's rule."""
    heads = values.reshape(-1, width).float()
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon)
    return (heads * scale * (1 + weight.float())).to(values.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Any, k: Any, q_weight: Any, k_weight: Any, epsilon: float, width: int
) -> tuple[Any, Any]:
    """Norm each head of q and of k."""
    return _normed(q, q_weight, epsilon, width), _normed(k, k_weight, epsilon, width)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_and_gate: Any, k: Any, q_weight: Any, k_weight: Any, epsilon: float, width: int, _heads: int
) -> tuple[Any, Any, Any]:
    """Norm each head of q and of k, and return the gates, each of which follows its head of q."""
    q, gates = q_and_gate.reshape(-1, 2, width).unbind(1)
    return _normed(q, q_weight, epsilon, width), _normed(k, k_weight, epsilon, width), gates.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    projected: Any, strengths: Any, key_heads: int, heads: int, key_width: int, width: int
) -> tuple[Any, Any, Any, Any]:
    """Return q, k and v side by side, z by head, b and a."""
    inner = heads * width
    qkv, z = projected.split([2 * key_heads * key_width + inner, inner], dim=-1)
    b, a = strengths.split([heads, heads], dim=-1)
    return qkv.contiguous(), z.reshape(-1, heads, width).contiguous(), b.contiguous(), a.contiguous()


def _convolved(inputs: Any, state: Any, weight: Any, bias: Any, activation: Any) -> tuple[Any, Any]:
    """Return the outputs of [channels, tokens] after a state [channels, rows], and the next state."""
    whole = torch.cat([state.to(inputs.dtype), inputs], 1)
    bias = None if bias is None else bias.float()
    found = functional.conv1d(whole.float()[None], weight.float()[:, None], bias, groups=inputs.shape[0])[0]
    if activation:
        found = functional.silu(found)
    return found.to(inputs.dtype), whole[:, -state.shape[1] :]


def causal_conv1d_fn_cpu(
    inputs: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = None,
    conv_states: Any = None,
    has_initial_state: Any = None,
    cache_indices: Any = None,
    query_start_loc: Any = None,
    **_unused: Any,
) -> Any:
    """Convolve the tokens of several prompts, which follow each other."""
    found = torch.empty_like(inputs)
    bounds = query_start_loc.tolist()
    for row, (first, end) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[row])
        state = conv_states[slot] if bool(has_initial_state[row]) else torch.zeros_like(conv_states[slot])
        found[:, first:end], after = _convolved(inputs[:, first:end], state, weight, bias, activation)
        conv_states[slot] = after.to(conv_states.dtype)
    return found


def causal_conv1d_update_cpu(
    inputs: Any,
    conv_states: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = None,
    conv_state_indices: Any = None,
    **_unused: Any,
) -> Any:
    """Convolve one token of each sequence."""
    found = torch.zeros_like(inputs)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            made, after = _convolved(inputs[row][:, None], conv_states[slot], weight, bias, activation)
            found[row] = made[:, 0]
            conv_states[slot] = after.to(conv_states.dtype)
    return found


def _gates(decay: Any, inputs: Any, bias: Any) -> Any:
    return -decay.float().exp() * functional.softplus(inputs.float() + bias.float())


def fused_gdn_gating_cpu(decay: Any, inputs: Any, strengths: Any, bias: Any, *_unused: Any) -> tuple[Any, Any]:
    """Return how far a state forgets with each token, and how much of the token it takes in."""
    return _gates(decay, inputs, bias)[None], strengths.float().sigmoid()[None]


def _ruled(q: Any, k: Any, v: Any, gates: Any, strengths: Any, state: Any) -> Any:
    """Return the outputs [tokens, value heads, width]; change the state [value heads, width, key width]."""
    share = v.shape[1] // q.shape[1]
    q, k = (functional.normalize(each.float(), dim=-1, eps=1e-6).repeat_interleave(share, 1) for each in (q, k))
    found = torch.empty(v.shape)
    for token in range(v.shape[0]):
        state *= gates[token].float().exp()[:, None, None]
        change = v[token].float() - torch.einsum("hvk,hk->hv", state, k[token])
        state += (change * strengths[token].float()[:, None])[:, :, None] * k[token][:, None, :]
        found[token] = torch.einsum("hvk,hk->hv", state, q[token]) * q.shape[-1] ** -0.5
    return found


def _all_ruled(q: Any, k: Any, v: Any, gates: Any, strengths: Any, states: Any, slots: Any, bounds: Any) -> Any:
    found = torch.zeros_like(v)
    for row, (first, end) in enumerate(pairwise(bounds)):
        slot, part = int(slots[row]), slice(first, end)
        if slot >= 0:
            state = states[slot].float().clone()
            found[0, part] = _ruled(q[0, part], k[0, part], v[0, part], gates[part], strengths[part], state).to(v.dtype)
            states[slot] = state.to(states.dtype)
    return found


def chunk_gated_delta_rule_cpu(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    initial_state_indices: Any = None,
    **_unused: Any,
) -> tuple[Any, None, None]:
    """Apply the rule to the tokens of several prompts, which follow each other."""
    heads = v.shape[2]
    gates, strengths = g.reshape(-1, heads), beta.reshape(-1, heads)
    found = _all_ruled(q, k, v, gates, strengths, initial_state, initial_state_indices, cu_seqlens.tolist())
    return found, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Any,  # noqa: N803 -- as SGLang names it
    dt_bias: Any,
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    initial_state_source: Any,
    initial_state_indices: Any,
    cu_seqlens: Any,
    **_unused: Any,
) -> Any:
    """Apply the rule to one token of each sequence."""
    heads = v.shape[2]
    gates = _gates(A_log, a.reshape(-1, heads), dt_bias)
    strengths = b.float().sigmoid().reshape(-1, heads)
    slots, bounds = initial_state_indices, cu_seqlens.tolist()
    return _all_ruled(q, k, v, gates, strengths, initial_state_source, slots, bounds)
