"""Kernels of rare samplers compile for a GPU, without one, and other steps need none of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, torch, triton
from localchat_cuda.compile_ahead.trace import Claims, only_compile
from localchat_cuda.kernels.launch import Traits
from localchat_cuda.kernels.sampling import sample, state
from localchat_cuda.kernels.sampling.rare import RareTensors

META, P, V, S = torch.device("meta"), 4, 5000, 8
only_compile(Traits.of((9, 0), 132), Claims(""))
launch, names = triton.runtime.jit.JITFunction.__getitem__, []

def noted(kernel, grid):
    names[-1].append(kernel.__name__)
    return launch(kernel, grid)

triton.runtime.jit.JITFunction.__getitem__ = noted

def words(*shape):
    return torch.empty(*shape, dtype=torch.int32, device=META)

def floats(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device=META)

known = state.PenaltyTokens(words(S, 4096), words(P), words(S), words(P, V))
rare = RareTensors(words(S, -(-V // 32)), words(P, V), floats(P, -(-V // 1024), 3, dtype=torch.float64))
for extra in ({}, {"rare": rare, "known": known}):
    names.append([])
    sample.draw(
        floats(P, V), words(P), words(P), words(P), state.SamplingTensors.empty(S, 4, META),
        state.Scratch.empty(P, V, META), words(P), floats(P), floats(P), **extra)
print(json.dumps(names))
"""


def test_rare_kernels_compile_and_are_launched_only_on_request(compiled_before: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(compiled_before),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    usual, rare = json.loads(done.stdout)
    assert usual == ["process_kernel", "measure_kernel", "collect_kernel", "_draw_kernel"]
    assert set(rare) - set(usual) == {
        *("tally_kernel", "repeats_kernel", "adjust_kernel", "cut_kernel"),
    }
