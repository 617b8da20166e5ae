"""GGUF files of tiny hybrids of transformers, with the names, layouts and numbers of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.llamacpp_models import ModelWriter

_NAMES = {
    "lfm2": {
        "model.embed_tokens": "token_embd",
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
    "nemotron_h": {
        "model.embeddings": "token_embd",
        "model.norm_f": "output_norm",
        "lm_head": "output",
        "norm": "attn_norm",
        "mixer.q_proj": "attn_q",
        "mixer.k_proj": "attn_k",
        "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
    },
    "granitehybrid": {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "shared_mlp.output_linear": "ffn_down",
    },
}
_MAMBA = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
}


def write_hybrid(
    model: Any, architecture: str, path: Path, form: gguf.GGMLQuantizationType
) -> Path:
    """Write a model of transformers. Its linear layers get the number format."""
    config = model.config
    names = dict(_NAMES[architecture])
    prefix = {"nemotron_h": "mixer.", "granitehybrid": "mamba."}.get(architecture, "")
    if prefix:
        names |= {prefix + own: name for own, name in _MAMBA.items()}
    w = ModelWriter(path, architecture, seed=1, layers=config.num_hidden_layers)
    w.gguf.add_embedding_length(config.hidden_size)
    attends = _write_numbers(w.gguf, model, architecture)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, values in _tensors(name, tensor, config, names, attends):
            array = values.numpy().astype(np.float32)
            is_linear = array.ndim == 2 and "conv" not in own and "ssm_" not in own
            if (
                is_linear or own.endswith(("ssm_in.weight", "ssm_out.weight"))
            ) and form.name != "F32":
                w.gguf.add_tensor(own, gguf.quants.quantize(array, form), raw_dtype=form)
            else:
                w.gguf.add_tensor(own, array)
    w.finish()
    return path


def _write_numbers(writer: gguf.GGUFWriter, model: Any, architecture: str) -> list[bool]:
    """Write the metadata, and return whether each layer has attention."""
    config = model.config
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    attends = [kind in ("full_attention", "attention") for kind in kinds]
    heads = config.num_attention_heads
    writer.add_head_count(heads)
    writer.add_head_count_kv([config.num_key_value_heads * attention for attention in attends])
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(10_000.0)
    if architecture == "lfm2":
        writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        return attends
    mixers = [layer for layer in model.modules() if hasattr(layer, "A_log")]
    mixer = mixers[0]
    writer.add_ssm_conv_kernel(mixer.conv1d.kernel_size[0])
    writer.add_ssm_inner_size(mixer.intermediate_size)
    writer.add_ssm_state_size(mixer.ssm_state_size)
    writer.add_ssm_time_step_rank(mixer.num_heads)
    writer.add_ssm_group_count(mixer.n_groups)
    if architecture == "nemotron_h":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_feed_forward_length(
            [config.intermediate_size * (kind == "mlp") for kind in kinds]
        )
        return attends
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.shared_intermediate_size)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    return attends


def _tensors(
    name: str, tensor: torch.Tensor, config: Any, names: dict[str, str], attends: list[bool]
) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor of a checkpoint as the file has it."""
    block, own = "", name
    if ".layers." in name:
        number, _, own = name.partition(".layers.")[2].partition(".")
        block = f"blk.{number}."
    if own == "shared_mlp.input_linear.weight":
        gate, up = tensor.chunk(2)
        return [(f"{block}ffn_gate.weight", gate), (f"{block}ffn_up.weight", up)]
    if own.endswith(("q_proj.weight", "k_proj.weight")) and "granitehybrid" in _of(names):
        heads = config.num_attention_heads
        if "k_proj" in own:
            heads = config.num_key_value_heads
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if own.endswith(".A_log"):
        tensor = -tensor.exp()
    if own.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    if own.endswith(("conv1d.weight", "conv.conv.weight")):
        tensor = tensor[:, 0]
    if own in ("mixer.norm.weight", "mamba.norm.weight"):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        tensor = tensor.view(groups, -1)
    if own in names:
        return [(block + names[own], tensor)]
    stem, _, suffix = own.rpartition(".")
    return [(f"{block}{names[stem]}.{suffix}", tensor)]


def _of(names: dict[str, str]) -> str:
    return "granitehybrid" if "shared_mlp.output_linear" in names else ""
