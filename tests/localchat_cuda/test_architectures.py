"""Every architecture against transformers, in fp32 on a CPU; and the kernels' way against the references'."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat_cuda.config.quantization import Quantization
from localchat_cuda.config.reader import read_config
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import RandomWeights
from tests.support import tiny_models
from tests.support.tiny_models import (
    CPU,
    KINDS,
    Stretch,
    Tiny,
    reference_logits,
    relative_error,
    tokens_of,
)

PROMPT, PAST_WINDOW = 70, 30
"""Tokens: of two pages, and of more than a window. Whole greedy texts: runner/test_runner.py."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.reference(request.param)
    tiny_models.save(model, folder)
    return model, folder


@pytest.fixture(
    scope="module",
    params=[
        *("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3-long", "mixtral", "qwen2-moe"),
        *("olmo2", "granite4-moe", "lfm2", "nemotron-h"),
    ],
)
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.reference(request.param)
    tiny_models.save_awq(model, folder)
    return model, folder


@pytest.mark.parametrize("chunk", [1, 17, 64, 70])
def test_prompt_logits_are_transformers_for_any_chunk(pair: tuple[Any, Path], chunk: int) -> None:
    model, folder = pair
    tokens = tokens_of(1, PROMPT if chunk > 1 else PAST_WINDOW)
    found = Tiny(folder, torch.float32).prompt(tokens, chunk)
    assert torch.allclose(found, reference_logits(model, tokens), atol=2e-3, rtol=1e-4)


