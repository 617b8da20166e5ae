"""On an NVIDIA GPU: once a model was compiled ahead, its steps compile nothing."""

import json
from pathlib import Path

import pytest
import torch

from localchat_cuda.compile_ahead import workers
from localchat_cuda.compile_ahead.job import CompileJob
from localchat_cuda.config.reader import parse_config
from localchat_cuda.kernels.launch import traits
from tests.support.compile_ahead_steps import TINY, can_of, child, random_shapes
from tests.support.cuda_configs import AWQ
from tests.support.tiny_engine_core import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]
GPU = torch.device("cuda", 0)
STEPS = """
import json, pickle, sys
import torch, triton
from localchat.backend_api.interface import StepPlan
from localchat_cuda.compile_ahead import trace
from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.load import warm_up
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.source import RandomWeights
from localchat_cuda.weights.loader import load

made, found = [], []
def record(*, src, metadata, metadata_group, times, cache_hit):
    (found if cache_hit else made).append(f"{src.name} {src.constants} {src.attrs}")

triton.knobs.compilation.listener = record
(job, more), gpu = pickle.load(sys.stdin.buffer), torch.device("cuda", 0)
config, can = job.config, job.capabilities
weights = load(config, RandomWeights(gpu), gpu)
pages = Pages(config, can, gpu, torch.float16)
runner = CudaRunner(DeviceModel(config, weights, pages, kernels=True), can)
warm_up(runner)
for shape in (*trace.compile_shapes(can), *more):
    plan = trace.step_plan(shape, config.vocabulary)
    for step in (plan, StepPlan(0, leave=tuple(one.seq for one in plan.enter))):
        runner.launch(step)
        runner.collect()
runner.close()
print(json.dumps([len(found), made]))
"""


def test_steps_compile_nothing_after_compile_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = parse_config({**TINY, "torch_dtype": "float16", "quantization_config": AWQ}, "it")
    can = can_of(config)
    job = CompileJob(config, can, traits(GPU))
    with workers.CompileAhead(job, print) as ahead:
        ahead.wait()
    found, made = json.loads(child(["-c", STEPS], (job, random_shapes(200)), tmp_path))
    assert found > 50
    assert not made
