"""Shapes of a layer's weights, by their fields in `Names`."""

from localchat_cuda.architectures.names import Names
from localchat_cuda.config.latent import LatentAttention
from localchat_cuda.config.model import ModelConfig


def linear_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return output features of each part, and input features, by field of `Names.merged`."""
    d = config.head_dim_of(layer)
    gemma = config.gemma
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    if config.latent is not None:
        shapes = _latent_shapes(config, config.latent)
    elif config.recurrent is not None and config.is_recurrent(layer):
        shapes = {
            "in": (config.recurrent.parts, config.hidden),
            "out": ((config.hidden,), config.recurrent.values),
        }
    elif config.has_attention(layer):
        shapes = {
            "qkv": (tuple(heads * d for heads in config.qkv_heads(layer)), config.hidden),
            "o": ((config.hidden,), config.heads * d),
        }
    if not config.has_feed(layer) or (config.has_experts(layer) and gemma is None):
        return shapes
    inner = config.intermediate_of(layer)
    if config.family.gated_feed:
        shapes["gate_up"] = (inner, inner), config.hidden
    else:
        shapes["up"] = (inner,), config.hidden
    shapes["down"] = (config.hidden,), inner
    if gemma is not None and gemma.input_columns:
        shapes["input_gate"] = (gemma.input_columns,), config.hidden
        shapes["input_projection"] = (config.hidden,), gemma.input_columns
    return shapes


def _latent_shapes(
    config: ModelConfig, latent: LatentAttention
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shapes of multi-head latent attention, with or without a latent of the queries."""
    queries = latent.queries(config.heads)
    hidden = config.hidden
    output = ((hidden,), config.heads * latent.value)
    if not latent.query_rank:
        return {"q_kv": ((queries, latent.row), hidden), "o": output}
    return {
        "latents": ((latent.query_rank, latent.row), hidden),
        "q": ((queries,), latent.query_rank),
        "o": output,
    }


def norm_widths(config: ModelConfig, names: Names, layer: int) -> dict[str, int]:
    """Return the columns of each norm, by field of `Names.norms` that a layer has."""
    gemma = config.gemma
    d = config.head_dim_of(layer)
    widths = dict.fromkeys(names.norms, config.hidden)
    for field, heads in (("q_norm", config.heads), ("k_norm", config.key_heads)):
        if field in widths:
            widths[field] = heads * d if config.family.normed_projections else d
            if not config.has_attention(layer):
                del widths[field]
    if config.latent is not None:
        widths |= {"q_latent": config.latent.query_rank, "kv_latent": config.latent.kv_rank}
        if not config.latent.query_rank:
            del widths["q_latent"]
    if gemma is not None:
        if not gemma.projections(layer):
            del widths["k_norm"]
        if not gemma.input_columns:
            del widths["post_input"]
        if config.mixture is None:
            for field in ("experts", "post_experts", "post_dense"):
                del widths[field]
    return widths
