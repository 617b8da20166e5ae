"""Hopper int4 gemm on a Hopper GPU: every tile config against the reference.

Repeated, one after the other, and in CUDA graphs.
TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from functools import lru_cache

import pytest
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4.activations import HalfRows
from localchat_cuda.kernels.int4.hopper_tile_config import HopperTileConfig
from localchat_cuda.kernels.int4.pack import W4
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.launch import traits
from tests.support import int4_reference
from tests.support.tiny_engine_core import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability()[0] != 9,
        reason="no Hopper GPU, or TRITON_INTERPRET is not 0",
    ),
]
EPS = 1e-6
GATE_UP, DOWN, QKV, OUT, SMALL = (
    (37888, 3584),
    (3584, 18944),
    (4608, 3584),
    (3584, 3584),
    (768, 640),
)
FUSED = [
    HopperTileConfig(64, 2),
    HopperTileConfig(64, 2, even=True),
    HopperTileConfig(128, 2),
    HopperTileConfig(128, 2, even=True),
]
SUMS = [
    HopperTileConfig(64, 1, 3),
    HopperTileConfig(64, 2, 2),
    HopperTileConfig(128, 1),
    HopperTileConfig(128, 2, 5),
    HopperTileConfig(128, 2, 3),
]
EVEN = [HopperTileConfig(64, 2, even=True), HopperTileConfig(128, 2, even=True)]


@lru_cache(maxsize=2)
def weight(n: int, k: int, group: int = 128) -> tuple[W4, torch.Tensor]:
    """Return a packed weight and its values, fp32."""
    generator = torch.Generator(device="cuda").manual_seed(n + k)

    def drawn(low: int, high: int, *extents: int) -> torch.Tensor:
        return torch.randint(low, high, extents, device="cuda", generator=generator)

    scales = drawn(8, 24, n, k // group) / (128 * k**0.5)
    found = w4_pack.pack(drawn(0, 16, n, k), scales, drawn(6, 10, n, k // group))
    return found, w4_pack.dense(found)


class Scene:
    """Rows, their norm, and the expected result."""

    def __init__(self, rows: int, n: int, k: int, normed: bool = True, group: int = 128) -> None:
        self.weight, whole = weight(n, k, group)
        generator = torch.Generator(device="cuda").manual_seed(rows)
        x = (torch.randn(rows, k, device="cuda", generator=generator) * 2).half().float()
        self.rows = HalfRows.empty(rows, k, x.device, "slots", group)
        int4_reference.quantize(x, self.rows)
        self.norm: RowNorm | None = None
        self.sums = x @ whole.t()
        if normed:
            self.norm = RowNorm(x.square().view(rows, -1, 128).sum(-1), EPS)
            self.sums *= torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    def activated(self, gelu: bool) -> torch.Tensor:
        gate, up = self.sums.chunk(2, 1)
        if gelu:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def gemm(scene: Scene, config: HopperTileConfig) -> torch.Tensor:
    shape = config.splits, scene.rows.x.shape[0], scene.weight.features_out
    out = torch.full(shape, float("nan"), device="cuda")
    assert int4.hopper is not None
    int4.hopper.gemm(scene.rows, scene.weight, out, config, scene.norm)
    return out


def fused(
    scene: Scene, config: HopperTileConfig, gelu: bool = False, group: int = 128
) -> torch.Tensor:
    """group: of the weight that reads the result."""
    rows, n = scene.rows.x.shape[0], scene.weight.features_out
    into = HalfRows.empty(rows, n // 2, scene.rows.x.device, "slots", group)
    into.x.fill_(float("nan"))
    assert int4.hopper is not None
    int4.hopper.gemm(scene.rows, scene.weight, into, config, scene.norm, gelu=gelu)
    return int4_reference.natural_order(into.x, "slots", group)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("n", "k", "rows"), [(*SMALL, 65), (*GATE_UP, 129)])
def test_repeated_gemms_of_small_groups_match_the_reference(
    n: int, k: int, rows: int, group: int
) -> None:
    scene = Scene(rows, n, k, group=group)
    for config in (SUMS[0], SUMS[3], EVEN[1]):
        first = gemm(scene, config)
        assert off(first.sum(0), scene.sums) < 1e-3
        assert all(torch.equal(gemm(scene, config), first) for _ in range(3))
    for config in (FUSED[0], FUSED[3]):
        first = fused(scene, config, group=group)
        assert off(first, scene.activated(False)) < 1e-3
        assert all(torch.equal(fused(scene, config, group=group), first) for _ in range(3))


@pytest.mark.parametrize("config", [*SUMS, *EVEN], ids=str)
@pytest.mark.parametrize("rows", [33, 65, 100, 300])
def test_repeated_sums_of_a_small_weight_match_the_reference(
    rows: int, config: HopperTileConfig
) -> None:
    scene = Scene(rows, *SMALL, normed=config.blocks == 2)
    first = gemm(scene, config)
    assert off(first.sum(0), scene.sums) < 1e-3
    for _ in range(4):
        assert torch.equal(gemm(scene, config), first)


@pytest.mark.parametrize("config", FUSED, ids=str)
@pytest.mark.parametrize("rows", [33, 65, 129, 300])
def test_repeated_fused_gemms_match_the_reference(rows: int, config: HopperTileConfig) -> None:
    scene, gelu = Scene(rows, *SMALL), config.even
    first = fused(scene, config, gelu)
    assert off(first, scene.activated(gelu)) < 1e-3
    for _ in range(4):
        assert torch.equal(fused(scene, config, gelu), first)


@pytest.mark.parametrize("rows", [6200, 12001])
def test_tiles_shared_by_two_programs_are_complete(rows: int) -> None:
    """More tiles than multiprocessors, distributed evenly; each config finds the workspace used."""
    scene = Scene(rows, *SMALL)
    wanted = scene.activated(True)
    for _ in range(3):
        for config in EVEN:
            assert config.items(rows, SMALL[0]) > traits(scene.rows.x.device).sms
            assert off(gemm(scene, config)[0], scene.sums) < 1e-3
        for config in (each for each in FUSED if each.even):
            assert off(fused(scene, config, gelu=True), wanted) < 1e-3


@pytest.mark.parametrize("config", FUSED, ids=str)
def test_consecutive_fused_gemms_of_a_large_model_match(config: HopperTileConfig) -> None:
    """Other rows and tile configs in between, as one kernel starts before its predecessor has ended."""
    scenes = [Scene(rows, *GATE_UP) for rows in (100, 64, 300)]
    found = [[fused(scene, each) for each in (config, FUSED[1], FUSED[3])] for scene in scenes * 3]
    for several, scene in zip(found, scenes * 3, strict=True):
        wanted = scene.activated(False)
        assert all(off(each, wanted) < 1e-3 for each in several)


@pytest.mark.parametrize(("n", "k"), [DOWN, QKV, OUT])
def test_consecutive_sums_of_a_large_model_match(n: int, k: int) -> None:
    scenes = [Scene(rows, n, k, normed=(n, k) == QKV) for rows in (64, 129, 1024)]
    for scene in scenes:
        found = [(config, gemm(scene, config)) for config in SUMS * 2]
        for config, each in found:
            assert off(each.sum(0), scene.sums) < 1e-3, config


def test_chosen_configs_match_the_reference() -> None:
    taken = 0
    for n, k in (GATE_UP, DOWN, QKV, OUT, (6144, 4096), SMALL):
        for rows in (33, 64, 96, 128, 200, 256, 512, 1024):
            scene = Scene(rows, n, k, normed=(n, k) in (GATE_UP, QKV))
            halves = (n, k) == GATE_UP
            config = int4.tile_config_for(rows, n, k, scene.rows.x.device, fused=halves)
            taken += isinstance(config, HopperTileConfig)
            for _ in range(2):
                if halves:
                    into = HalfRows.empty(rows, n // 2, scene.rows.x.device, "slots")
                    into.x.fill_(float("nan"))
                    int4.gemm_silu_mul(scene.rows, scene.weight, into, scene.norm)
                    found = int4_reference.natural_order(into.x, "slots")
                    wanted = scene.activated(False)
                else:
                    found = int4.gemm(scene.rows, scene.weight, scene.norm).sum(0)
                    wanted = scene.sums
                assert off(found, wanted) < 1e-3, (n, k, rows, config)
    assert taken


def test_graphs_replay_a_chain_with_other_rows() -> None:
    """A chain: even gate and up, then down of their result, then gate and up of another weight."""
    device = torch.device("cuda")
    wide, _ = weight(2048, 512)
    narrow, _ = weight(512, 1024)
    first = HalfRows.empty(100, 512, device, "slots")
    into, last = (HalfRows.empty(100, 1024, device, "slots") for _ in range(2))
    out = torch.empty(3, 100, 512, device=device)
    again = HalfRows.empty(100, 512, device, "slots")
    hopper, even = int4.hopper, HopperTileConfig(64, 2, even=True)
    assert hopper is not None

    def chain() -> None:
        hopper.gemm(first, wide, into, even)
        hopper.gemm(into, narrow, out, HopperTileConfig(128, 2, 3))
        w4_activations.prepare("plain", out, again)
        hopper.gemm(again, wide, last, HopperTileConfig(128, 2, even=True))

    chain()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        chain()
    held = [HalfRows.empty(100, k, device, "slots") for k in (1024, 512, 1024)]
    sums = torch.empty(1, 100, 512, device=device)
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        int4_reference.quantize(torch.randn(100, 512, device=device, generator=generator), first)
        last.x.fill_(float("nan"))
        for _ in range(5):
            graph.replay()
        tiled, config = (
            w4_tiled.fused_tile_config_for(100, 2048),
            w4_tiled.TiledGemmConfig(TileConfig(1, 8, 3, 1), 64),
        )
        w4_tiled.gemm(first, wide, held[0], tiled)
        w4_tiled.gemm(held[0], narrow, sums, config)
        w4_activations.prepare("plain", sums, held[1])
        w4_tiled.gemm(held[1], wide, held[2], tiled)
        assert off(last.x, held[2].x.float()) < 3e-3
