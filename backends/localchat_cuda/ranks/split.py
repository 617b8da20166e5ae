"""Divides a model's shape among ranks. Imports no torch.

Each rank has some of the heads, and some of the columns inside every MLP and expert. Products over a part of
the columns are added up across ranks (collective.py). Key heads are copied where ranks outnumber them. Norms,
routers, latents and layers with a running state are whole on every rank.
"""

from dataclasses import replace

from localchat.errors import UsageError
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.quantization import PACKED_GROUPS, Quantization

MAX_RANKS = 8
_FLOAT_UNIT = 16
"""Floating layers are divided in multiples of this many columns, so that rows stay aligned."""


def split_config(config: ModelConfig, ranks: int, name: str) -> ModelConfig:
    """Return the shape that one of `ranks` ranks computes. Raises UsageError if the model cannot be divided."""
    if ranks == 1:
        return config
    why = objection(config, ranks)
    if why:
        possible = possible_ranks(config)
        hint = "It runs on one GPU: leave out --gpus."
        if len(possible) > 1:
            hint = f"Possible numbers of GPUs for this model: {', '.join(map(str, possible))}."
        raise UsageError(f"{name} cannot be divided among {ranks} GPUs: {why}.", hint=hint)
    mixture = config.mixture
    if mixture is not None:
        mixture = replace(mixture, dense_columns=mixture.dense_columns // ranks)
    gemma = config.gemma
    if gemma is not None:
        gemma = replace(
            gemma,
            key_heads=max(1, gemma.key_heads // ranks),
            intermediates=tuple(columns // ranks for columns in gemma.intermediates),
        )
    return replace(
        config,
        ranks=ranks,
        heads=config.heads // ranks,
        key_heads=max(1, config.key_heads // ranks),
        intermediate=config.intermediate // ranks,
        mixture=mixture,
        gemma=gemma,
    )


def possible_ranks(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of GPUs among which a model can be divided, including 1."""
    return tuple(n for n in range(1, MAX_RANKS + 1) if n == 1 or not objection(config, n))


def objection(config: ModelConfig, ranks: int) -> str:
    """Return why a model cannot be divided among `ranks` ranks, or an empty text."""
    quantization = config.quantization
    if not 1 <= ranks <= MAX_RANKS:
        return f"1 to {MAX_RANKS} GPUs are supported"
    if quantization is not None and quantization.method == "gguf":
        return "of GGUF files, llama.cpp divides the layers (--backend llamacpp)"
    if quantization is not None and quantization.act_order:
        return "its groups of columns are scattered (act-order)"
    if config.heads % ranks:
        return f"{ranks} does not divide its {config.heads} query heads"
    full_layers = config.gemma.key_heads if config.gemma is not None else config.key_heads
    for heads in (config.key_heads, full_layers):
        if heads % ranks and ranks % heads:
            return f"{heads} key heads can be neither divided nor copied evenly"
    unit = _unit(quantization)
    for columns in sorted(_divided_columns(config)):
        if columns % (unit * ranks):
            return f"{columns} columns of a layer are not a multiple of {ranks} times {unit}"
    return ""


def _divided_columns(config: ModelConfig) -> set[int]:
    """Return the input columns of the layers whose products are added up across ranks."""
    columns = set()
    for layer in range(config.layers):
        if config.has_attention(layer):
            value_dim = config.latent.value if config.latent else config.head_dim_of(layer)
            columns.add(config.heads * value_dim)
        if config.has_experts(layer):
            columns.add(config.intermediate)
        if config.has_feed(layer) and (not config.has_experts(layer) or config.gemma is not None):
            columns.add(config.intermediate_of(layer))
    return columns


def _unit(quantization: Quantization | None) -> int:
    """Return the smallest number of columns that division keeps together: a group of a scale."""
    if quantization is None:
        return _FLOAT_UNIT
    if quantization.of_experts:
        return PACKED_GROUPS[-1]
    if quantization.on_load or quantization.packed:
        return max(PACKED_GROUPS[0], quantization.group)
    if quantization.method == "nvfp4":
        # Kernels read 32 columns at a time.
        return PACKED_GROUPS[-1]
    return max(_FLOAT_UNIT, quantization.group)