def test_sequences_in_one_step_do_not_touch_each_other(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    ours = Tiny(folder, torch.float32)
    texts = [tokens_of(3, 70), tokens_of(4, 33), tokens_of(5, 20)]
    for slot, text in enumerate(texts[:2]):
        ours.prompt(text[:-1], 40, slot)
    stretches = [Stretch(2, 0, texts[2], 2), *(
        Stretch(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts[:2])
    )]  # fmt: skip
    found = ours.step(*stretches)
    wanted = [
        reference_logits(model, texts[2])[-2:],
        reference_logits(model, texts[0])[-1:],
        reference_logits(model, texts[1])[-1:],
    ]
    assert torch.allclose(found, torch.cat(wanted), atol=2e-3, rtol=1e-4)


def test_a_copied_page_and_state_continue_like_their_originals(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    ours, text = Tiny(folder, torch.float32), tokens_of(6, 40)
    ours.prompt(text[:30], 30)
    ours.pages.copy(int(ours.table.block_tables[0, 0]), int(ours.table.block_tables[1, 0]), 30)
    if ours.pages.states is not None:
        ours.pages.states.copy(0, 1)
    found = ours.step(Stretch(1, 30, text[30:]))
    assert torch.allclose(found, reference_logits(model, text)[-1:], atol=2e-3, rtol=1e-4)


def rows_of_gemms(monkeypatch: pytest.MonkeyPatch, kind: type[DenseLayers]) -> list[int]:
    """How many rows each gemm of a step has, in order; filled as it runs."""
    seen: list[int] = []
    whole = kind.gemm

    def gemm(self: Any, x: Any, weight: Any) -> torch.Tensor:
        found: torch.Tensor = whole(self, x, weight)
        seen.append(found.shape[1])
        return found

    monkeypatch.setattr(kind, "gemm", gemm)
    return seen


@pytest.mark.parametrize("wanted", [1, 3, 30])
def test_after_the_last_attention_only_rows_with_logits_go_on(
    pair: tuple[Any, Path], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 tokens; where most are wanted, all do."""
    model, folder = pair
    tokens = tokens_of(12, 40)
    seen = rows_of_gemms(monkeypatch, DenseLayers)
    found = Tiny(folder, torch.float32).step(Stretch(0, 0, tokens, wanted))
    assert torch.allclose(found, reference_logits(model, tokens)[-wanted:], atol=2e-3, rtol=1e-4)
    config = read_config(folder)
    dense = config.mixture is None or config.gemma is not None
    computed, after = seen[0], 3 if dense else 1
    if config.gemma is not None and config.gemma.input_columns:
        after += 2
    assert computed >= 40
    assert set(seen[:-after]) == {computed}
    assert seen[-after:] == [wanted if 2 * wanted <= computed else computed] * after


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("quantized", ["qwen2", "gemma3", "lfm2", "nemotron-h"], indirect=True)
def test_after_the_last_attention_only_rows_with_logits_are_packed(
    quantized: tuple[Any, Path], kernels: bool
) -> None:
    model, folder = quantized
    ours = Tiny(folder, torch.float16 if kernels else torch.float32, kernels=kernels)
    close = 2e-2 if kernels else 5e-3
    several = [Stretch(slot, 0, tokens_of(14 + slot, 5)) for slot in (1, 2)]
    found = ours.step(*several, packed=True)
    wanted = [reference_logits(model, each.tokens)[-1:] for each in several]
    assert relative_error(found, torch.cat(wanted)) < close
    if not kernels:  # a step in Triton's interpreter takes seconds
        tokens = tokens_of(13, 18)
        found = ours.step(Stretch(0, 0, tokens, 2), packed=True)
        assert relative_error(found, reference_logits(model, tokens)[-2:]) < close


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 40])
def test_awq_logits_are_those_of_the_dequantized_weights(
    quantized: tuple[Any, Path], packed: bool, chunk: int
) -> None:
    model, folder = quantized
    tokens = tokens_of(7, 40 if chunk > 1 else PAST_WINDOW)
    found = Tiny(folder, torch.float32).prompt(tokens, chunk, packed=packed)
    wanted = reference_logits(model, tokens)
    # packed activations are rounded to 16 bits a group (up to 8 rows) or to fp16
    assert relative_error(found, wanted) < (5e-3 if packed else 1e-5)


@pytest.mark.parametrize(
    ("quantized", "chunk"),
    [("qwen2", 9), ("qwen2", 17), ("mixtral", 1), ("mixtral", 17), ("qwen2-moe", 17)],
    indirect=["quantized"],
)
def test_kernels_of_packed_weights_are_their_references(
    quantized: tuple[Any, Path], chunk: int
) -> None:
    model, folder = quantized
    tokens = tokens_of(8, 17 if chunk > 1 else 4)
    found = Tiny(folder, torch.float16, kernels=True).prompt(tokens, chunk, packed=True)
    assert relative_error(found, reference_logits(model, tokens)) < 2e-2


@pytest.mark.parametrize(
    "pair", ["qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next"], indirect=True
)
def test_kernels_of_dense_weights_are_their_references(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    ours, tokens = Tiny(folder, torch.float16, kernels=True), tokens_of(9, 6)
    ours.step(Stretch(0, 0, tokens[:5]))
    found = ours.step(Stretch(0, 5, tokens[5:]), Stretch(1, 0, tokens_of(10, 17)))
    wanted = torch.cat(
        (reference_logits(model, tokens)[-1:], reference_logits(model, tokens_of(10, 17))[-1:])
    )
    assert relative_error(found, wanted) < 2e-2


@pytest.mark.parametrize("quantization", [None, Quantization("awq")])
def test_random_weights_run(pair: tuple[Any, Path], quantization: Quantization | None) -> None:
    ours = Tiny(pair[1], torch.float32)
    if quantization is not None and ours.config.architecture == "gpt_oss":
        quantization = Quantization("mxfp4", group=32)
    if ours.config.mixture is not None and ours.config.gemma is not None:
        quantization = None
    ours.config = replace(ours.config, quantization=quantization)
    ours.weights = load(ours.config, RandomWeights(CPU), CPU, dtype=torch.float32)
    found = ours.prompt(tokens_of(11, 9), 9)
    assert bool(found.isfinite().all())
    assert float(found.std()) > 0.0
