"""Compiled code of the FP8 KV cache kernels for every supported GPU, without a GPU.

They fit shared memory, pages are loaded through the pipeline, and bytes are decoded in the layout of the
operand."""

from typing import Any

import pytest

from tests.support.compiled_kernels import KernelCompiler

SHARED_BYTES = {80: 101_376, 89: 101_376, 90: 232_448}
"""Most that a program may take, by compute capability; 86 runs what is made for 80 and has less."""
SCRIPT = """
import json, re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from localchat_cuda.kernels.attention import decode as decode_attention, kv_fp8, kv_fp8_dequant
from localchat_cuda.kernels.attention.reference import AttentionBatch, AttentionShape
from localchat_cuda.kernels.rope import Cache
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels import rope

def compiled(kernel, types, warps, cc, **values):
    names = kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    attributes = {}
    for i, n in enumerate(names):
        kind = types.get(n, "")
        if isinstance(kind, tuple):  # a named tuple of tensors and strides
            attributes |= {(i, j): aligned for j in range(len(kind))}
        elif "*" in kind or "stride" in n:
            attributes[i,] = aligned
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()}, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=dict(num_warps=warps))
    whole, ptx = made.asm["ttgir"], made.asm["ptx"]
    loop = whole[whole.index("scf.for"):] if "scf.for" in whole else ""
    loop = loop[:loop.find("scf.yield")]
    return dict(
        shared=made.metadata.shared, copies=loop.count("ttg.async_copy_global_to_local"),
        moved=loop.count("ttg.convert_layout"), stored=loop.count("ttg.local_alloc"),
        loaded=loop.count("ttg.local_load"),
        converted=ptx.count("sub.rn.f16x2"),
        dots=loop.count("ttng.warp_group_dot "), waits=loop.count("ttng.warp_group_dot_wait "))

cc = int(sys.argv[1])
pdl, decoder = cc >= 90, kv_fp8.PACKED
index = {n: "*i32" for n in ("starts", "counts", "lengths", "slots", "tables", "tiles", "positions")}
index["batch"] = AttentionBatch(*["*i32"] * 5)
whole = {n: "i32" for n in ("T", "width", "page_stride", "mark_stride")}
paged = dict(k="*i16", v="*i16", cache=Cache("*i16", "*i16", "*i16", "i32", "i32"),
             partials=decode_attention.Partials("*fp32", "*fp32", "*fp32"), scale="fp32", **index, **whole)
found = {}
for q, d, rows, window, cap in (
    ("*fp16", 128, 16, 0, 0.0), ("*bf16", 256, 64, 1024, 50.0),
)[: 1 if cc == 89 else 2]:  # 89 has the memory of 80, and decodes as 90
    types = dict(paged, q=q, out=q)
    shape = AttentionShape(28, 4, d, 64, 0, 0, window, cap, decoder, 0)
    config = decode_attention.tile_config_for(d, rows, True)
    found[f"decode {d} {rows}"] = compiled(
        decode_attention._decode_kernel, types, config.warps, cc, ROWS=rows, ROW_BLOCKS=1, ROOMY=False, PDL=pdl,
        shape=shape._replace(TILE=config.tile, STAGES=config.stages))
    config = prefill_attention.tile_config_for(d)
    found[f"prefill {d}"] = compiled(
        prefill_attention._prefill_kernel, dict(types, sinks="*fp32"), config.warps, cc, M=config.rows,
        SUNK=True, shape=shape._replace(TILE=config.tile, STAGES=config.stages))
found["plain"] = compiled(
    kv_fp8_dequant._dequantize_kernel, dict(paged, sources="*i32", pool="*bf16", table="*i32"), 4, cc, J=4,
    P=64,
    D=128,
    CODED=decoder)
writing = dict(qkv="*fp32", bias="*bf16", table="*fp32", q_norm="*fp32", k_norm="*fp32", eps="fp32",
               q="*bf16", **{**paged, "cache": Cache("*i16", "*i16", "*u8", "i32", "i32")})
for d, r in ((128, 128), (128, 96)) if cc != 89 else ():
    found[f"rope {d} {r}"] = compiled(
        rope._rope_kernel, writing, 1, cc, ROOMY=False, PDL=pdl, shape=rope.RopeShape(
            H=8, J=4, D=d, R=r, P=64, S=4, BIAS=True, NORM=True, NORM_V=False, STORED=2, HEADS=1, CODED=True))
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=sorted(SHARED_BYTES))
def made(
    request: pytest.FixtureRequest, compiler: KernelCompiler
) -> tuple[int, dict[str, dict[str, Any]]]:
    capability = request.param
    return capability, compiler.results(f"kv_fp8_{capability}", SCRIPT, str(capability))


def test_kernels_fit_shared_memory_and_use_the_packed_decoder(
    made: tuple[int, dict[str, dict[str, Any]]],
) -> None:
    capability, found = made
    assert len(found) == (3 if capability == 89 else 7)
    for name, one in found.items():
        assert one["shared"] <= SHARED_BYTES[capability], name
        reads = not name.startswith("rope")
        assert (one["converted"] > 0) == reads, name


def test_decode_loop_loads_pages_through_the_pipeline(
    made: tuple[int, dict[str, dict[str, Any]]],
) -> None:
    _, found = made
    one = found["decode 128 16"]
    assert one["copies"] == 2
    assert one["moved"] == 0
    # the weights alone are put into shared memory; keys, values, both halves of the query and the
    # weights are read from there
    assert one["stored"] == 1
    assert one["loaded"] == 5


def test_prefill_loop_waits_for_products_before_overwriting_operands(
    made: tuple[int, dict[str, dict[str, Any]]],
) -> None:
    capability, found = made
    one = found["prefill 128"]
    assert one["waits"] == one["dots"] == (4 if capability == 90 else 0)
