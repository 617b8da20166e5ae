"""Checkpoints quantized here, in each layout: what is loaded is what was stored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat.errors import ModelInvalid
from localchat.model_files.safetensors import Tensor
from localchat_cuda.config.quantization import Quantization
from localchat_cuda.config.reader import read_config
from localchat_cuda.kernels import permute_columns
from localchat_cuda.kernels.ggml.pack import GgmlWeight
from localchat_cuda.load import random_weights
from localchat_cuda.plan.weight_sizes import weights_bytes
from localchat_cuda.weights.formats.gptq import Gptq
from localchat_cuda.weights.formats.int8 import Int8
from localchat_cuda.weights.formats.pack_quantized import PackQuantized
from localchat_cuda.weights.formats.weight import dequantized
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import CheckpointWeights, LoadTarget
from tests.support import quantizers, tiny_models
from tests.support.quantizers import WIDE, Way
from tests.support.tiny_models import CPU, Tiny, reference_logits, relative_error, tokens_of

SYMMETRIC, PLAIN = Way(symmetric=True), Way()
SAVED: dict[str, Any] = {
    "gptq1": (PLAIN, 1), "gptq1-sym": (SYMMETRIC, 1), "gptq2": (PLAIN, 2), "gptq2-sym": (SYMMETRIC, 2),
    "gptq-order": (Way(ordered=True), 1), "gptq-sym-order": (Way(symmetric=True, ordered=True), 2),
    "gptq-rows": (Way(size=0), 1), "gptq-rows-order": (Way(size=0, ordered=True), 1),
    "int4": (PLAIN, 0), "int4-sym": (SYMMETRIC, 0), "int4-rows": (Way(size=0, symmetric=True), 0),
    "int4-order": (Way(ordered=True), 0),
    "gptq-64": (Way(size=64), 1), "gptq-32-sym": (Way(size=32, symmetric=True), 1),
    "gptq-32-order": (Way(size=32, ordered=True), 2),
    "int4-32": (Way(size=32), 0), "int4-64-order": (Way(size=64, ordered=True), 0),
    "awq-32": (Way(size=32), "awq"), "awq-64": (Way(size=64), "awq"),
}  # fmt: skip


EIGHT_BITS: dict[str, Any] = {
    "gptq": (Way(bits=8, symmetric=True), 1), "gptq2-zeros": (Way(bits=8), 2),
    "gptq-order": (Way(bits=8, symmetric=True, ordered=True), 1),
    "gptq-32-zeros": (Way(size=32, bits=8), 1), "gptq-rows": (Way(size=0, symmetric=True, bits=8), 1),
    "packed": (Way(bits=8, symmetric=True), 0), "packed-zeros-order": (Way(bits=8, ordered=True), 0),
    "packed-rows": (Way(size=0, symmetric=True, bits=8), 0),
    "int8-rows": (Way(size=0, symmetric=True, bits=8), "int8"),
    "int8-rows-zeros": (Way(size=0, bits=8), "int8"),
    "int8-groups": (Way(size=64, symmetric=True, bits=8), "int8"),
}  # fmt: skip


def loaded(folder: Path, said: list[str] | None = None) -> ModelWeights:
    config = read_config(folder)
    say = (lambda text: None) if said is None else said.append
    return load(config, CheckpointWeights(folder, CPU), CPU, dtype=torch.float32, notify=say)


@pytest.mark.parametrize("kind", sorted(SAVED))
def test_logits_are_those_of_the_weights_that_are_stored(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE)
    quantizers.save(model, tmp_path, *SAVED[kind])
    tokens, ours = tokens_of(31, 24), Tiny(tmp_path, torch.float32)
    assert ours.weights.packed
    wanted = reference_logits(model, tokens)
    assert relative_error(ours.prompt(tokens, 24), wanted) < 1e-5
    # packed activations are rounded to 16 bits a group up to 8 rows, and to fp16 beyond
    assert relative_error(ours.prompt(tokens, 8, slot=1, packed=True), wanted) < 5e-3
    assert relative_error(ours.prompt(tokens, 24, slot=2, packed=True), wanted) < 5e-3


@pytest.mark.parametrize("kind", sorted(EIGHT_BITS))
def test_logits_of_eight_bits_are_those_of_the_weights_that_are_stored(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_models.reference("qwen3", **WIDE)
    quantizers.save(model, tmp_path, *EIGHT_BITS[kind])
    tokens, ours = tokens_of(31, 24), Tiny(tmp_path, torch.float32)
    # zeros times scales are rounded to fp16
    bound = 1e-3 if "zeros" in kind else 1e-5
    assert relative_error(ours.prompt(tokens, 24), reference_logits(model, tokens)) < bound
    assert all(isinstance(each, GgmlWeight) for each in ours.weights.layers[0].linears.values())


@pytest.mark.parametrize(("rows", "kind"), [(3, "gptq-order"), (12, "int8-rows-zeros")])
def test_kernels_read_eight_bits_as_their_references(rows: int, kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE, num_attention_heads=4, num_key_value_heads=1)
    quantizers.save(model, tmp_path, *EIGHT_BITS[kind])
    tokens, ours = tokens_of(37, rows), Tiny(tmp_path, torch.float16, kernels=True)
    assert relative_error(ours.prompt(tokens, rows), reference_logits(model, tokens)) < 2e-2


NARROW = {"hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 1}
"""Widths that are no multiples of 128, as SmolLM2 has them."""
NARROW_WAYS: dict[str, Any] = {
    "awq-32": (Way(size=32), "awq"),
    "gptq-32": (Way(size=32), 1),
    "packed-32-sym": (Way(size=32, symmetric=True), 0),
    "int8-rows": EIGHT_BITS["int8-rows"],
    "gptq8-32": EIGHT_BITS["gptq-32-zeros"],
}


@pytest.mark.parametrize("kind", sorted(NARROW_WAYS))
def test_widths_that_are_no_multiple_of_128_are_read(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **NARROW)
    quantizers.save(model, tmp_path, *NARROW_WAYS[kind])
    tokens = tokens_of(31, 24)
    ours = Tiny(tmp_path, torch.float32)
    assert not ours.weights.packed
    bound = 1e-3 if kind == "gptq8-32" else 1e-5
    assert relative_error(ours.prompt(tokens, 24), reference_logits(model, tokens)) < bound
    headers = CheckpointWeights(tmp_path, CPU).headers.values()
    planned = weights_bytes(replace(ours.config, dtype="float32"), headers)
    # The plan counts scales by whole tiles.
    assert 0.99 * ours.weights.bytes <= planned <= 1.02 * ours.weights.bytes


@pytest.mark.parametrize("rows", [3, 12, 40])
def test_kernels_read_padded_columns_as_their_references(rows: int, tmp_path: Path) -> None:
    shape = {**NARROW, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = tiny_models.reference("qwen3", **shape)
    quantizers.save(model, tmp_path, *NARROW_WAYS["awq-32"])
    tokens = tokens_of(37, rows)
    ours = Tiny(tmp_path, torch.float16, kernels=True)
    assert relative_error(ours.prompt(tokens, rows), reference_logits(model, tokens)) < 2e-2


def test_shapes_that_no_kernel_takes_are_objected_to_before_a_load() -> None:
    quantization = Quantization("awq", group=128)
    codes = Tensor("model.layers.0.self_attn.o_proj.qweight", (576, 72), "I32", 0, 0)
    assert "576 inputs, which groups of 128 do not divide" in quantization.objection(codes)
    assert replace(quantization, group=64).objection(codes) == ""
    act_order = Quantization("gptq", group=64, act_order=True)
    words = Tensor("model.layers.0.self_attn.o_proj.qweight", (72, 576), "I32", 0, 0)
    assert "act-order layers need multiples of 128" in act_order.objection(words)


@pytest.mark.parametrize("strategy", ["tensor", "damaged"])
def test_scales_of_int8_are_one_or_one_for_each_row(strategy: str, tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (64, 256), dtype=torch.int8)
    scales = torch.full((1,) if strategy == "tensor" else (7, 1), 0.25, dtype=torch.bfloat16)
    tensors = {"it.weight": codes, "it.weight_scale": scales}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    target = LoadTarget(CheckpointWeights(tmp_path, CPU), CPU, torch.float32, print)
    layer = Int8(target, Quantization("int8", 8, 0, symmetric=True))
    if strategy == "damaged":
        with pytest.raises(ModelInvalid, match=r"it.weight_scale has the shape \(7, 1\)"):
            layer.part("it", 64, 256)
        return
    found = dequantized(layer.part("it", 64, 256), torch.float32)
    assert torch.equal(found, codes.float() * 0.25)


@pytest.mark.parametrize("kind", ["gemma3", "mistral", "phi3"])
def test_scattered_groups_are_read_in_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    """Post-norms, GELU, products that are stored merged."""
    model = tiny_models.reference(kind, hidden_size=256, intermediate_size=384)
    quantizers.save(model, tmp_path, Way(ordered=True))
    tokens, ours = tokens_of(33, 20), Tiny(tmp_path, torch.float32)
    wanted = reference_logits(model, tokens)
    assert relative_error(ours.prompt(tokens, 20), wanted) < 1e-5
    assert relative_error(ours.prompt(tokens, 7, slot=1, packed=True), wanted) < 5e-3


def test_kernels_read_scattered_groups_as_their_references(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE, num_attention_heads=4, num_key_value_heads=1)
    quantizers.save(model, tmp_path, Way(ordered=True), 1)
    tokens, ours = tokens_of(32, 3), Tiny(tmp_path, torch.float16, kernels=True)
    found = ours.prompt(tokens, 3, packed=True)
    assert relative_error(found, reference_logits(model, tokens)) < 2e-2


@pytest.mark.parametrize(("rows", "kind"), [(3, "gptq-32-order"), (12, "awq-32"), (40, "awq-64")])
def test_kernels_read_small_groups_as_their_references(
    rows: int, kind: str, tmp_path: Path
) -> None:
    """One row count of each form."""
    model = tiny_models.reference("qwen3", **WIDE, num_attention_heads=4, num_key_value_heads=1)
    quantizers.save(model, tmp_path, *SAVED[kind])
    tokens, ours = tokens_of(37, rows), Tiny(tmp_path, torch.float16, kernels=True)
    found = ours.prompt(tokens, rows, packed=True)
    assert relative_error(found, reference_logits(model, tokens)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gathered_columns_are_the_reference(dtype: torch.dtype) -> None:
    order = torch.randperm(640, generator=torch.Generator().manual_seed(9)).int()
    for rows in (0, 1, 9):
        x = torch.randn(rows, 640).to(dtype)
        assert torch.equal(permute_columns.gather(x, order), permute_columns.reference(x, order))
    with pytest.raises(ValueError, match="order"):
        permute_columns.gather(torch.zeros(1, 128), order)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_floating_layer_runs_next_to_packed_ones(rows: int, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE, num_attention_heads=4, num_key_value_heads=1)
    quantizers.save(model, tmp_path, Way(ordered=True), floating="mlp.down_proj")
    tokens, ours = tokens_of(34, rows), Tiny(tmp_path, torch.float16, kernels=True)
    assert not ours.weights.packed
    assert relative_error(ours.prompt(tokens, rows), reference_logits(model, tokens)) < 2e-2


def test_a_model_may_be_as_wide_between_gate_and_down_as_elsewhere(tmp_path: Path) -> None:
    """Then a product must not write into the rows that it still reads."""
    square = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_models.reference("qwen3", **square, num_attention_heads=4, num_key_value_heads=2)
    quantizers.save(model, tmp_path, Way(ordered=True), 1)
    tokens, ours = tokens_of(36, 40), Tiny(tmp_path, torch.float16, kernels=True)
    found = ours.prompt(tokens, 40, packed=True)
    assert relative_error(found, reference_logits(model, tokens)) < 2e-2


def test_what_gate_and_up_compute_is_in_the_order_of_down(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE)
    quantizers.save(model, tmp_path, Way(ordered=True), 1)
    layer = loaded(tmp_path).layers[0]
    held = {name: getattr(layer.linears[name], "order") for name in layer.linears}  # noqa: B009
    assert held["down"] is None
    assert all(held[name] is not None for name in ("qkv", "o", "gate_up"))
    mlp = model.model.layers[0].mlp
    gate_up = dequantized(layer.linears["gate_up"], torch.float32)
    rows = [
        torch.cat((mlp.gate_proj.weight[i], mlp.up_proj.weight[i])).tolist() for i in range(384)
    ]
    order = [rows.index(torch.cat((gate_up[i], gate_up[384 + i])).tolist()) for i in range(384)]
    assert order != list(range(384))
    down = dequantized(layer.linears["down"], torch.float32)
    assert torch.equal(down, mlp.down_proj.weight[:, order])


@pytest.mark.parametrize(
    "saved",
    [*SAVED.values(), *EIGHT_BITS.values()],
    ids=[*SAVED, *(f"8-{each}" for each in EIGHT_BITS)],
)
def test_what_is_planned_is_what_is_held(saved: tuple[Way, Any], tmp_path: Path) -> None:
    quantizers.save(tiny_models.reference("qwen3", **WIDE), tmp_path, *saved)
    source = CheckpointWeights(tmp_path, CPU)
    config = read_config(tmp_path)
    held = load(config, source, CPU, dtype=torch.float16).bytes
    planned = weights_bytes(config, source.headers.values())
    assert held <= planned <= held + 4 * 4 * 384


@pytest.mark.parametrize(
    "quantization",
    [
        *(
            Quantization("gptq", act_order=True),
            Quantization("gptq", group=0),
            Quantization("packed"),
        ),
        *(Quantization("gptq", group=32, act_order=True), Quantization("awq", group=64)),
        *(
            Quantization("gptq", 8, symmetric=True, act_order=True),
            Quantization("int8", 8, 0, symmetric=True),
        ),
    ],
)
def test_random_weights_run(quantization: Quantization, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3", **WIDE), tmp_path)
    ours = Tiny(tmp_path, torch.float32)
    ours.config = replace(ours.config, quantization=quantization)
    source = random_weights(ours.config, CPU)
    ours.weights = load(ours.config, source, CPU, dtype=torch.float32)
    assert ours.weights.packed == (quantization.packed or quantization.in_ggml_forms)
    found = ours.prompt(tokens_of(35, 9), 9)
    assert bool(found.isfinite().all())
    assert float(found.std()) > 0.0


def test_unpacked_zeros_of_early_versions_are_read(tmp_path: Path) -> None:
    made = PLAIN.rounded("o_proj", torch.randn(64, 256, generator=torch.Generator().manual_seed(7)))
    tensors = quantizers.compressed(made, symmetric=False, ordered=False).tensors
    tensors["weight_zero_point"] = (made.zeros - 8).to(torch.int8)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({f"it.{name}": each for name, each in tensors.items()}, path)
    target = LoadTarget(CheckpointWeights(tmp_path, CPU), CPU, torch.float32, print)
    found = dequantized(
        PackQuantized(target, Quantization("packed")).part("it", 64, 256), torch.float32
    )
    assert torch.equal(found, made.weight)


# ---------------------------------------------------------------------------- zeros


@pytest.mark.parametrize(
    "way", [SYMMETRIC, PLAIN, Way(size=0), Way(ordered=True), Way(size=32), Way(size=64)]
)
@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("label", [1, 2])
def test_the_zeros_are_read_as_they_are_stored_whatever_the_label_says(
    way: Way, stored: int, label: int, tmp_path: Path
) -> None:
    model = tiny_models.reference("qwen3", **WIDE)
    quantizers.save(model, tmp_path, way, label, stored)
    said: list[str] = []
    found = loaded(tmp_path, said)
    o = dequantized(found.layers[0].linears["o"], torch.float32)
    assert torch.equal(o, model.model.layers[0].self_attn.o_proj.weight)
    if label == stored:
        assert said == []
    else:
        (sentence,) = said
        assert f"(GPTQ version {label})" in sentence and f"(version {stored})" in sentence


def test_zeros_that_do_not_tell_are_read_by_the_label(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (64, 256), generator=draw)
    zeros = torch.randint(0, 16, (64, 2), generator=draw)
    made = quantizers.Rounded(
        codes, torch.ones(64, 2).half(), zeros, torch.arange(256).int() // 128
    )
    for label in (1, 2):
        found, said = one_layer(made, tmp_path, label, stored=label)
        assert torch.equal(found, made.weight)
        assert said == []


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_zero_of_nothing_is_read_in_both_ways_to_take_one(borrowed: bool, tmp_path: Path) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    weight[[3, 20, 24], :128] = weight[[3, 20, 24], :128].abs()
    made = PLAIN.rounded("o_proj", weight)
    assert (made.zeros == 0).sum() == 3
    found, _ = one_layer(made, tmp_path, 1, stored=1, borrowed=borrowed)
    assert torch.equal(found, made.weight)


@pytest.mark.parametrize("size", [96, 192, 384])
def test_groups_of_several_packed_ones_are_read(size: int, tmp_path: Path) -> None:
    made = Way(size=size).rounded("o_proj", torch.randn(64, 768))
    found, _ = one_layer(made, tmp_path, 1, stored=1, size=size)
    assert torch.equal(found, made.weight)


def one_layer(
    made: quantizers.Rounded, folder: Path, label: int, *, stored: int, borrowed: bool = True,
    size: int = 128,
) -> tuple[torch.Tensor, list[str]]:  # fmt: skip
    """A layer by itself, through its file: the weight, and what was said."""
    tensors = quantizers.gptq(made, stored, borrowed=borrowed).tensors
    named = {f"it.{name}": each.contiguous() for name, each in tensors.items()}
    safetensors.torch.save_file(named, folder / "model.safetensors")
    said: list[str] = []
    target = LoadTarget(CheckpointWeights(folder, CPU), CPU, torch.float32, said.append)
    n, k = made.codes.shape
    quantization = Quantization("gptq", group=size, zeros_minus_one=label == 1)
    weight = Gptq(target, quantization).part("it", n, k)
    return dequantized(weight, torch.float32), said


# ---------------------------------------------------------------------------- refusals


def test_parts_that_are_sorted_differently_are_named(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3", **WIDE)

    def layer(prefix: str, weight: torch.Tensor) -> tiny_models.Layer:
        way = Way(ordered=True, seed=int(prefix.endswith("up_proj")))
        return quantizers.gptq(way.rounded(prefix, weight), 1)

    config = quantizers.gptq_config(Way(ordered=True))
    tiny_models.save_layers(model, tmp_path, layer, config)
    with pytest.raises(ModelInvalid, match=r"gate_proj and .*up_proj cannot be merged") as caught:
        loaded(tmp_path)
    assert "desc_act" in caught.value.hint


def test_groups_that_are_none_are_refused(tmp_path: Path) -> None:
    made = PLAIN.rounded("o_proj", torch.randn(64, 256))
    made.groups[:3] = 1
    with pytest.raises(ModelInvalid, match="it: its g_idx does not name 2 groups of 128"):
        one_layer(made, tmp_path, 1, stored=1)


def test_inputs_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    made = Way(size=0).rounded("o_proj", torch.randn(64, 192))
    with pytest.raises(ModelInvalid, match="192 inputs in groups of 128"):
        one_layer(made, tmp_path, 1, stored=1)
