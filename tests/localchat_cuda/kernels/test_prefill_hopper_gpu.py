"""Hopper prefill attention on a Hopper GPU: against the reference, and replayed with other lengths.

Models with this kernel: test_model_gpu.py.
TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

import pytest
import torch

from localchat_cuda.kernels.attention import kv_fp8, kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.kv_fp8_dequant import DequantizedPages
from localchat_cuda.kernels.attention.prefill import HOPPER
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from tests.support.attention_scenes import scene
from tests.support.kv_fp8_scenes import coded_scene
from tests.support.kv_fp8_sources import sources_of
from tests.support.tiny_engine_core import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability()[0] != 9,
        reason="no Hopper GPU, or TRITON_INTERPRET is not 0",
    ),
]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ERRORS = {"fp16": 5e-4, "bf16": 4e-3}
RAGGED = [(300, 300), (1, 1), (77, 200), (130, 1000), (64, 64), (5, 65), (128, 1152), (257, 4000)]


def gpu_scene(
    work: list[tuple[int, int]], h: int, j: int, d: int, half: str
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Queries, pages [pages, 2, J, P, D] with NaN in every unwritten place, and the batch."""
    q, k, v, batch = scene(work, h, j, d)
    names = ("starts", "counts", "lengths", "slots", "tables")
    pool = torch.stack((k, v), 1).to(HALVES[half]).cuda()
    return (
        q.to(HALVES[half]).cuda(),
        pool,
        AttentionBatch(*(getattr(batch, n).cuda() for n in names)),
    )


def listed(work: list[tuple[int, int]], idle: int = 0) -> torch.Tensor:
    """List the tiles on the GPU, and `idle` more of the last sequence."""
    tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], HOPPER.rows)
    return torch.tensor(tiles + [(len(work) - 1, 0)] * idle, dtype=torch.int32, device="cuda")


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("rules", [Rules(0.2), Rules(window=300)])
@pytest.mark.parametrize(("h", "j", "d"), [(14, 2, 64), (28, 4, 128)])
def test_repeated_ragged_sequences_match_the_reference(
    h: int, j: int, d: int, rules: Rules, half: str
) -> None:
    q, pool, batch = gpu_scene(RAGGED, h, j, d, half)
    k, v = pool[:, 0], pool[:, 1]
    assert prefill_attention.best_tile_config(d, 64, q.dtype, q.device) == HOPPER
    wanted = attention_reference.reference(q, k, v, batch, rules)
    first = None
    for _ in range(5):
        out = torch.full_like(q, float("nan"))
        prefill_attention.attend(q, k, v, batch, listed(RAGGED), out, rules, config=HOPPER)
        assert off(out, wanted) < ERRORS[half]
        first = out if first is None else first
        assert torch.equal(first, out)


def test_heads_of_96_and_256_and_soft_caps_use_the_portable_kernel() -> None:
    for d, cap in ((96, 0.0), (256, 0.0), (128, 50.0)):
        config = prefill_attention.best_tile_config(d, 64, torch.float16, torch.device("cuda"), cap)
        assert config == prefill_attention.tile_config_for(d)


def test_more_items_than_programs_match_the_reference() -> None:
    work = [(2000, 7000), (513, 513), (700, 3000)]
    q, pool, batch = gpu_scene(work, 28, 4, 128, "fp16")
    wanted = attention_reference.reference(q, pool[:, 0], pool[:, 1], batch, Rules())
    out = torch.full_like(q, float("nan"))
    prefill_attention.attend(q, pool[:, 0], pool[:, 1], batch, listed(work), out, config=HOPPER)
    assert off(out, wanted) < ERRORS["fp16"]


def test_graph_replays_with_other_lengths_and_idle_tiles() -> None:
    """Captured with one active and one idle sequence; replayed with both active, and with shorter ones."""
    whole = [(150, 1000), (140, 640)]
    q, pool, batch = gpu_scene(whole, 28, 4, 128, "bf16")
    k, v = pool[:, 0], pool[:, 1]
    out, tiles = torch.full_like(q, float("nan")), listed([whole[0], (0, 1)], idle=2)
    held = batch.counts.clone(), batch.lengths.clone()
    batch.counts[1], batch.lengths[1] = 0, 1

    def attend() -> None:
        prefill_attention.attend(q, k, v, batch, tiles, out, config=HOPPER)

    attend()
    torch.cuda.synchronize()
    wanted = attention_reference.reference(q, k, v, batch, Rules())
    assert off(out[:150], wanted[:150]) < ERRORS["bf16"]
    assert bool(out[150:].isnan().all())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        attend()
    for lengths in (held[1], torch.tensor([150, 400], device="cuda", dtype=torch.int32)):
        batch.counts.copy_(held[0])
        batch.lengths.copy_(lengths)
        work = list(zip(held[0].tolist(), lengths.tolist(), strict=True))
        tiles.copy_(listed(work))
        out.fill_(float("nan"))
        graph.replay()
        assert off(out, attention_reference.reference(q, k, v, batch, Rules())) < ERRORS["bf16"]


@pytest.mark.parametrize("decoder", [kv_fp8.PLAIN, kv_fp8.PACKED])
@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize(("h", "j", "d"), [(14, 2, 64), (28, 4, 128)])
def test_dequantized_pages_give_the_attention_of_fp8_pages(
    h: int, j: int, d: int, half: str, decoder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_fp8, "decoder_of", lambda device: decoder)
    q, words, more, marks, held = coded_scene(RAGGED, h, j, d)
    names = ("starts", "counts", "lengths", "slots", "tables")
    batch = AttentionBatch(*(getattr(held, n).cuda() for n in names))
    pool, marks, q = torch.stack((words, more), 1).cuda(), marks.cuda(), q.to(HALVES[half]).cuda()
    k, v = pool[:, 0], pool[:, 1]
    plain = DequantizedPages.empty(128, j, 64, d, q.dtype, batch.tables)
    plain.pool.fill_(float("nan"))
    sources = sources_of(batch, 128)
    for rules in (Rules(), Rules(window=300)):
        kv_fp8_dequant.dequantize(k, v, marks, batch.tables, sources, plain)
        at = 0
        for slot, length in zip(held.slots.tolist(), held.lengths.tolist(), strict=True):
            for n in range(-(-length // 64)):
                page, there = held.tables[slot, n], min(64, length - n * 64)
                for i, codes in enumerate((k, v)):
                    exact = kv_fp8.decode_reference(codes[page], marks[page, ..., i])[:, :there]
                    written = plain.pool[at, i, :, :there].float()
                    assert torch.allclose(written, exact.to(q.dtype).float(), rtol=2**-8)
                at += 1
        out = torch.full_like(q, float("nan"))
        prefill_attention.attend(
            q, plain.pool[:, 0], plain.pool[:, 1], plain.batch(batch), listed(RAGGED), out, rules,
            config=HOPPER,
        )  # fmt: skip
        # Decoded numbers are rounded once more, to bf16.
        bound = 1.5 * ERRORS[half]
        assert off(out, attention_reference.reference(q, k, v, batch, rules, marks)) < bound
