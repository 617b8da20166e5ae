"""--quantize: layers of a floating checkpoint, rounded while they are read."""

from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
import safetensors.torch
import torch

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.errors import UsageError
from localchat.fit.load_options import LoadOptions, RoundedType
from localchat_cuda.config.model import rounded_config, rounded_types
from localchat_cuda.config.quantization import rounding
from localchat_cuda.config.reader import read_config
from localchat_cuda.plan.weight_sizes import dummy_bytes, weights_bytes
from localchat_cuda.weights.formats.rounded import Rounded
from localchat_cuda.weights.formats.weight import dequantized
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import CheckpointWeights, LoadTarget, RandomWeights
from tests.support import quantizers, tiny_models
from tests.support.answers import ask
from tests.support.quantizers import WIDE, Way
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_models import CPU, Tiny, tokens_of

TYPES: tuple[RoundedType, ...] = get_args(RoundedType)
_ERROR = {"fp8": 0.03, "int8": 0.008, "int4": 0.11}
"""Of the weights, at most; of rounding as a whole, relative."""


def part(to: RoundedType, weight: torch.Tensor, folder: Path) -> torch.Tensor:
    safetensors.torch.save_file({"model.layers.0.it.weight": weight}, folder / "model.safetensors")
    target = LoadTarget(CheckpointWeights(folder, CPU), CPU, torch.float32, print)
    found = Rounded(target, rounding(to)).part("model.layers.0.it", *weight.shape)
    return dequantized(found, torch.float32)


@pytest.mark.parametrize("to", TYPES)
def test_weights_are_off_by_no_more_than_their_type_makes_it(
    to: RoundedType, tmp_path: Path
) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[5] = 0.0
    found = part(to, weight, tmp_path)
    assert not bool(found[5].any())
    assert 0 < float((found - weight).norm() / weight.norm()) < _ERROR[to]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("columns", [96, 160, 576])
def test_widths_that_are_no_multiple_of_128_are_rounded_as_well(
    columns: int, to: RoundedType, tmp_path: Path
) -> None:
    """SmolLM2 has 576 columns."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(48, columns, generator=generator) * 0.02
    rounded = part(to, weight, tmp_path)
    assert rounded.shape == weight.shape
    assert 0 < float((rounded - weight).norm() / weight.norm()) < _ERROR[to]


def test_ranges_of_four_bits_keep_the_largest_weights(tmp_path: Path) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)) * 0.02
    rounded = part("int4", weight, tmp_path)
    whole = Way().rounded("it", weight).weight
    assert torch.allclose(rounded, whole, atol=1e-6)


def test_layers_of_other_shapes_stay_floating(tmp_path: Path) -> None:
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(5))
    for to in TYPES:
        assert torch.equal(part(to, weight, tmp_path), weight)


@pytest.mark.parametrize("to", TYPES)
def test_what_is_planned_is_what_is_held(to: RoundedType, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3", **WIDE), tmp_path)
    source = CheckpointWeights(tmp_path, CPU)
    config = rounded_config(read_config(tmp_path), to, "it")
    held = load(config, source, CPU)
    planned = weights_bytes(config, source.headers.values())
    assert held.bytes <= planned <= held.bytes + 4 * 4 * 384
    random = load(config, RandomWeights(CPU), CPU)
    assert random.bytes <= dummy_bytes(config) + 4096
    assert [type(each) for each in random.layers[0].linears.values()] == [
        type(each) for each in held.layers[0].linears.values()
    ]


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_kernels_are_the_reference(to: RoundedType, tmp_path: Path) -> None:
    """Those of four bits are tested with checkpoints that are stored so."""
    model = tiny_models.reference("qwen3", **WIDE, num_attention_heads=4, num_key_value_heads=1)
    tiny_models.save(model, tmp_path)
    tokens, found = tokens_of(37, 5), []
    for kernels in (True, False):
        ours = Tiny(tmp_path, torch.float16 if kernels else torch.float32, kernels=kernels)
        config = rounded_config(ours.config, to, "it")
        source = CheckpointWeights(tmp_path, CPU)
        dtype = ours.weights.embedding.dtype
        ours.weights = load(config, source, CPU, dtype=dtype)
        found.append(ours.prompt(tokens, 5).float())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 2e-2


def test_a_checkpoint_that_is_quantized_is_refused(tmp_path: Path) -> None:
    quantizers.save(tiny_models.reference("qwen3", **WIDE), tmp_path, Way())
    with pytest.raises(UsageError, match=r"it is already quantized \(GPTQ 4-bit\)") as caught:
        rounded_config(read_config(tmp_path), "fp8", "it")
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "to"), [("granite-moe", "int4"), ("granite4-h-moe", "int4"), ("glm4", "fp8")]
)
def test_experts_of_one_tensor_and_sorted_rows_are_rounded(
    kind: str, to: RoundedType, tmp_path: Path
) -> None:
    changes = WIDE if kind != "granite4-h-moe" else {}
    tiny_models.save(tiny_models.reference(kind, **changes), tmp_path)
    tokens = tokens_of(9, 3)
    exact = Tiny(tmp_path, torch.float32).prompt(tokens, 5)
    rounded = Tiny(tmp_path, torch.float32, rounded=to)
    distance = float((rounded.prompt(tokens, 5) - exact).norm() / exact.norm())
    assert 0 < distance < 0.3
    source = CheckpointWeights(tmp_path, CPU)
    planned = weights_bytes(rounded.config, source.headers.values())
    assert planned == pytest.approx(rounded.weights.bytes, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("llama", ("fp8", "int8", "int4")),
        ("glm4", ("fp8", "int4")),
        ("granite-moe", ("int4",)),
        ("qwen3-next", ("int4",)),
        ("gemma4-moe", ()),
    ],
)
def test_the_hint_names_only_types_that_the_model_can_be_rounded_to(
    kind: str, types: tuple[RoundedType, ...], tmp_path: Path
) -> None:
    tiny_models.save(tiny_models.reference(kind), tmp_path)
    config = read_config(tmp_path)
    assert rounded_types(config) == types
    for to in TYPES:
        if to in types:
            assert rounded_config(config, to, "it").quantization == rounding(to)
            continue
        with pytest.raises(UsageError, match=f"it cannot be rounded to {to}") as caught:
            rounded_config(config, to, "it")
        named = {word for word in TYPES if word in caught.value.hint}
        assert named == set(types)


def test_it_reaches_the_engine_process(tmp_path: Path) -> None:
    said: list[str] = []
    options = EngineOptions(
        # The test must not depend on the free memory of this machine.
        load=LoadOptions(context_tokens=128, max_slots=1, quantize="int8", anyway=True),
        model=write_speaking(tmp_path),
        backend="localchat_cuda.backend:ReferenceBackend",
    )
    with closing(LocalEngine(options, notify=said.append)) as engine:
        sampling = Sampling(temperature=0)
        answer = ask(engine, GenerateRequest(TextPrompt("hello"), sampling=sampling, max_tokens=4))
    assert answer.text
    assert any("The layers are rounded to int8 while they are read." in text for text in said)
