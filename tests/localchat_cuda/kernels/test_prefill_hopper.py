"""Hopper prefill attention without a Hopper GPU: emulation, compiled code and dispatch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import prefill_hopper
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import LOG2E
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from localchat_cuda.kernels.launch import Traits
from tests.support import gluon_emulation
from tests.support.attention_scenes import PAGE, close, scene
from tests.support.compiled_kernels import KernelCompiler
from tests.support.gluon_emulation import Boxes, Pointer
from tests.support.tiny_engine_core import without_gpu

ROOT = Path(__file__).parents[3]
NOWHERE = 10_000
"""No page has this number."""


def emulated(
    q: torch.Tensor, pool: torch.Tensor, batch: AttentionBatch, tiles: list[tuple[int, int]], rules: Rules,
    programs: int,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel in emulation over pages [pages, 2, J, P, D]; rows that it does not write are NaN."""
    _, h, d = q.shape
    j = pool.shape[2]
    rows = pool.reshape(-1, d)
    out = torch.full_like(q, float("nan"))
    listed = torch.tensor(tiles, dtype=torch.int32)
    sinks = torch.zeros(h) if rules.sinks is None else rules.sinks
    sequences = AttentionBatch(*(Pointer(each.flatten()) for each in batch))  # type: ignore[arg-type]
    constants = (
        prefill_hopper.ROWS // 2,
        prefill_hopper.STAGES,
        rules.window,
        rules.sinks is not None,
    )
    shape = prefill_hopper.HopperShape(h, j, d, PAGE, *constants)
    gluon_emulation.run(
        prefill_hopper._hopper_kernel,
        programs,
        (
            Pointer(q.flatten()), Boxes(rows, PAGE), Boxes(rows[j * PAGE :], PAGE),
            Pointer(out.view(-1)), Pointer(sinks.flatten()), Pointer(listed.flatten()), sequences,
            rules.scale_for(d) * LOG2E.value, batch.tables.shape[1], 2 * j * PAGE, len(tiles) * h, shape,
        ),
    )  # fmt: skip
    return out


def tiles_of(work: list[tuple[int, int]]) -> list[tuple[int, int]]:
    counts, lengths = [c for c, _ in work], [n for _, n in work]
    return prefill_attention.tiles_of(counts, lengths, prefill_hopper.ROWS)


WORK = [
    [(1, 1)],
    [(128, 128)],
    [(64, 65)],
    [(77, 200)],
    [(256, 384)],
    [(130, 1000), (5, 64), (300, 300)],
]


