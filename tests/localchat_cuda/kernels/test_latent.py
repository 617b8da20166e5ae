"""Latents: their store, their norms and attention over them, against plain torch at awkward lengths."""

import pytest
import torch

from localchat_cuda.kernels import latent, rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from localchat_cuda.kernels.launch import Traits
from tests.support.attention_scenes import close, numbers, scene
from tests.support.seeded import seeded

RULES = Rules(scale=0.07)


def latents(
    work: list[tuple[int, int]], h: int, d: int, tail: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """As `scene`, with values that are the first columns of the keys."""
    q, k, _, batch = scene(work, h, 1, d + tail)
    return q, k, k[..., :d], batch


def test_the_reference_is_attention_over_expanded_keys_and_values() -> None:
    """Queries times the keys' matrix over latents are queries over latents times it."""
    h, d, tail, plain = 3, 128, 16, 24
    _, k, v, batch = latents([(2, 70)], h, d, tail)
    up_k, up_v = numbers(h, plain, d, seed=1), numbers(h, plain, d, seed=2)
    q = numbers(2, h, plain + tail)
    absorbed = torch.cat((torch.einsum("thn,hnd->thd", q[..., :plain], up_k), q[..., plain:]), 2)
    found = attention_reference.reference(absorbed, k, v, batch, RULES)
    rows = torch.cat([k[int(page), 0] for page in batch.tables[1, :2]]).float()[:70]
    keys = torch.einsum("td,hnd->htn", rows[:, :d], up_k)
    keys = torch.cat((keys, rows[None, :, d:].expand(h, -1, -1)), 2)
    values = torch.einsum("td,hnd->htn", rows[:, :d], up_v)
    logits = torch.einsum("thn,hkn->htk", q, keys) * RULES.scale
    logits[:, 0, 69] = -torch.inf
    wanted = torch.einsum("htk,hkn->thn", logits.softmax(-1), values)
    assert torch.allclose(torch.einsum("thd,hnd->thn", found, up_v), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("length", "splits"), [(1, 3), (63, 1), (64, 1), (64, 3), (65, 1), (65, 3), (200, 3)]
)
def test_decode_matches_the_reference_at_page_borders(length: int, splits: int) -> None:
    q, k, v, batch = latents([(1, length), (1, 5)], 5, 128, 32)
    partials, out = Partials.empty(splits, 2, 5, 128, q.device), torch.full((2, 640), float("nan"))
    decode_attention.attend(q, k, v, batch, 1, partials, RULES)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, RULES).view(2, -1))


@pytest.mark.parametrize(
    ("h", "d", "tail"), [(3, 256, 32), (16, 128, 16), (20, 128, 64), (2, 512, 64)]
)
def test_decode_of_several_tokens_matches_the_reference(h: int, d: int, tail: int) -> None:
    q, k, v, batch = latents([(3, 70), (16, 16), (1, 130)], h, d, tail)
    partials = Partials.empty(2, 20, h, d, q.device)
    out = torch.full((20, h * d), float("nan"), dtype=torch.float16)
    decode_attention.attend(q, k, v, batch, 16, partials, RULES)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, RULES).view(20, -1))


@pytest.mark.parametrize(("h", "d", "tail"), [(3, 128, 32), (1, 256, 16), (2, 512, 64)])
def test_prefill_matches_the_reference(h: int, d: int, tail: int) -> None:
    work = [(65, 65), (40, 167), (1, 64)]
    q, k, v, batch = latents(work, h, d, tail)
    rows = prefill_attention.tile_config_for(d + tail).rows
    tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
    out = torch.full((106, h, d), float("nan"), dtype=torch.float16)
    listed = torch.tensor(tiles, dtype=torch.int32)
    prefill_attention.attend(q, k, v, batch, listed, out, RULES)
    close(out, attention_reference.reference(q, k, v, batch, RULES))


