"""Makes a Qwen3 model small enough for two cores, with random weights from a fixed seed: `tiny_model.py DIRECTORY`.

Run with vLLM's environment. Its tokens are the words w0 to w1023. Its weights are unusually large: with smaller ones the
next token would not depend on the prompt.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = 1024

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=WORDS,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=2048,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(sys.argv[1])
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w3"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
).save_pretrained(sys.argv[1])
