"""Counts a model's weights and their bytes on the GPU, from its config. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from localchat.model_files.safetensors import SafetensorsHeader
from localchat_cuda.config.gemma import GemmaLayers
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.quantization import PACKED_GROUPS, Quantization, can_round, padded
from localchat_cuda.config.tensor_names import canonical_name, is_in_layers, is_text
from localchat_cuda.weights.layer_shapes import linear_shapes, norm_widths

_HALF = 2
_FLOAT = 4


def weights_bytes(config: ModelConfig, headers: Iterable[SafetensorsHeader]) -> int:
    """Return the bytes of the text part's loaded tensors, floating ones in the config's type."""
    latent = config.latent
    always_floating = 0 if latent is None else config.layers * latent.kv(config.heads)
    return always_floating * config.float_bytes + sum(
        config.loaded_bytes(tensor)
        for header in headers
        for tensor in header.tensors
        if is_text(tensor.name)
        and is_in_layers(tensor.name, config.layers)
        and not (latent is not None and ".kv_b_proj." in tensor.name)
        and not (config.tied and canonical_name(tensor.name) == "lm_head.weight")
    )


def parameters(config: ModelConfig) -> int:
    """Return the number of weights, as model sizes are counted."""
    width = config.hidden
    names = config.family.names
    others = sum(sum(norm_widths(config, names, n).values()) for n in range(config.layers))
    if config.mixture is not None:
        router = width * (config.mixture.experts + config.mixture.gated)
        others += config.expert_layers * (router + _expert_biases(config))
    if "o" in names.biased:
        others += config.layers * width
    attention = 0
    if config.qkv_bias:
        attention += config.qkv_columns
    if names.sinks:
        attention += config.heads
    if config.latent is not None:
        attention += config.latent.kv(config.heads)
    others += sum(map(config.has_attention, range(config.layers))) * attention
    if config.gemma is not None:
        others += _gemma_extras(config, config.gemma)
    if (states := config.recurrent) is not None:
        others += states.count * states.extra_numbers(width)
    ends = config.vocabulary * width * (1 if config.tied else 2) + width
    return sum(map(prod, _all_linear_shapes(config))) + others + ends


def _gemma_extras(config: ModelConfig, own: GemmaLayers) -> int:
    """Return the weights of Gemma 4 outside linear layers, norms and routers."""
    layer = 0
    total = 0
    width = config.hidden
    if config.mixture is not None:
        layer += width + config.mixture.experts
    if columns := own.input_columns:
        total += input_rows(config) + columns
        layer += width * columns
    return total + config.layers * layer


def input_rows(config: ModelConfig) -> int:
    """Return the weights of a second embedding, of which a token reads one row."""
    own = config.gemma
    if own is not None:
        return own.input_vocabulary * config.layers * own.input_columns
    return 0


def _expert_biases(config: ModelConfig) -> int:
    """Return the biases of a layer's router and experts."""
    if config.mixture is None or not config.mixture.biased:
        return 0
    return config.mixture.experts * (1 + 2 * config.intermediate + config.hidden)


def _expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of the linear layers of a layer's experts."""
    shapes = _expert_shapes(config)
    quantization = config.quantization
    if quantization is None or config.mixture is None:
        return sum(n * k for n, k in shapes) * config.float_bytes
    if quantization.of_experts:
        rows = 2 * config.mixture.stored * padded(config.intermediate)
        shapes = ((rows, shapes[0][1]), *shapes[1:])
    return sum(quantization.linear_bytes(n, k) for n, k in shapes)


def _expert_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return outputs and inputs of the linear layers of a layer's experts, all joined."""
    if config.mixture is None:
        return ()
    stored = config.mixture.stored
    width = config.hidden
    inner = config.intermediate
    return (stored * (1 + config.family.gated_feed) * inner, width), (stored * width, inner)


def _all_linear_shapes(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield outputs and inputs of all linear layers that may be rounded."""
    for layer in range(config.layers):
        for parts, k in linear_shapes(config, layer).values():
            yield sum(parts), k
        if config.has_experts(layer):
            yield from _expert_shapes(config)


def token_bytes(config: ModelConfig, weights: int) -> int:
    """Return the bytes that one token reads out of `weights` bytes.

    Omits the experts that it does not choose, and a second embedding, of which it reads one row.
    """
    weights -= input_rows(config) * config.float_bytes
    if config.mixture is None:
        return weights
    share = config.expert_layers * _expert_bytes(config) / dummy_bytes(config)
    return round(weights * (1 - share * (1 - config.mixture.taken / config.mixture.stored)))


def dummy_bytes(config: ModelConfig) -> int:
    """Return the bytes of random weights of this shape."""
    number_bytes = config.float_bytes
    if config.quantization is None:
        return parameters(config) * number_bytes
    if config.quantization.of_experts:
        return _float_and_expert_bytes(config, number_bytes)
    shapes = Counter(_all_linear_shapes(config))
    linear = sum(
        count * config.quantization.linear_bytes(*shape) for shape, count in shapes.items()
    )
    plain = parameters(config) - sum(count * prod(shape) for shape, count in shapes.items())
    return linear + plain * number_bytes


def own_dummy_bytes(config: ModelConfig) -> int:
    """Return the bytes of random weights on one of the GPUs."""
    return dummy_bytes(replace(config, vocabulary=config.vocabulary_part))


def weight_share(undivided: ModelConfig, part: ModelConfig) -> float:
    """Return the share of a model's bytes that a GPU with the shape `part` stores."""
    if part.ranks == 1:
        return 1.0
    return own_dummy_bytes(part) / dummy_bytes(undivided)


def _float_and_expert_bytes(config: ModelConfig, number_bytes: int) -> int:
    """Return the bytes of a model whose experts alone are quantized."""
    assert config.mixture is not None
    experts = config.expert_layers * sum(map(prod, _expert_shapes(config)))
    padding = config.mixture.experts * 2 * (padded(config.intermediate) - config.intermediate)
    plain = parameters(config) - experts + config.expert_layers * padding  # in biases
    return config.expert_layers * _expert_bytes(config) + plain * number_bytes


def unpacked_bytes(config: ModelConfig, *, hopper: bool = False) -> int:
    """Return the bytes of unpacked copies of the packed linear layers outside experts.

    hopper: copies of groups of 128 are in e4m3, with fp32 scales (kernels/int4/gemm_e4m3.py).
    """
    quantization = config.quantization
    if quantization is None or not (quantization.packed or quantization.in_ggml_forms):
        return 0
    shapes = Counter(_all_linear_shapes(config))
    shapes.subtract(list(_expert_shapes(config)) * config.expert_layers)
    return sum(
        count * _copy_bytes(quantization, n, k, hopper=hopper)
        for (n, k), count in shapes.items()
        if not quantization.on_load or can_round("", n, k)
    )


def _copy_bytes(quantization: Quantization, n: int, k: int, *, hopper: bool) -> int:
    if not quantization.packed:
        return _HALF * n * k
    group = PACKED_GROUPS[0]
    if hopper and quantization.packed_group == group and k % group == 0:
        return n * k + n * k // group * _FLOAT
    return _HALF * n * padded(k)


def head_bounds_bytes(config: ModelConfig) -> int:
    """Return the bytes of an int8 copy of the head with its scales and bounds."""
    return config.vocabulary * (padded(config.hidden) + 2 * _FLOAT)
