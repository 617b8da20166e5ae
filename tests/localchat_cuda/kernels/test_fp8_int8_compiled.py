"""Compiled code of the 8-bit gemms for every supported GPU, without a GPU."""

import pytest

from tests.support.compiled_kernels import KernelCompiler

SHARED_BYTES = {80: 101_376, 90: 232_448}
"""Most that a program may take, by compute capability: 86 and 89 have the least, and run what 80 runs."""
SCRIPT = r"""
import json, re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from localchat_cuda.kernels.fp8_int8 import gemm_dequant as w8_dequant, gemm_fp8, gemm_small as w8_small
from localchat_cuda.kernels.fp8_int8 import gemm_tiled as w8_tiled, gemv as w8_gemv
from localchat_cuda.kernels.fp8_int8 import tile_config as w8_tile_config
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape

def compiled(kernel, types, warps, **values):
    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if "*" in types.get(n, "")})
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=dict(num_warps=warps))

cc = int(sys.argv[1])
hopper, decoder = cc >= 90, 2 if cc >= 89 else 1
made = {}
types = dict(codes="*u8", scales="*fp32", out="*fp32", M="i32", N="i32", first="i32")
def shape_of(shared, whole=False):
    return W8Shape(4608, 3584, shared, whole, decoder)

mx = W8Shape(4608, 3584, False, False, decoder, True)
words = dict(types, x="*bf16", scales="*i32")

for x, blocks, parts, shared, weights in (
    ("*bf16", 1, 1, True, False), ("*fp16", 2, 2, False, hopper)):
    made[f"small {x} {shared} {weights}"] = compiled(
        w8_small._small_kernel, dict(types, x=x), 1, PARTS=parts, shape=shape_of(shared, weights),
        tile=w8_tile_config.W8TileConfig(blocks, 1, 2), PDL=hopper)
for x, rows, shared in (("*bf16", 64, False),):
    config = w8_tile_config.tiled_config(rows, 4608, 3584, 132)._replace(splits=2)
    made[f"tiled {x}"] = compiled(
        w8_tiled._tiled_kernel, dict(types, x=x), config.warps, MP=rows, tile=config, shape=shape_of(shared),
        FOUR=not hopper, PDL=hopper)
one = w8_tile_config.gemv_config(4608, 3584, 132)
made["gemv"] = compiled(
    w8_gemv._gemv_kernel, dict(types, x="*bf16"), one.warps, shape=shape_of(True), tile=one, PDL=hopper)
made["mx gemv"] = compiled(w8_gemv._gemv_kernel, words, one.warps, shape=mx, tile=one, PDL=hopper)
made["mx small"] = compiled(
    w8_small._small_kernel, words, 1, PARTS=1, shape=mx, tile=w8_tile_config.W8TileConfig(1, 1, 2), PDL=hopper)
made["mx tiled"] = compiled(
    w8_tiled._tiled_kernel, words, config.warps, MP=64, tile=config, shape=mx, FOUR=not hopper, PDL=hopper)
made["dequantize"] = compiled(
    w8_dequant._dequantize_kernel, dict(types, out="*bf16"), 4, shape=shape_of(True), ROWS=4, COLUMNS=1024)
if cc >= 89:
    pair = dict(types, x="*fp8e4nv", factors="*fp32", codes="*fp8e4nv", out="*bf16", N="constexpr")
    made["blocks"] = compiled(
        gemm_fp8._blocks_kernel, pair, 8, N=4608, K=3584, BM=128, BN=128, STAGES=3)
    rows = dict(x="*bf16", codes="*u8", scales="*fp32")
    made["rows"] = compiled(gemm_fp8._rows_kernel, rows, 4, K=3584, RUN=1024)
ptx = made["small *bf16 True False"].asm["ptx"]
LOOP = r"(\$L__BB\d+_\d+):((?:(?!\$L__BB).)*mma(?:(?!\$L__BB).)*)bra\s+\1;"
turn = re.search(LOOP, ptx, re.S)[2]
grouped = re.search(LOOP, made["mx small"].asm["ptx"], re.S)[2]
tiles = made["tiled *bf16"].asm["ttgir"]
turns = tiles[tiles.index("scf.for"):tiles.index("scf.yield")]
print(json.dumps(dict(
    shared={name: one.metadata.shared for name, one in made.items()},
    eights=[name for name, one in made.items() if "e4m3" in one.asm["ptx"]],
    grouped=[grouped.count(part) for part in ("mma.sync", ".shared", "shfl", "prmt.b32")],
    products=turn.count("mma.sync"), through=turn.count(".shared"), spread=turn.count("prmt.b32"),
    wide=len(re.findall(r"ld\.global[^;]*\.v4\.b32", turn)),
    dots=turns.count("ttng.warp_group_dot "), waits=turns.count("ttng.warp_group_dot_wait "))))
"""


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_gemms_compile_and_fit_shared_memory(capability: int, compiler: KernelCompiler) -> None:
    found = compiler.results(f"fp8_int8_{capability}", SCRIPT, str(capability))
    assert max(found["shared"].values()) <= SHARED_BYTES[capability]
    # the conversions and the tensor cores for FP8 begin with 8.9
    assert bool(found["eights"]) == (capability >= 89)
    # 128 columns of 16 features: eight products of 16, four wide loads of weights and four of x, each
    # word spread by two permutations, nothing through shared memory
    assert (found["products"], found["wide"], found["through"]) == (8, 8, 0)
    assert found["spread"] == 2 * 16
    # MXFP8 the same: its exponents are loaded where they are needed, and multiply for nothing
    assert found["grouped"] == [8, 0, 0, 2 * 16]
    if capability == 90:
        assert found["dots"] == 1
        assert found["waits"] == found["dots"]
