"""Loads experts as gpt-oss stores them: all of a layer in one tensor, rows of gate and up in turns.

In MXFP4 `blocks` uint8 [X, N, K / 32, 16] (two codes a byte, the first low) and `scales` uint8 [X, N, K / 32];
or floating, transposed: [X, K, N]. Kernels want gate before up, and MXFP4's inner features in 128s.
"""

from collections.abc import Iterator

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.config.mixture import Mixture
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.quantization import padded
from localchat_cuda.kernels.experts import Experts, Router
from localchat_cuda.kernels.int4 import e2m1
from localchat_cuda.weights.formats.weight import Weight, stack_rows
from localchat_cuda.weights.source import LoadTarget


def load(
    prefix: str, router: Router, config: ModelConfig, mixture: Mixture, target: LoadTarget
) -> Experts:
    """Load the experts of a layer, whose names begin with `prefix`. Raises ModelInvalid."""
    count = mixture.experts
    hidden = config.hidden
    inner = config.intermediate
    quantized = config.quantization is not None
    read = _mxfp4 if quantized else _floating
    wide = padded(inner) if quantized else inner
    gate_up = (_in_order(each, wide) for each in read(f"{prefix}gate_up_proj", config, target))
    down = read(f"{prefix}down_proj", config, target)
    biases = [
        target.tensor(f"{prefix}{name}_proj_bias", (count, rows), target.dtype)
        for name, rows in (("gate_up", 2 * inner), ("down", hidden))
    ]
    gate_up_bias = torch.stack([_in_order(each[:, None], wide)[:, 0] for each in biases[0]])
    try:
        gate_up_stack, down_stack = (
            stack_rows(map(_packed, parts), count) for parts in (gate_up, down)
        )
    except ValueError as error:
        raise ModelInvalid(
            f"The experts {prefix}* cannot be read: {error}.",
            hint="The file may be damaged: download it again, or take a GGUF of it for llama.cpp.",
        ) from error
    return Experts(
        router,
        gate_up_stack,
        down_stack,
        gate_up_bias.flatten(),
        biases[1].flatten(),
        mixture.limit,
    )


def _shape(name: str, config: ModelConfig) -> tuple[int, int]:
    """N and K of an expert."""
    hidden = config.hidden
    inner = config.intermediate
    if name.endswith("gate_up_proj"):
        return (2 * inner, hidden)
    return (hidden, inner)


def _mxfp4(name: str, config: ModelConfig, target: LoadTarget) -> Iterator[torch.Tensor]:
    """Each expert's codes [N, K], and in K / 32 more columns its exponents: both are sorted as rows."""
    (n, k), count = _shape(name, config), _count(config)
    groups = k // e2m1.GROUP
    blocks = target.tensor(f"{name}_blocks", (count, n, groups, e2m1.GROUP // 2), torch.uint8)
    scales = target.tensor(f"{name}_scales", (count, n, groups), torch.uint8)
    for held, exponents in zip(blocks, scales, strict=True):
        codes = torch.stack((held & 15, held >> 4), -1).view(n, k)
        yield torch.cat((codes, exponents), 1)


def _floating(name: str, config: ModelConfig, target: LoadTarget) -> Iterator[torch.Tensor]:
    (n, k), count = _shape(name, config), _count(config)
    for held in target.tensor(name, (count, k, n), target.dtype):
        yield held.t()


def _count(config: ModelConfig) -> int:
    assert config.mixture is not None
    return config.mixture.experts


def _in_order(rows: torch.Tensor, wide: int) -> torch.Tensor:
    """Rows of gate, then of up, each followed by zeros up to `wide`, of rows in turns."""
    parts = rows.view(-1, 2, rows.shape[1]).transpose(0, 1)
    return torch.nn.functional.pad(parts, (0, 0, 0, wide - parts.shape[1])).flatten(0, 1)


def _packed(rows: torch.Tensor) -> Weight:
    if rows.dtype != torch.uint8:
        return rows
    columns = rows.shape[1] * e2m1.GROUP // (e2m1.GROUP + 1)
    return e2m1.pack_floats(rows[:, :columns], rows[:, columns:])
