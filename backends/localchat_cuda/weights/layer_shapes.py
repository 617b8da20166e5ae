"""Shapes of a layer's weights, by their fields in `Names`."""

from localchat_cuda.architectures.names import Names
from localchat_cuda.config.latent import LatentAttention
from localchat_cuda.config.model import ModelConfig


def linear_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """By field of `Names.merged` that a layer has: output features of each part, and input features."""
    d = config.head_dim_of(layer)
    net = config.delta_net
    own = config.gemma
    mixer: dict[str, tuple[tuple[int, ...], int]]
    if config.latent is not None:
        mixer = _latent_shapes(config, config.latent)
    elif net is not None and net.layers[layer]:
        mixer = {
            "qkvz": ((net.channels, net.values), config.hidden),
            "out": ((config.hidden,), net.values),
        }
    else:
        mixer = {
            "qkv": (tuple(heads * d for heads in config.qkv_heads(layer)), config.hidden),
            "o": ((config.hidden,), config.heads * d),
        }
    if config.has_experts(layer) and own is None:
        return mixer
    inner = config.intermediate_of(layer)
    found = mixer | {
        "gate_up": ((inner, inner), config.hidden),
        "down": ((config.hidden,), inner),
    }
    if own is not None and own.input_columns:
        found["input_gate"] = (own.input_columns,), config.hidden
        found["input_projection"] = (config.hidden,), own.input_columns
    if own is not None and own.altup is not None:
        found["laurel_left"] = (own.altup.laurel_rank,), config.hidden
        found["laurel_right"] = (config.hidden,), own.altup.laurel_rank
    return found


def _latent_shapes(
    config: ModelConfig, latent: LatentAttention
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of multi-head latent attention, with a latent of the queries or without."""
    queries = latent.queries(config.heads)
    hidden = config.hidden
    found: dict[str, tuple[tuple[int, ...], int]] = {"q_kv": ((queries, latent.row), hidden)}
    if latent.query_rank:
        found = {
            "latents": ((latent.query_rank, latent.row), hidden),
            "q": ((queries,), latent.query_rank),
        }
    return {**found, "o": ((hidden,), config.heads * latent.value)}


def norm_widths(config: ModelConfig, names: Names, layer: int) -> dict[str, int]:
    """By field of `Names.norms` that a layer has: columns."""
    own = config.gemma
    d = config.head_dim_of(layer)
    widths = dict.fromkeys(names.norms, config.hidden)
    for field, heads in (("q_norm", config.heads), ("k_norm", config.key_heads)):
        if field in widths:
            widths[field] = heads * d if config.normed_projections else d
            if config.has_delta_net(layer):
                del widths[field]
    if config.latent is not None:
        widths |= {"q_latent": config.latent.query_rank, "kv_latent": config.latent.kv_rank}
        if not config.latent.query_rank:
            del widths["q_latent"]
    if own is not None:
        if not own.projections(layer):
            del widths["k_norm"]
        if not own.input_columns:
            del widths["post_input"]
        if config.mixture is None:
            for field in ("experts", "post_experts", "post_dense"):
                del widths[field]
    return widths
