"""Kernels of newer architectures compile for every supported GPU and fit its shared memory, without a GPU.

Windows, soft caps, heads of 256 and 512 columns, latents, partial rotations, post-norms, GELU; the int4 gemms
on cards that no test has run them on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
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
        *("sparse", "altup predict", "altup correct"),
        *("decode 256 32", "decode 256 64", "decode 512 64", "decode fused"),
        "prefill 512",
        "decode latents 32",
        "prefill latents",
        "delta net scan",
    },
    100: {
        *("decode latents 32", "prefill latents"),
        *("decode 256 32", "decode 256 64", "decode 512 64"),
        *("prefill 256", "prefill 512", "delta net chunks", "delta net scan"),
        *("ggml tiles", "tiled 128 True 128", "experts float many True"),
        "experts int4 many True 32",
    },
}
"""All kernels are compiled for 120, elsewhere those that may differ. 86 has the same tensor cores and as much
memory, but may lack instructions that were written by hand. 90 and 100 have tensor cores of their own, whose
operands take other memory: of each kind the form that takes the most. On 90, tests on a GPU run the others."""
SCRIPT = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from localchat_cuda.kernels.attention import decode as decode_attention, prefill as prefill_attention
from localchat_cuda.kernels.attention import decode_fused
from localchat_cuda.kernels import activation, altup, latent, permute_columns, qk_norm, rms_norm_post, rope
from localchat_cuda.kernels.sampling import rescore
from localchat_cuda.kernels.delta_net import chunked, gated_norm, prepare, recurrent
from localchat_cuda.kernels.experts import blocks, choice, gemm_float, gemm_int4_few, gemm_int4_many
from localchat_cuda.kernels.ggml import gemm_int8 as ggml_int8, gemm_tiles as ggml_tiles, pack as ggml_pack
from localchat_cuda.kernels.int4 import activations as w4_activations, gemm_fp16, gemm_int8, gemm_tiled
from localchat_cuda.kernels.launch import Traits

cc, wanted, found = int(sys.argv[1]), set(sys.argv[2:]), {}

def compiled(name, kernel, types, warps, cc, **values):
    if wanted and name not in wanted:
        return
    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if "*" in types.get(n, "")})
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=dict(num_warps=warps))
    found[name] = made.metadata.shared

pdl = cc >= 90
index = {n: "*i32" for n in ("starts", "counts", "lengths", "slots", "tables", "tiles", "positions")}
whole = {n: "i32" for n in ("T", "M", "width", "page_stride", "mark_stride")}
paged = dict(q="*bf16", k="*bf16", v="*bf16", marks="*bf16", out="*bf16", sums="*fp32", peaks="*fp32",
             masses="*fp32", sinks="*fp32", scale="fp32", **index, **whole)
rules = dict(WINDOW=1024, SOFT_CAP=50.0, CODED=0, E=0)
gpu = Traits.of((cc // 10, cc % 10), 132)
for d in (256, 512):
    for rows in (32, 64) if d == 256 else (64,):
        config = decode_attention.tile_config_for(d, rows, roomy=gpu.roomy)
        compiled(f"decode {d} {rows}",
            decode_attention._decode_kernel, paged, config.warps, cc, H=16, J=8, D=d, D_POW2=d, P=64,
            TILE=config.tile, ROWS=rows, ROW_BLOCKS=1, STAGES=config.stages, ROOMY=True, PDL=pdl, **rules)
    config = prefill_attention.tile_config_for(d)
    compiled(f"prefill {d}",
        prefill_attention._prefill_kernel, paged, config.warps, cc, H=16, J=8, D=d, D_POW2=d, P=64,
        M=config.rows, TILE=config.tile, STAGES=config.stages, SUNK=True, **rules)
fused = dict(qkv="*fp32", bias="*bf16", angles="*fp32", q_norm="*bf16", k_norm="*bf16", eps="fp32",
             row_stride="i32", part_stride="i32", **paged)
compiled("decode fused",
    decode_fused._fused_kernel, fused, 4, cc, H=32, J=4, D=128, HALF=64, D_POW2=128, R=128, P=64, S=4,
    ROWS=16, BIAS=True, NORM=True, WINDOW=1024, SOFT_CAP=50.0, QUERIES=tl.bfloat16, PDL=pdl)
plain = dict(H=16, J=1, D=512, D_POW2=512, E=64, P=64, WINDOW=0, SOFT_CAP=0.0, CODED=0)
for rows in (16, decode_attention.LATENT_ROWS):
    config = decode_attention.latent_tile_config_for(512, rows, 9, gpu)
    compiled(f"decode latents {rows}",
        decode_attention._decode_kernel, paged, config.warps, cc, TILE=config.tile, ROWS=rows, ROW_BLOCKS=1,
        STAGES=config.stages, ROOMY=True, PDL=pdl, **plain)
config = prefill_attention.LATENTS if gpu.roomy else prefill_attention.tile_config_for(512 + 64)
compiled("prefill latents",
    prefill_attention._prefill_kernel, paged, config.warps, cc, M=config.rows, TILE=config.tile,
    STAGES=config.stages, SUNK=False, **plain)
rows_of = dict(q="*fp32", latents="*fp32", gain="*bf16", table="*fp32", plain="*bf16", queries="*bf16",
               pages="*bf16", y="*fp32", out="*bf16", eps="fp32", **index, **whole)
compiled("latent store",
    latent._store_kernel, rows_of, 1, cc, H=20, N=192, N_POW2=256, D=512, E=64, Q_COLUMNS=5120, COLUMNS=1344,
    P=64, S=3, S_POW2=4, SL=1, SL_POW2=1, HEADS=1, NEIGHBOURS=True, ROOMY=False, PDL=pdl)
compiled("latent norm",
    latent._norm_kernel, rows_of, 4, cc, Q=768, Q_POW2=1024, COLUMNS=1344, S=3, S_POW2=4, ROOMY=False, PDL=pdl)
rescored = dict(
    logits="*fp32", states="*bf16", weight="*bf16", bounds="*fp32", rows="*i32", slots="*i32",
    positions="*i32", floats="*fp32", top_k="*i32", keys="*i64", bias_counts="*i32", bias_ids="*i32",
    bias_values="*fp32", masks="*i32", mask_rows="*i32", counts="*i32", upper="*fp32", peaks="*fp32",
    floors="*fp32", V="i32", words="i32", width="i32", S="i32", P="i32", M="i32")
compiled("bounds",
    rescore._bound_kernel, rescored, 4, cc, K=3584, K_POW2=4096, BLOCK=1024, GROUP=64, MASKED=True,
    TALLIED=True, PDL=pdl)
compiled("floors", rescore._floor_kernel, rescored, 8, cc, S_POW2=4096, PDL=pdl)
for rows in (1, 8):
    compiled(f"rescore {rows}",
        rescore._rescore_kernel, rescored, 4, cc, N=152064, K=3584, MP=rows, ROWS=min(rows, 2),
        TOKENS=128, BN=4, BK=512, UNROLL=4, PDL=pdl)
states = dict(
    x="*bf16", qkvz="*fp32", ba="*fp32", conv="*bf16", decays="*fp32", dt_bias="*fp32", inputs="*bf16",
    offsets="*i32", decay="*fp32", beta="*fp32", matrices="*fp32", out="*bf16", eps="fp32", T="i32", N="i32",
    chunks="*i32", keys="*bf16", values="*bf16", sums="*fp32", z="*fp32", weight="*bf16",
    **dict.fromkeys(("part_stride", "row_stride", "ba_part_stride", "ba_row_stride"), "i32"), **index)
net = dict(G=16, H=32, K=128, V=128)
for rows, sums in ((1, 4), (16, 1)):
    compiled(f"delta net prepare {rows}",
        prepare._prepare_kernel, states, 1 if rows == 1 else 4, cc, W=128, TAPS=4, P=sums, P_BA=sums, H_POW2=32,
        BT=rows, ROOMY=rows > 1, PDL=pdl, **net)
    compiled(f"delta net gate {rows}",
        gated_norm._gate_kernel, states, 1 if rows == 1 else 4, cc, H=32, V=128, W=128, P=sums, NORM=True,
        ROWS=rows, ROOMY=rows > 1, PDL=pdl)
compiled("delta net recurrent",
    recurrent._recurrent_kernel, states, 4, cc, BV=32, TAPS=4, P=4, ROOMY=False, PDL=pdl, **net)
compiled("delta net chunks", chunked._chunk_kernel, states, 4, cc, B=64, **net)
compiled("delta net scan",
    chunked._scan_kernel, states, 4, cc, BV=32, B=64, TAPS=4, P=1, STAGES=chunked.stages_of(cc), **net)
held = dict(x="*fp16", factors="*fp32", low="*i8", high="*i8", out="*fp32", sides="*i64", scales="*i32",
            squares="*fp32", eps="fp32", M="i32", N="i32", C="i32", column="i32")
formats = {name: ggml_int8.constants(ggml_pack.empty(name, 16, 3584, torch.device("meta")))
           for name in ("Q3_K", "Q8_0", "Q5_K")}
for rows, form in ((1, "Q8_0"), (2, "Q5_K"), (4, "Q3_K")):
    compiled(f"ggml few {rows}",
        ggml_int8._few_kernel, dict(held, x="*i8"), 2, cc, MQ=4, R=rows, SPLITS=1, BLOCKS=1, WARPS=2,
        NORM=True, G_POW2=32, ASM=True, PDL=pdl, **formats[form])
compiled("ggml tiles",
    ggml_tiles._tiles_kernel, held, 4, cc, TILE=64, SPLITS=1, TILES=8, STAGES=3, ASM=True, PDL=pdl,
    WHOLE=cc // 10 == 9, **formats["Q8_0"])
compiled("ggml dequantized",
    ggml_tiles._dequantize_kernel, held, 4, cc, TILES=4, ASM=True, **formats["Q5_K"])
turning = dict(qkv="*fp32", bias="*bf16", table="*fp32", q_norm="*fp32", k_norm="*fp32", eps="fp32",
               exponents="*bf16", **{**paged, **whole})
for d, r in ((256, 256), (128, 96)):
    compiled(f"rope {d} {r}",
        rope._rope_kernel, turning, 1, cc, H=8, J=4, D=d, HALF=d // 2, R=r, P=64, S=4, S_POW2=4,
        BIAS=False, NORM=d == r, NORM_V=False, STORED=2, HEADS=1, CODED=False, ROOMY=False, PDL=pdl)
normed = dict(y="*fp32", source="*fp32", residual="*fp32", post="*fp32", weight="*fp32", out="*bf16",
              sums="*fp32", squares="*fp32", factors="*fp32", ids="*i32", order="*i32", eps="fp32",
              scale="fp32", factor="fp32", shift="fp32", T="i32", M="i32")
compiled("post-norm",
    rms_norm_post._row_kernel, normed, 8, cc, H=3840, H_POW2=4096, S=1, NORM=True, ROOMY=True,
    PDL=pdl)
compiled("norm of projections",
    qk_norm._normalize_kernel, dict(turning, out="*fp32"), 8, cc, Q=5120, K=1024, BLOCK=8192, S=4,
    ROOMY=True, PDL=pdl)
compiled("sums",
    rms_norm_post._sums_kernel, normed, 1, cc, H=3840, S=14, ROWS=16, ROOMY=True,
    PDL=pdl)
for form, x in ((0, "*i8"), (2, "*fp16")):
    compiled(f"prepare {form}",
        rms_norm_post._prepare_kernel, dict(normed, x=x), 1, cc, H=3840, G_POW2=32, MQ=8, FORMAT=form,
        ROWS=4 if form else 1, ORDER=form == 0, PDL=pdl, GROUP=128)
compiled("merge",
    decode_attention._merge_kernel, dict(paged, out="*i8", factors="*fp32"), 1, cc, H=28,
    D=128, SUNK=True, SPLITS=4, SPLITS_POW2=4, MQ=4, FORMAT=0, ROOMY=False,
    PDL=pdl, GROUP=32)
for mode, n in (("norm", 3584), ("act_and_mul", 7168)):
    compiled(f"{mode} in order",
        w4_activations._prepare_kernel, dict(normed, x="*i8"), 1, cc, N=n, K=3584, MQ=4, S=4, ROOMY=False,
        MODE=w4_activations._MODES[mode], FORMAT=0, ROWS=1, GELU=False, ORDER=True, PDL=pdl, GROUP=64)
compiled("wide act_and_mul",
    w4_activations._prepare_kernel, dict(normed, x="*i8"), 1, cc, N=30720, K=15360, MQ=4, S=1, ROOMY=False,
    MODE=2, FORMAT=0, ROWS=1, GELU=True, ORDER=False, PDL=pdl, GROUP=128)
acted = dict(gate_up="*bf16", other="*bf16", out="*bf16", cutoff="fp32", T="i32", stride="i32")
for name, warps, shape in (
        ("act_and_mul", 4, dict(F=15360, S=2, OTHER=False, SPARSE=False, BLOCK=1024)),
        ("act and another", 4, dict(F=256, S=1, OTHER=True, SPARSE=False, BLOCK=1024)),
        ("sparse", 16, dict(F=16384, S=1, OTHER=False, SPARSE=True, BLOCK=16384))):
    compiled(name,
        activation._act_and_mul_kernel, acted, warps, cc, GELU=True, ROOMY=True, PDL=pdl, **shape)
streams = dict(
    streams="*fp32", y="*fp32", laurel="*fp32", residual="*fp32", out="*bf16", eps="fp32", T="i32",
    **{name: "*bf16" for name in ("post", "router", "norm", "prediction", "correction", "scale", "gain",
                                  "laurel_post", "first", "second")})
row = dict(H=2048, H_POW2=2048, S=3, ROOMY=False, PDL=pdl)
compiled("altup predict", altup._predict_kernel, streams, 8, cc, A=4, A_POW2=4, **row)
compiled("altup laurel", altup._add_laurel_kernel, streams, 8, cc, SL=1, **row)
compiled("altup correct", altup._correct_kernel, streams, 8, cc, A=4, A_POW2=4, **row)
compiled("permute",
    permute_columns._gather_kernel, dict(x="*bf16", order="*i32", out="*bf16", T="i32"), 4, cc, K=3584,
    ROWS=permute_columns._ROWS, BLOCK=permute_columns._BLOCK)
types = dict(x="*fp16", factors="*fp32", codes="*i16", scale_zeros="*i32", out="*fp32", squares="*fp32",
             eps="fp32", M="i32")
shape = dict(N=37888, K=3584, NORM=True, G_POW2=32, ASM=True, PDL=pdl)
for group in (128, 32):  # of two blocks, smaller groups compile long; 64 takes the branches of both
    compiled(f"int8 {group}",
        gemm_int8._int8_kernel, dict(types, x="*i8", codes="*i8"), 2, cc, MQ=4, SPLITS=1, BLOCKS=1, WARPS=2,
        DEPTH=1, GROUP=group, **shape)
    compiled(f"fp16 {group}",
        gemm_fp16._fp16_kernel, types, 2, cc, MP=16 if group == 128 else 8, SPLITS=1,
        BLOCKS=1 + (group == 128), WARPS=2, DEPTH=1, GROUP=group, **shape)
for tile, warps, fused, group in (
        (32, 4, False, 128), (128, 8, False, 128), (128, 8, True, 128), (64, 4, True, 32)):
    compiled(f"tiled {tile} {fused} {group}",
        gemm_tiled._tiled_kernel, dict(types, out="*fp16" if fused else "*fp32"), warps, cc, TILE=tile,
        SPLITS=1, BLOCKS=1 + fused, WARPS=warps, STAGES=3, FUSED=fused, GELU=False, GROUP=group, INTO=group,
        **shape)
few, none = dict(SPLITS=16, WIDTH=2048), dict(SPLITS=0, WIDTH=1)
biased = dict(BIASED=True, LIMIT=7.0)
chosen = dict(
    ids="*i32", slots="*i32", owners="*i32", scales="*fp32", weights="*fp32", logits="*fp32",
    squares="*fp32", eps="fp32", P="i32", T="i32", B="i32", y="*fp32", residual="*fp32", gain="*bf16",
    added="*fp32", weight="*bf16", x="*bf16", out="*bf16", bias="*fp32",
    y_bias="*bf16", arrivals="*i32")
compiled("experts add",
    choice._few_logits_kernel, dict(chosen, x="*fp16"), 4, cc, R=128, E=127, R_POW2=128, K=2048,
    KX=2176, PARTS=8, M=8, BK=128, SPLITS=16, GROUP=128, CHOSEN=8, C=12, C_POW2=16, NORMALIZED=True,
    SIGMOID=True, SCALE=1.8, Y_BIASED=True, BIASED=True, CHOOSE=True, PDL=pdl)
compiled("experts choose",
    choice._choose_kernel, chosen, 1, cc, R=512, E=512, K=2048, R_POW2=512, SPLITS=16, CHOSEN=8, C=8,
    C_POW2=8, NORMALIZED=True, SIGMOID=False, SCALE=1.0, FEW=True, BIASED=True, PDL=pdl)
compiled("experts sort",
    blocks._sort_kernel, chosen, 4, cc, X=128, X_POW2=128, M=64, CHUNK=1024, PDL=pdl)
tile = gemm_float.tile_for(gated=True)
compiled("experts float few",
    gemm_float._float_kernel, chosen, tile.warps, cc, C=8, N=1536, K=2048, M=16, P_POW2=1,
    BN=tile.features, BK=tile.run, STAGES=tile.stages, GATED=True, GELU=False, PDL=pdl, **few,
    **biased)
most = 64
for gated, n, k in ((True, 1536, 2048), (False, 2048, 768)):
    tile = gemm_float.tile_for(gated=gated)
    compiled(f"experts float many {gated}",
        gemm_float._float_kernel, chosen, tile.warps, cc, C=8, N=n, K=k, M=most, P_POW2=0,
        BN=tile.features, BK=tile.run, STAGES=tile.stages, GATED=gated, GELU=gated, PDL=pdl, **none,
        BIASED=False, LIMIT=0.0)
    packed = dict(chosen, x="*fp16", codes="*i16", scale_zeros="*i32", out="*fp16")
    tile = gemm_int4_many.tile_for(most, n // (1 + gated), gated=gated)
    for group in (128, 32):
        form = dict(GROUP=group, E2M1=group == 32, INTO=group, **biased)
        compiled(f"experts int4 many {gated} {group}",
            gemm_int4_many._many_kernel, packed, tile.warps, cc, C=8, N=n, K=k, TILE=most,
            BLOCKS=tile.blocks, WARPS=tile.warps, STAGES=tile.stages, GATED=gated, ASM=True,
            PDL=pdl, **form)
        # Deeper, and with more blocks, it takes no more memory, and up to a minute to compile.
        if gated != (group == 128):
            continue  # both groups and both products are compiled, not each with each
        few_tile = gemm_int4_few.tile_for(8, n // (1 + gated), k, gated=gated, e2m1=False)
        held = few if gated else none
        compiled(f"experts int4 few {gated} {group}",
            gemm_int4_few._few_kernel, packed, few_tile.warps, cc, C=8, N=n, K=k, M=8, P_POW2=64,
            WARPS=few_tile.warps, DEPTH=1, BLOCKS=min(few_tile.blocks, 2), GATED=gated,
            R=8 if group == 128 else 2, ASM=True, PDL=pdl, **form, **held)
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_kernels_compile_and_fit_shared_memory(capability: int, compiled_before: Path) -> None:
    wanted = WANTED.get(capability, set())
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(compiled_before),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), *wanted],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == wanted or (len(found) == 65 and not wanted)
    wide = {name: held for name, held in found.items() if held > SHARED_BYTES[capability]}
    assert not wide, f"of {SHARED_BYTES[capability]} bytes"
