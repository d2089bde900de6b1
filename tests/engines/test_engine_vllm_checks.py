"""Tests which versions of vLLM, configurations and options the connector accepts, and its errors for others."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from longshore_client import ArgumentError, Half
from longshore_engines.tensors import PageFormat
from longshore_engines.vllm_checks import check_engine, check_version, page_format, roles_of, setting

DRAFT = SimpleNamespace(method="draft_model", draft_tensor_parallel_size=2)
MTP = SimpleNamespace(method="mtp", draft_tensor_parallel_size=2)
NGRAM = SimpleNamespace(method="ngram", draft_tensor_parallel_size=None)


def engine(*, groups=1, **changes):
    values = {
        "mla": False,
        "sleep": False,
        "device": "cpu",
        "context_parallel": 1,
        "speculative": None,
        "stages": 1,
        "states": None,
        "block": 64,
        "cache": "auto",
        "unit": None,
        "hidden": None,
        "spares": 0,
        "role": "SPARSE",
        "lookahead": 0,
        **changes,
    }
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values["context_parallel"],
            tensor_parallel_size=2,
            pipeline_parallel_size=values["stages"],
        ),
        model_config=SimpleNamespace(use_mla=values["mla"], enable_cumem_allocator=values["sleep"]),
        attention_config=SimpleNamespace(hisparse_config=values["hidden"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache"], prefix_match_unit=values["unit"]),
        device_config=SimpleNamespace(device_type=values["device"]),
        speculative_config=values["speculative"],
        num_prefill_lookahead_tokens=values["lookahead"],
    )
    attention = SimpleNamespace(block_size=values["block"], cache_role=SimpleNamespace(name=values["role"]))
    state = SimpleNamespace(
        block_size=64, mamba_type="MAMBA2", mamba_cache_mode=values["states"], num_speculative_blocks=values["spares"]
    )
    specs = [state if values["states"] else attention] * groups + [attention]
    return config, SimpleNamespace(
        transfer_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["l"]) for spec in specs]
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0rc1", "0.33.0"])
def test_tested_versions_are_let_in(version):
    check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev", ""])
def test_other_versions_are_refused_with_the_range_and_the_option_that_lets_them_in(version, caplog):
    with pytest.raises(ArgumentError, match=r">= 0\.32, < 0\.34; .*allow_untested_version"):
        check_version(version, allow_untested=False)
    assert not caplog.messages
    check_version(version, allow_untested=True)
    (said,) = caplog.messages
    assert f"vLLM {version}: this connector was tested with vLLM >= 0.32, < 0.34: compare its answers" in said


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sleep": True},
        {"mla": True},
        {"speculative": DRAFT},
        {"speculative": NGRAM},
        {"speculative": MTP, "lookahead": 1},
        {"states": "align"},
        {"states": "none", "block": 16},
    ],
)
def test_models_with_one_group_of_layers_are_served(changes):
    check_engine(*engine(**changes), "0.32.0")


LATER = [
    ({"sleep": True, "device": "cuda"}, "enable_sleep_mode"),
    ({"cache": "fp8_per_token_head"}, "kv_cache_dtype 'fp8_per_token_head'"),
    ({"cache": "fp8_ds_mla"}, "kv_cache_dtype 'fp8_ds_mla'"),
    ({"role": "INDEXER"}, "index keys"),
    ({"states": "align", "spares": 2}, "speculative decoding with states in a prefix cache"),
]


@pytest.mark.parametrize(("changes", "said"), LATER)
def test_what_was_tried_with_a_later_release_alone_is_refused_by_name_with_an_earlier_one(changes, said):
    for version in ("0.33.0", "dev"):
        check_engine(*engine(**changes), version)
    with pytest.raises(ArgumentError, match=rf"vLLM 0\.32\.1 with .*{said}.*: use vLLM 0\.33"):
        check_engine(*engine(**changes), "0.32.1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": 2, "states": "none", "stages": 2}, "recurrent states"),
        ({"cache": "nvfp4"}, "kv_cache_dtype is 'nvfp4': only auto"),
        ({"unit": 32, "states": "align"}, "after each 32 tokens, within a block of states.*prefix_match_unit"),
        ({"block": 96, "states": "align"}, "after each 32 tokens"),
        ({"block": 16, "states": "align"}, "after each 16 tokens, within a block of states"),
        ({"context_parallel": 2}, "decode_context_parallel_size is 2"),
        ({"hidden": object()}, "hisparse_config"),
        (
            {"speculative": SimpleNamespace(method="medusa")},
            "method is 'medusa': only draft_model, eagle, eagle3, mtp, ngram were tried",
        ),
        (
            {"speculative": SimpleNamespace(method="draft_model", draft_tensor_parallel_size=1)},
            "draft_tensor_parallel_size is 1",
        ),
        ({"speculative": DRAFT, "stages": 2}, "pipeline_parallel_size 2"),
        ({"speculative": MTP, "lookahead": 3}, "reads 3 tokens ahead"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(changes, said):
    with pytest.raises(ArgumentError, match=said):
        check_engine(*engine(**changes), "0.33.0")


def test_options_have_defaults_and_are_read():
    assert setting({}).socket is None
    assert setting({"socket": "/a", "transfer_limit_s": 5}) == (
        "/a",
        5.0,
        setting({}).connect_s,
        "opaque",
        math.inf,
        False,
    )


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sokcet": "/a"}, "sokcet"),
        ({"socket": ""}, "socket"),
        ({"socket": 5}, "socket"),
        ({"transfer_limit_s": 0}, "transfer_limit_s is 0"),
        ({"transfer_limit_s": "60"}, "transfer_limit_s"),
        ({"connect_limit_s": True}, "connect_limit_s"),
        ({"recompute_after_s": 0}, "recompute_after_s is 0"),
        ({"allow_untested_version": "yes"}, "allow_untested_version is 'yes': give true or false"),
        ({"transfer_limit_s": None}, "transfer_limit_s is None"),
    ],
)
def test_a_wrong_option_is_named(extra, said):
    with pytest.raises(ArgumentError, match=said):
        setting(extra)


@pytest.mark.parametrize(
    ("producer", "consumer", "roles"),
    [(True, True, (Half.SOURCE, Half.TARGET)), (True, False, (Half.SOURCE,)), (False, True, (Half.TARGET,))],
)
def test_the_kv_role_says_what_an_engine_may_do(producer, consumer, roles):
    assert roles_of(SimpleNamespace(is_kv_producer=producer, is_kv_consumer=consumer)) == roles


def test_tokens_are_shared_only_of_backends_whose_pages_are_known():
    assert page_format("opaque", "CPU_ATTN amx") is PageFormat.BLOB
    assert page_format("tokens", "CPU_ATTN vec") is PageFormat.TRANSPOSED_KEYS
    assert page_format("tokens", "FLASH_ATTN") is PageFormat.TOKEN_ROWS
    with pytest.raises(ArgumentError, match="CPU_ATTN amx"):
        page_format("tokens", "CPU_ATTN amx")
    with pytest.raises(ArgumentError, match="pages is 'pages'"):
        setting({"pages": "pages"})
