import re

import pytest
import torch
from triton.language import constexpr

from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.fp8_int8 import gemm_dequant as w8_dequant
from localchat_cuda.kernels.fp8_int8 import gemm_fp8
from localchat_cuda.kernels.fp8_int8 import gemm_small as w8_small
from localchat_cuda.kernels.fp8_int8 import gemm_tiled as w8_tiled
from localchat_cuda.kernels.fp8_int8 import gemv as w8_gemv
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8 import tile_config as w8_tile_config
from localchat_cuda.kernels.fp8_int8 import tile_ops as w8_tile_ops
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_config import GemvConfig, W8TileConfig
from tests.support import float_checkpoints, fp8_reference
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE, ON_GPU

KINDS = {
    "row": w8_pack.e4m3_rows,
    "block": fp8_reference.e4m3_blocks,
    "whole": w8_pack.whole_rows,
    "mx": float_checkpoints.mx_weight,
}
CODES = torch.arange(256, device=DEVICE).to(torch.uint8)
NUMBERS = (CODES & 127) != 127
"""Without the two codes of no number."""
WIDE = torch.bfloat16 if ON_GPU else torch.float32
"""Rows of MXFP8 weights, which are multiplied in bf16 on a GPU."""


def drawn(kind: str, n: int, k: int) -> W8:
    generator = seeded(n + k)
    return KINDS[kind](torch.randn(n, k, generator=generator))