def test_tiles_for_much_shared_memory_match_the_reference() -> None:
    hopper, work = Traits.of((9, 0), 132), [(1, 130), (1, 64)]
    q, k, v, batch = latents(work, 16, 512, 64)
    wanted = attention_reference.reference(q, k, v, batch, RULES)
    for sequences in (1, 9):
        config = decode_attention.latent_tile_config_for(512, 16, sequences, hopper)
        assert config.tile == 64
        partials, out = Partials.empty(3, 2, 16, 512, q.device), torch.full((2, 8192), float("nan"))
        decode_attention.attend(q, k, v, batch, 1, partials, RULES, config=config)
        decode_attention.merge(partials, out)
        close(out, wanted.view(2, -1))
    q, k, v, batch = latents([(70, 130)], 2, 512, 64)
    wide = prefill_attention.LATENTS
    tiles = prefill_attention.tiles_of([70], [130], wide.rows)
    listed = torch.tensor(tiles, dtype=torch.int32)
    out = torch.full((70, 2, 512), float("nan"), dtype=torch.float16)
    prefill_attention.attend(q, k, v, batch, listed, out, RULES, config=wide)
    close(out, attention_reference.reference(q, k, v, batch, RULES))


@pytest.mark.parametrize(("capability", "latents"), [((9, 0), True), ((8, 6), False)])
def test_only_gpus_with_room_get_the_wide_tiles(
    capability: tuple[int, int], latents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Traits.of(capability, 132)
    monkeypatch.setattr(prefill_attention, "traits", lambda device: gpu)
    found = prefill_attention.best_tile_config(576, 64, torch.float16, torch.device("cpu"))
    assert (found == prefill_attention.LATENTS) == latents
    assert (
        prefill_attention.best_tile_config(512, 64, torch.float16, torch.device("cpu")).tile == 16
    )
    assert (decode_attention.latent_tile_config_for(512, 16, 1, gpu).tile == 64) == latents


def test_values_that_are_no_view_of_their_latents_are_refused() -> None:
    q, k, v, batch = latents([(1, 5)], 2, 128, 32)
    partials = Partials.empty(1, 1, 2, 128, q.device)
    for wrong in (v.clone(), k[..., :112], k[..., 32:]):
        with pytest.raises(ValueError, match=r"^v: |^k, v: "):
            decode_attention.attend(q, k, wrong, batch, 1, partials)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(
    ("tokens", "h", "plain", "merged"), [(1, 3, 24, True), (5, 2, 64, False), (33, 4, 48, True)]
)
def test_stored_rows_and_queries_are_those_of_the_reference(
    tokens: int, h: int, plain: int, merged: bool, neighbours: bool
) -> None:
    d, tail = 64, 32
    own = h * (plain + tail)
    first = numbers(3, tokens, own + d + tail) if merged else numbers(2, tokens, own)
    second = first if merged else numbers(3, tokens, 40 + d + tail)
    generator = seeded(tokens)
    positions = torch.randperm(4 * 64, generator=generator)[:tokens].int()
    slots = torch.ones(tokens, dtype=torch.int32)
    tables = torch.tensor([[0, 0, 0, 0], [3, 1, 4, 2]], dtype=torch.int32)
    table = rope.angles(256, tail, 1e4, first.device)
    found, wanted = (
        (
            torch.full((tokens, h, plain), float("nan")).half(),
            torch.zeros(tokens, h, d + tail).half(),
            torch.zeros(5, 1, 64, d + tail).half(),
        )
        for _ in range(2)
    )
    given = first, second, numbers(d), table, positions, slots, tables
    latent.store(*given, *found, 1e-6, neighbours=neighbours)
    latent.store_reference(*given, *wanted, 1e-6, neighbours=neighbours)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=2e-3, rtol=2e-3)
    assert bool((found[1][..., :d] == 0).all())
    assert int((found[2] != 0).any(-1).sum()) == tokens


@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (7, 128), (20, 64)])
def test_normed_columns_are_those_of_the_reference(tokens: int, width: int) -> None:
    y, gain = numbers(3, tokens, width + 40), numbers(width)
    found, wanted = torch.empty(2, tokens, width).half()
    latent.norm(y, gain, found, 1e-6)
    latent.norm_reference(y, gain, wanted, 1e-6)
    assert torch.allclose(found, wanted, atol=2e-3, rtol=2e-3)
