"""FP8 checkpoints, quantized here in every layout, against the model with the weights that their codes mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat.errors import ModelInvalid
from localchat.model_files.checkpoint import read_checkpoint
from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.plan import preflight
from localchat_cuda.plan.weight_sizes import dummy_bytes, weights_bytes
from localchat_cuda.weights.formats.weight import concat_rows
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import RandomWeights
from tests.support import fp8_reference, tiny_models
from tests.support.cuda_configs import QWEN25
from tests.support.fp8_checkpoints import BLOCKS, LAYOUTS, compressed, save_fp8
from tests.support.tiny_models import CPU, Tiny, reference_logits, tokens_of


def made(layout: str, folder: Path, kind: str = "qwen3") -> Any:
    model = tiny_models.reference(kind)
    save_fp8(model, folder, layout)
    return model


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_dequantizes_to_its_weights(layout: str, tmp_path: Path) -> None:
    model, tokens = made(layout, tmp_path), tokens_of(21, 40)
    ours = Tiny(tmp_path, torch.float32)
    weight = ours.weights.layers[0].linears["gate_up"]
    assert isinstance(weight, W8)
    assert weight.blocks == (layout in ("block", "deepseek"))
    assert torch.allclose(
        ours.prompt(tokens, 17), reference_logits(model, tokens), atol=2e-3, rtol=1e-4
    )


def test_kernels_are_their_references(tmp_path: Path) -> None:
    model, tokens = made("deepseek", tmp_path, "llama"), tokens_of(22, 18)
    ours = Tiny(tmp_path, torch.float16, kernels=True)
    found = torch.cat(
        (ours.prompt(tokens[:17], 17), ours.step(tiny_models.Stretch(0, 17, tokens[17:])))
    )
    wanted = reference_logits(model, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.parametrize("kernels", [False, True])
def test_widths_that_are_no_multiple_of_128_are_read(kernels: bool, tmp_path: Path) -> None:
    shape = {"hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 1}
    model = tiny_models.reference("qwen3", **shape)
    save_fp8(model, tmp_path, "channel")
    tokens = tokens_of(21, 12)
    ours = Tiny(tmp_path, torch.float16 if kernels else torch.float32, kernels=kernels)
    wanted = reference_logits(model, tokens)
    bound = 2e-2 if kernels else 1e-5
    assert float((ours.prompt(tokens, 12) - wanted).norm() / wanted.norm()) < bound


def test_parts_whose_blocks_do_not_join_become_floating() -> None:
    parts = [fp8_reference.e4m3_blocks(torch.randn(n, 256)) for n in (128, 64, 64)]
    found = concat_rows(iter(parts), 256, torch.float32)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.cat([w8_pack.dense(each) for each in parts]))
    assert isinstance(concat_rows(iter(parts[:2]), 192, torch.float32), W8)
    mixed = concat_rows(iter((parts[0], torch.ones(3, 256))), 131, torch.float32)
    assert isinstance(mixed, torch.Tensor)


def test_a_layer_without_scales_stays_floating(tmp_path: Path) -> None:
    model = made("channel", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    del tensors[name + "_scale"]
    tensors[name] = model.state_dict()[name].clone()
    safetensors.torch.save_file(tensors, path)
    ours, tokens = Tiny(tmp_path, torch.float32), tokens_of(24, 20)
    assert isinstance(ours.weights.layers[1].linears["down"], torch.Tensor)
    assert isinstance(ours.weights.layers[0].linears["down"], W8)
    assert torch.allclose(
        ours.prompt(tokens, 20), reference_logits(model, tokens), atol=2e-3, rtol=1e-4
    )


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    made("channel", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(
        ModelInvalid, match=r"has the shape \(3,\)\. Expected one number, 128 numbers or 1x2"
    ):
        Tiny(tmp_path, torch.float32)


def test_a_head_of_codes_is_refused(tmp_path: Path) -> None:
    made("channel", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(w8_pack.E4M3)
    tensors["lm_head.weight_scale"] = torch.ones(1)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match="lm_head is quantized like the layers"):
        Tiny(tmp_path, torch.float32)
    assert preflight.objection(read_checkpoint(tmp_path)).startswith("lm_head is quantized like")


@pytest.mark.parametrize("layout", ["channel", "deepseek"])
def test_the_plan_counts_the_bytes_that_are_held(layout: str, tmp_path: Path) -> None:
    made(layout, tmp_path)
    config = replace(read_config(tmp_path), dtype="float16")
    header = read_safetensors(tmp_path / "model.safetensors")
    half, whole = (Tiny(tmp_path, kind).weights.bytes for kind in (torch.float16, torch.float32))
    assert abs(weights_bytes(config, [header]) - half) < 0.005 * half
    wide = replace(config, dtype="float32")
    assert abs(weights_bytes(wide, [header]) - whole) < 0.005 * whole
    assert abs(dummy_bytes(config) - half) < 0.02 * half


def config_with(raw: dict[str, object]) -> ModelConfig:
    return parse_config({**QWEN25, "quantization_config": raw}, "it")


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_configs_give_scale_groups_and_fp8_activations(layout: str) -> None:
    found = config_with(LAYOUTS[layout]).quantization
    assert found is not None
    assert (found.method, found.bits, found.packed, found.label) == ("fp8", 8, False, "FP8")
    assert found.group == (128 if layout in ("block", "deepseek") else 0)
    assert found.fp8_activations
    weights_only = config_with(compressed("channel", None)).quantization
    assert weights_only is not None
    assert not weights_only.fp8_activations


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"blocks of \[64, 64\] \(supported: 128 x 128"),
        ({**BLOCKS, "fmt": "e5m2"}, "e5m2"),
        (compressed("token"), "one scale for each token"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ],
)
def test_other_kinds_of_fp8_are_refused(raw: dict[str, object], said: str) -> None:
    with pytest.raises(ModelInvalid, match=said):
        config_with(raw)


@pytest.mark.parametrize("layout", ["channel", "deepseek"])
def test_random_fp8_layers_run(layout: str, tmp_path: Path) -> None:
    made(layout, tmp_path)
    ours = Tiny(tmp_path, torch.float32)
    ours.weights = load(ours.config, RandomWeights(CPU), CPU, dtype=torch.float32)
    weight = ours.weights.layers[0].linears["qkv"]
    assert isinstance(weight, W8)
    assert weight.blocks == (layout == "deepseek")
    found = ours.prompt(tokens_of(25, 9), 9)
    assert bool(found.isfinite().all())
    assert float(found.std()) > 0.0
