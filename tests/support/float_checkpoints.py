"""NVFP4 and MXFP8 checkpoints as compressed-tensors and ModelOpt write them, with a reference of each format.

Letters: N output and K input features.
"""

from pathlib import Path
from typing import Any

import torch

from localchat_cuda.kernels.fp8_int8.pack import W8
from tests.support.tiny_models import Layer, save_layers

_E2M1_LARGEST = 6.0
_E4M3_LARGEST = 448.0
_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_NVFP4 = {**_INPUTS, "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}
_MXFP8 = {
    **_NVFP4,
    "num_bits": 8,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}


def compressed(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors. `more`: other fields."""
    scheme = {"weights": weights, "input_activations": _INPUTS, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        **more,
    }


def modelopt(algorithm: str, size: int) -> dict[str, Any]:
    """Return a quantization_config of ModelOpt."""
    weights = {"num_bits": 4, "type": "float", "group_size": size, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }


CONFIGS = {
    "nvfp4": compressed("nvfp4-pack-quantized", _NVFP4),
    "nvfp4 modelopt": modelopt("NVFP4", 16),
    "mxfp8": compressed("mxfp8-quantized", _MXFP8),
    "mxfp8 modelopt": modelopt("MXFP8", 32),
}
"""quantization_config by layout."""
SIDECAR = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.1.mlp*"],
    },
}
"""hf_quant_config.json of an NVFP4 model by ModelOpt."""


def e2m1(code: int) -> float:
    """Return the value of a code: a sign bit, two bits of exponent (bias 1) and one of mantissa."""
    exponent = code >> 1 & 3
    mantissa = code & 1
    magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -magnitude if code & 8 else magnitude


def e4m3(code: int) -> float:
    """Return the value of a code: a sign bit, four bits of exponent (bias 7) and three of mantissa."""
    exponent = code >> 3 & 15
    mantissa = code & 7
    magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -magnitude if code & 128 else magnitude


_E2M1 = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
_E4M3 = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def nvfp4_values(packed: torch.Tensor, scales: torch.Tensor, number: float) -> torch.Tensor:
    """Return the weight fp64 [N, K] of codes [N, K/2], e4m3 scales [N, K/16], and the number of the layer."""
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
    wide = _E4M3.to(scales.device)[scales.view(torch.uint8).long()].repeat_interleave(16, 1)
    return _E2M1.to(codes.device)[codes.long()] * wide * number


def mxfp8_values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the weight fp64 [N, K] of e4m3 codes [N, K] and e8m0 exponents [N, K/32]."""
    powers = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    return _E4M3.to(codes.device)[codes.view(torch.uint8).long()] * powers


def nvfp4_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [N, K] to packed codes, scales and the number of the layer, fp32 [1]."""
    n, k = weight.shape
    number = (weight.abs().max() / (_E2M1_LARGEST * _E4M3_LARGEST)).reshape(1)
    runs = weight.float().view(n, k // 16, 16)
    scales = (runs.abs().amax(2) / _E2M1_LARGEST / number).to(torch.float8_e4m3fn)
    steps = (scales.float() * number).clamp_min(1e-30)
    table = _E2M1.float().to(weight.device)
    distances = ((runs / steps[..., None])[..., None] - table).abs()
    codes = distances.argmin(-1).view(n, k // 2, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
    return packed, scales, number


def mxfp8_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [N, K] to e4m3 codes and e8m0 exponents."""
    n, k = weight.shape
    runs = weight.float().view(n, k // 32, 32)
    powers = torch.floor(torch.log2(runs.abs().amax(2).clamp_min(1e-30))) - 8
    codes = (runs / torch.exp2(powers)[..., None]).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
    return codes.view(n, k).to(torch.float8_e4m3fn), (powers + 127).to(torch.uint8)


def mx_weight(weight: torch.Tensor) -> W8:
    """Round a weight [N, K] to MXFP8, after groups were made to differ a thousandfold."""
    spread = torch.logspace(-2, 1, weight.shape[1] // 32, device=weight.device)
    return W8(*mxfp8_parts(weight * spread.repeat_interleave(32)))


def layer(layout: str, weight: torch.Tensor) -> Layer:
    """Return a layer's tensors, and the weight that they stand for."""
    if layout.startswith("mxfp8"):
        codes, exponents = mxfp8_parts(weight)
        tensors = {"weight": codes, "weight_scale": exponents}
        return Layer(tensors, mxfp8_values(codes, exponents).float())
    packed, scales, number = nvfp4_parts(weight)
    if layout == "nvfp4":
        inverse = 1 / number
        tensors = {
            "weight_packed": packed,
            "weight_scale": scales,
            "weight_global_scale": inverse,
            "input_global_scale": torch.tensor([300.0]),
        }
        return Layer(tensors, nvfp4_values(packed, scales, 1 / float(inverse)).float())
    tensors = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": number[0],
        "input_scale": torch.tensor(0.003),
    }
    return Layer(tensors, nvfp4_values(packed, scales, float(number)).float())


def save_floats(model: Any, folder: Path, layout: str, floating: str = "-") -> None:
    """Write a checkpoint. The model's own weights become what is stored.

    `floating`: part of the names of layers that stay floating."""
    save_layers(
        model, folder, lambda prefix, weight: layer(layout, weight), CONFIGS[layout], floating
    )
