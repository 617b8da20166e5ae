"""Compiled inner loops of the int4 gemms, without a GPU.

Triton's choice of layouts changes between versions; a shuffle or a trip through shared memory in this loop
would cost a third of the speed."""

from typing import Any

import pytest

from tests.support.compiled_kernels import KernelCompiler

SCRIPT = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from localchat_cuda.kernels.int4 import gemm_few as w4_few, gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import Int4FewRows
TYPES = dict(x="*i8", factors="*fp32", codes="*i8", scale_zeros="*i32", out="*fp32", squares="*fp32",
             eps="fp32", M="i32")

def compiled(kernel, types, warps, **values):
    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if "*" in types.get(n, "")})
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=dict(num_warps=warps)).asm

def counted(group):
    few = Int4FewRows(4608, 3584, False, 4, group, TileConfig(2, 1, 1, 14), False, True)
    ptx = compiled(w4_few._few_kernel, TYPES, 1, few=few, PDL=True)["ptx"]
    return dict(
        products=ptx.count("mma.sync.aligned.m16n8k32"), shared=ptx.count(".shared"),
        wait=ptx.count("griddepcontrol.wait"), wide=ptx.count("v4.b32") + ptx.count("v4.u32"),
        unpacked=ptx.count("0x0f0f0f0f") + ptx.count("0xf0f0f0f0"))
config = w4_tiled.TiledGemmConfig(TileConfig(1, 8, 3, 1), 128)
many = w4_tiled.ManyRows(4608, 3584, 128, config, False, False, False, 128, True)
tiled = compiled(
    w4_tiled._tiled_kernel, dict(TYPES, x="*fp16", codes="*i16"), 8, many=many, PDL=True)["ttgir"]
loop = tiled[tiled.index("scf.for"):tiled.index("scf.yield")]
print(json.dumps(dict(
    groups={group: counted(group) for group in (32, 64, 128)},
    dots=loop.count("ttng.warp_group_dot "), waits=loop.count("ttng.warp_group_dot_wait "))))
"""


@pytest.fixture(scope="module")
def found(compiler: KernelCompiler) -> dict[str, Any]:
    results: dict[str, Any] = compiler.results("int4", SCRIPT)
    return results


@pytest.mark.parametrize("group", ["32", "64", "128"])
def test_int8_loop_has_wide_loads_and_no_shared_memory(found: dict[str, Any], group: str) -> None:
    # two chunks are in the code, the peeled one and the loop's, each of two row blocks; a block
    # is four products of 32 k, two wide loads and eight words a lane, unpacked by two ANDs each
    made = found["groups"][group]
    assert made["products"] == 2 * 2 * 4
    assert made["shared"] == 0
    assert made["wait"] == 1
    assert made["wide"] >= 2 * 2 * 2
    assert made["unpacked"] == 2 * 2 * 8 * 2


def test_tiled_loop_waits_for_products_before_overwriting_weights(
    found: dict[str, Any],
) -> None:
    assert found["dots"] == 4
    assert found["waits"] == found["dots"]
