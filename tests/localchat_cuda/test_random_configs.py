"""Families of many shapes: random configs of each against transformers, in fp32 on a CPU."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.support import tiny_models
from tests.support.tiny_models import Tiny, tokens_of

CONFIGS = 5


def dense(draw: Random) -> dict[str, Any]:
    keys = draw.choice((1, 2, 3))
    return {
        "hidden_size": draw.choice((64, 128, 192)),
        "intermediate_size": draw.choice((64, 96, 160)),
        "num_hidden_layers": draw.choice((2, 3)),
        "num_key_value_heads": keys,
        "num_attention_heads": keys * draw.choice((1, 2, 3)),
        "head_dim": draw.choice((64, 96, 128)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-2)),
        "initializer_range": draw.uniform(0.1, 0.3),
    }


def windows(draw: Random) -> dict[str, Any]:
    shape = dense(draw)
    kinds = [
        draw.choice(("sliding_attention", "full_attention"))
        for _ in range(shape["num_hidden_layers"])
    ]
    return {**shape, "sliding_window": draw.choice((1, 7, 24, 600)), "layer_types": kinds}


def granite(draw: Random) -> dict[str, Any]:
    return {
        **dense(draw),
        "embedding_multiplier": draw.uniform(0.1, 20.0),
        "attention_multiplier": draw.uniform(0.01, 0.2),
        "residual_multiplier": draw.uniform(0.1, 2.0),
        "logits_scaling": draw.uniform(0.5, 8.0),
    }


def granite_mixture(draw: Random) -> dict[str, Any]:
    experts, inner = draw.randint(1, 9), draw.choice((32, 64))
    return {
        **granite(draw),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "intermediate_size": inner,
    }


def granite4(draw: Random, shape: dict[str, Any], widths: tuple[int, ...]) -> dict[str, Any]:
    return {
        **shape,
        "shared_intermediate_size": draw.choice(widths),
        "layer_types": ["full_attention"] * shape["num_hidden_layers"],
        "position_embedding_type": draw.choice((None, "rope")),
    }


def granite4_mixture(draw: Random) -> dict[str, Any]:
    shape = granite_mixture(draw)
    inner = shape["intermediate_size"]
    return granite4(draw, shape, (inner, 3 * inner))


FAMILIES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "olmo2": dense,
    "olmo3": windows,
    "granite-moe": granite_mixture,
    "granite4": lambda draw: granite4(draw, granite(draw), (64, 192)),
    "granite4-moe": granite4_mixture,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompt_logits_of_random_configs_are_transformers(kind: str, tmp_path: Path) -> None:
    for seed in range(CONFIGS):
        draw = Random(f"{kind} {seed}")
        config, length = FAMILIES[kind](draw), draw.randint(2, 80)
        model = tiny_models.reference(kind, **config)
        folder = tmp_path / str(seed)
        tiny_models.save(model, folder, "1GB")
        tokens = tokens_of(seed, length)
        found = Tiny(folder, torch.float32).prompt(tokens, draw.randint(1, length))
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0]
        assert torch.allclose(found, wanted, atol=2e-3, rtol=1e-3), (seed, config)
