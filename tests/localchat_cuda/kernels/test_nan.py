"""A NaN in a row reaches every result of the row, and of no other: so that the sampler finds no usable logits,
and the user gets an error in place of gibberish."""

from collections.abc import Callable

import pytest
import torch

from localchat_cuda.kernels import activation, rms_norm, rms_norm_post, skinny_gemm
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.fp8_int8 import gemm_fp8
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_few as w4_few
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4.activations import HalfRows, Int8Rows, Rows
from localchat_cuda.kernels.int4.tile_config import TileConfig
from tests.support import int4_reference
from tests.support.attention_scenes import numbers, scene
from tests.support.int4_weights import values, weight
from tests.support.tiny_engine_core import DEVICE

# numpy, under the interpreter, warns where a GPU computes on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN = float("nan")
FORMATS: dict[str, Callable[[int, int], Rows]] = {
    "int8": lambda m, k: Int8Rows.empty(m, k, DEVICE),
    "fp16": lambda m, k: HalfRows.empty(m, k, DEVICE),
    "tiled": lambda m, k: HalfRows.empty(m, k, DEVICE, "slots", factored=False),
}


def spoilt(x: torch.Tensor, at: int = 200) -> torch.Tensor:
    """A NaN in the second row; numbers around it are larger than it would be."""
    x[..., 1, at] = NAN
    return x


def only_second(found: torch.Tensor) -> bool:
    """Whether the second row is NaN and no other has any."""
    nan = found.float().isnan()
    others = torch.arange(found.shape[0]) != 1
    return bool(nan[1].all()) and not bool(nan[others].any())


def gemm(form: str, rows: Rows) -> torch.Tensor:
    w = weight(64, 256)
    out = torch.empty(1, 3, 64)
    if isinstance(rows, Int8Rows):
        w4_few.gemm(rows, w, out, TileConfig(1, 2, 1, 1))
    elif form == "fp16":
        w4_few.gemm(rows, w, out, TileConfig(1, 1, 1, 1))
    else:
        w4_tiled.gemm(rows, w, out, w4_tiled.TiledGemmConfig(TileConfig(1, 4, 2, 1), 16))
    return out[0]


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("mode", ["norm", "act_and_mul", "plain"])
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_it_passes_the_activations_of_every_int4_gemm(
    form: str, mode: w4_activations.Mode, kernel: bool
) -> None:
    rows = FORMATS[form](3, 256)
    source = spoilt(values(3, 512 if mode == "act_and_mul" else 256))[None]
    call = w4_activations.prepare if kernel else int4_reference.prepare
    normed = {}
    if mode == "norm":
        normed = {
            "residual": values(3, 256), "weight": torch.ones(256), "squares": torch.empty(3, 2)
        }  # fmt: skip
    call(mode, source, rows, **normed)  # type: ignore[arg-type]
    assert only_second(gemm(form, rows))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_it_passes_the_norm_after_a_sublayer(form: str) -> None:
    rows, squares, ones = FORMATS[form](3, 256), torch.empty(3, 2), torch.ones(256)
    residual = spoilt(values(3, 256))
    rms_norm_post.prepare(values(3, 256)[None], residual, ones, ones, rows, squares, 1e-6)
    assert only_second(gemm(form, rows))


@pytest.mark.parametrize("gelu", [False, True])
def test_it_passes_the_fused_gate(gelu: bool) -> None:
    rows, out = (HalfRows.empty(3, 256, DEVICE, "slots", factored=False) for _ in range(2))
    int4_reference.quantize(spoilt(values(3, 256)), rows)
    config = w4_tiled.TiledGemmConfig(TileConfig(2, 4, 3, 1), 64)
    w4_tiled.gemm(rows, weight(512, 256), out, config, gelu=gelu)
    assert only_second(out.x)


@pytest.mark.parametrize("blocks", [False, True])
def test_it_passes_the_rounding_to_fp8(blocks: bool) -> None:
    codes, scales = gemm_fp8.round_rows(spoilt(values(3, 256)), blocks=blocks)
    runs = codes.float().view(3, scales.shape[1], -1) * scales[..., None]
    assert only_second(runs[:, -1]) and not bool(codes.float().isnan().all())


def test_it_passes_norms_activations_and_the_head() -> None:
    out = torch.empty(3, 256)
    rms_norm.add_norm(spoilt(values(3, 256))[None], values(3, 256), torch.ones(256), out, 1e-6)
    assert only_second(out)
    gated = torch.empty(3, 256)
    activation.act_and_mul(spoilt(values(3, 512)), gated)
    assert bool(gated[1, 200].isnan()) and int(gated.isnan().sum()) == 1
    logits = torch.empty(3, 96)
    skinny_gemm.gemm(out.half(), numbers(96, 256).half(), logits)
    assert only_second(logits)


@pytest.mark.parametrize("spoils", ["query", "keys", "values"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_it_passes_attention(prefill: bool, spoils: str) -> None:
    work = [(1, 70), (1, 130), (1, 5)]
    q, k, v, batch = scene(work, 2, 1, 64)
    if spoils == "query":
        q[1] = NAN
    else:
        page = int(batch.tables[int(batch.slots[1]), 1])
        (k if spoils == "keys" else v)[page, :, 3] = NAN
    out = torch.empty_like(q)
    if prefill:
        config = prefill_attention.tile_config_for(64)
        tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], config.rows)
        listed = torch.tensor(tiles, dtype=torch.int32)
        prefill_attention.attend(q, k, v, batch, listed, out)
    else:
        partials = Partials.empty(2, 3, 2, 64, q.device)
        decode_attention.attend(q, k, v, batch, 1, partials)
        decode_attention.merge(partials, out.view(3, -1))
    assert only_second(out.view(3, -1))
