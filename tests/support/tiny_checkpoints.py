"""Tiny random checkpoints of transformers with a byte-level vocabulary, as folders that can be converted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.model_files.pre_tokenizers import PATTERNS
from tests.support import tiny_models
from tests.support.llamacpp_models import CONTROL, MERGES, TEMPLATE, VOCAB, vocabulary

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": ("llama", {"rope_parameters": tiny_models.LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": tiny_models.YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    # llama.cpp derives the scale of the scores from the size of the heads.
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 256, "num_hidden_layers": 4, "layer_types": None},
    ),
}
"""Kind and changes of tiny_models by name."""


def write_checkpoint(folder: Path, name: str) -> Any:
    """Write a checkpoint with tokenizer and chat template, and return its model."""
    kind, changes = SHAPES[name]
    if name == "gemma3":
        changes = {**changes, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = tiny_models.reference(kind, vocab_size=VOCAB + 4, initializer_range=0.1, **changes)
    tiny_models.save(model, folder)
    texts = vocabulary()
    tokenizer = {
        "added_tokens": [
            {"id": texts.index(text), "content": text, "special": True} for text in CONTROL
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PATTERNS["qwen2"]}, "behavior": "Isolated"},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(texts) if text not in CONTROL},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"bos_token": CONTROL[0], "eos_token": {"content": CONTROL[1]}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "add_bos_token": True, "chat_template": TEMPLATE})
    )
    return model


def logprobs(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """Return log probabilities (T, V) of the tokens that follow each position."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    result: NDArray[np.float32] = torch.log_softmax(logits, -1).numpy()
    return result
