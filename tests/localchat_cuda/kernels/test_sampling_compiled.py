"""Kernels of rare samplers compile for a GPU, without one, and other steps need none of them."""

from tests.support.compiled_kernels import KernelCompiler

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
        floats(P, V), state.Draws(words(P), words(P), words(P)), state.SamplingTensors.empty(S, 4, META),
        state.Scratch.empty(P, V, META), words(P), floats(P), floats(P), **extra)
print(json.dumps(names))
"""


def test_rare_kernels_compile_and_are_launched_only_on_request(compiler: KernelCompiler) -> None:
    usual, rare = compiler.results("sampling", SCRIPT)
    assert usual == ["process_kernel", "measure_kernel", "collect_kernel", "_draw_kernel"]
    assert set(rare) - set(usual) == {
        *("tally_kernel", "repeats_kernel", "adjust_kernel", "cut_kernel"),
    }
