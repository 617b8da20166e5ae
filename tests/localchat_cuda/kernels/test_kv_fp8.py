"""FP8 KV cache: the format, and the kernels that write and read it."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.attention.reference import Rules
from tests.support.attention_scenes import PAGE, close, numbers, scene
from tests.support.kv_fp8_scenes import NONE, coded, coded_scene
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE


@given(
    st.lists(
        st.floats(-(2**16), 2**16, width=32) | st.floats(-(2**-10), 2**-10, width=32),
        min_size=8,
        max_size=8,
    )
)
@settings(max_examples=300)
def test_encoding_rounds_to_the_nearest_code(values: list[float]) -> None:
    x = torch.tensor(values)
    words, exponents = kv_fp8.encode_reference(x[None])
    decoded = kv_fp8.decode_reference(words, exponents)[0]
    scale = float(kv_fp8.scale_of(exponents))
    largest = float(x.abs().max())
    assert words.shape == (1, 4) and words.dtype == torch.int16
    assert bool(((decoded - x).abs() <= 0.5001 * scale).all())
    if largest > 127 * 2**-20:
        # a scale has three bits of mantissa and is rounded up
        assert 127 * 8 / 9 < largest / scale <= 127.0001


@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_hadamard_rotation_keeps_products_and_spreads_outliers(d: int) -> None:
    generator = seeded(d)
    q, k = torch.randn(2, 50, d, generator=generator)
    k[:, 5] += 300.0
    rotated = kv_fp8.hadamard_reference(k)
    products = (kv_fp8.hadamard_reference(q) * rotated).sum(-1)
    assert torch.allclose(products, (q * k).sum(-1), rtol=1e-4, atol=1e-2)
    assert float(rotated.abs().max()) < 1.2 * 300 * kv_fp8.block_of(d) ** -0.5 + 5


def test_keys_with_an_outlier_channel_keep_their_scores() -> None:
    """Keys of Qwen2.5 have channels of 300 beside others of 3."""
    generator = seeded(4)
    q, k = torch.randn(2, 200, 128, generator=generator)
    k[:, 40] += 300.0
    rotated = kv_fp8.hadamard_reference(k)
    decoded = kv_fp8.decode_reference(*kv_fp8.encode_reference(rotated))
    error = (kv_fp8.hadamard_reference(q) * (decoded - rotated)).sum(-1) / 128**0.5
    e4m3 = (k / 2).to(torch.float8_e4m3fn).float() * 2
    before = (q * (e4m3 - k)).sum(-1) / 128**0.5
    assert float(error.square().mean().sqrt()) < 0.25
    assert float(error.square().mean()) < 0.1 * float(before.square().mean())


@pytest.mark.parametrize(("d", "turning"), [(64, 0), (96, 24)])
def test_kernel_encodes_as_torch_does(d: int, turning: int) -> None:
    t, h, j = 6, 1, 2
    qkv = numbers(1, t, (h + 2 * j) * d)
    qkv[0, 1] = 0.0
    qkv[0, 2] *= 300.0
    qkv[0, 3] *= 1e-4
    qkv[0, 4, -1] = float("inf")
    qkv[0, 5, -3] = float("nan")
    # numbers of which many lie in the middle of two codes, and the largest code
    qkv[0, 0, -d:] = torch.arange(17, 17 + d) / 2
    qkv[0, 0, -1] = -127
    radians = Rotation(10000.0, None, turning).radians(d, 300)
    table = rope.angle_table(300, d, radians, DEVICE)
    positions = torch.tensor([0, 63, 64, 65, 2, 3], dtype=torch.int32)
    slots = torch.zeros(t, dtype=torch.int32)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    found = []
    for call in (rope.rope_store, rope.reference):
        pool = torch.full((3, 2, j, PAGE, d // 2), 0x7F7F, dtype=torch.int16)
        exponents = torch.full((3, j, PAGE, 2), NONE, dtype=torch.uint8)
        q = torch.full((t, h, d), float("nan"), dtype=torch.float16)
        call(
            qkv, table, positions, slots, tables, q, pool[:, 0], pool[:, 1], exponents=exponents,
            columns=turning,
        )  # fmt: skip
        found.append((q, pool, exponents))
    (q, pool, exponents), (q_wanted, pool_wanted, exponents_wanted) = found
    assert torch.allclose(q, q_wanted, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert torch.equal(exponents, exponents_wanted)
    assert int(exponents[2, 1, 2, 1]) == int(exponents[2, 1, 3, 1]) == NONE
    usable = (exponents_wanted != NONE).permute(0, 3, 1, 2)
    one = kv_fp8.decode_reference(pool, exponents.permute(0, 3, 1, 2))[usable]
    other = kv_fp8.decode_reference(pool_wanted, exponents_wanted.permute(0, 3, 1, 2))[usable]
    # rotations may differ in the last bit of fp32, and then a tie falls the other way: values are exact
    assert torch.equal(pool[:, 1][usable[:, 1]], pool_wanted[:, 1][usable[:, 1]])
    assert float((one - other).abs().max() / other.abs().max()) < 0.08
    assert float(((one - other).abs() > 0).float().mean()) < 0.01


@triton.jit  # type: ignore[untyped-decorator]
def _decode(words, low, high, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    a, b = kv_fp8.decode(tl.load(words + i), 1)
    tl.store(low + i, a)
    tl.store(high + i, b)


def test_decoder_converts_every_code_in_place() -> None:
    words = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    low, high = (torch.empty(65536, dtype=torch.float16) for _ in range(2))
    _decode[(16,)](words, low, high, COUNT=4096)
    codes = words.view(torch.uint8).float().view(-1, 2) - 128
    assert torch.equal(low.float(), codes[:, 0])
    assert torch.equal(high.float(), codes[:, 1])


@pytest.mark.parametrize(
    ("length", "splits"), [(1, 3), (63, 1), (64, 3), (65, 1), (65, 3), (200, 1), (200, 3)]
)
def test_decode_matches_the_reference_at_page_borders(length: int, splits: int) -> None:
    q, k, v, marks, batch = coded_scene([(1, length), (1, 5)], 6, 2, 64)
    partials = Partials.empty(splits, 2, 6, 64, q.device)
    out = torch.full((2, 384), float("nan"))
    decode_attention.attend(q, k, v, batch, 1, partials, exponents=marks)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, Rules(), marks).view(2, -1))


@pytest.mark.parametrize(("h", "j", "d"), [(2, 2, 96), (7, 1, 64)])  # 128, 256: test_kv_fp8_gpu.py
def test_decode_of_several_tokens_matches_the_reference(h: int, j: int, d: int) -> None:
    q, k, v, marks, batch = coded_scene([(3, 70), (16, 16), (1, 130)], h, j, d)
    partials = Partials.empty(2, 20, h, d, q.device)
    out = torch.full((20, h * d), float("nan"), dtype=torch.float16)
    decode_attention.attend(q, k, v, batch, 16, partials, exponents=marks)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, Rules(), marks).view(20, -1))


@pytest.mark.parametrize(("h", "j", "d"), [(4, 2, 64), (2, 1, 96)])  # 128, 256: test_kv_fp8_gpu.py
def test_prefill_matches_the_reference(h: int, j: int, d: int) -> None:
    work = [(65, 65), (40, 167), (1, 64)]
    q, k, v, marks, batch = coded_scene(work, h, j, d)
    rows = prefill_attention.tile_config_for(d).rows
    tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
    out = torch.full_like(q, float("nan"))
    listed = torch.tensor(tiles, dtype=torch.int32)
    prefill_attention.attend(q, k, v, batch, listed, out, exponents=marks)
    close(out, attention_reference.reference(q, k, v, batch, Rules(), marks))


@pytest.mark.parametrize("rules", [Rules(window=50), Rules(soft_cap=5.0), Rules(scale=0.3)])
@pytest.mark.parametrize("prefill", [False, True])
def test_windows_soft_caps_and_scales_match_the_reference(rules: Rules, prefill: bool) -> None:
    q, k, v, marks, batch = coded_scene([(9, 150)], 2, 1, 64)
    wanted = attention_reference.reference(q, k, v, batch, rules, marks)
    if prefill:
        out = torch.zeros_like(q)
        tiles = torch.tensor(prefill_attention.tiles_of([9], [150], 64), dtype=torch.int32)
        prefill_attention.attend(q, k, v, batch, tiles, out, rules, exponents=marks)
        close(out, wanted)
    else:
        partials = Partials.empty(2, 9, 2, 64, q.device)
        flat = torch.empty(9, 128)
        decode_attention.attend(q, k, v, batch, 9, partials, rules, exponents=marks)
        decode_attention.merge(partials, flat)
        close(flat, wanted.view(9, -1))


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("key", "value"), [(1e3, 1e-5), (1e-3, 3e4), (300.0, 1.0)])
def test_keys_and_values_of_extreme_size_keep_their_precision(
    key: float, value: float, prefill: bool
) -> None:
    q, k, v, batch = scene([(9, 150)], 2, 1, 64)
    k, v = k.float() * key, v.float() * value
    v[:, :, ::2] *= 2.0**-12
    k, v, marks = coded(k, v)
    q = (q / key).half()
    wanted = attention_reference.reference(q, k, v, batch, Rules(), marks)
    if prefill:
        out = torch.zeros(9, 2, 64)
        tiles = torch.tensor(prefill_attention.tiles_of([9], [150], 64), dtype=torch.int32)
        prefill_attention.attend(q.float(), k, v, batch, tiles, out, exponents=marks)
        close(out, wanted)
    else:
        partials = Partials.empty(2, 9, 2, 64, q.device)
        flat = torch.empty(9, 128)
        decode_attention.attend(q, k, v, batch, 9, partials, exponents=marks)
        decode_attention.merge(partials, flat)
        close(flat, wanted.view(9, -1))


@pytest.mark.parametrize("which", [0, 1])
def test_infinite_and_nan_inputs_stay_nan(which: int) -> None:
    q, k, v, marks, batch = coded_scene([(1, 100), (1, 100)], 2, 1, 64)
    marks[int(batch.tables[1, 1]), 0, 3, which] = NONE
    partials = Partials.empty(2, 2, 2, 64, q.device)
    flat = torch.empty(2, 128)
    decode_attention.attend(q, k, v, batch, 1, partials, exponents=marks)
    decode_attention.merge(partials, flat)
    assert bool(flat[0].isnan().all())
    assert not bool(flat[1].isnan().any())


def test_wrong_arguments_raise_with_their_name() -> None:
    q, k, v, marks, batch = coded_scene([(1, 5)], 2, 1, 64)
    partials = Partials.empty(1, 1, 2, 64, q.device)
    with pytest.raises(ValueError, match="exponents: shape"):
        decode_attention.attend(q, k, v, batch, 1, partials, exponents=marks[..., 0].contiguous())
    with pytest.raises(ValueError, match="codes with exponents"):
        decode_attention.attend(
            q, k.view(torch.float16), v.view(torch.float16), batch, 1, partials, exponents=marks
        )
    with pytest.raises(ValueError, match="k: pages x heads x tokens x 64"):
        decode_attention.attend(q, k, v, batch, 1, partials)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("window", "d"), [(64, 64), (100, 256)])
def test_a_window_reads_no_codes_of_pages_before_it(window: int, d: int, prefill: bool) -> None:
    work = [(9, 300), (3, 201)]
    q, k, v, exponents, batch = coded_scene(work, 2, 1, d)
    rules = Rules(window=window)
    wanted = attention_reference.reference(q, k, v, batch, rules, exponents)
    for i, (count, length) in enumerate(work):
        batch.tables[i + 1, : (length - count - window + 1) // PAGE] = k.shape[0] - 1  # NaN
    if prefill:
        out = torch.zeros_like(q)
        rows = prefill_attention.tile_config_for(d).rows
        listed = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
        tiles = torch.tensor(listed, dtype=torch.int32)
        prefill_attention.attend(q, k, v, batch, tiles, out, rules, exponents=exponents)
        close(out, wanted)
        return
    partials, flat = Partials.empty(2, 12, 2, d, q.device), torch.empty(12, 2 * d)
    decode_attention.attend(q, k, v, batch, 9, partials, rules, exponents=exponents)
    decode_attention.merge(partials, flat)
    close(flat, wanted.view(12, -1))
