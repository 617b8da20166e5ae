"""Dequantized pages of prefill chunks: the kernel, the choice of pages, and a model that uses them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localchat_cuda.kernels.attention import kv_fp8, kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.kv_fp8_dequant import DequantizedPages
from localchat_cuda.kernels.attention.prefill import HOPPER
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from localchat_cuda.plan.memory_plan import dequant_pages
from localchat_cuda.runner.input_batch import BatchConfig, TokenSpan, build_input_batch
from tests.support import tiny_models
from tests.support.attention_scenes import PAGE
from tests.support.kv_fp8_scenes import coded_scene
from tests.support.kv_fp8_sources import sources_of
from tests.support.tiny_engine_core import without_gpu
from tests.support.tiny_models import Tiny, tokens_of

CODED = BatchConfig(4, 2, 128, 64, 132, fp8_kv=True, prefill_tile=HOPPER)
SCRATCH = 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 128])
def test_dequantized_pages_match_the_reference(d: int, dtype: torch.dtype) -> None:
    work = [(65, 130), (1, 64), (30, 70)]
    q, k, v, exponents, batch = coded_scene(work, 2, 2, d)
    plain = DequantizedPages.empty(8, 2, PAGE, d, dtype, batch.tables)
    plain.pool.fill_(7.0)
    kv_fp8_dequant.dequantize(k, v, exponents, batch.tables, sources_of(batch, 8), plain)
    at = 0
    for slot, (_, length) in zip(batch.slots.tolist(), work, strict=True):
        for n in range(-(-length // PAGE)):
            page, held = batch.tables[slot, n], min(PAGE, length - n * PAGE)
            for i, words in enumerate((k, v)):
                exact = kv_fp8.decode_reference(words[page], exponents[page, ..., i])[:, :held]
                # the interpreter cuts the last bits of bf16 where a GPU rounds
                tolerance = 2**-7 if dtype == torch.bfloat16 else 0.0
                written = plain.pool[at, i, :, :held].float()
                assert torch.allclose(written, exact, rtol=tolerance, atol=0.0)
            at += 1
    assert bool((plain.pool[at:] == 7.0).all())
    keys, values = plain.pool.unbind(1)
    found = attention_reference.reference(q, keys, values, plain.batch(batch), Rules())
    wanted = attention_reference.reference(q, k, v, batch, Rules(), exponents)
    assert torch.allclose(found, wanted, atol=1e-4 if dtype == torch.float16 else 5e-2)


def test_dequantized_nan_stays_nan() -> None:
    q, k, v, exponents, batch = coded_scene([(64, 64)], 1, 1, 64)
    exponents[int(batch.tables[1, 0]), 0, 5, 1] = kv_fp8.NONE.value
    plain = DequantizedPages.empty(1, 1, PAGE, 64, q.dtype, batch.tables)
    kv_fp8_dequant.dequantize(k, v, exponents, batch.tables, sources_of(batch, 1), plain)
    assert plain.pool.isnan().any(-1).nonzero().tolist() == [[0, 1, 0, 5]]


# ---------------------------------------------------------------------------- which pages


def test_page_sources_of_chunks_are_padded_for_a_graph() -> None:
    batch = build_input_batch(
        [TokenSpan(3, 100, 40), TokenSpan(1, 0, 200), TokenSpan(2, 5, 1)], CODED, SCRATCH
    )
    own = [(3, 0), (3, 1), (3, 2), *[(1, n) for n in range(4)]]
    assert sorted(batch.dequantized) == sorted([*own, (SCRATCH, 0)])
    assert batch.shape.dequant_pages == 64
    assert batch.tile_config == HOPPER


def test_long_histories_use_the_larger_pool_and_the_longest_read_fp8() -> None:
    most = dequant_pages(2, 128)
    assert most == 512
    for length, room in ((4096, 64), (4097, most), (most * 64, most), (most * 64 + 1, 0)):
        batch = build_input_batch([TokenSpan(0, length - 4096, 4096)], CODED, SCRATCH)
        assert batch.shape.dequant_pages == room
        assert batch.tile_config == (HOPPER if room else prefill_attention.tile_config_for(128))
        assert len(batch.dequantized) == (-(-length // 64) if room else 0)


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("prefill_tile", [None, prefill_attention.tile_config_for(128), HOPPER])
def test_pages_are_dequantized_only_for_fp8_and_the_hopper_kernel(
    fp8_kv: bool, prefill_tile: prefill_attention.PrefillTileConfig | None
) -> None:
    config = BatchConfig(4, 2, 128, 64, 132, fp8_kv=fp8_kv, prefill_tile=prefill_tile)
    batch = build_input_batch([TokenSpan(0, 0, 500)], config, SCRATCH)
    assert bool(batch.dequantized) == (fp8_kv and prefill_tile == HOPPER)
    assert batch.tile_config == (
        HOPPER if prefill_tile == HOPPER else prefill_attention.tile_config_for(128)
    )
    tiles = {tile for tile in batch.tiles if tile[0] == 0}
    assert tiles == {(0, first) for first in range(0, 500, batch.tile_config.rows)}


def test_pool_is_bounded_for_models_with_many_key_heads() -> None:
    assert dequant_pages(8, 128) == 512
    assert dequant_pages(32, 128) == 128
    assert dequant_pages(8, 64) == 512


# ---------------------------------------------------------------------------- a model


@without_gpu
@pytest.mark.parametrize(
    ("kind", "fp8_kv", "length"), [("qwen2", True, 84), ("mistral", False, 68)]
)
def test_model_dequantizes_chunks_for_the_hopper_kernel(
    kind: str, fp8_kv: bool, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference replaces the Hopper kernel; everything around it is the real code."""
    tiny_models.save(tiny_models.reference(kind, num_hidden_layers=1), tmp_path)
    calls = []

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch,
               tiles: torch.Tensor, out: torch.Tensor, rules: Rules) -> None:  # fmt: skip
        assert k.dtype == q.dtype
        calls.append(k.shape[0])
        rows = int(batch.starts[0])
        out[rows:] = attention_reference.reference(q, k, v, batch, rules)[rows:].to(out.dtype)

    monkeypatch.setattr(prefill_attention, "hopper", SimpleNamespace(launch=launch))
    half, tokens = torch.float32, tokens_of(50, length)
    usual = Tiny(tmp_path, half, fp8_kv=fp8_kv)
    other = Tiny(tmp_path, half, kernels=True, fp8_kv=fp8_kv, prefill_tile=HOPPER)
    wanted, found = usual.prompt(tokens, length // 2), other.prompt(tokens, length // 2)
    assert torch.allclose(found, wanted, atol=2e-3)
    assert len(calls) == 2 * other.config.layers
    assert set(calls) == {64 if fp8_kv else other.pages.pools[0].shape[1]}