@without_gpu
@pytest.mark.parametrize("work", WORK, ids=str)
@pytest.mark.parametrize(("d", "programs"), [(64, 3), (128, 1)])
def test_emulated_kernel_matches_the_reference_for_ragged_sequences(
    work: list[tuple[int, int]], d: int, programs: int
) -> None:
    q, k, v, batch = scene(work, 4, 2, d)
    wanted = attention_reference.reference(q, k, v, batch, Rules(scale=0.2))
    for i, (_, length) in enumerate(work):
        batch.tables[i + 1, -(-length // PAGE) :] = NOWHERE
    pool = torch.stack((k, v), 1)
    close(emulated(q, pool, batch, tiles_of(work), Rules(scale=0.2), programs), wanted)


@without_gpu
@pytest.mark.parametrize("window", [1, 64, 65, 128, 200, 500])
def test_emulated_kernel_with_a_window_reads_no_page_before_it(window: int) -> None:
    work = [(140, 600), (65, 65), (1, 200), (70, 333)]
    q, k, v, batch = scene(work, 1, 1, 64)
    wanted = attention_reference.reference(q, k, v, batch, Rules(window=window))
    for i, (count, length) in enumerate(work):
        batch.tables[i + 1, : max(length - count - window + 1, 0) // PAGE] = NOWHERE
    pool = torch.stack((k, v), 1)
    close(emulated(q, pool, batch, tiles_of(work), Rules(window=window), 2), wanted)


@without_gpu
def test_emulated_kernel_with_sinks_matches_the_reference() -> None:
    q, k, v, batch = scene([(140, 200)], 4, 2, 64)
    rules = Rules(window=100, sinks=torch.tensor([3.0, -1.0, 0.5, 20.0]))
    wanted = attention_reference.reference(q, k, v, batch, rules)
    close(emulated(q, torch.stack((k, v), 1), batch, tiles_of([(140, 200)]), rules, 2), wanted)


@without_gpu
def test_tiles_without_work_write_nothing_and_read_no_keys() -> None:
    work = [(150, 300), (0, 1)]
    q, k, v, batch = scene([work[0], (1, 1)], 2, 1, 64)
    wanted = attention_reference.reference(q, k, v, batch, Rules())
    batch.counts[1] = 0
    batch.tables[2] = NOWHERE
    tiles = [*tiles_of(work), *[(1, 0)] * 5]
    for programs in (1, 4):
        found = emulated(q, torch.stack((k, v), 1), batch, tiles, Rules(), programs)
        close(found[:150], wanted[:150])
        assert bool(found[150:].isnan().all())


# ---------------------------------------------------------------------------- the compiler

SCRIPT = """
import collections, json, re, subprocess, sys, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from localchat_cuda.kernels.attention import prefill_hopper as hopper
from localchat_cuda.kernels.attention.reference import AttentionBatch

def compiled(half, d, window):
    kernel, names = hopper._hopper_kernel, hopper._hopper_kernel.arg_names
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    boxes = f"tensordesc<{half}[64, {d}],{layout}>"
    types = dict(
        q="*" + half, k_boxes=boxes, v_boxes=boxes, out="*" + half, factor="fp32", width="i32",
        items="i32", rows_a_page="i32",
        sinks="*fp32", tiles="*i32", batch=AttentionBatch(*["*i32"] * 5))
    values = dict(shape=hopper.HopperShape(
        28, 4, d, hopper.PAGE, hopper.ROWS // 2, hopper.STAGES, window, window > 0))
    aligned = [["tt.divisibility", 16]]
    batch = names.index("batch")
    source = GluonASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in values.items()},
        {(i,): aligned for i, n in enumerate(names) if "*" in types.get(n, "") or n == "rows_a_page"}
        | {(batch, i): aligned for i in range(5)})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options=dict(num_warps=4, maxnreg=168))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, file.name]
        usage = subprocess.run([tool[0], "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool[0], "-sass", file.name], capture_output=True, text=True).stdout
    products = re.findall("HGMMA.*", sass)
    return dict(
        shared=made.metadata.shared, warps=made.metadata.num_warps,
        stack=int(re.search("STACK:([0-9]+)", usage)[1]),
        products=len(products), ends=sum("gsb0" in each for each in products),
        waits=sass.count("WARPGROUP.DEPBAR"), boxes=sass.count("UTMALDG"))

print(json.dumps([triton.__version__, {
    f"{half} {d} {window}": compiled(half, d, window)
    for half, d, window in (("fp16", 128, 0), ("bf16", 64, 512))}]))
"""


@pytest.fixture(scope="module")
def made(compiler: KernelCompiler) -> tuple[str, dict[str, dict[str, int]]]:
    version, kernels = compiler.results("prefill_hopper", SCRIPT)
    return version, kernels


def test_products_of_a_step_overlap(
    made: tuple[str, dict[str, dict[str, int]]],
) -> None:
    _, found = made
    assert len(found) == 2
    for name, one in found.items():
        # two warpgroups, each with keys and values of two pages: once before the loop, once in it, once
        # after it. The compiler that runs them one after the other ends and awaits each instruction.
        half, d, _ = name.split()
        assert one["ends"] == 2 * (2 + 4 + 2), half
        assert one["products"] == one["ends"] * (int(d) // 16 + 4) // 2
        assert one["waits"] == 2 * 4
        assert one["boxes"] == 2 * 4 * (int(d) // 64)


def test_kernel_fits_shared_memory_and_spills_little(
    made: tuple[str, dict[str, dict[str, int]]],
) -> None:
    version, found = made
    # Triton 3.9 moves some of a warpgroup's 240 registers out and in again, 3.6 hardly any
    spilled = 16 if version < "3.7" else 256
    for name, one in found.items():
        assert one["shared"] <= 232_448, name
        assert one["warps"] == prefill_hopper.WARPS, name
        assert one["stack"] <= spilled, name


# ---------------------------------------------------------------------------- the choice


def test_other_devices_use_the_portable_kernel() -> None:
    cpu = torch.device("cpu")
    assert prefill_attention.best_tile_config(
        128, 64, torch.float16, cpu
    ) == prefill_attention.tile_config_for(128)


@pytest.mark.parametrize(
    ("d", "page", "dtype", "cap", "major", "served"),
    [
        (128, 64, torch.float16, 0.0, 9, True),
        (64, 64, torch.bfloat16, 0.0, 9, True),
        (96, 64, torch.float16, 0.0, 9, False),
        (256, 64, torch.float16, 0.0, 9, False),
        (128, 16, torch.float16, 0.0, 9, False),
        (128, 64, torch.float32, 0.0, 9, False),
        (128, 64, torch.float16, 50.0, 9, False),
        (128, 64, torch.float16, 0.0, 8, False),
        (128, 64, torch.float16, 0.0, 10, False),
    ],
)
def test_best_tile_config_selects_hopper_only_for_supported_heads(
    d: int, page: int, dtype: torch.dtype, cap: float, major: int, served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(prefill_hopper, "traits", lambda device: Traits.of((major, 0), 132))
    device = torch.device("cuda", 0)
    found = prefill_attention.best_tile_config(d, page, dtype, device, cap)
    assert found == (prefill_attention.HOPPER if served else prefill_attention.tile_config_for(d))
    monkeypatch.setattr(prefill_attention, "hopper", None)
    assert prefill_attention.best_tile_config(
        d, page, dtype, device, cap
    ) == prefill_attention.tile_config_for(d)


def test_hopper_tile_config_equals_the_kernel_constants() -> None:
    rows, tile, warps, stages = prefill_attention.HOPPER
    kernel = prefill_hopper
    assert (rows, tile, warps, stages) == (kernel.ROWS, kernel.KEYS, kernel.WARPS, kernel.STAGES)


def test_hopper_kernel_refuses_fp8_pages() -> None:
    q, k, _, batch = scene([(20, 20)], 2, 1, 64)
    words, marks = k.view(torch.int16)[..., :32].contiguous(), torch.zeros(2, 1, 64, 2).byte()
    tiles = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="config"):
        prefill_attention.attend(
            q, words, words, batch, tiles, torch.empty_like(q), exponents=marks,
            config=prefill_attention.HOPPER,
        )  # fmt: skip


INCOMPATIBLE = (
    'sys.modules["triton.experimental.gluon"] = None',
    "import triton.experimental.gluon.language.nvidia.hopper as h; del h.warpgroup_mma_wait",
    "import triton.experimental.gluon.language as gl; "
    "[delattr(gl, n) for n in ('barrier', 'thread_barrier') if hasattr(gl, n)]",
)


@without_gpu
def test_hopper_uses_the_portable_kernel_without_a_compatible_gluon() -> None:
    # torch and Triton are imported once; every case breaks Gluon in a fork of that process
    script = f"""
import os, sys
import torch, triton
for broken in {INCOMPATIBLE!r}:
    child = os.fork()
    if not child:
        exec(broken)
        from localchat_cuda.kernels.attention import prefill
        device = torch.device("cuda", 0)
        print(prefill.hopper, prefill.best_tile_config(128, 64, torch.float16, device).rows, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["None", "64"] * len(INCOMPATIBLE), done.stderr[-2000:]
