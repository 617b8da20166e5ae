"""Families of many shapes: random configs of each against transformers, in fp32 on a CPU.

`LOCALCHAT_RANDOM_CONFIGS=30 pytest -rP -k lfm2 ...` tries more configs, and prints the largest difference.
"""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.support import tiny_models
from tests.support.tiny_models import Tiny, tokens_of

# Read here, because each test runs without the LOCALCHAT_ variables of the person who starts it.
CONFIGS = int(os.environ.get("LOCALCHAT_RANDOM_CONFIGS", "5"))


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


def gemma4(draw: Random) -> dict[str, Any]:
    """Of both kinds of layers, the last without a window; some with experts or with what only the small models
    have."""
    layers, small = draw.randint(2, 5), draw.random() < 0.5
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)]
    kinds.append("full_attention")
    shared = draw.randint(0, layers - 2) if small else 0
    kinds[: len({*kinds})] = sorted({*kinds}, reverse=True)  # each kind has a layer with keys
    shared = min(shared, layers - len({*kinds}))
    heads, keys = draw.choice(((4, 2), (4, 4), (2, 1)))
    experts = draw.randint(1, 9)
    return {
        **dense(draw),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": draw.choice((64, 96)),
        "global_head_dim": draw.choice((128, 256)),
        "num_global_key_value_heads": draw.choice((None, 1, 2)),
        "attention_k_eq_v": draw.random() < 0.5,
        "sliding_window": draw.choice((1, 7, 24, 600)),
        "final_logit_softcapping": draw.choice((None, 5.0)),
        "hidden_size_per_layer_input": draw.choice((32, 64)) if small else 0,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": draw.random() < 0.5,
        "enable_moe_block": draw.random() < 0.5,
        "num_experts": experts,
        "top_k_experts": draw.randint(1, experts),
        "moe_intermediate_size": draw.choice((32, 64)),
    }


def latent(draw: Random) -> dict[str, Any]:
    """With a latent of the queries or without, and experts in all layers, some or none."""
    heads, experts, layers = draw.choice((1, 2, 4)), draw.randint(1, 9), draw.choice((2, 3))
    tail = draw.choice((16, 32, 64))
    scaled = {**tiny_models.YARN, "factor": draw.choice((1.5, 8.0)), **tiny_models.SHARPENED}
    return {
        **dense(draw),
        "hidden_size": draw.choice((64, 128, 192)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice((128, 256)),
        "q_lora_rank": draw.choice((None, 24, 128)),
        "qk_rope_head_dim": tail,
        "head_dim": tail,
        "qk_nope_head_dim": draw.choice((8, 40, 64)),
        "v_head_dim": draw.choice((16, 24, 64)),
        "first_k_dense_replace": draw.randint(0, layers),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "n_shared_experts": draw.randint(1, 3),
        "moe_intermediate_size": draw.choice((32, 64)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "rope_parameters": draw.choice((scaled, tiny_models.LATENT["rope_parameters"])),
    }


def sigmoids(draw: Random) -> dict[str, Any]:
    shape = latent(draw)
    first, layers = shape.pop("first_k_dense_replace"), shape["num_hidden_layers"]
    heads = draw.choice((1, 3, 5))
    return {
        **shape,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "norm_topk_prob": draw.random() < 0.7,
        "rope_interleave": draw.random() < 0.5,
        # of a group the two best are added up, even where there is one group alone
        "n_routed_experts": max(2, shape["n_routed_experts"]),
    }


def kinds_with_attention(draw: Random, state: str, *others: str) -> list[str]:
    """Kinds of two to six layers, one of them with attention and one with a running state."""
    kinds = [draw.choice((state, "full_attention", *others)) for _ in range(draw.randint(0, 4))]
    kinds += [state, "full_attention"]
    draw.shuffle(kinds)
    return kinds


def short_convs(draw: Random) -> dict[str, Any]:
    shape = dense(draw)
    kinds = kinds_with_attention(draw, "conv")
    return {
        **shape,
        "hidden_size": shape["num_attention_heads"] * 64,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "norm_eps": shape["rms_norm_eps"],
        "initializer_range": draw.uniform(0.05, 0.15),
        "conv_L_cache": draw.choice((2, 3, 4)),
        "block_auto_adjust_ff_dim": draw.random() < 0.5,
        "block_multiple_of": draw.choice((32, 64)),
        "block_ffn_dim_multiplier": draw.choice((1.0, 1.3)),
    }


def short_convs_mixture(draw: Random) -> dict[str, Any]:
    shape = short_convs(draw)
    experts = draw.randint(2, 9)
    return {
        **shape,
        # Checkpoints may carry this field of the dense class, which this class ignores.
        "block_auto_adjust_ff_dim": draw.random() < 0.5,
        "num_dense_layers": draw.randint(0, shape["num_hidden_layers"]),
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "moe_intermediate_size": draw.choice((32, 64)),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }


def granite4_hybrid(draw: Random) -> dict[str, Any]:
    shape = granite_mixture(draw)
    if draw.random() < 0.5:
        shape |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    kinds = kinds_with_attention(draw, "linear_attention")
    groups, head = draw.choice((1, 2)), draw.choice((16, 32))
    inner = shape["intermediate_size"]
    return {
        **granite4(draw, shape, (inner, 3 * inner)),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "initializer_range": draw.uniform(0.05, 0.15),
        "mamba_n_groups": groups,
        "mamba_d_head": head,
        "mamba_expand": 2,
        "mamba_n_heads": 2 * shape["hidden_size"] // head,
        "mamba_d_state": draw.choice((16, 32, 64)),
        "mamba_conv_bias": draw.random() < 0.5,
    }


def nemotron(draw: Random) -> dict[str, Any]:
    shape = dense(draw)
    del shape["num_hidden_layers"]
    experts, inner = draw.randint(2, 9), draw.choice((32, 64))
    groups = draw.choice((1, 2, 4))
    return {
        **shape,
        "layers_block_type": kinds_with_attention(draw, "linear_attention", "mlp", "moe"),
        "tie_word_embeddings": False,
        "layer_norm_epsilon": shape["rms_norm_eps"],
        "initializer_range": draw.uniform(0.05, 0.15),
        "mamba_num_heads": groups * draw.choice((1, 2, 3)),
        "mamba_head_dim": draw.choice((16, 48, 64, 80)),
        "n_groups": groups,
        "ssm_state_size": draw.choice((16, 32, 64)),
        "use_conv_bias": draw.random() < 0.5,
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": inner * draw.randint(1, 3),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }


FAMILIES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "olmo2": dense,
    "olmo3": windows,
    "granite-moe": granite_mixture,
    "granite4": lambda draw: granite4(draw, granite(draw), (64, 192)),
    "granite4-moe": granite4_mixture,
    "gemma4-small": gemma4,
    "deepseek-v2": latent,
    "glm4-moe-lite": sigmoids,
    "lfm2": short_convs,
    "lfm2-moe": short_convs_mixture,
    "granite4-h": granite4_hybrid,
    "nemotron-h": nemotron,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompt_logits_of_random_configs_are_transformers(kind: str, tmp_path: Path) -> None:
    worst = 0.0
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
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    print(f"{kind}: {CONFIGS} configs, largest difference over the largest logit {worst:.1e}")
