"""Loads what drafts for a loaded model: a draft model, its own prediction head, or an EAGLE-3 head."""

from collections.abc import Callable
from pathlib import Path

import torch

from localchat.backend_api.interface import LoadRequest, Progress, Tokenizer
from localchat.errors import ModelInvalid
from localchat.fit.load_options import LoadOptions
from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.config.eagle import EagleConfig
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.prediction import head_config
from localchat_cuda.load import advise_on_out_of_memory, capabilities, load_runner, warm_up
from localchat_cuda.plan.draft_plan import GRAPH_BYTES, SAME_FAMILY, DraftShape, plan_of
from localchat_cuda.plan.memory_plan import OVERHEAD_BYTES, kv_token_bytes, kv_types
from localchat_cuda.runner.drafter import CudaDrafter
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.model import Fusion, HeadModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.eagle import EagleWeights, load_eagle
from localchat_cuda.weights.prediction_head import HeadWeights, load_head
from localchat_cuda.weights.source import CheckpointWeights, WeightSource

_PADDING = 512
"""Vocabularies of one family differ by so many unused tokens at the end."""


def draft_request(request: LoadRequest, config: ModelConfig) -> LoadRequest:
    """The load of a draft model, or of a head, within that of its model."""
    plan = plan_of(
        request.plan, config, kv_types(config)[0], kv_token_bytes(config), OVERHEAD_BYTES
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
    """Load the draft model of `request` beside a runner. `shared_vocab`: tokens that both models have.

    Raises ModelInvalid, DoesNotFit, DeviceFault, EngineClosed."""
    total = max(request.plan.weights_bytes, 1)
    own = load_runner(
        draft.config,
        Path(request.options.draft or ""),
        str(runner.device),
        draft_request(request, draft.config),
        lambda done, all_: progress(total, total),
        notify,
    )
    runner.attach(CudaDrafter(own, runner.table, "the draft model", shared_vocab))


def attach_head(
    runner: CudaRunner,
    config: ModelConfig,
    source: WeightSource,
    request: LoadRequest,
    notify: Callable[[str], None] = lambda text: None,
) -> None:
    """Load the prediction head of a runner's model. Raises ModelInvalid, DoesNotFit, DeviceFault."""
    model = runner.model
    names = config.family.names
    with advise_on_out_of_memory(request):
        weights = load_head(
            config, names, source, model.weights, model.pages.dtype, runner.device, notify
        )
        _attach(runner, head_config(config), weights, request, "the model's own head")


def attach_eagle(
    runner: CudaRunner,
    draft: DraftShape,
    request: LoadRequest,
    notify: Callable[[str], None] = lambda text: None,
    source: WeightSource | None = None,
) -> None:
    """Load the EAGLE-3 head of `request`, or of another source, for a runner.

    Raises ModelInvalid, DoesNotFit, DeviceFault."""
    model = runner.model
    names = ARCHITECTURES["llama"].FAMILY.names
    assert draft.eagle is not None
    if source is None:
        source = CheckpointWeights(Path(request.options.draft or ""), runner.device)
    with advise_on_out_of_memory(request):
        weights = load_eagle(
            draft.config,
            draft.eagle,
            names,
            source,
            model.weights,
            model.pages.dtype,
            runner.device,
            notify,
        )
        _attach(runner, draft.config, weights, request, "the EAGLE-3 head", draft.eagle)


def _attach(
    runner: CudaRunner,
    own: ModelConfig,
    weights: HeadWeights | EagleWeights,
    request: LoadRequest,
    name: str,
    eagle: EagleConfig | None = None,
) -> None:
    """Let a head with these weights draft, as a runner of its own, from states that its model now keeps."""
    model = runner.model
    can = capabilities(own, draft_request(request, own))
    blocks = can.kv_tokens // can.block_tokens
    slots = runner.capabilities.max_slots
    dtype = model.pages.dtype
    device = runner.device
    with torch.inference_mode():
        pages = Pages(
            own, blocks + 1, can.context_tokens, device, dtype, can.block_tokens, slots=slots
        )
        states = LastStates(slots, own.hidden, dtype, device)
    fusion = None
    if eagle is not None and isinstance(weights, EagleWeights):
        fusion = Fusion(eagle.taps, weights.fuse)
    runner.keep_last_states(states, fusion)
    head = CudaRunner(
        HeadModel(own, weights, pages, states, kernels=model.kernels, eagle=eagle),
        can,
        graphs=not request.safe_mode,
        graph_bytes=GRAPH_BYTES,
    )
    warm_up(head)
    runner.attach(CudaDrafter(head, runner.table, name, own.vocabulary, states))


def shared_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> int:
    """Tokens that two models have in common, from the first. Raises ModelInvalid where they number them
    differently."""
    why = ""
    sizes = (draft.vocab_size, target.vocab_size)
    if abs(sizes[0] - sizes[1]) > _PADDING:
        why = f"it has {sizes[0]:,} tokens, and the model has {sizes[1]:,}"
    else:
        for token in range(min(sizes)):
            here, there = (one.piece(token, special=True) for one in (draft, target))
            if here != there:
                mine, other = (one.decode("utf-8", "replace")[:20] for one in (here, there))
                why = f"its token {token} is {mine!r}, and the model's is {other!r}"
                break
    if why:
        raise ModelInvalid(f"{name} cannot be a draft model for this one: {why}.", hint=SAME_FAMILY)
    return min(sizes)