def rows(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(m, k, generator=seeded(m)).to(dtype)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("whole", [False, True])
def test_plain_decoder_converts_every_code_exactly(whole: bool) -> None:
    codes = CODES.view(2, 128) if whole else CODES.view(w8_pack.E4M3).view(2, 128)
    out = torch.empty(2, 128, dtype=torch.float16)
    w8_dequant.dequantize(W8(codes, torch.ones(2)), out, decoder=w8_tile_ops.PLAIN)
    wanted = w8_pack.values(codes)
    held = torch.ones(256, dtype=torch.bool) if whole else NUMBERS
    assert torch.equal(out.float().view(-1)[held], wanted.view(-1)[held])


PROGRAMS = {
    ("e4m3", "fp16"): (w8_tile_ops.E4M3_FP16_FOUR, w8_tile_ops.E4M3_FP16_TWO),
    ("e4m3", "bf16"): (w8_tile_ops.E4M3_BF16_FOUR, w8_tile_ops.E4M3_BF16_TWO),
    ("whole", "fp16"): (w8_tile_ops.WHOLE_FP16_FOUR, w8_tile_ops.WHOLE_FP16_TWO),
    ("whole", "bf16"): (w8_tile_ops.WHOLE_BF16_FOUR, w8_tile_ops.WHOLE_BF16_TWO),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def emulated(
    program: str, word: int, dtype: torch.dtype, results: int, factor: int = 0
) -> list[float]:
    """Emulate the few PTX instructions of the decoders on a word."""
    held: dict[str, int] = {f"${results}": word, f"${results + 1}": factor}

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    def halves(register: int) -> torch.Tensor:
        pair = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32)
        return pair.to(torch.int16).view(dtype).double()

    def packed(pair: torch.Tensor) -> int:
        low, high = (int(half) & 0xFFFF for half in pair.to(dtype).view(torch.int16))
        return low | high << 16

    for line in program.strip(" {}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not rest or name == ".reg":
            continue
        target, *names = [each.strip() for each in rest.split(",")]
        given = [value(each) for each in names]
        if name == "prmt.b32":
            data = [given[0] >> 8 * i & 255 for i in range(4)]
            picks = [given[2] >> 4 * i & 15 for i in range(4)]
            made = [(255 if data[p & 3] > 127 else 0) if p & 8 else data[p & 3] for p in picks]
            held[target] = sum(byte << 8 * i for i, byte in enumerate(made))
        elif name == "lop3.b32":
            assert given[3] in (0xEA, 0x6A)
            both = given[0] & given[1]
            held[target] = both | given[2] if given[3] == 0xEA else both ^ given[2]
        elif name == "shl.b32":
            held[target] = given[0] << given[1] & 0xFFFFFFFF
        elif name == "and.b32":
            held[target] = given[0] & given[1]
        elif name in ("mov.b32", "cvt.u32.u16"):
            held[target] = given[0]
        else:
            assert re.fullmatch(r"(mul|add|fma)\.rn\.b?f16x2", name), name
            one, *others = [halves(each) for each in given]
            held[target] = packed(
                one + others[0] if name[:3] == "add" else one * others[0] + sum(others[1:])
            )
    return [each for i in range(results) for each in halves(held[f"${i}"]).tolist()]


@pytest.mark.parametrize("kind", sorted(PROGRAMS))
def test_packed_decoder_converts_every_code_exactly(kind: tuple[str, str]) -> None:
    four, two = PROGRAMS[kind]
    assert isinstance(four, constexpr)
    assert isinstance(two, constexpr)
    codes = CODES if kind[0] == "whole" else CODES.view(w8_pack.E4M3)
    wanted = w8_pack.values(codes).tolist()
    numbers = range(256) if kind[0] == "whole" else [c for c in range(256) if c & 127 != 127]
    for a in numbers:
        b, c, d = (x if x in numbers else 3 for x in ((a * 7 + 1) % 256, 255 - a, a ^ 128))
        word = a | b << 8 | c << 16 | d << 24
        found = emulated(four.value, word, DTYPES[kind[1]], 2)
        assert found == [wanted[x] for x in (a, b, c, d)]
        pair = emulated(two.value, a | b << 8, DTYPES[kind[1]], 1)
        assert pair == [wanted[a], wanted[b]]


@pytest.mark.parametrize("exponent", [20, 60, 110, 127, w8_pack.MX_MOST])
def test_packed_decoder_of_mxfp8_multiplies_exactly(exponent: int) -> None:
    wanted = (w8_pack.values(CODES.view(w8_pack.E4M3)).double() * 2.0 ** (exponent - 127)).tolist()
    factor = (exponent + 120) * 0x0080_0080
    for code in (c for c in range(256) if c & 127 != 127):
        other = code ^ 128
        word = code | other << 8 | 56 << 16 | other << 24
        four = emulated(w8_tile_ops.MX_BF16_FOUR.value, word, torch.bfloat16, 2, factor)
        assert four == [wanted[c] for c in (code, other, 56, other)]
        pair = code | other << 8
        two = emulated(w8_tile_ops.MX_BF16_TWO.value, pair, torch.bfloat16, 1, factor)
        assert two == [wanted[code], wanted[other]]


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "config"),
    [
        ("row", 1, 40, 256, W8TileConfig(1, 2, 1)),
        ("block", 3, 130, 384, W8TileConfig(2, 1, 2)),
        ("block", 8, 16, 512, W8TileConfig(1, 4, 1)),
        ("whole", 9, 33, 256, W8TileConfig(2, 1, 2)),
        ("row", 16, 48, 128, W8TileConfig(1, 1, 1)),
        ("block", 27, 32, 128, W8TileConfig(2, 1, 1)),
        ("mx", 3, 40, 256, W8TileConfig(1, 2, 1)),
        ("mx", 16, 33, 384, W8TileConfig(2, 1, 2)),
    ],
)
def test_small_gemm_matches_the_reference(
    kind: str, m: int, n: int, k: int, config: W8TileConfig
) -> None:
    weight, x = drawn(kind, n, k), rows(m, k)
    out = torch.full((config.splits, m, n), float("nan"))
    w8_small.gemm(x, weight, out, config, decoder=w8_tile_ops.PLAIN)
    assert off(out.sum(0), w8_small.reference(x, weight)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "n", "k", "config"),
    [
        ("row", 300, 384, GemvConfig(4, 512, 2, 4)),
        ("block", 256, 1024, GemvConfig(8, 256, 4, 1)),
        ("block", 130, 640, GemvConfig(2, 512, 1, 2)),
        ("whole", 33, 256, GemvConfig(4, 128, 1, 1)),
        ("mx", 130, 640, GemvConfig(4, 512, 1, 2)),
    ],
)
def test_gemv_matches_the_reference(kind: str, n: int, k: int, config: GemvConfig) -> None:
    weight, x = drawn(kind, n, k), rows(1, k)
    out = torch.full((1, 1, n), float("nan"))
    w8_gemv.gemv(x, weight, out, config, decoder=w8_tile_ops.PLAIN)
    assert off(out[0], w8_small.reference(x, weight)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "splits"),
    [
        ("row", 17, 66, 256, 2),
        ("block", 40, 130, 384, 3),
        ("whole", 64, 64, 128, 1),
        ("mx", 40, 130, 384, 3),
    ],
)
def test_tiled_gemm_matches_the_reference(kind: str, m: int, n: int, k: int, splits: int) -> None:
    weight, x = drawn(kind, n, k), rows(m, k)
    out = torch.full((splits, m, n), float("nan"))
    w8_tiled.gemm(x, weight, out, W8TileConfig(4, 4, splits, 3), decoder=w8_tile_ops.PLAIN)
    assert off(out.sum(0), w8_small.reference(x, weight)) < 1e-6


