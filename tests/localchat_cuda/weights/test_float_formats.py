"""NVFP4 and MXFP8 checkpoints of both writers, against the model with the weights that their codes mean."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat.errors import ModelInvalid
from localchat.model_files.checkpoint import Checkpoint, read_checkpoint
from localchat.model_files.safetensors import Tensor, read_safetensors
from localchat_cuda.config.model import ModelConfig, runtime_config
from localchat_cuda.config.quantization import Quantization
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.ggml.pack import GgmlWeight
from localchat_cuda.plan import preflight
from localchat_cuda.plan.weight_sizes import dummy_bytes, unpacked_bytes, weights_bytes
from localchat_cuda.weights.formats.weight import dequantized
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import with_unpacked
from localchat_cuda.weights.source import RandomWeights
from tests.support import hub_configs, tiny_models
from tests.support.cuda_configs import QWEN25
from tests.support.float_checkpoints import CONFIGS, SIDECAR, save_floats
from tests.support.tiny_models import (
    CPU,
    Stretch,
    Tiny,
    reference_logits,
    relative_error,
    tokens_of,
)

LAYOUTS = sorted(CONFIGS)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384}
NVFP4 = Quantization("nvfp4", 4, 16, symmetric=True)
MXFP8 = Quantization("mxfp8", 8, 32, symmetric=True)


def made(layout: str, folder: Path, kind: str = "qwen3", **changes: Any) -> Any:
    model = tiny_models.reference(kind, **changes)
    save_floats(model, folder, layout)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_layout_has_the_logits_of_its_weights(kind: str, layout: str, tmp_path: Path) -> None:
    model = made(layout, tmp_path, kind, **WIDE)
    tokens = tokens_of(21, 40)
    ours = Tiny(tmp_path, torch.float32)
    kinds = {type(weight) for layer in ours.weights.layers for weight in layer.linears.values()}
    assert kinds == {W8 if layout.startswith("mxfp8") else GgmlWeight}
    assert relative_error(ours.prompt(tokens, 17), reference_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"),
    [
        ("llama", torch.float16, "nvfp4"),
        ("qwen2", torch.float32, "nvfp4"),
        ("llama", torch.float32, "mxfp8"),
    ],
)
def test_kernels_have_the_logits_of_the_weights(
    kind: str, dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    model = made(layout, tmp_path, kind, num_hidden_layers=1)
    tokens = tokens_of(22, 19)
    ours = Tiny(tmp_path, dtype, kernels=True)
    found = torch.cat(
        (
            ours.prompt(tokens[:17], 17),
            ours.step(Stretch(0, 17, tokens[17:18])),
            ours.step(Stretch(0, 18, tokens[18:]), packed=layout == "nvfp4"),
        )
    )
    bound = 2e-2 if dtype == torch.float16 else 1e-3
    assert relative_error(found, reference_logits(model, tokens)) < bound


def test_mxfp8_runs_in_bf16(tmp_path: Path) -> None:
    for layout, dtype in (("mxfp8", "bfloat16"), ("nvfp4", "float16")):
        (tmp_path / layout).mkdir()
        made(layout, tmp_path / layout)
        stored = replace(read_config(tmp_path / layout), dtype="float16")
        config, notes = runtime_config(stored, gpu=True)
        assert (config.dtype, bool(notes)) == (dtype, dtype == "bfloat16")


@pytest.mark.parametrize("layout", ["nvfp4", "mxfp8"])
def test_weights_are_those_of_the_specification(layout: str, tmp_path: Path) -> None:
    model = made(layout, tmp_path)
    ours = Tiny(tmp_path, torch.float32).weights.layers[1].linears["down"]
    wanted = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    # NVFP4 of compressed-tensors multiplies by an inverse, which is rounded.
    assert torch.allclose(dequantized(ours, torch.float32), wanted, rtol=2e-7, atol=0)


@pytest.mark.parametrize("layout", ["nvfp4", "mxfp8"])
def test_widths_that_are_no_multiple_of_128_are_read(layout: str, tmp_path: Path) -> None:
    model = made(layout, tmp_path, hidden_size=192, intermediate_size=352, num_hidden_layers=1)
    tokens = tokens_of(21, 12)
    for kernels in (False, True):
        ours = Tiny(tmp_path, torch.float32, kernels=kernels)
        assert relative_error(ours.prompt(tokens, 12), reference_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_excluded_layers_stay_floating(layout: str, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3")
    save_floats(model, tmp_path, layout, "layers.1.mlp")
    ours = Tiny(tmp_path, torch.float32)
    tokens = tokens_of(24, 20)
    assert isinstance(ours.weights.layers[1].linears["down"], torch.Tensor)
    assert isinstance(ours.weights.layers[1].linears["o"], W8 | GgmlWeight)
    assert relative_error(ours.prompt(tokens, 20), reference_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_the_bytes_that_are_held(layout: str, tmp_path: Path) -> None:
    made(layout, tmp_path, **WIDE)
    config = replace(read_config(tmp_path), dtype="float16")
    header = read_safetensors(tmp_path / "model.safetensors")
    weights = Tiny(tmp_path, torch.float16).weights
    assert abs(weights_bytes(config, [header]) - weights.bytes) < 0.005 * weights.bytes
    assert abs(dummy_bytes(config) - weights.bytes) < 0.02 * weights.bytes
    copies = with_unpacked(weights, torch.float16).bytes - weights.bytes
    assert unpacked_bytes(config) == copies


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_layers_run(layout: str, tmp_path: Path) -> None:
    made(layout, tmp_path)
    ours = Tiny(tmp_path, torch.float32)
    ours.weights = load(ours.config, RandomWeights(CPU), CPU, dtype=torch.float32)
    found = ours.prompt(tokens_of(25, 9), 9)
    assert bool(found.isfinite().all())
    assert float(found.std()) > 0.0


def config_with(raw: dict[str, object]) -> ModelConfig:
    return parse_config({**QWEN25, "quantization_config": raw}, "it")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configs_name_the_format(layout: str) -> None:
    config = config_with(CONFIGS[layout])
    assert config.quantization == (MXFP8 if layout.startswith("mxfp8") else NVFP4)
    assert config.quantization is not None and not config.quantization.packed
    assert not config.fp8_activations
    assert config.quantization.label == layout[:5].upper()


def test_a_config_may_state_the_format_for_each_group() -> None:
    config = CONFIGS["nvfp4"]
    group = {**config["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"}
    mixed = {**config, "format": "mixed-precision", "config_groups": {"group_0": group}}
    assert config_with(mixed).quantization == NVFP4


def test_modelopt_may_have_its_config_in_a_separate_file(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3")
    save_floats(model, tmp_path, "nvfp4 modelopt", "layers.1.mlp")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(SIDECAR))
    assert read_config(tmp_path).quantization == NVFP4
    tokens = tokens_of(26, 12)
    ours = Tiny(tmp_path, torch.float32)
    assert relative_error(ours.prompt(tokens, 12), reference_logits(model, tokens)) < 1e-4


def _changed(layout: str, **changes: object) -> dict[str, Any]:
    """Return a config of compressed-tensors with other fields of its weights."""
    config = CONFIGS[layout]
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], **changes}
    return {**config, "config_groups": {"group_0": {**group, "weights": weights}}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            _changed("nvfp4", group_size=32),
            "4 bits in groups of 32 .supported: 4 bits in groups of 16",
        ),
        (_changed("nvfp4", symmetric=False), "NVFP4 weights with zero points"),
        (_changed("mxfp8", num_bits=6), "6 bits in groups of 32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "as NVFP4_AWQ .supported: FP8, MX",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "as MIXED_PRECISION"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "in groups of 32"),
        (
            {**CONFIGS["nvfp4"], "format": "mxfp4-pack-quantized"},
            "compressed as mxfp4-pack-quantized",
        ),
    ],
)
def test_other_kinds_are_refused_before_the_load(raw: dict[str, object], said: str) -> None:
    with pytest.raises(ModelInvalid, match=said):
        config_with(raw)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_refused_before_the_load(layout: str) -> None:
    raw = {**hub_configs.CONFIGS["qwen3:30b-a3b"][0], "quantization_config": CONFIGS[layout]}
    label = layout[:5].upper()
    message = f"experts quantized as {label} .experts support bf16, fp16 and 4-bit integers"
    with pytest.raises(ModelInvalid, match=message):
        parse_config(raw, "it")
    assert "experts quantized as" in preflight.objection(Checkpoint("it", raw))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_that_no_kernel_reads_are_refused_before_the_load(layout: str) -> None:
    quantization = config_with(CONFIGS[layout]).quantization
    assert quantization is not None
    name, dtype, codes = {
        "nvfp4": ("weight_packed", "U8", 24),
        "nvfp4 modelopt": ("weight", "U8", 24),
    }.get(layout, ("weight", "F8_E4M3", 48))
    stored = Tensor(f"model.layers.0.mlp.down_proj.{name}", (16, codes), dtype, 0, 16 * codes)
    assert "has 48 inputs" in quantization.objection(stored)
    assert quantization.objection(stored._replace(shape=(16, codes // 3 * 4))) == ""


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "said"),
    [
        ("nvfp4", "weight_global_scale", torch.zeros(1), "is 0.0. Expected a number above 0"),
        ("nvfp4", "weight_global_scale", torch.tensor([float("nan")]), "is nan"),
        (
            "nvfp4",
            "weight_global_scale",
            torch.ones(2),
            r"has the shape \(2,\). Expected one number",
        ),
        ("nvfp4", "weight_global_scale", None, "lacks the tensor .*weight_global_scale"),
        ("nvfp4 modelopt", "weight_scale_2", torch.tensor(-1.0), "is -1.0"),
        (
            "nvfp4 modelopt",
            "weight_scale",
            torch.full((128, 16), -1.0).to(torch.float8_e4m3fn),
            "scales that are negative",
        ),
        ("nvfp4", "weight_scale", torch.ones(128, 16), "stored as float32"),
        ("nvfp4", "weight_packed", torch.zeros(128, 64, dtype=torch.uint8), "has the shape"),
        ("mxfp8", "weight_scale", torch.full((128, 8), 255, dtype=torch.uint8), "not a number"),
        ("mxfp8", "weight_scale", torch.ones(128, 4, dtype=torch.uint8), "has the shape"),
        ("mxfp8", "weight_scale", torch.ones(128, 8), "stored as float32"),
    ],
)
def test_damaged_layers_are_named(
    layout: str, name: str, tensor: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    made(layout, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[f"{DOWN}.{name}"]
    if tensor is not None:
        tensors[f"{DOWN}.{name}"] = tensor
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match=said):
        Tiny(tmp_path, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_codes_is_refused(layout: str, tmp_path: Path) -> None:
    made(layout, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["lm_head.weight"]
    tensors |= {
        f"lm_head.{name.removeprefix(DOWN + '.')}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(DOWN)
    }
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match="lm_head is quantized like the layers"):
        Tiny(tmp_path, torch.float32)
    assert preflight.objection(read_checkpoint(tmp_path)).startswith("lm_head is quantized like")
