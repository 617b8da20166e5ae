"""LoRA adapters in the format of PEFT, with random matrices."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_peft(folder: Path, model: Any, *, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """Write an adapter for the modules of a transformers model. config: more fields of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in MODULES:
            outputs, inputs = module.weight.shape
            stem = f"base_model.model.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merge(model: Any, folder: Path, scale: float) -> None:
    """Add scale * B A of each module to the weights of a transformers model."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            stem = f"base_model.model.{name}"
            if f"{stem}.lora_A.weight" in tensors:
                product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
                module.weight += scale * product