def test_mxfp8_asks_for_bf16() -> None:
    with pytest.raises(ValueError, match="bf16 wanted with MXFP8, fp16 given"):
        w8_small.gemm(
            rows(3, 256).half(),
            drawn("mx", 40, 256),
            torch.empty(1, 3, 40),
            W8TileConfig(1, 1, 1),
            decoder=w8_tile_ops.PLAIN,
        )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_dequantize_writes_the_values_of_the_codes(kind: str) -> None:
    weight = drawn(kind, 140, 256)
    out = torch.full((140, 256), float("nan"))
    w8_dequant.dequantize(weight, out, decoder=w8_tile_ops.PLAIN)
    assert torch.allclose(out, w8_pack.dense(weight), rtol=1e-6)
    x = rows(70, 256)
    y = w8_dequant.gemm(x, weight, decoder=w8_tile_ops.PLAIN)
    assert off(y, w8_small.reference(x, weight)) < 1e-5


def test_mxfp8_is_that_of_the_specification() -> None:
    codes = CODES.view(w8_pack.E4M3).view(2, 128)
    exponents = torch.tensor([[0, 1, 127, 254], [100, 120, 130, 140]], dtype=torch.uint8)
    wanted = float_checkpoints.mxfp8_values(codes, exponents)
    number = NUMBERS.view(2, 128)
    found = w8_pack.dense(W8(codes, exponents), torch.float32).double()
    assert torch.equal(found[number], wanted[number].float().double())


def test_padded_mxfp8_has_columns_of_zeros() -> None:
    weight = drawn("mx", 20, 192)
    padded = w8_pack.padded(weight)
    assert (padded.features_in, padded.padding) == (256, 64)
    assert torch.equal(w8_pack.dense(padded)[:, :192], w8_pack.dense(weight))
    assert not w8_pack.dense(padded)[:, 192:].any()
    x = rows(9, 192, WIDE)
    wanted = x.float() @ w8_pack.dense(weight).t()
    assert off(fp8_int8.gemm(x, padded).sum(0), wanted) < 1e-6


@pytest.mark.parametrize("blocks", [False, True])
def test_round_rows_matches_the_reference(blocks: bool) -> None:
    # some values of a row are subnormal next to its largest
    x = rows(3, 1280) * torch.tensor([[1.0], [1e-3], [300.0]])
    x[:, ::9] *= 1e-4
    codes, scales = gemm_fp8.round_rows(x, blocks=blocks)
    wanted, factors = fp8_reference.round_rows(x, blocks=blocks)
    assert torch.allclose(scales, factors, rtol=1e-6)
    # a division may end on the other side of a tie
    assert int((codes.float() != wanted.float()).sum()) <= 4
    back = codes.float().view(3, scales.shape[1], -1) * scales[..., None]
    assert off(back.view(3, -1), x) < 0.03


@pytest.mark.parametrize("kind", ["row", "block"])
def test_fp8_gemm_matches_the_reference(kind: str) -> None:
    weight, x = drawn(kind, 144, 256), rows(70, 256)
    assert off(gemm_fp8.gemm(x, weight), fp8_reference.gemm(x, weight)) < 3e-3
    assert off(fp8_reference.gemm(x, weight), w8_small.reference(x, weight)) < 0.05


