"""Tests that the SGLang connector refuses what it cannot serve, and names it and the remedy."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest

from longshore_client import ArgumentError
from longshore_engines.sglang_checks import (
    V0_5_16,
    V0_5_23,
    check_engine,
    check_hooks,
    check_pool,
    check_version,
    is_chosen,
)


def facts(**changed):
    plain = {
        "state_types": [],
        "num_draft_entries": 0,
        "speculative_algorithm": None,
        "disaggregation_decode_allocation_policy": "early",
        "enable_memory_saver": False,
        "enable_hierarchical_cache": False,
        "pp_size": 1,
        "attn_cp_size": 1,
        "attn_dcp_size": 1,
        "enable_kv_cache_sharding": False,
    }
    return SimpleNamespace(**{**plain, **changed})


def check(environment=None, version=V0_5_23, **changed):
    found = facts(**changed)
    check_engine(found, found, found, environment or {}, version)


def test_a_plain_engine_is_served():
    check()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"state_types": [SimpleNamespace(value="mamba"), SimpleNamespace(value="dsa")]}, "of the kind dsa"),
        ({"state_types": [SimpleNamespace(value="swa")], "version": V0_5_16}, "with SGLang 0.5.16 none is moved"),
        ({"state_types": [SimpleNamespace(value="mamba")], "pp_size": 2}, "pipeline parallel size is 2"),
        ({"num_draft_entries": 2}, "speculative"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"attn_cp_size": 2}, "attention context parallel size is 2"),
        ({"attn_dcp_size": 2}, "decode context parallel size is 2"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "'early'"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"environment": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"}}, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(changed, named):
    with pytest.raises(ArgumentError) as caught:
        check(**changed)
    assert named in str(caught.value)


def test_other_layouts_of_a_pool_are_refused_by_name():
    plain = SimpleNamespace(k_buffer=[], kv_cache_layout="nhd", head_dim=8, v_head_dim=8)
    check_pool(plain)
    check_pool(SimpleNamespace(kv_buffer=[]))
    with pytest.raises(ArgumentError, match="SGLANG_USE_HND_KVCACHE"):
        check_pool(SimpleNamespace(**{**vars(plain), "kv_cache_layout": "hnd"}))
    with pytest.raises(ArgumentError, match="8 elements in K and 4 in V"):
        check_pool(SimpleNamespace(**{**vars(plain), "v_head_dim": 4}))


def states(**changed):
    """The pool of states of gated delta rules."""
    cache = {"conv": [np.zeros((2, 5, 512, 3))], "temporal": np.zeros((2, 5, 4, 64, 32)), "replayssm_d": None}
    names = {name: changed.pop(name) for name in list(changed) if name in ("conv", "temporal", "replayssm_d")}
    plain = {"_slot_siblings": (), "conv_shard_groups": [128, 128, 256], "conv_slice_axis": 0}
    return SimpleNamespace(mamba_cache=SimpleNamespace(**{**cache, **names}), **{**plain, **changed})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"conv_shard_groups": None}, "gated delta rules"),
        ({"conv_slice_axis": 1}, "gated delta rules"),
        ({"conv": [np.zeros(1)] * 3}, "gated delta rules"),
        ({"replayssm_d": np.zeros(1)}, "replayssm_d"),
        ({"_slot_siblings": (object(),)}, "siblings"),
    ],
)
def test_states_of_other_kinds_are_refused_by_name(changed, named):
    check_pool(states())
    with pytest.raises(ArgumentError, match=named):
        check_pool(states(**changed))


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "unknown"])
def test_a_version_that_was_not_tested_is_refused_by_name(version):
    check_version("0.5.23")
    with pytest.raises(ArgumentError, match=f"SGLang {version} is not supported"):
        check_version(version)


def test_the_backend_is_chosen_by_either_form_of_its_argument():
    assert is_chosen(["--disaggregation-transfer-backend", "longshore"])
    assert is_chosen(["--disaggregation-transfer-backend=longshore"])
    assert not is_chosen(["--disaggregation-transfer-backend", "nixl", "longshore"])


def test_a_hook_that_did_not_take_is_named():
    def plain():
        pass

    @wraps(plain)
    def hooked():
        pass

    check_hooks({"module:hooked": hooked})
    with pytest.raises(ArgumentError, match=r"module:plain did not take.*SGLANG_PLUGINS"):
        check_hooks({"module:plain": plain})
