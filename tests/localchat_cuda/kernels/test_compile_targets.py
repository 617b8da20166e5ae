"""Kernels of newer architectures compile for every supported GPU and fit its shared memory, without a GPU.

Windows, soft caps, heads of 256 and 512 columns, latents, partial rotations, post-norms, GELU; the int4 gemms
on cards that no test has run them on."""

import json

import pytest

from tests.support.compiled_kernels import KernelCompiler

SHARED_BYTES = {86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Most that a program may take, by compute capability; 89 is as 86, 103 as 100, and 80 has more."""
WANTED = {
    86: {
        *("ggml few 1", "ggml few 2", "ggml few 4"),
        *(
            "ggml tiles",
            "ggml dequantized",
            "int8 128",
            "fp16 128",
            "tiled 32 False 128",
        ),
        *("experts int4 many True 32", "experts int4 few False 32", "decode fused"),
        *("decode latents 16", "decode latents 32", "prefill latents"),
    },
    90: {
        *("decode 256 32", "decode 256 64", "decode 512 64", "decode fused"),
        "prefill 512",
        "decode latents 32",
        "prefill latents",
        *("delta net scan", "mamba scan"),
    },
    100: {
        *("decode latents 32", "prefill latents"),
        *("decode 256 32", "decode 256 64", "decode 512 64"),
        *("prefill 256", "prefill 512", "delta net chunks", "delta net scan"),
        *("mamba scan", "mamba gate"),
        *("ggml tiles", "tiled 128 True 128", "experts float many True"),
        "experts int4 many True 32",
    },
}
"""Most kernels are compiled for 120, elsewhere those that may differ. 86 has the same tensor cores and as much
memory, but may lack instructions that were written by hand. 90 and 100 have tensor cores of their own, whose
operands take other memory: of each kind the form that takes the most. On 90, tests on a GPU run the others."""
ONLY_FOR_86 = {"ggml few 2", "ggml few 4", "int8 128", "fp16 128", "decode latents 16"}
"""Variants that are not compiled again for 120, which has the instructions and the memory of 86.

Another variant of each of these kernels is compiled for 120."""
SCRIPT = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from localchat_cuda.kernels.attention import decode as decode_attention, prefill as prefill_attention
from localchat_cuda.kernels.attention import decode_fused
from localchat_cuda.kernels import activation, latent, permute_columns, qk_norm, rms_norm, rms_norm_post, rope
from localchat_cuda.kernels.attention.reference import AttentionBatch, AttentionShape
from localchat_cuda.kernels.rope import Cache
from localchat_cuda.kernels.sampling import rescore
from localchat_cuda.kernels.sampling.state import Draws, Masking, SamplingTensors
from localchat_cuda.kernels import short_conv
from localchat_cuda.kernels.delta_net import chunked, gated_norm, prepare, recurrent
from localchat_cuda.kernels.delta_net import shapes as delta_shapes
from localchat_cuda.kernels.experts import blocks, choice, gemm_float, gemm_int4_few, gemm_int4_many
from localchat_cuda.kernels.ggml import gemm_int8 as ggml_int8, gemm_tiles as ggml_tiles, pack as ggml_pack
from localchat_cuda.kernels.ggml import tile_ops as ggml_tile_ops
from localchat_cuda.kernels.int4 import activations as w4_activations, gemm_few, gemm_tiled
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import Int4FewRows
from localchat_cuda.kernels.launch import Traits

cc, wanted, skipped, found = int(sys.argv[1]), set(json.loads(sys.argv[2])), set(json.loads(sys.argv[3])), {}

def compiled(name, kernel, types, warps, cc, **values):
    if name in skipped or (wanted and name not in wanted):
        return
    names = kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    attributes = {}
    for i, n in enumerate(names):
        kind = types.get(n, "")
        if isinstance(kind, tuple):  # a named tuple of tensors
            attributes |= {(i, j): aligned for j, part in enumerate(kind) if "*" in part}
        elif "*" in kind:
            attributes[i,] = aligned
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()}, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=dict(num_warps=warps))
    found[name] = made.metadata.shared

pdl = cc >= 90
index = {n: "*i32" for n in ("starts", "counts", "lengths", "slots", "tables", "tiles", "positions")}
index["batch"] = AttentionBatch(*["*i32"] * 5)
whole = {n: "i32" for n in ("T", "M", "width", "page_stride", "mark_stride")}
paged = dict(q="*bf16", k="*bf16", v="*bf16", cache=Cache("*bf16", "*bf16", "*bf16", "i32", "i32"), out="*bf16",
             partials=decode_attention.Partials("*fp32", "*fp32", "*fp32"), sinks="*fp32", scale="fp32",
             **index, **whole)
def ruled(d, config):
    return AttentionShape(16, 8, d, 64, config.tile, config.stages, 1024, 50.0, 0, 0)

gpu = Traits.of((cc // 10, cc % 10), 132)
for d in (256, 512):
    for rows in (32, 64) if d == 256 else (64,):
        config = decode_attention.tile_config_for(d, rows, roomy=gpu.roomy)
        compiled(f"decode {d} {rows}",
            decode_attention._decode_kernel, paged, config.warps, cc, shape=ruled(d, config), ROWS=rows,
            ROW_BLOCKS=1, ROOMY=True, PDL=pdl)
    config = prefill_attention.tile_config_for(d)
    compiled(f"prefill {d}",
        prefill_attention._prefill_kernel, paged, config.warps, cc, shape=ruled(d, config), M=config.rows,
        SUNK=True)
fused = dict(qkv="*fp32", bias="*bf16", angles="*fp32", q_norm="*bf16", k_norm="*bf16", eps="fp32",
             row_stride="i32", part_stride="i32", **paged)
compiled("decode fused",
    decode_fused._fused_kernel, fused, 4, cc, QUERIES=tl.bfloat16, PDL=pdl, shape=decode_fused.FusedShape(
        H=32, J=4, D=128, R=128, P=64, S=4, ROWS=16, BIAS=True, NORM=True, WINDOW=1024, SOFT_CAP=50.0))
def latent_shape(config):
    return AttentionShape(16, 1, 512, 64, config.tile, config.stages, 0, 0.0, 0, 64)

for rows in (16, decode_attention.LATENT_ROWS):
    config = decode_attention.latent_tile_config_for(512, rows, 9, gpu)
    compiled(f"decode latents {rows}",
        decode_attention._decode_kernel, paged, config.warps, cc, shape=latent_shape(config), ROWS=rows,
        ROW_BLOCKS=1, ROOMY=True, PDL=pdl)
config = prefill_attention.LATENTS if gpu.roomy else prefill_attention.tile_config_for(512 + 64)
compiled("prefill latents",
    prefill_attention._prefill_kernel, paged, config.warps, cc, shape=latent_shape(config), M=config.rows,
    SUNK=False)
rows_of = dict(q="*fp32", latents="*fp32", gain="*bf16", table="*fp32", plain="*bf16", queries="*bf16",
               pages="*bf16", y="*fp32", out="*bf16", eps="fp32", **index, **whole)
compiled("latent store",
    latent._store_kernel, rows_of, 1, cc, ROOMY=False, PDL=pdl, shape=latent.LatentShape(
        H=20, N=192, D=512, E=64, Q_COLUMNS=5120, COLUMNS=1344, P=64, S=3, SL=1, HEADS=1, NEIGHBOURS=True))
compiled("latent norm",
    latent._norm_kernel, rows_of, 4, cc, Q=768, COLUMNS=1344, S=3, ROOMY=False, PDL=pdl)
settings = SamplingTensors("*fp32", "*i32", "*i64", *["*i32"] * 3, "*fp32", "*i32")
rescored = dict(
    logits="*fp32", states="*bf16", weight="*bf16", bounds="*fp32", draws=Draws("*i32", "*i32", "*i32"),
    slots="*i32", settings=settings, masking=Masking("*i32", "*i32"), counts="*i32", upper="*fp32",
    peaks="*fp32", floors="*fp32", scratch=rescore.RescoreScratch("*fp32", "*fp32"), V="i32", words="i32",
    width="i32", S="i32", P="i32", M="i32")
compiled("bounds",
    rescore._bound_kernel, rescored, 4, cc, K=3584, BLOCK=1024, GROUP=64, MASKED=True, TALLIED=True, PDL=pdl)
compiled("floors", rescore._floor_kernel, rescored, 8, cc, S_POW2=4096, PDL=pdl)
for rows in (1, 4):
    compiled(f"rescore {rows}",
        rescore._rescore_kernel, rescored, 4, cc, N=152064, K=3584, MP=rows, ROWS=min(rows, 2),
        TOKENS=128, BN=4, BK=512, UNROLL=4, PDL=pdl)
states = dict(
    x="*bf16", qkvz="*fp32", ba="*fp32", inputs="*bf16", eps="fp32", T="i32", N="i32", chunks="*i32",
    skip="*fp32", keys="*bf16", values="*bf16", sums="*fp32", z="*fp32", weight="*bf16",
    weights=delta_shapes.DeltaNetWeights("*bf16", *["*fp32"] * (len(delta_shapes.DeltaNetWeights._fields) - 1)),
    tokens=delta_shapes.Tokens("*i32", "*i32", "*i32"), source=delta_shapes.Source("*fp32", "i32", "i32"),
    prepared=delta_shapes.Prepared("*bf16", "*fp32", "*fp32"),
    states=delta_shapes.LayerStates("*fp32", "*bf16"),
    **dict.fromkeys(("part_stride", "row_stride", "ba_part_stride", "ba_row_stride"), "i32"), **index)
layer = delta_shapes.LayerStates(
    torch.empty(1, 32, 128, 128, device="meta"), torch.empty(1, 3, 2 * 16 * 128 + 32 * 128, device="meta"))
nets = {
    name: delta_shapes.DeltaShape.of(layer, 4, delta=name == "delta net") for name in ("delta net", "mamba")}
for rows, sums in ((1, 4), (16, 1)):
    for name, net in nets.items():
        compiled(f"{name} prepare {rows}",
            prepare._prepare_kernel, dict(states, out=states["prepared"]), 1 if rows == 1 else 4, cc, BT=rows,
            ROOMY=rows > 1, PDL=pdl, shape=net._replace(P=sums), P_BA=sums, BIASED=not net.DELTA)
    compiled(f"delta net gate {rows}",
        gated_norm._gate_kernel, dict(states, out="*fp32"), 1 if rows == 1 else 4, cc, H=32, V=128, W=128,
        P=sums, NORM=True, GROUPS=False, ROWS=rows, ROOMY=rows > 1, PDL=pdl)
states["out"] = "*fp32"
for name, net in nets.items():
    compiled(f"{name} recurrent",
        recurrent._recurrent_kernel, states, 4, cc, shape=net, ROOMY=False, PDL=pdl)
    compiled(f"{name} scan",
        chunked._scan_kernel, states, 4, cc, B=64, STAGES=chunked.stages_of(cc), shape=net._replace(P=1))
compiled("delta net chunks", chunked._chunk_kernel, states, 4, cc, B=64, shape=nets["delta net"])
compiled("mamba gate",
    gated_norm._gate_kernel, states, 8, cc, H=1, V=8192, W=8192, P=1, NORM=True, GROUPS=True, ROWS=1,
    ROOMY=True, PDL=pdl)
states |= dict(product="*fp32", conv="*bf16", inputs="*bf16", out="*bf16")
sizes = dict(C=2048, TAPS=3, P=4, COLUMNS=128)
compiled("short conv", short_conv._conv_kernel, states, 4, cc, ROWS=16, **sizes)
compiled("short conv inputs", short_conv._store_kernel, states, 4, cc, **sizes)
planes = ggml_tile_ops.Planes("*i8", "*i8", "*i64", "*i32")
held = dict(x="*fp16", factors="*fp32", weight=planes, out="*fp32", squares="*fp32", eps="fp32", M="i32",
            N="i32", C="i32", column="i32")
formats = {name: ggml_tile_ops.form_of(ggml_pack.empty(name, 16, 3584, torch.device("meta")), gpu)
           for name in ("Q3_K", "Q8_0", "Q5_K", "NVFP4")}
for rows, form in ((1, "Q8_0"), (2, "Q5_K"), (4, "Q3_K")):
    compiled(f"ggml few {rows}",
        ggml_int8._few_kernel, dict(held, x="*i8"), 2, cc, form=formats[form], PDL=pdl,
        few=ggml_int8.BlockFewRows(3584, 4, rows, TileConfig(1, 2, 1, 1), True))
compiled("ggml tiles",
    ggml_tiles._tiles_kernel, held, 4, cc, K=3584, form=formats["Q8_0"], WHOLE=cc // 10 == 9, PDL=pdl,
    config=gemm_tiled.TiledGemmConfig(TileConfig(2, 4, 3, 1), 64))
compiled("ggml dequantized",
    ggml_tiles._dequantize_kernel, held, 4, cc, K=3584, TILES=4, form=formats["Q5_K"])
numbered = dict(held, weight=planes._replace(scales="*fp32"))
compiled("nvfp4 few",
    ggml_int8._few_kernel, dict(numbered, x="*i8"), 2, cc, form=formats["NVFP4"], PDL=pdl,
    few=ggml_int8.BlockFewRows(3584, 4, 1, TileConfig(1, 2, 1, 1), True))
compiled("nvfp4 tiles",
    ggml_tiles._tiles_kernel, numbered, 4, cc, K=3584, form=formats["NVFP4"], WHOLE=cc // 10 == 9, PDL=pdl,
    config=gemm_tiled.TiledGemmConfig(TileConfig(2, 4, 3, 1), 64))
turning = dict(qkv="*fp32", bias="*bf16", table="*fp32", q_norm="*fp32", k_norm="*fp32", eps="fp32",
               exponents="*bf16", **{**paged, **whole})
for d, r in ((256, 256), (128, 96)):
    compiled(f"rope {d} {r}",
        rope._rope_kernel, turning, 1, cc, ROOMY=False, PDL=pdl, shape=rope.RopeShape(
            H=8, J=4, D=d, R=r, P=64, S=4, BIAS=False, NORM=d == r, NORM_V=False, STORED=2, HEADS=1,
            CODED=False))
normed = dict(y="*fp32", source="*fp32", residual="*fp32", post="*fp32", weight="*fp32", out="*bf16",
              sums="*fp32", squares="*fp32", factors="*fp32", ids="*i32", order="*i32", eps="fp32",
              scale="fp32", factor="fp32", shift="fp32", T="i32", M="i32",
              words="*i64", addresses="*i64", counts="*i32", room="i32")
compiled("post-norm",
    rms_norm._norm_kernel, dict(normed, packed="*fp16", own="*fp32"), 8, cc, H=3840, H_PACKED=0, S=1,
    GROUP=0, BIASED=False, POST=True, NORM=True, ROOMY=True, PDL=pdl)
compiled("norm of projections",
    qk_norm._normalize_kernel, dict(turning, out="*fp32"), 8, cc, Q=5120, K=1024, BLOCK=8192, S=4,
    ROOMY=True, PDL=pdl)
compiled("sums",
    rms_norm_post._sums_kernel, normed, 1, cc, H=3840, S=14, ROWS=16, ROOMY=True,
    PDL=pdl)
for form, x in ((0, "*i8"), (2, "*fp16")):
    compiled(f"prepare {form}",
        rms_norm_post._prepare_kernel, dict(normed, x=x), 1, cc, H=3840, MQ=8, FORMAT=form,
        ROWS=4 if form else 1, ORDER=form == 0, PDL=pdl, GROUP=128)
compiled("merge",
    decode_attention._merge_kernel, dict(paged, out="*i8", factors="*fp32"), 1, cc, H=28,
    D=128, SUNK=True, SPLITS=4, MQ=4, FORMAT=0, ROOMY=False,
    PDL=pdl, GROUP=32)
for mode, n in (("norm", 3584), ("act_and_mul", 7168)):
    compiled(f"{mode} in order",
        w4_activations._prepare_kernel, dict(normed, x="*i8"), 1, cc, N=n, K=3584, MQ=4, S=4, ROOMY=False,
        MODE=w4_activations._MODES[mode], FORMAT=0, ROWS=1, GELU=False, ORDER=True, PDL=pdl, GROUP=64,
        RANK=0, RANKS=1)
compiled("norm over ranks",
    w4_activations._prepare_kernel, dict(normed, x="*fp16"), 1, cc, N=3584, K=3584, MQ=16, S=4, ROOMY=False,
    MODE=1, FORMAT=1, ROWS=1, GELU=False, ORDER=False, PDL=pdl, GROUP=128, RANK=1, RANKS=2)
compiled("wide act_and_mul",
    w4_activations._prepare_kernel, dict(normed, x="*i8"), 1, cc, N=30720, K=15360, MQ=4, S=1, ROOMY=False,
    MODE=2, FORMAT=0, ROWS=1, GELU=True, ORDER=False, PDL=pdl, GROUP=128, RANK=0, RANKS=1)
acted = dict(gate_up="*bf16", other="*bf16", out="*bf16", T="i32", stride="i32")
for name, warps, shape in (
        ("act_and_mul", 4, dict(F=15360, S=2, OTHER=False, SQUARE=False, BLOCK=1024)),
        ("squared", 4, dict(F=21504, S=1, OTHER=False, SQUARE=True, BLOCK=1024)),
        ("act and another", 4, dict(F=256, S=1, OTHER=True, SQUARE=False, BLOCK=1024))):
    compiled(name,
        activation._act_and_mul_kernel, acted, warps, cc, GELU=True, ROOMY=True, PDL=pdl, **shape)
compiled("permute",
    permute_columns._gather_kernel, dict(x="*bf16", order="*i32", out="*bf16", T="i32"), 4, cc, K=3584,
    ROWS=permute_columns._ROWS, BLOCK=permute_columns._BLOCK)
types = dict(x="*fp16", factors="*fp32", codes="*i16", scale_zeros="*i32", out="*fp32", squares="*fp32",
             eps="fp32", M="i32")
for group in (128, 32):  # of two blocks, smaller groups compile long; 64 takes the branches of both
    compiled(f"int8 {group}",
        gemm_few._few_kernel, dict(types, x="*i8", codes="*i8"), 2, cc, PDL=pdl,
        few=Int4FewRows(37888, 3584, False, 4, group, TileConfig(1, 2, 1, 1), True, True))
    padded, blocks_of_warp = (16, 2) if group == 128 else (8, 1)
    compiled(f"fp16 {group}",
        gemm_few._few_kernel, types, 2, cc, PDL=pdl,
        few=Int4FewRows(37888, 3584, True, padded, group, TileConfig(blocks_of_warp, 2, 1, 1), True, True))
for tile, warps, fused, group in (
        (32, 4, False, 128), (128, 8, False, 128), (128, 8, True, 128), (64, 4, True, 32)):
    config = gemm_tiled.TiledGemmConfig(TileConfig(1 + fused, warps, 3, 1), tile)
    compiled(f"tiled {tile} {fused} {group}",
        gemm_tiled._tiled_kernel, dict(types, out="*fp16" if fused else "*fp32"), warps, cc, PDL=pdl,
        many=gemm_tiled.ManyRows(37888, 3584, group, config, True, fused, False, group, True))
few, none = dict(SPLITS=16, WIDTH=2048), dict(SPLITS=0, WIDTH=1)
def routed(**fields):
    shared = dict(K=2048, SPLITS=16, CHOSEN=8, NORMALIZED=True, BIASED=True)
    return choice.RouterConstants(**shared, **fields)

chosen = dict(
    choices=choice.Choices("*i32", "*fp32"), ids="*i32", slots="*i32", owners="*i32", scales="*fp32",
    logits="*fp32",
    squares="*fp32", eps="fp32", P="i32", T="i32", B="i32", y="*fp32", residual="*fp32", gain="*bf16",
    added="*fp32", weight="*bf16", x="*bf16", out="*bf16", bias="*fp32",
    y_bias="*bf16", arrivals="*i32")
compiled("experts add",
    choice._few_logits_kernel, dict(chosen, x="*fp16"), 4, cc, KX=2176, PARTS=8, M=8, BK=128, GROUP=128,
    Y_BIASED=True, CHOOSE=True, PDL=pdl, router=routed(R=128, E=127, C=12, SIGMOID=True, SCALE=1.8))
compiled("experts choose",
    choice._choose_kernel, chosen, 1, cc, FEW=True, PDL=pdl,
    router=routed(R=512, E=512, C=8, SIGMOID=False, SCALE=1.0))
compiled("experts sort",
    blocks._sort_kernel, chosen, 4, cc, X=128, X_POW2=128, M=64, CHUNK=1024, PDL=pdl)
def pairs(tile, gated, n, k, m, **fields):
    common = dict(C=8, N=n, K=k, M=m, P_POW2=0, GATED=gated, GELU=False, SQUARE=False, BIASED=True, LIMIT=7.0,
                  GROUP=0, E2M1=False, INTO=128, ASM=True, **none)
    inner = n // (1 + gated)
    return blocks.PairConstants(**{"F": inner, **common, **fields}, tile=tile)

tile = gemm_float.tile_for(2048, gated=True)
compiled("experts float few",
    gemm_float._float_kernel, chosen, tile.warps, cc, PDL=pdl,
    shape=pairs(tile, True, 1536, 2048, 16, P_POW2=1, **few))
most = 64
for gated, n, k in ((True, 1536, 2048), (False, 2048, 768)):
    tile = gemm_float.tile_for(k, gated=gated)
    compiled(f"experts float many {gated}",
        gemm_float._float_kernel, chosen, tile.warps, cc, PDL=pdl,
        shape=pairs(tile, gated, n, k, most, GELU=gated, SQUARE=not gated, BIASED=False, LIMIT=0.0))
    packed = dict(chosen, x="*fp16", codes="*i16", scale_zeros="*i32", out="*fp16")
    tile = gemm_int4_many.tile_for(most, n // (1 + gated), gated=gated)
    for group in (128, 32):
        form = dict(GROUP=group, E2M1=group == 32, INTO=group)
        compiled(f"experts int4 many {gated} {group}",
            gemm_int4_many._many_kernel, packed, tile.warps, cc, PDL=pdl,
            many=pairs(tile, gated, n, k, most, **form))
        # Deeper, and with more blocks, it takes no more memory, and up to a minute to compile.
        if gated != (group == 128):
            continue  # both groups and both products are compiled, not each with each
        few_tile = gemm_int4_few.tile_for(8, n // (1 + gated), k, gated=gated, e2m1=False)
        few_tile = few_tile._replace(depth=1, blocks=min(few_tile.blocks, 2))
        held = few if gated else none
        own = 8 if group == 128 else 2
        compiled(f"experts int4 few {gated} {group}",
            gemm_int4_few._few_kernel, packed, few_tile.warps, cc, PDL=pdl,
            few=pairs(few_tile, gated, n, k, own, P_POW2=64, **form, **held))
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_kernels_compile_and_fit_shared_memory(capability: int, compiler: KernelCompiler) -> None:
    wanted = WANTED.get(capability, set())
    skipped = set() if wanted else ONLY_FOR_86
    lists = (json.dumps(sorted(names)) for names in (wanted, skipped))
    found: dict[str, int] = compiler.results(
        f"targets_{capability}", SCRIPT, str(capability), *lists
    )
    assert found.keys() == wanted or (len(found) == 67 and not wanted)
    wide = {name: held for name, held in found.items() if held > SHARED_BYTES[capability]}
    assert not wide, f"of {SHARED_BYTES[capability]} bytes"
