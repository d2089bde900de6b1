"""Writes a small model that sees images, LLaVA with random weights, into a folder. A program of vLLM's environment.

Called by `test_vllm_families`. It needs transformers, which also writes the processor of images.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SIDE, PATCH = 56, 14
VOCABULARY = 1024
IMAGE, TEMPLATE = (
    "<image>",
    (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %} <image> {% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    ),
)


def main() -> None:
    """Write the model into the folder that the first argument names."""
    path = Path(sys.argv[1])
    torch.manual_seed(0)
    sees = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    speaks = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=sees, text_config=speaks, image_token_index=VOCABULARY - 1)
    )
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.2)
    model.save_pretrained(path)
    # vLLM knows the older names of the tower's weights.
    file = path / "model.safetensors"
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {IMAGE: VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="w0",
            eos_token="w1",
            pad_token="w2",
            unk_token="w3",
            additional_special_tokens=[IMAGE],
        ),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)


if __name__ == "__main__":
    main()
