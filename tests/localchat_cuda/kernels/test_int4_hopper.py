"""Hopper int4 gemm without a Hopper GPU: tile configs, dispatch, emulation and compiled code."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_hopper as w4_hopper
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4 import hopper_tile_config
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from localchat_cuda.kernels.int4.hopper_tile_config import HopperTileConfig
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.launch import Traits
from tests.support import gluon_emulation, int4_reference
from tests.support.compiled_kernels import KernelCompiler
from tests.support.gluon_emulation import Boxes, Pointer
from tests.support.int4_weights import CPU, relative, values, weight
from tests.support.tiny_engine_core import DEVICE, without_gpu

SEVEN = {(37888, 3584, True), (3584, 18944, False), (4608, 3584, False), (3584, 3584, False)}
EVEN = HopperTileConfig(64, 2, even=True)


# ---------------------------------------------------------------------------- the plan


def test_config_fits_only_weights_that_it_divides() -> None:
    assert HopperTileConfig(128, 2, 4).fits(3584, 18944, fused=False)
    assert not HopperTileConfig(128, 2).fits(3712, 3584, fused=False)
    assert HopperTileConfig(128, 1).fits(3712, 3584, fused=False)
    assert not HopperTileConfig(128, 1).fits(37888, 3584, fused=True)
    assert not HopperTileConfig(128, 2, 2).fits(37888, 3584, fused=True)
    assert not HopperTileConfig(64, 2, 2, even=True).fits(512, 512, fused=False)
    assert not HopperTileConfig(64, 2, 5).fits(512, 512, fused=False)
    assert not HopperTileConfig(96, 2).fits(512, 512, fused=False)
    with pytest.raises(ValueError, match="does not divide a gate-and-up weight of 384x512"):
        HopperTileConfig(64, 2).check(384, 512, fused=True)


def test_stages_of_every_config_fit_shared_memory() -> None:
    for rows in (64, 128):
        for blocks in (1, 2):
            for fused in (False, True):
                config = HopperTileConfig(rows, blocks)
                if not config.fits(512, 512, fused=fused):
                    continue
                # in groups of 32 three boxes of scales and zeros for one in groups of 128
                stage = rows * 256 + 2 * blocks * 64 * (64 + 3 * 4)
                turned = 2 * 64 * rows * 2 if fused else 0
                assert config.stages(fused=fused) * stage + turned <= 232_000


@pytest.mark.parametrize(
    ("n", "k", "fused"),
    [*sorted(SEVEN), (6144, 4096, False), (28672, 4096, True), (4096, 14336, False)],
)
def test_chosen_config_fits_and_keeps_most_multiprocessors_busy(
    n: int, k: int, fused: bool
) -> None:
    for rows in (33, 64, 65, 100, 129, 300, 512, 1024):
        config = hopper_tile_config.tile_config_for(rows, n, k, 132, fused)
        assert config is not None
        assert config.fits(n, k, fused=fused)
        assert config.items(rows, n) >= (132 if config.even else 60)
    assert hopper_tile_config.tile_config_for(32, n, k, 132, fused) is None
    assert hopper_tile_config.tile_config_for(1025, n, k, 132, fused) is None


def test_small_weights_get_no_hopper_config() -> None:
    for n, k, fused in ((64, 128, False), (896, 896, False), (384, 512, True), (832, 4096, True)):
        assert hopper_tile_config.tile_config_for(64, n, k, 132, fused) is None


def test_even_runs_share_a_tile_between_at_most_two_programs() -> None:
    """hand_over and take_over rely on this; work assigned as in hopper_tile_ops.items_here and item."""
    for items, groups, sms in ((148, 28, 132), (132, 3, 132), (1184, 148, 132), (7, 5, 4)):
        grid = min(items, sms)
        bounds = [c * items * groups // grid for c in range(grid + 1)]
        assert all(b - a >= groups for a, b in pairwise(bounds))


# ---------------------------------------------------------------------------- the kernel's text


def scaled(w: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """hopper_tile_ops._scaled without inline instructions."""
    w, plain = w.int() & 0xFFFF, zero.float() - 1024
    codes = w & 15, (w >> 8) & 15, ((w >> 4) & 15) ^ 8, ((w >> 12) & 15) ^ 8
    return tuple((each - plain).half() * scale for each in codes)


def scaled_planes(
    w: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, zero_high: torch.Tensor,
    scale_high: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """hopper_tile_ops._scaled_planes without inline instructions."""
    return *scaled(w, zero, scale)[:2], *scaled(w, zero_high, scale_high)[2:]


@without_gpu
@pytest.mark.parametrize(
    ("n", "k", "rows", "config", "programs", "gelu", "group", "into"),
    [
        (512, 640, 100, HopperTileConfig(64, 1, 3), 5, None, 128, 128),
        (512, 512, 65, HopperTileConfig(64, 2, 2), 3, None, 128, 128),
        (256, 384, 129, HopperTileConfig(128, 2, 3), 9, None, 128, 128),
        (1024, 384, 70, HopperTileConfig(64, 2, even=True), 5, None, 128, 128),
        (768, 640, 100, HopperTileConfig(64, 2, even=True), 4, False, 128, 128),
        (512, 384, 150, HopperTileConfig(128, 2), 2, True, 128, 32),
        (1024, 256, 130, HopperTileConfig(128, 2, even=True), 7, True, 128, 128),
        (512, 640, 100, HopperTileConfig(64, 1, 3), 5, None, 32, 128),
        (1024, 384, 70, HopperTileConfig(64, 2, even=True), 5, None, 64, 128),
        (768, 640, 100, HopperTileConfig(64, 2, even=True), 4, False, 32, 32),
        (512, 384, 150, HopperTileConfig(128, 2), 2, True, 64, 64),
    ],
)
def test_emulated_kernel_matches_the_reference_and_clears_its_flags(
    n: int, k: int, rows: int, config: HopperTileConfig, programs: int, gelu: bool | None,
    group: int, into: int,
) -> None:  # fmt: skip
    """gelu None: partial sums without act_and_mul. into: the group of the weight that reads the result."""
    w, x, groups = weight(n, k, group=group), values(rows, k) / 30, k // 128
    fused = gelu is not None
    held = w4_activations.HalfRows.empty(rows, k, DEVICE, "slots", group)
    int4_reference.quantize(x, held)
    squares = x.square().view(rows, groups, 128).sum(-1)
    shape = (rows, n // 2) if fused else (config.splits, rows, n)
    out = torch.full(shape, float("nan"), dtype=torch.float16 if fused else torch.float32)
    items, tiles = config.items(rows, n), -(-rows // config.rows)
    programs = min(programs, items)
    work = torch.full((programs * 128 * config.blocks * config.rows,), float("nan"))
    flags = torch.zeros(2 * programs, dtype=torch.int32)
    gluon_emulation.run(
        w4_hopper._hopper_kernel,
        programs,
        (
            Boxes(held.x, config.rows, 64),
            Boxes(w.codes.view(torch.int32).view(n // 16, groups * 256), 4, 256),
            Boxes(w.scale_zeros.view(n // 16, -1), 4, 16),
            *(Pointer(each) for each in (out.view(-1), work, flags, squares.view(-1))),
            0.5, rows, items, tiles, config.splits,
            w4_hopper.HopperRows(
                n, k, config.rows, config.blocks, config.stages(fused=fused), True, fused, bool(gelu), True,
                config.even, group, into,
            ),
        ),
        gdc_wait=lambda: None, gdc_launch_dependents=lambda: None, _scaled=scaled,
        _scaled_planes=scaled_planes,
    )  # fmt: skip
    assert not flags.any()
    sums = int4_reference.gemm_fp16(held, w, RowNorm(squares, 0.5))
    if gelu is None:
        assert relative(out.sum(0), sums) < 1e-3
    else:
        wanted = w4_activations.HalfRows.empty(rows, n // 2, DEVICE, "slots", into)
        int4_reference.prepare("act_and_mul", sums[None], wanted, gelu=gelu)
        assert relative(out.float(), wanted.x.float()) < 1e-3


# ---------------------------------------------------------------------------- the choice


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4_hopper, "serves", lambda device: True)
    monkeypatch.setattr(int4, "traits", lambda device: Traits(True, True, 132))
    ruled = hopper_tile_config.tile_config_for

    def tile_config_for(
        rows: int, n: int, k: int, sms: int, fused: bool
    ) -> HopperTileConfig | None:
        """Choose a Hopper config for a weight small enough for a CPU, too."""
        small = EVEN if fused else HopperTileConfig(64, 1, 3)
        return small if rows <= 256 and (n, k) == (512, 384) else ruled(rows, n, k, sms, fused)

    monkeypatch.setattr(hopper_tile_config, "tile_config_for", tile_config_for)


@pytest.mark.usefixtures("on_hopper")
def test_tile_config_selects_the_hopper_kernel_only_where_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    assert int4.tile_config_for(40, 512, 384, device, fused=True) == EVEN
    assert isinstance(int4.tile_config_for(16, 4608, 3584, device), w4_tile_config.TileConfig)
    assert isinstance(int4.tile_config_for(32, 4608, 3584, device), w4_tiled.TiledGemmConfig)
    assert isinstance(int4.tile_config_for(33, 4608, 3584, device), HopperTileConfig)
    assert isinstance(
        int4.tile_config_for(300, 512, 384, device, fused=True), w4_tiled.TiledGemmConfig
    )
    assert int4.tile_config_for(300, 64, 128, device) == w4_tiled.tile_config_for(300, 64, 128, 132)
    assert (int4.packed_rows(device), int4.packed_rows(CPU)) == (1024, 1024)
    monkeypatch.setattr(w4_hopper, "serves", lambda device: False)
    assert int4.tile_config_for(40, 512, 384, device, fused=True) == w4_tiled.fused_tile_config_for(
        40, 512
    )
    monkeypatch.setattr(int4, "hopper", None)
    assert int4.tile_config_for(33, 4608, 3584, device) == w4_tiled.tile_config_for(
        33, 4608, 3584, 132
    )


def test_only_compute_capability_9_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not w4_hopper.serves(CPU)
    for capability, wanted in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        found = Traits.of(capability, 132)
        monkeypatch.setattr(w4_hopper, "traits", lambda device, found=found: found)
        assert w4_hopper.serves(torch.device("cuda", 0)) == wanted


@pytest.mark.usefixtures("on_hopper")
def test_gemms_dispatch_by_tile_config(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        w4_hopper, "gemm", lambda r, w, out, *given, gelu: calls.append((out, *given, gelu))
    )
    w = weight(512, 384)
    rows, into = (w4_activations.HalfRows.empty(40, k, DEVICE, "slots") for k in (384, 256))
    norm = RowNorm(torch.empty(40, 3), 0.5)
    int4.gemm_silu_mul(rows, w, into, norm, gelu=True)
    assert calls.pop() == (into, EVEN, norm, True)
    out = int4.gemm(rows, w)
    assert out.shape == (3, 40, 512)
    assert calls.pop()[1:] == (HopperTileConfig(64, 1, 3), None, False)


def test_unsupported_arguments_raise() -> None:
    w = weight(512, 384)
    x = values(40, 384)
    rows, into = (w4_activations.HalfRows.empty(40, k, DEVICE, "slots") for k in (384, 256))
    int4_reference.quantize(x, rows)
    with pytest.raises(ValueError, match=r"config: .* does not divide a weight"):
        w4_hopper.gemm(rows, w, torch.empty(4, 40, 512), HopperTileConfig(64, 2, 4))
    with pytest.raises(ValueError, match="out: shape 2x40x512 wanted"):
        w4_hopper.gemm(rows, w, torch.empty(1, 40, 512), HopperTileConfig(64, 2, 2))
    lanes = w4_activations.HalfRows.empty(40, 256, DEVICE, "lanes")
    with pytest.raises(ValueError, match="out: slot order wanted"):
        w4_hopper.gemm(rows, w, lanes, EVEN)
    with pytest.raises(ValueError, match=r"rows: .* in slot order wanted"):
        w4_hopper.gemm(
            w4_activations.HalfRows.empty(40, 384, DEVICE, "lanes"),
            w,
            into,
            HopperTileConfig(64, 2),
        )


def test_descriptors_are_dropped_with_their_weight() -> None:
    held = w4_hopper._BOXES_OF_WEIGHTS
    before = len(held)
    w = weight(512, 384)
    boxes = w4_hopper._boxes(w)
    assert w4_hopper._boxes(w) is boxes
    assert [list(each.shape) for each in boxes] == [[32, 768], [32, 48]]
    assert len(held) == before + 1
    del w, boxes
    assert len(held) == before


# ---------------------------------------------------------------------------- the compiler

SCRIPT = """
import json, re, subprocess, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from localchat_cuda.kernels.int4 import gemm_hopper as w4_hopper
from localchat_cuda.kernels.int4.hopper_tile_config import HopperTileConfig

