"""Runs a draft model: a second, small model with the same vocabulary in a context of its own."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk
from localchat.backend_api.interface import LoadRequest, Progress
from localchat.backend_api.sampling.reference import Sampler
from localchat.errors import ModelInvalid
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.draft_shape import SAME_FAMILY, draft_shape
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import (
    ContextSpec,
    Placement,
    Weights,
    load_weights,
    open_context,
)
from localchat_llamacpp.slots import Slots

_PADDING = 128
"""Unused tokens at the end by which vocabularies of one family may differ."""
_STEP_TOKENS = 128
_WARM_TOKENS = 32


def load_drafter(
    target: int, request: LoadRequest, threads: int, progress: Progress
) -> "LlamaDrafter":
    """Load the draft model of `request` for the native model `target`.

    Raises ModelMissing, ModelInvalid, DoesNotFit, EngineClosed.
    """
    path = Path(request.options.draft or "")
    plan = request.plan
    api = library().api
    draft_shape(str(path), plan.context_tokens)
    weights = load_weights(
        path,
        placement=Placement(-1 if plan.gpu_layers else 0),
        safe_mode=request.safe_mode,
        total_bytes=path.stat().st_size,
        progress=lambda done, total: progress(0, total),
    )
    try:
        refuse_other_vocabulary(path.name, weights.handle, target)
        spec = ContextSpec(
            context_tokens=plan.context_tokens,
            slots=request.options.max_slots,
            step_tokens=min(_STEP_TOKENS, plan.max_step_tokens),
            kv_type="f16",
            flash_attention=bool(plan.gpu_layers),
            threads=threads,
            window_only=False,
        )
        context, buffers = open_context(weights, spec)
    except BaseException:
        weights.close()
        raise
    vocabularies = [
        int(api.llama_vocab_n_tokens(_vocabulary(model))) for model in (weights.handle, target)
    ]
    drafter = LlamaDrafter(weights, context, spec, vocabularies[0], min(vocabularies), buffers)
    try:
        drafter.warm_up()
    except BaseException:
        drafter.close()
        raise
    return drafter


def _vocabulary(model: int) -> Any:  # noqa: ANN401 - a pointer
    return library().api.llama_model_get_vocab(model)


def refuse_other_vocabulary(name: str, draft: int, target: int) -> None:
    """Raise ModelInvalid if two native models number their tokens differently."""
    api = library().api
    mine = _vocabulary(draft)
    other = _vocabulary(target)
    sizes = [int(api.llama_vocab_n_tokens(model)) for model in (mine, other)]
    why = ""
    if api.llama_vocab_type(mine) != api.llama_vocab_type(other):
        why = "its tokenizer is of another kind"
    elif abs(sizes[0] - sizes[1]) > _PADDING:
        why = f"it has {sizes[0]:,} tokens, and the model has {sizes[1]:,}"
    else:
        text = api.llama_vocab_get_text
        for token in range(min(sizes)):
            if (here := text(mine, token)) != (there := text(other, token)):
                shown = [(piece or b"").decode("utf-8", "replace")[:20] for piece in (here, there)]
                why = f"its token {token} is {shown[0]!r}, and the model's is {shown[1]!r}"
                break
    if why:
        raise ModelInvalid(f"{name} cannot be a draft model for this one: {why}.", hint=SAME_FAMILY)


class _SlotText:
    """Tokens of a sequence in a slot of the draft context."""

    __slots__ = ("slot", "start", "tokens", "verified")

    def __init__(self, slot: int, start: int) -> None:
        self.slot = slot
        self.start = start
        self.tokens: list[int] = []
        self.verified = 0
        """Leading tokens that are not drafts. Later ones may be truncated."""


class LlamaDrafter:
    """Drafter over a second native model. See Drafter."""

    name = "the draft model"
    together = False

    def __init__(
        self,
        weights: Weights,
        context: int,
        spec: ContextSpec,
        vocab_size: int,
        shared_vocab: int,
        buffers: Sequence[Buffer],
    ) -> None:
        """Take ownership of `weights` and `context`. shared_vocab: tokens that both models have."""
        self._api: Any = library().api
        self._weights = weights
        self._context = context
        self._spec = spec
        self._vocab_size = vocab_size
        self._shared = shared_vocab
        self._batch = Batch(spec.step_tokens, spec.slots + 1)
        self._slots = Slots(context, spec.slots + 1, can_truncate=True)
        self._sampler = Sampler(shared_vocab)
        self._texts: dict[int, _SlotText] = {}
        self._free = list(range(spec.slots))
        self.buffers = [*weights.buffers, *buffers]
        self.token_s = self.prompt_token_s = 0.0

    def warm_up(self) -> None:
        """Read the weights, and time a prompt token and a drafted one. Raises RuntimeError."""
        slot = self._spec.slots
        count = min(_WARM_TOKENS, self._spec.step_tokens)
        text = [number * 7919 % self._shared for number in range(count)]
        times = []
        for tokens in (text, text, text[:1], text[:1], text[:1]):
            started_s = time.perf_counter()
            if not self._decode(slot, tokens):
                tail = "; ".join(library().log.tail(3))
                raise RuntimeError(f"llama.cpp failed in the draft model's warm-up: {tail}")
            times.append(time.perf_counter() - started_s)
        self._slots.drop(slot)
        self.prompt_token_s = times[1] / count
        self.token_s = min(times[2:])

    def earliest(self, seq: int, length: int) -> int:
        return 0

    def ready(self, unread: Mapping[int, int]) -> bool:
        return True

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        seq, tokens, start, sampling, limit, goes_on = ask
        text = self._text_of(seq, start)
        if text is None or not self._catch_up(text, tokens):
            self.forget(seq)
            return NO_DRAFT
        plain = sampling.for_drafts(top_logprobs=0)
        drafts: list[int] = []
        chances: list[float] = []
        while len(drafts) < limit:
            drawn = self._sampler.draw(
                self._logits(), plain, start + len(tokens) + len(drafts), None
            )
            if not 0 <= drawn.token < self._shared:
                break
            drafts.append(drawn.token)
            chances.append(math.exp(drawn.logprob) if drawn.logprob is not None else 0.0)
            if len(drafts) == limit or not goes_on(chances[-1]):
                break
            if not self._decode(text.slot, drafts[-1:]):
                self.forget(seq)
                break
            text.tokens.append(drafts[-1])
        return Draft(tuple(drafts), tuple(chances))

    def forget(self, seq: int) -> None:
        """Empty the slot of a sequence that left."""
        text = self._texts.pop(seq, None)
        if text is not None:
            self._slots.drop(text.slot)
            self._free.append(text.slot)

    def close(self) -> None:
        """Release context and weights. Idempotent."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = 0
            self._weights.close()

    def _text_of(self, seq: int, start: int) -> _SlotText | None:
        text = self._texts.get(seq)
        if text is not None and text.start != start:
            self.forget(seq)
            text = None
        if text is None and self._free:
            text = self._texts[seq] = _SlotText(self._free.pop(), start)
        return text

    def _catch_up(self, text: _SlotText, tokens: Sequence[int]) -> bool:
        """Compute the tokens that the slot lacks, and always the last one. False without room."""
        same = text.verified
        limit = min(len(text.tokens), len(tokens) - 1)
        while same < limit and text.tokens[same] == tokens[same]:
            same += 1
        same = min(same, len(tokens) - 1)
        self._slots.truncate(text.slot, same)
        del text.tokens[same:]
        for begin in range(same, len(tokens), self._spec.step_tokens):
            if not self._decode(text.slot, tokens[begin : begin + self._spec.step_tokens]):
                return False
        text.tokens += tokens[same:]
        text.verified = len(tokens)
        return True

    def _decode(self, slot: int, tokens: Sequence[int]) -> bool:
        """Append tokens to a slot, and compute the logits of the last. False without room."""
        start = self._slots.lengths[slot]
        self._batch.clear()
        self._batch.add(slot, start, tokens, [len(tokens) - 1])
        if self._api.llama_decode(self._context, self._batch.native):
            return False
        self._api.llama_synchronize(self._context)
        self._slots.lengths[slot] = start + len(tokens)
        return True

    def _logits(self) -> Any:  # noqa: ANN401 - a row of the library's buffer
        row = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(row, (self._vocab_size,))[: self._shared]
