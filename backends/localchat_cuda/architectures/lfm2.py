"""LFM2 and LFM2.5: short gated convolutions in most layers, and attention with norms of heads in the others.

Liquid AI, 2025 (huggingface.co/docs/transformers/model_doc/lfm2). Configs on the hub have three generations of
names, and state the columns of the MLP before their adjustment.
"""

from typing import Any

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.architectures.names import Names, RecurrentNames


def canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with the names that the reader knows."""
    layers = fields.get("num_hidden_layers")
    attention = fields.get("full_attn_idxs")
    renamed = {
        "rms_norm_eps": fields.get("norm_eps"),
        "tie_word_embeddings": fields.get("tie_embedding", fields["tie_word_embeddings"]),
        "intermediate_size": fields.get("block_ff_dim", fields.get("intermediate_size")),
    }
    if "layer_types" not in fields and isinstance(attention, list) and isinstance(layers, int):
        renamed["layer_types"] = [
            "full_attention" if layer in attention else "conv" for layer in range(layers)
        ]
    inner = renamed["intermediate_size"]
    multiplier = fields["block_ffn_dim_multiplier"]
    multiple = fields["block_multiple_of"]
    if fields["block_auto_adjust_ff_dim"] and isinstance(inner, int):
        inner = 2 * inner // 3
        if isinstance(multiplier, int | float) and isinstance(multiple, int) and multiple > 0:
            inner = -(-int(multiplier * inner) // multiple) * multiple
        renamed["intermediate_size"] = inner
    return fields | renamed


FAMILY = Family(
    name="lfm2",
    classes=("Lfm2ForCausalLM",),
    label="LFM2",
    names=Names(
        embedding="model.embed_tokens.weight",
        last_norm="model.embedding_norm.weight",
        head="lm_head.weight",
        layer="model.layers.{}.",
        norms={
            "attention": "operator_norm.weight",
            "mlp": "ffn_norm.weight",
            "q_norm": "self_attn.q_layernorm.weight",
            "k_norm": "self_attn.k_layernorm.weight",
        },
        merged={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.out_proj",),
            "in": ("conv.in_proj",),
            "out": ("conv.out_proj",),
            "gate_up": ("feed_forward.w1", "feed_forward.w3"),
            "down": ("feed_forward.w2",),
        },
        recurrent=RecurrentNames("short_conv", "conv.conv.weight"),
    ),
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    canonical=canonical,
    gguf=GgufTraits(
        names={
            "token_embd_norm": "model.embedding_norm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
    ),
)
forward = llama.forward