def boxes(kind, rows, columns, swizzle, bits):
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{kind}[{rows}, {columns}],{layout}>"

def compiled(n, k, config, fused, gelu, group=128):
    kernel, names = w4_hopper._hopper_kernel, w4_hopper._hopper_kernel.arg_names
    types = dict(
        x_boxes=boxes("fp16", config.rows, 64, 128, 16), w_boxes=boxes("i32", 4, 256, 0, 32),
        s_boxes=boxes("i32", 4, 16, 0, 32), out="*fp16" if fused else "*fp32", work="*fp32",
        flags="*i32", squares="*fp32", eps="fp32", M="i32", items="i32", tiles="i32", splits="i32")
    values = dict(many=w4_hopper.HopperRows(
        N=n, K=k, TILE=config.rows, BLOCKS=config.blocks, STAGES=config.stages(fused=fused), NORM=fused,
        FUSED=fused, GELU=gelu, PDL=True, EVEN=config.even, GROUP=group, INTO=group))
    source = GluonASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if "*" in types.get(n, "")})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options=dict(num_warps=4, maxnreg=168))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, file.name]
        usage = subprocess.run([tool[0], "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool[0], "-sass", file.name], capture_output=True, text=True).stdout
    lines = [line for line in sass.splitlines() if re.search("/\\\\*[0-9a-f]{4,5}\\\\*/", line)]
    at = [i for i, line in enumerate(lines) if "HGMMA" in line]
    half = next(i for i, (a, b) in enumerate(zip(at, at[1:])) if b - a > 1000 or i + 1 == len(at) // 2)
    loops = lines[at[0]:at[half]], lines[at[half + 1]:at[-1]]
    return dict(
        shared=made.metadata.shared, warps=made.metadata.num_warps,
        stack=int(re.search("STACK:([0-9]+)", usage)[1]), products=len(at),
        ends=sum("gsb0" in lines[i] for i in at), waits=sass.count("WARPGROUP.DEPBAR"),
        spilled=sum("STL" in line or "LDL" in line for loop in loops for line in loop),
        boxes=sass.count("UTMALDG"), barriers=made.asm["ptx"].count("mbarrier.init"),
        stages=config.stages(fused=fused))

G, D = (37888, 3584), (3584, 18944)
print(json.dumps({
    "even 128": compiled(*G, HopperTileConfig(128, 2, even=True), True, True),
    "block 64": compiled(*D, HopperTileConfig(64, 1, 4), False, False),
    "even 128 in groups of 32": compiled(*G, HopperTileConfig(128, 2, even=True), True, True, 32)}))
"""


@pytest.fixture(scope="module")
def made(compiler: KernelCompiler) -> dict[str, dict[str, int]]:
    kernels: dict[str, dict[str, int]] = compiler.results("int4_hopper", SCRIPT)
    return kernels


def test_products_of_block_0_overlap_dequantizing_block_1(
    made: dict[str, dict[str, int]],
) -> None:
    assert len(made) == 3
    for name, one in made.items():
        # Per warpgroup two planes of each block, four instructions of 16 k each. The compiler that runs
        # them one after the other would end and await each.
        blocks = 1 if "block 64" in name else 2
        assert one["products"] == 2 * blocks * 2 * 4, name
        assert one["ends"] == 2 * blocks * 2, name
        assert one["waits"] == 2 * blocks, name
        assert one["boxes"] > 2 + 2 * 2 * blocks, name


def test_kernel_fits_shared_memory_and_loops_spill_nothing(made: dict[str, dict[str, int]]) -> None:
    for name, one in made.items():
        assert one["shared"] <= 232_448, name
        assert one["warps"] == 12, name
        assert one["spilled"] == 0, name
        assert one["stack"] <= (512 if "128" in name else 0), name


def test_kernel_has_two_barriers_per_stage(made: dict[str, dict[str, int]]) -> None:
    """`full` and `empty` of each stage, and no barrier that nothing waits for.

    The compiler gives the memory of an unused one to other data, and a GPU that switches back from another
    process writes the barrier's state over that data.
    """
    for name, one in made.items():
        assert one["barriers"] == 2 * one["stages"], name
