"""The verdict on a checkpoint before it is loaded, as `fit` and `pull` ask for it. Imports no torch."""

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
from localchat_cuda.model_config import ModelConfig, parse_config, runtime_config

KINDS: Final[tuple[Kind, ...]] = ("safetensors",)
_READING_SHARE: Final = 0.6
"""Of the card's bandwidth, what decoding one sequence reaches where nothing was measured."""
_NO_CARD = Gpu(0, "no GPU", 0, 0)


def objection(model: ModelSummary) -> str:
    """Why the engine cannot run a model: the end of a sentence, empty where nothing speaks against it."""
    if not isinstance(model, Checkpoint):
        return "the CUDA backend runs safetensors checkpoints, and this is a GGUF file"
    try:
        _config_of(model)
    except ModelInvalid as problem:
        return problem.message.rstrip(".")
    return ""


def plan_for(model: ModelSummary, wish: LoadOptions, machine: Machine) -> MemoryPlan:
    """What a load would take of the card that computes: the engine uses one. Raises UsageError,
    ModelInvalid for a config that it cannot run."""
    if not isinstance(model, Checkpoint):
        raise UsageError(f"{model.name}: {objection(model)}", hint="llama.cpp runs it.")
    config, said = runtime_config(_config_of(model), gpu=True)
    card = _gpu(machine)
    limits = planner.StepLimits(wish.gpu_limit_bytes, wish.kv_limit_bytes)
    headers = () if wish.dummy_weights else model.headers
    found = planner.plan(config, headers, wish, card, limits)
    found = replace(found, notes=(*said, *found.notes))
    if not machine.gpus:
        note = f" {machine.gpu_note}" if machine.gpu_note else ""
        return replace(
            found,
            fits=False,
            missing=f"the CUDA backend needs an NVIDIA GPU, and none was found here.{note}",
            advice=("A GGUF of this model: llama.cpp runs it on the CPU.",),
        )
    if len(machine.gpus) > 1:
        note = f"The CUDA backend uses one GPU: {card.name}, number {card.index}."
        return replace(found, notes=(*found.notes, note))
    return found


def _gpu(machine: Machine) -> Gpu:
    """The card that computes."""
    return machine.gpus[choose_gpu(machine.gpus)] if machine.gpus else _NO_CARD


def expected_rate(
    model: ModelSummary, plan: MemoryPlan, machine: Machine, past: Sequence[PastRun] = ()
) -> float | None:
    """Tokens a second of one request: the weights are read once a token, at a share of the card's bandwidth
    that past runs tell. None where the driver does not tell the bandwidth."""
    card = _gpu(machine)
    if not card.bytes_per_s or not plan.weights_bytes:
        return None
    shares = [one.tokens_per_s * _read_bytes(one.model) / card.bytes_per_s for one in past]
    share = median(shares) if shares else _READING_SHARE
    return share * card.bytes_per_s / plan.weights_bytes


def _config_of(model: Checkpoint) -> ModelConfig:
    return parse_config(model.config, model.name, model.headers)


def _read_bytes(model: ModelSummary) -> int:
    """Weights that a token reads, as they lay on the card."""
    if not isinstance(model, Checkpoint) or objection(model):
        return model.weights_bytes
    config, _ = runtime_config(_config_of(model), gpu=True)
    return planner.weights_bytes(config, model.headers)
