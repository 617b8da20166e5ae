"""Makes a 4-bit AWQ version of the guide from its GGUF, in seconds (AutoAWQ layout, groups of 128).

    python scripts/tools/guide/awq.py FOLDER [--gguf localchat/guide/guide.gguf]

Activation-aware scaling (Lin et al. 2023): inputs with large activations get larger weights before
rounding and are divided by the same factor upstream, in the norm or the matrix before. A grid search
over the error of the layer's output finds the exponent; calibration text comes from the guide's own
generators.

Letters: N calibration tokens, I inputs and O outputs of a matrix, G groups of 128 inputs.
"""

import argparse
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from checkpoint import GUIDE, Weights, config, hub_name, read_gguf, write_folder
from conversations import conversations, read_facts
from export import shape_of
from model import Guide
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokens import encode
from torch import Tensor, nn

GROUP: Final = 128
LEVELS: Final = 15  # 4 bits
GRID: Final = 20
CALIBRATION_SEED: Final = 31
ORDER: Final = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # the output in each of the eight nibbles, lowest first
# Matrices that share an input, and the part before them that takes the inverse factor.
SHARED: Final = ((("q", "k", "v"), "attn_norm"), (("gate", "up"), "ffn_norm"), (("down",), "up"))


def round_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight (O, I) to integers 0..15 (O, I), fp16 scales and integer zeros (O, G), by minimum
    and maximum.
    """
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / LEVELS).clamp(min=1e-5).half().float()
    zeros = (-low / scales).round().clamp(0, LEVELS)
    levels = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, LEVELS)
    return levels.flatten(1).int(), scales, zeros.int()


def restored(levels: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight (O, I) that a reader of the checkpoint computes."""
    groups = levels.view(len(levels), -1, GROUP).float()
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


def best_scale(weights: list[Tensor], inputs: Tensor) -> Tensor:
    """The factor per input (I,) with the least output error; inputs: (N, I)."""
    size = inputs.abs().mean(0).clamp(min=1e-6)
    best, least = torch.ones_like(size), float("inf")
    for step in range(GRID):
        scale = size ** (step / GRID)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        error = 0.0
        for weight in weights:
            rounded = restored(*round_groups(weight * scale)) / scale
            error += ((inputs @ (rounded - weight).T) ** 2).mean().item()
        if error < least:
            best, least = scale, error
    return best


def calibration(tokenizer: dict[str, Any], length: int = 512, rows: int = 4) -> Tensor:
    """Token ids (rows, length) of new conversations."""
    facts = read_facts(Path(__file__).with_name("facts.json"))
    talks = [talk for _, talk in islice(conversations(facts, CALIBRATION_SEED), 40 * rows)]
    coder = Tokenizer.from_str(json.dumps(tokenizer))
    flat = [i for ids, _ in encode(coder, talks) for i in ids][: rows * length]
    return torch.tensor(flat).view(rows, length)


def inputs_of(parts: dict[str, nn.Module], model: Guide, ids: Tensor) -> dict[str, Tensor]:
    """The inputs (N, I) of each part while the model reads the ids."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _part, args: seen.update({name: args[0].flatten(0, 1)})

    hooks = [part.register_forward_pre_hook(note(name)) for name, part in parts.items()]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def scale_and_round(weights: Weights, ids: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Scale the model in place (`weights` keeps its function); return the rounded matrices by name."""
    model = Guide(shape_of(weights)).eval()
    model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in weights.items()})
    parts = dict(model.named_modules())
    rounded: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for i in range(model.shape.layers):
        inputs = inputs_of({g[0]: parts[f"blocks.{i}.{g[0]}"] for g, _ in SHARED}, model, ids)
        for group, before in SHARED:
            matrices = [parts[f"blocks.{i}.{name}"].weight for name in group]
            scale = best_scale([m.data for m in matrices], inputs[group[0]])
            for m in matrices:
                m.mul_(scale)
            upstream = parts[f"blocks.{i}.{before}"].weight
            upstream.div_(scale[:, None] if upstream.ndim == 2 else scale)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            matrix = parts[f"blocks.{i}.{name}"].weight
            rounded[f"blocks.{i}.{name}"] = round_groups(matrix.data)
    weights.update({k: p.detach().numpy() for k, p in model.named_parameters()})
    return rounded


def packed(levels: Tensor) -> NDArray[np.int32]:
    """Pack integers (rows, O), eight to an int32 (rows, O / 8), in AutoAWQ's order."""
    eights = levels.numpy().astype(np.uint32).reshape(levels.shape[0], -1, 8)
    out = np.zeros(eights.shape[:2], np.uint32)
    for nibble, column in enumerate(ORDER):
        out |= eights[:, :, column] << np.uint32(4 * nibble)
    return out.view(np.int32)


def tensors_of(
    weights: Weights, rounded: dict[str, tuple[Tensor, Tensor, Tensor]]
) -> dict[str, NDArray[Any]]:
    """The checkpoint's tensors: qweight (I, O/8), qzeros (G, O/8), scales (G, O), the rest fp16."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if stem not in rounded:
            tensors[hub_name(name)] = value.astype(np.float16)
            continue
        levels, scales, zeros = rounded[stem]
        front = hub_name(name).removesuffix(".weight")
        tensors[f"{front}.qweight"] = packed(levels.T.contiguous())
        tensors[f"{front}.qzeros"] = packed(zeros.T.contiguous())
        tensors[f"{front}.scales"] = np.ascontiguousarray(scales.T.numpy().astype(np.float16))
    return tensors


def quantize(
    path: Path,
) -> tuple[Weights, dict[str, tuple[Tensor, Tensor, Tensor]], dict[str, Any]]:
    """(scaled weights, rounded matrices, tokenizer) of a GGUF of the guide."""
    weights, tokenizer = read_gguf(path)
    return weights, scale_and_round(weights, calibration(tokenizer)), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="write the guide as AWQ, 4 bits")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, default=GUIDE)
    args = parser.parse_args()
    weights, rounded, tokenizer = quantize(args.gguf)
    settings = config(weights, "float16") | {
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    }  # fmt: skip
    tensors = tensors_of(weights, rounded)
    write_folder(args.folder, tensors, settings, tokenizer)
    print(f"{args.folder}: {sum(t.nbytes for t in tensors.values()):,} bytes")


if __name__ == "__main__":
    main()
