"""Tiny random GGUF files of models with a running state, beside attention in most: see llamacpp_models."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from tests.support.llamacpp_models import (
    EMBED,
    HEAD,
    HEADS,
    KV_HEADS,
    VOCAB,
    ModelWriter,
    write_attention,
    write_feed,
    write_head,
    write_mamba,
    write_successors,
)

_KERNEL, _STATE, _GROUPS, _SSM_HEADS = 4, 16, 1, 4
_INNER = 2 * EMBED
_SCALE = 0.2


def _begin(
    path: Path,
    architecture: str,
    seed: int,
    layers: int,
    norm: str = "output_norm",
    *,
    successors: bool = False,
) -> ModelWriter:
    """successors: see write_successors."""
    w = ModelWriter(path, architecture, seed=seed, layers=layers)
    if successors:
        write_successors(w)
    else:
        w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=1.0)
    if architecture != "lfm2" and not successors:
        w.random_matrix("output.weight", VOCAB, EMBED, scale=0.5)
    w.ones(norm + ".weight", EMBED)
    return w


def _heads(w: ModelWriter, kv_heads: int | list[int] = KV_HEADS) -> None:
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(kv_heads)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_rope_dimension_count(HEAD)
    w.gguf.add_rope_freq_base(10_000.0)


def _mamba2_numbers(w: ModelWriter) -> None:
    w.gguf.add_ssm_conv_kernel(_KERNEL)
    w.gguf.add_ssm_inner_size(_INNER)
    w.gguf.add_ssm_state_size(_STATE)
    w.gguf.add_ssm_time_step_rank(_SSM_HEADS)
    w.gguf.add_ssm_group_count(_GROUPS)


def _mamba2_mixer(w: ModelWriter, block: str) -> None:
    channels = _INNER + 2 * _GROUPS * _STATE
    w.random_matrix(block + "ssm_in.weight", _INNER + channels + _SSM_HEADS, EMBED)
    w.random_matrix(block + "ssm_conv1d.weight", channels, _KERNEL)
    w.random_matrix(block + "ssm_conv1d.bias", channels)
    w.random_matrix(block + "ssm_dt.bias", _SSM_HEADS)
    w.tensor(block + "ssm_a", -np.arange(1.0, _SSM_HEADS + 1).reshape(-1, 1))
    w.tensor(block + "ssm_d", np.ones((_SSM_HEADS, 1)))
    w.tensor(block + "ssm_norm.weight", np.ones((_GROUPS, _INNER // _GROUPS)))
    w.random_matrix(block + "ssm_out.weight", EMBED, _INNER)


def write_falcon_h1(path: Path, *, seed: int = 11) -> Path:
    """Attention and Mamba 2 side by side in each layer."""
    w = _begin(path, "falcon-h1", seed, 2)
    _heads(w)
    _mamba2_numbers(w)
    for layer in range(2):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        _mamba2_mixer(w, block)
        write_attention(w, block, scale=_SCALE)
        w.ones(block + "ffn_norm", EMBED)
        write_feed(w, block, scale=_SCALE)
    w.finish()
    return path


def write_granite_hybrid(path: Path, *, seed: int = 12) -> Path:
    """Layers of Mamba 2, and one of attention."""
    w = _begin(path, "granitehybrid", seed, 3)
    _heads(w, [0, KV_HEADS, 0])
    _mamba2_numbers(w)
    for layer in range(3):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        if layer == 1:
            write_attention(w, block, scale=_SCALE)
        else:
            _mamba2_mixer(w, block)
        w.ones(block + "ffn_norm.weight", EMBED)
        write_feed(w, block, scale=_SCALE)
    w.finish()
    return path


def write_lfm2(path: Path, *, seed: int = 13) -> Path:
    """Short convolutions, and one layer of attention; the output is the embedding."""
    w = _begin(path, "lfm2", seed, 3, norm="token_embd_norm")
    _heads(w, [0, KV_HEADS, 0])
    w.gguf.add_shortconv_l_cache(3)
    for layer in range(3):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        if layer == 1:
            write_attention(w, block, scale=_SCALE)
            w.ones(block + "attn_q_norm.weight", HEAD)
            w.ones(block + "attn_k_norm.weight", HEAD)
        else:
            w.random_matrix(block + "shortconv.conv.weight", EMBED, 3)
            w.random_matrix(block + "shortconv.in_proj.weight", 3 * EMBED, EMBED)
            w.random_matrix(block + "shortconv.out_proj.weight", EMBED, EMBED)
        w.ones(block + "ffn_norm.weight", EMBED)
        write_feed(w, block, scale=_SCALE)
    w.finish()
    return path


def write_qwen35(
    path: Path,
    *,
    seed: int = 14,
    head: Literal["", "random", "exact"] = "",
    scale: float = _SCALE,
    layers: int = 4,
) -> Path:
    """Gated delta nets, and a gated attention in every second layer.

    head: with a prediction head of random weights, or with one that passes on its token's embedding. The exact
    one agrees with its model if the layers have a small `scale`: each token then decides about the next.
    """
    heads, width = 2, 16
    inner, channels = heads * width, 3 * heads * width
    w = _begin(path, "qwen35", seed, layers + bool(head), successors=head == "exact")
    _heads(w)
    w.gguf.add_rope_dimension_sections([6, 5, 5, 0])
    w.gguf.add_ssm_conv_kernel(_KERNEL)
    w.gguf.add_ssm_inner_size(inner)
    w.gguf.add_ssm_state_size(width)
    w.gguf.add_ssm_time_step_rank(heads)
    w.gguf.add_ssm_group_count(heads)
    w.gguf.add_full_attention_interval(2)
    if head:
        write_head(w, f"blk.{layers}.nextn.", random=head == "random")
    for layer in range(layers + bool(head)):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        w.ones(block + "post_attention_norm.weight", EMBED)
        if layer % 2 or layer == layers:
            write_attention(w, block, scale=scale, gated=True)
            w.ones(block + "attn_q_norm.weight", HEAD)
            w.ones(block + "attn_k_norm.weight", HEAD)
        else:
            w.random_matrix(block + "attn_qkv.weight", channels, EMBED)
            w.random_matrix(block + "attn_gate.weight", inner, EMBED)
            w.random_matrix(block + "ssm_conv1d.weight", channels, _KERNEL)
            w.random_matrix(block + "ssm_dt.bias", heads)
            w.tensor(block + "ssm_a", -np.arange(1.0, heads + 1))
            w.random_matrix(block + "ssm_beta.weight", heads, EMBED)
            w.random_matrix(block + "ssm_alpha.weight", heads, EMBED)
            w.ones(block + "ssm_norm.weight", width)
            w.random_matrix(block + "ssm_out.weight", EMBED, inner, scale=scale)
        write_feed(w, block, scale=scale)
    w.finish()
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "mamba": write_mamba,
    "falcon-h1": write_falcon_h1,
    "granitehybrid": write_granite_hybrid,
    "lfm2": write_lfm2,
    "qwen35": write_qwen35,
}
