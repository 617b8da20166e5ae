"""Checks and plans a checkpoint before it is loaded, for `fit` and `pull`. Imports no torch."""

from dataclasses import replace
from typing import Final

from msgspec import structs

from localchat.errors import ModelInvalid, UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed import Estimate, Spread
from localchat.model_files.checkpoint import Checkpoint, ModelSummary
from localchat.model_files.safetensors import SafetensorsHeader
from localchat_cuda.config.gguf import config_of, loaded_header, tokenizer_kind
from localchat_cuda.config.model import ModelConfig, rounded_config, runtime_config
from localchat_cuda.config.quantization import is_floating, quantized_head
from localchat_cuda.config.reader import parse_config
from localchat_cuda.config.tensor_names import canonical_name
from localchat_cuda.environment import usable_gpus
from localchat_cuda.plan.draft_plan import read_draft
from localchat_cuda.plan.rank_plan import RankLoad
from localchat_cuda.plan.weight_sizes import head_bounds_bytes, token_bytes

_BANDWIDTH_SHARE: Final = 0.6
"""Share of the GPU's bandwidth that decoding one sequence reaches, before the first run."""
_RATE_RANGE: Final = Spread(0.5, 1.6)
"""Measured shares of the bandwidth lie between 0.3 and 0.92."""
_MEASURED: Final = ((9, 0),)
"""Compute capabilities on which this share was measured, except for GGUF files in bf16."""
_NO_GPU = Gpu(0, "no GPU", 0, 0)


def objection(model: ModelSummary) -> str:
    """Return why the engine cannot run a model, or an empty text."""
    if not isinstance(model, Checkpoint) and model.header is None:
        return "only the file itself tells whether the CUDA backend runs this GGUF"
    try:
        _parsed(model)
    except ModelInvalid as error:
        return error.message.rstrip(".")
    return ""


def plan_for(model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
    """Plan the memory of a load on one GPU. Raises UsageError, ModelInvalid for a config that cannot run."""
    refuse_adapters(options)
    config, headers = _parsed(model)
    config, config_notes = runtime_config(config, gpu=True)
    config = rounded_config(config, options.quantize, model.name)
    draft = None if options.draft is None else read_draft(options.draft, config)
    gpu = _gpu(machine)
    headers = () if options.dummy_weights else headers
    gpus = [machine.gpus[n] for n in usable_gpus(machine.gpus)]
    if not gpus:
        gpus = [gpu]
        options = structs.replace(options, gpus=1)
    plan = RankLoad(
        model.name, config, headers, options, gpus, machine.ram_free_bytes, draft
    ).plan()
    plan = replace(plan, notes=(*config_notes, *plan.notes))
    if not machine.gpus:
        note = ""
        if machine.gpu_note:
            note = f" {machine.gpu_note}"
        return replace(
            plan,
            fits=False,
            missing=f"the CUDA backend needs an NVIDIA GPU, and none was found here.{note}",
            advice=(
                "A GGUF of this model: llama.cpp runs it on the CPU."
                if isinstance(model, Checkpoint)
                else "Leave out --backend cuda: llama.cpp runs it on the CPU.",
            ),
        )
    if len(machine.gpus) > 1 and plan.gpus == 1:
        note = f"The CUDA backend uses one GPU: {gpu.name}, number {gpu.index}."
        return replace(plan, notes=(*plan.notes, note))
    return plan


def refuse_adapters(options: LoadOptions) -> None:
    """Raise UsageError for LoRA adapters, which only llama.cpp applies."""
    if options.lora:
        raise UsageError(
            "the CUDA backend cannot apply LoRA adapters; llama.cpp can",
            hint="run a GGUF of the model with --backend llamacpp; localchat quantize converts a checkpoint",
        )


def _gpu(machine: Machine) -> Gpu:
    """Return the GPU that computes."""
    if machine.gpus:
        return machine.gpus[usable_gpus(machine.gpus)[0]]
    return _NO_GPU


def expected_rate(model: ModelSummary, plan: MemoryPlan, machine: Machine) -> Estimate | None:
    """Predict the tokens per second of one request.

    Each token reads all weights, but only the chosen experts, at a share of the GPU's bandwidth. None if the
    driver does not report the bandwidth.
    """
    gpu = _gpu(machine)
    if not gpu.bytes_per_s or not plan.weights_bytes:
        return None
    config, _ = runtime_config(_parsed(model)[0], gpu=True)
    read_bytes = plan.weights_bytes - plan.unpacked_bytes
    if plan.head_bounds:
        read_bytes -= head_bounds_bytes(config)
    in_bf16 = config.dtype == "bfloat16" and not isinstance(model, Checkpoint)
    # The time of sums across GPUs has not been measured.
    untried = gpu.compute_capability not in _MEASURED or in_bf16 or plan.gpus > 1
    tokens_per_s = _BANDWIDTH_SHARE * gpu.bytes_per_s / token_bytes(config, read_bytes)
    return _RATE_RANGE.around(tokens_per_s, untried=untried)


def _parsed(model: ModelSummary) -> tuple[ModelConfig, tuple[SafetensorsHeader, ...]]:
    """Return config and headers. Those of a GGUF describe its loaded tensors. Raises ModelInvalid."""
    if isinstance(model, Checkpoint):
        config = parse_config(model.config, model.name, model.headers)
        _check_layers(model, config)
        return config, model.headers
    if model.header is None:
        raise ModelInvalid(f"{model.name}: {objection(model)}.", hint="llama.cpp runs it.")
    tokenizer_kind(model.header)
    return parse_config(config_of(model.header), model.name), (loaded_header(model.header),)


def _check_layers(model: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelInvalid for the first quantized layer without a kernel."""
    if config.quantization is None:
        return
    _check_head(model, config)
    for header in model.headers:
        for tensor in header.tensors:
            if why := config.quantization.objection(tensor):
                raise ModelInvalid(
                    f"{why}.", hint="Take another quantization of the model, or a GGUF."
                )


def _check_head(model: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelInvalid for a head that is stored in codes alone."""
    head = config.family.names.head
    prefix = head.removesuffix(".weight")
    tensors = [
        tensor
        for header in model.headers
        for tensor in header.tensors
        if canonical_name(tensor.name).startswith(f"{prefix}.")
    ]
    has_floating = any(
        canonical_name(tensor.name) == head and is_floating(tensor) for tensor in tensors
    )
    if tensors and not has_floating and not config.tied:
        raise quantized_head(prefix)