@pytest.mark.parametrize(("kind", "dtype"), [("row", torch.float16), ("mx", WIDE)])
@pytest.mark.parametrize("m", [1, 16, 17, 65])
def test_gemm_supports_every_row_count(m: int, kind: str, dtype: torch.dtype) -> None:
    weight, x = drawn(kind, 48, 128), rows(m, 128, dtype)
    wanted = w8_small.reference(x, weight)
    # The library's products of many rows are in the type of x.
    assert off(fp8_int8.gemm(x, weight).sum(0), wanted) < (
        3e-3 if dtype == torch.bfloat16 else 1e-3
    )
    assert torch.equal(fp8_int8.gemm(x, weight, kernels=False)[0], wanted)


def test_logits_of_more_rows_than_a_tile_are_computed_in_chunks() -> None:
    weight, x = drawn("whole", 50, 128), rows(70, 128, WIDE)
    assert off(fp8_int8.logits(x, weight), w8_small.reference(x, weight)) < 1e-6


def test_quantization_error_is_within_half_a_code() -> None:
    weight = torch.randn(5000, 128, generator=seeded(5))
    whole = w8_pack.whole_rows(weight)
    steps = (w8_pack.dense(whole) - weight).abs() / whole.scales[:, None]
    assert float(steps.max()) <= 0.501
    for make in (w8_pack.e4m3_rows, fp8_reference.e4m3_blocks):
        assert off(w8_pack.dense(make(weight[:200])), weight[:200]) < 0.03


def test_weights_join_only_if_their_scales_do() -> None:
    one, two = drawn("block", 128, 256), drawn("block", 64, 256)
    joined = w8_pack.joined([one, two])
    assert joined is not None
    wanted = torch.cat((w8_pack.dense(one), w8_pack.dense(two)))
    assert torch.equal(w8_pack.dense(joined), wanted)
    assert w8_pack.joined([two, one]) is None
    assert w8_pack.joined([one, drawn("row", 64, 256)]) is None
    assert w8_pack.joined([one, drawn("mx", 64, 256)]) is None
    mx = [drawn("mx", 33, 256), drawn("mx", 64, 256)]
    joined = w8_pack.joined(mx)
    assert joined is not None
    assert torch.equal(w8_pack.dense(joined), torch.cat([w8_pack.dense(part) for part in mx]))


def test_tile_config_is_equal_within_a_row_class() -> None:
    for n, k in ((37888, 3584), (3584, 18944), (4608, 3584), (152064, 3584), (64, 128)):
        assert len({w8_tile_config.small_config(m, n, k, 132) for m in range(2, 9)}) == 1
        for config in (
            w8_tile_config.small_config(16, n, k, 132),
            w8_tile_config.tiled_config(64, n, k, 132),
        ):
            config.check(n, k)


def test_unsupported_shapes_raise_with_their_name() -> None:
    weight, config = drawn("row", 32, 128), W8TileConfig(1, 1, 1)
    out = torch.empty(1, 33, 32)
    with pytest.raises(ValueError, match="x: 1 to 32 rows wanted, 33"):
        w8_small.gemm(rows(33, 128), weight, out, config, decoder=0)
    with pytest.raises(ValueError, match="in 128s wanted, 96"):
        w8_small.gemm(rows(1, 96), drawn("row", 32, 96), torch.empty(1, 1, 32), config, decoder=0)
    with pytest.raises(ValueError, match="does not divide"):
        w8_small.gemm(rows(1, 128), weight, torch.empty(2, 1, 32), W8TileConfig(1, 1, 2), decoder=0)
    with pytest.raises(ValueError, match="rows that divide 128"):
        w8_gemv.gemv(
            rows(1, 128), weight, torch.empty(1, 1, 32), GemvConfig(3, 128, 1, 1), decoder=0
        )
    with pytest.raises(ValueError, match="x: 1 to 1 rows wanted, 2"):
        w8_gemv.gemv(
            rows(2, 128), weight, torch.empty(1, 2, 32), GemvConfig(4, 128, 1, 1), decoder=0
        )
    with pytest.raises(ValueError, match="out: shape 32x128 wanted"):
        w8_dequant.dequantize(weight, torch.empty(32, 64), decoder=0)
