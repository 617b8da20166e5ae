"""Loads experts as gpt-oss stores them: one tensor per layer, with alternating rows of gate and up.

MXFP4 has `blocks` uint8 [X, N, K / 32, 16] (two codes a byte, the first one low) and `scales` uint8 [X, N, K /
32]. Floating tensors are transposed: [X, K, N]. Kernels need all rows of gate before those of up, and MXFP4's
inner features in multiples of 128.
"""

from collections.abc import Iterator

import torch

from localchat_cuda.config.mixture import Mixture
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.quantization import padded
from localchat_cuda.kernels.experts import Experts, Router
from localchat_cuda.kernels.int4 import e2m1
from localchat_cuda.weights.formats.weight import Weight, refused, stack_rows
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
    padded_inner = padded(inner) if quantized else inner
    gate_up = (
        _gate_before_up(rows, padded_inner)
        for rows in read(f"{prefix}gate_up_proj", (count, 2 * inner, hidden), target)
    )
    down = read(f"{prefix}down_proj", (count, hidden, inner), target)
    dtype = target.dtype
    stored_bias = target.tensor(f"{prefix}gate_up_proj_bias", (count, 2 * inner), dtype)
    down_bias = target.tensor(f"{prefix}down_proj_bias", (count, hidden), dtype)
    gate_up_bias = torch.stack(
        [_gate_before_up(bias[:, None], padded_inner)[:, 0] for bias in stored_bias]
    )
    hint = "The file may be damaged: download it again, or use a GGUF file with llama.cpp."
    with refused(f"The experts {prefix}* cannot be read", hint):
        gate_up_stack = stack_rows(map(_packed, gate_up), count)
        down_stack = stack_rows(map(_packed, down), count)
    return Experts(
        router,
        gate_up_stack,
        down_stack,
        gate_up_bias.flatten(),
        down_bias.flatten(),
        mixture.limit,
    )


def _mxfp4(name: str, shape: tuple[int, int, int], target: LoadTarget) -> Iterator[torch.Tensor]:
    """Yield each expert's codes [N, K], with its exponents in K / 32 more columns. `shape`: X, N and K.

    In one tensor, both are sorted by rows together."""
    count, n, k = shape
    groups = k // e2m1.GROUP
    blocks = target.tensor(f"{name}_blocks", (count, n, groups, e2m1.GROUP // 2), torch.uint8)
    scales = target.tensor(f"{name}_scales", (count, n, groups), torch.uint8)
    for pairs, exponents in zip(blocks, scales, strict=True):
        codes = torch.stack((pairs & 15, pairs >> 4), -1).view(n, k)
        yield torch.cat((codes, exponents), 1)


def _floating(name: str, shape: tuple[int, int, int], target: LoadTarget) -> Iterator[torch.Tensor]:
    count, n, k = shape
    for weight in target.tensor(name, (count, k, n), target.dtype):
        yield weight.t()


def _gate_before_up(rows: torch.Tensor, padded_inner: int) -> torch.Tensor:
    """Sort alternating rows into gate and up, each padded with zeros to `padded_inner`."""
    parts = rows.view(-1, 2, rows.shape[1]).transpose(0, 1)
    return torch.nn.functional.pad(parts, (0, 0, 0, padded_inner - parts.shape[1])).flatten(0, 1)


def _packed(rows: torch.Tensor) -> Weight:
    if rows.dtype != torch.uint8:
        return rows
    columns = rows.shape[1] * e2m1.GROUP // (e2m1.GROUP + 1)
    return e2m1.pack_floats(rows[:, :columns], rows[:, columns:])
