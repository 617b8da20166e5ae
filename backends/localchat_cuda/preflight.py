"""Checks a checkpoint before it is loaded, for `fit` and `pull`. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from localchat.errors import ModelInvalid, UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed_history import PastRun
from localchat.model_files.checkpoint import Checkpoint, ModelSummary
from localchat_cuda import memory_plan as planner
from localchat_cuda.environment import choose_gpu
from localchat_cuda.model_config import ModelConfig, parse_config, rounded_config, runtime_config

KINDS: Final[tuple[Kind, ...]] = ("safetensors",)
_BANDWIDTH_SHARE: Final = 0.6
"""Share of the GPU's bandwidth that decoding one sequence reaches, until a run was measured."""
_NO_GPU = Gpu(0, "no GPU", 0, 0)


def objection(model: ModelSummary) -> str:
    """Why the engine cannot run a model, as the end of a sentence; empty if it can."""
    if not isinstance(model, Checkpoint):
        return "the CUDA backend runs safetensors checkpoints, and this is a GGUF file"
    try:
        _config_of(model)
    except ModelInvalid as error:
        return error.message.rstrip(".")
    return ""


def plan_for(model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
    """Plan the memory of a load on one GPU. Raises UsageError, ModelInvalid for a config that cannot run."""
    if not isinstance(model, Checkpoint):
        raise UsageError(f"{model.name}: {objection(model)}", hint="llama.cpp runs it.")
    config, config_notes = runtime_config(_config_of(model), gpu=True)
    config = rounded_config(config, options.quantize, model.name)
    gpu = _gpu(machine)
    limits = planner.StepLimits(options.gpu_limit_bytes, options.kv_limit_bytes)
    headers = () if options.dummy_weights else model.headers
    plan = planner.plan(config, headers, options, gpu, limits)
    plan = replace(plan, notes=(*config_notes, *plan.notes))
    if not machine.gpus:
        note = f" {machine.gpu_note}" if machine.gpu_note else ""
        return replace(
            plan,
            fits=False,
            missing=f"the CUDA backend needs an NVIDIA GPU, and none was found here.{note}",
            advice=("A GGUF of this model: llama.cpp runs it on the CPU.",),
        )
    if len(machine.gpus) > 1:
        note = f"The CUDA backend uses one GPU: {gpu.name}, number {gpu.index}."
        return replace(plan, notes=(*plan.notes, note))
    return plan


def _gpu(machine: Machine) -> Gpu:
    """The GPU that computes."""
    return machine.gpus[choose_gpu(machine.gpus)] if machine.gpus else _NO_GPU


def expected_rate(
    model: ModelSummary, plan: MemoryPlan, machine: Machine, past: Sequence[PastRun] = ()
) -> float | None:
    """Tokens per second of one request: each token reads all weights, at a share of the GPU's bandwidth that
    past runs show. None if the driver does not report the bandwidth."""
    gpu = _gpu(machine)
    if not gpu.bytes_per_s or not plan.weights_bytes:
        return None
    shares = [one.tokens_per_s * _bytes_per_token(one.model) / gpu.bytes_per_s for one in past]
    share = median(shares) if shares else _BANDWIDTH_SHARE
    return share * gpu.bytes_per_s / plan.weights_bytes


def _config_of(model: Checkpoint) -> ModelConfig:
    return parse_config(model.config, model.name, model.headers)


def _bytes_per_token(model: ModelSummary) -> int:
    """Bytes of weights on the GPU that each token reads."""
    if not isinstance(model, Checkpoint) or objection(model):
        return model.weights_bytes
    config, _ = runtime_config(_config_of(model), gpu=True)
    return planner.weights_bytes(config, model.headers)
