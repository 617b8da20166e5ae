"""Loads the drafter of a loaded model: a draft model, a prediction head, an EAGLE-3 head or an assistant."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from localchat.backend_api.interface import LoadRequest, Progress
from localchat.fit.load_options import LoadOptions
from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.config.assistant import AssistantConfig
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.prediction import head_config
from localchat_cuda.load import advise_on_out_of_memory, capabilities, load_runner, warm_up
from localchat_cuda.plan.draft_plan import (
    GRAPH_BYTES,
    STEP_TOKENS,
    DraftShape,
    pool_tokens,
    text_tokens,
)
from localchat_cuda.plan.memory_plan import OVERHEAD_BYTES, kv_token_bytes, kv_types
from localchat_cuda.runner.assistant import AssistantDrafter, AssistantModel
from localchat_cuda.runner.drafter import CudaDrafter
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.model import HeadModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.assistant import load_assistant
from localchat_cuda.weights.eagle import EagleWeights, load_eagle
from localchat_cuda.weights.prediction_head import HeadWeights, load_head
from localchat_cuda.weights.source import CheckpointWeights, LoadTarget, WeightSource


def draft_request(request: LoadRequest, config: ModelConfig) -> LoadRequest:
    """Return the request for a draft model or a head, within its model's plan."""
    context = request.plan.context_tokens
    plan = replace(
        request.plan,
        kv_bytes=pool_tokens(config, context) * kv_token_bytes(config),
        kv_type=kv_types(config)[0],
        context_tokens=text_tokens(config, context),
        max_step_tokens=STEP_TOKENS,
        overhead_bytes=OVERHEAD_BYTES + GRAPH_BYTES,
        cache_ram_bytes=0,
        unpacked_bytes=0,
        head_bounds=False,
        saved_states=0,
        window_pages=0,
    )
    options = LoadOptions(max_slots=request.options.max_slots)
    return LoadRequest(plan, options, request.safe_mode)


def attach_draft_model(
    runner: CudaRunner,
    draft: DraftShape,
    request: LoadRequest,
    progress: Progress,
    notify: Callable[[str], None],
    shared_vocab: int,
) -> None:
    """Load the draft model of `request` for a runner. `shared_vocab`: tokens that both models share.

    Raises ModelInvalid, DoesNotFit, DeviceFault, EngineClosed."""
    total = max(request.plan.weights_bytes, 1)
    drafter = load_runner(
        draft.config,
        Path(request.options.draft or ""),
        str(runner.device),
        draft_request(request, draft.config),
        lambda done, all_: progress(total, total),
        notify,
    )
    runner.attach(CudaDrafter(drafter, runner.table, "the draft model", shared_vocab))


def attach_head(
    runner: CudaRunner,
    config: ModelConfig,
    source: WeightSource,
    request: LoadRequest,
    notify: Callable[[str], None] = lambda text: None,
) -> None:
    """Load the prediction head of a runner's model. Raises ModelInvalid, DoesNotFit, DeviceFault."""
    target = LoadTarget(source, runner.device, runner.model.pages.dtype, notify)
    with advise_on_out_of_memory(request):
        weights = load_head(config, runner.model.weights, target)
        _attach(runner, head_config(config), weights, request, "the model's own head")


def attach_reader_of_states(
    runner: CudaRunner,
    draft: DraftShape,
    request: LoadRequest,
    notify: Callable[[str], None] = lambda text: None,
) -> None:
    """Load the EAGLE-3 head or Gemma 4 assistant of `request` for a runner.

    Raises ModelInvalid, DoesNotFit, DeviceFault."""
    model = runner.model
    own = draft.config
    source = CheckpointWeights(Path(request.options.draft or ""), runner.device)
    target = LoadTarget(source, runner.device, model.pages.dtype, notify)
    with advise_on_out_of_memory(request):
        if draft.eagle is not None:
            names = ARCHITECTURES["llama"].FAMILY.names
            weights = load_eagle(own, draft.eagle, names, model.weights, target)
            _attach(runner, own, weights, request, "the EAGLE-3 head")
        elif draft.assistant is not None:
            _attach_assistant(runner, own, draft.assistant, target, request)


def _attach_assistant(
    runner: CudaRunner,
    own: ModelConfig,
    settings: AssistantConfig,
    target: LoadTarget,
    request: LoadRequest,
) -> None:
    model = runner.model
    weights = load_assistant(own, settings, model.config, model.weights, target)
    with torch.inference_mode():
        states = LastStates(
            runner.capabilities.max_slots, settings.columns, target.dtype, runner.device
        )
        assistant = AssistantModel(
            own,
            weights,
            model.pages.view(settings.sources),
            states,
            runner.table,
            settings.active,
            kernels=model.kernels,
        )
    runner.keep_last_states(states)
    # Its tables have no pages, and a step has a token of each sequence.
    caps = replace(runner.capabilities, window_blocks=0, max_step_tokens=STEP_TOKENS)
    graphs = not request.safe_mode
    own_runner = CudaRunner(assistant, caps, graphs=graphs, graph_bytes=GRAPH_BYTES)
    runner.attach(AssistantDrafter(own_runner, assistant, runner.table, states))


def _attach(
    runner: CudaRunner,
    own: ModelConfig,
    weights: HeadWeights | EagleWeights,
    request: LoadRequest,
    name: str,
) -> None:
    """Attach a head as a runner. The model then stores last states for it."""
    model = runner.model
    caps = capabilities(own, draft_request(request, own))
    with torch.inference_mode():
        pages = Pages(own, caps, runner.device, model.pages.dtype)
        states = LastStates(caps.max_slots, own.hidden, pages.dtype, runner.device)
    runner.keep_last_states(states, weights if isinstance(weights, EagleWeights) else None)
    head = CudaRunner(
        HeadModel(own, weights, pages, states, kernels=model.kernels),
        caps,
        graphs=not request.safe_mode,
        graph_bytes=GRAPH_BYTES,
    )
    warm_up(head)
    runner.attach(CudaDrafter(head, runner.table, name, own.vocabulary, states))
