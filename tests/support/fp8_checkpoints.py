"""Shared by tests: save_fp8."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.pack import W8
from tests.support import fp8_reference

TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(strategy: str, activations: object = TOKEN, **more: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"weights": weights, "input_activations": activations}}
    kind = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**kind, "config_groups": groups, "ignore": ["lm_head"]}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": compressed("tensor"),
    "channel": compressed("channel"),
    "block": compressed("block", block_structure=[128, 128]),
    "deepseek": {**BLOCKS, "activation_scheme": "dynamic"},
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}


def stored(weight: torch.Tensor, layout: str) -> tuple[W8, dict[str, torch.Tensor]]:
    """A layer's codes, and what stands beside them in the files."""
    if layout in ("block", "deepseek"):
        found = fp8_reference.e4m3_blocks(weight)
        return found, {"weight_scale" + "_inv" * (layout == "deepseek"): found.scales}
    if layout == "channel":
        found = w8_pack.e4m3_rows(weight)
        scales = found.scales.bfloat16()
        return W8(found.codes, scales.float()), {"weight_scale": scales[:, None]}
    scale = weight.abs().max() / 448
    found = W8((weight / scale).to(w8_pack.E4M3), scale.repeat(weight.shape[0]))
    beside = {"weight_scale": scale if layout == "modelopt" else scale[None]}
    if layout != "tensor":
        beside["input_scale"] = torch.tensor([0.01])
    return found, beside


def save_fp8(model: Any, folder: Path, layout: str) -> None:
    """The checkpoint; the model's own weights become what the codes stand for."""
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.startswith("model.layers.") and parameter.dim() == 2:
                weight, beside = stored(parameter, layout)
                parameter.copy_(w8_pack.dense(weight))
                tensors[name] = weight.codes
                prefix = name.removesuffix("weight")
                tensors |= {prefix + key: value.contiguous() for key, value in beside.items()}
            elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
                tensors[name] = parameter.clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    held = model.config.to_dict() | {"quantization_config": LAYOUTS[layout]}
    held["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(held, default=str))
