"""Translates what a GGUF file says about layers with a running state to config.json. Imports no torch."""

from typing import Any

from localchat.model_files.gguf import Header
from localchat_cuda.architectures.family import Family


def key_heads(header: Header) -> int:
    """Return the heads of keys and values. Layers without attention have 0 in the file."""
    layers = header.number("block_count")
    heads = header.number("attention.head_count")
    return max(header.numbers("attention.head_count_kv", layers, heads), default=0) or heads


def feed_columns(header: Header) -> int:
    """Return the columns inside the MLP. Layers without one have 0 in the file."""
    return max(header.numbers("feed_forward_length", header.number("block_count")), default=0)


def hybrid_config(header: Header, family: Family, eps: float) -> dict[str, Any]:
    """Return the fields of config.json on a family's layers; empty for families without running states."""
    recurrent = family.names.recurrent
    if recurrent is None or family.has_delta_nets:
        return {}
    layers = header.number("block_count")
    attends = [heads > 0 for heads in header.numbers("attention.head_count_kv", layers)]
    if recurrent.kind == "short_conv":
        return {
            "layer_types": ["full_attention" if attention else "conv" for attention in attends],
            "conv_L_cache": header.number("shortconv.l_cache"),
            # The file stores the adjusted columns of the MLP.
            "block_auto_adjust_ff_dim": False,
            "norm_eps": eps,
        }
    heads = header.number("ssm.time_step_rank")
    head_columns = header.number("ssm.inner_size") // max(heads, 1)
    has_bias = any(tensor.name.endswith("ssm_conv1d.bias") for tensor in header.tensors)
    if family.single_parts:
        return {
            "mamba_num_heads": heads,
            "mamba_head_dim": head_columns,
            "ssm_state_size": header.number("ssm.state_size"),
            "n_groups": header.number("ssm.group_count"),
            "conv_kernel": header.number("ssm.conv_kernel"),
            "use_conv_bias": has_bias,
            "use_bias": False,
            "layers_block_type": _single_parts(header, attends),
            "layer_norm_epsilon": eps,
        }
    rotates = header.metadata.get(f"{header.architecture}.rope.scaling.finetuned") is not False
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_columns,
        "mamba_d_state": header.number("ssm.state_size"),
        "mamba_n_groups": header.number("ssm.group_count"),
        "mamba_d_conv": header.number("ssm.conv_kernel"),
        "mamba_conv_bias": has_bias,
        "layer_types": ["attention" if attention else "mamba" for attention in attends],
        "shared_intermediate_size": feed_columns(header),
        "num_local_experts": 0,
        "position_embedding_type": "rope" if rotates else "nope",
    }


def _single_parts(header: Header, attends: list[bool]) -> list[str]:
    """Return the kind of each layer: attention, Mamba 2 or MLP."""
    names = {tensor.name for tensor in header.tensors}
    kinds = []
    for layer, attention in enumerate(attends):
        kind = "mamba"
        if attention:
            kind = "attention"
        elif f"blk.{layer}.ffn_up.weight" in names:
            kind = "mlp"
        kinds.append(kind)
    return kinds
