"""Runs a draft model with the same vocabulary, or the model's own prediction head.

Either has a native context of its own. A head reads each token with a hidden state: for the text, the model's
state of the token before (head_states.py), and for a drafted token its own. The rows that it read with its own
states are computed again once the model has verified them. It drafts for all sequences in one batch, because
most of its time is the output matrix, which is read once.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk, shared_vocabulary, unfit
from localchat.backend_api.interface import LoadRequest, Progress, SamplingParams
from localchat.backend_api.sampling.reference import Sampler
from localchat_llamacpp.batch import Batch, float_array
from localchat_llamacpp.draft_shape import draft_shape
from localchat_llamacpp.head_states import HeadStates
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import (
    ContextSpec,
    Placement,
    Weights,
    load_weights,
    open_context,
)
from localchat_llamacpp.plan.buffers import STATE_WINDOW, head_cells
from localchat_llamacpp.slots import Slots

_STEP_TOKENS = 128
_WARM_TOKENS = 32
_LONGEST_DRAFT = 32


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
        shared = _shared_vocabulary(path.name, weights.handle, target)
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
    vocab_size = int(api.llama_vocab_n_tokens(_vocabulary(weights.handle)))
    drafter = LlamaDrafter(context, spec, vocab_size, shared, weights=weights)
    drafter.buffers = [*weights.buffers, *buffers]
    return _warmed_up(drafter)


def open_head(weights: Weights, request: LoadRequest, threads: int) -> "LlamaDrafter":
    """Open the prediction head of a model that was loaded with it. Raises DoesNotFit, RuntimeError."""
    plan = request.plan
    api = library().api
    slots = request.options.max_slots
    spec = ContextSpec(
        context_tokens=head_cells(max(plan.kv_tokens, plan.context_tokens), slots),
        slots=slots,
        step_tokens=min(_STEP_TOKENS, plan.max_step_tokens),
        kv_type="f16",
        flash_attention=plan.flash_attention,
        threads=threads,
        window_only=False,
    )
    context, buffers = open_context(weights, spec, head=True)
    # Not masked: llama.cpp's graphs of heads output the states of all tokens, with or without logits.
    api.llama_set_embeddings_nextn(context, True, False)
    vocab_size = int(api.llama_vocab_n_tokens(_vocabulary(weights.handle)))
    states = HeadStates(int(api.llama_model_n_embd_out(weights.handle)))
    drafter = LlamaDrafter(context, spec, vocab_size, vocab_size, states=states)
    rings = Buffer("CPU", "compute", 4 * slots * STATE_WINDOW * states.width)
    drafter.buffers = [*buffers, rings]
    return _warmed_up(drafter)


def _warmed_up(drafter: "LlamaDrafter") -> "LlamaDrafter":
    try:
        drafter.warm_up()
    except BaseException:
        drafter.close()
        raise
    return drafter


def _vocabulary(model: int) -> Any:  # noqa: ANN401 - a pointer
    return library().api.llama_model_get_vocab(model)


def _shared_vocabulary(name: str, draft: int, target: int) -> int:
    """Return how many tokens two native models share. Raises ModelInvalid if they number them differently."""
    api = library().api
    vocabularies = _vocabulary(draft), _vocabulary(target)
    if len({api.llama_vocab_type(vocabulary) for vocabulary in vocabularies}) > 1:
        raise unfit(name, " for this one: its tokenizer is of another kind")
    own, other = vocabularies
    sizes = int(api.llama_vocab_n_tokens(own)), int(api.llama_vocab_n_tokens(other))

    def text(vocabulary: int, token: int) -> bytes:
        return api.llama_vocab_get_text(vocabulary, token) or b""

    return shared_vocabulary(name, sizes, partial(text, own), partial(text, other))


@dataclass(slots=True, eq=False)
class _SlotText:
    """Tokens of a sequence in a slot of the draft context."""

    slot: int
    start: int
    tokens: list[int] = field(default_factory=list)
    verified: int = 0
    """Leading tokens that are not drafts. Later ones may be truncated."""


@dataclass(slots=True)
class _GrowingDraft:
    """Unfinished draft."""

    ask: DraftAsk
    text: _SlotText
    sampling: SamplingParams
    unread: Sequence[int]
    """Tokens that the next decode reads."""
    states: NDArray[np.float32]
    """States (T, E) that a head reads with them. E is 0 for a draft model."""
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def finished(self) -> Draft:
        """Return the tokens so far. NO_DRAFT: none yet."""
        if not self.tokens:
            return NO_DRAFT
        return Draft(tuple(self.tokens), tuple(self.chances))


class LlamaDrafter:
    """Drafter over a second native context. See Drafter."""

    def __init__(
        self,
        context: int,
        spec: ContextSpec,
        vocab_size: int,
        shared_vocab: int,
        *,
        weights: Weights | None = None,
        states: HeadStates | None = None,
    ) -> None:
        """Take ownership of `context` and `weights`.

        shared_vocab: tokens that both models have. states: of the model, for its prediction head.
        """
        self._api: Any = library().api
        self._weights = weights
        self._context = context
        self._spec = spec
        self._vocab_size = vocab_size
        self._shared = shared_vocab
        self.states = states
        self.name = "the draft model"
        self._width = 0
        """Numbers of a head's state."""
        if states is not None:
            self.name = "the model's prediction head"
            self._width = states.width
        self.together = states is not None
        self.active = True
        self._batch = Batch(spec.step_tokens, spec.slots + 1, self._width)
        self._slots = Slots(context, spec.slots + 1, can_truncate=True)
        self._sampler = Sampler(shared_vocab)
        self._texts: dict[int, _SlotText] = {}
        self._free = list(range(spec.slots))
        self.buffers: list[Buffer] = []
        self.token_s = self.prompt_token_s = 0.0

    def warm_up(self) -> None:
        """Read the weights, and time a prompt token and a drafted one. Raises RuntimeError."""
        slot = self._spec.slots
        count = min(_WARM_TOKENS, self._spec.step_tokens)
        text = [number * 7919 % self._shared for number in range(count)]
        states = np.random.default_rng(0).standard_normal((count, self._width), np.float32)
        times = []
        for tokens in (text, text, text, text[:1], text[:1], text[:1]):
            started_s = time.perf_counter()
            self._batch.clear()
            self._add(slot, tokens, states[: len(tokens)])
            if not self._decode():
                tail = library().log.tail()
                raise RuntimeError(f"llama.cpp failed in the warm-up of {self.name}: {tail}")
            times.append(time.perf_counter() - started_s)
        self._slots.drop(slot)
        self.token_s = min(times[3:])
        # Another program's load must not make a text look too long to read.
        self.prompt_token_s = min(*times[1:3], self.token_s * count) / count

    def earliest(self, seq: int, length: int) -> int:
        if self.states is None:
            return 0
        first = self.states.earliest(seq)
        limit = self._spec.context_tokens // max(len(self._texts), 1)
        text = self._texts.get(seq)
        if text is not None and length + _LONGEST_DRAFT - text.start <= limit:
            unread = text.start + text.verified
            if unread >= first:
                return text.start
        return max(first, length - limit // 2)

    def ready(self, unread: Mapping[int, int]) -> bool:
        return True

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        if self.together:
            return self._draft(asks)
        return [draft for ask in asks for draft in self._draft([ask])]

    def _draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Draft for several sequences, a token of each in one decode."""
        drafts = [self._begin(ask, self._spec.step_tokens // len(asks)) for ask in asks]
        going = [draft for draft in drafts if draft is not None]
        while going:
            self._batch.clear()
            for draft in going:
                self._add(draft.text.slot, draft.unread, draft.states)
            if not self._decode():
                for draft in going:
                    self.forget(draft.ask.seq)
                break
            logits = self._logits(len(going))
            states = self._new_states()
            last_rows = np.cumsum([len(draft.unread) for draft in going]) - 1
            going = [
                draft
                for draft, row, end in zip(going, logits, last_rows, strict=True)
                if self._goes_on(draft, row, states[end : end + 1])
            ]
        return [NO_DRAFT if draft is None else draft.finished() for draft in drafts]

    def _begin(self, ask: DraftAsk, room: int) -> _GrowingDraft | None:
        """Read a text except for its last tokens, at most `room`. None if it cannot be read."""
        text = self._text_of(ask.seq, ask.start)
        if text is None or not ask.tokens:
            return None
        tokens = ask.tokens
        same = self._same(text, tokens)
        states: NDArray[np.float32] | None = np.empty((len(tokens) - same, 0), np.float32)
        if self.states is not None:
            states = self.states.before(ask.seq, ask.start + same, ask.start + len(tokens))
        if states is None:
            self.forget(ask.seq)
            return None
        self._slots.truncate(text.slot, same)
        last = max(len(tokens) - room, same)
        for begin in range(same, last, self._spec.step_tokens):
            end = min(begin + self._spec.step_tokens, last)
            self._batch.clear()
            self._add(text.slot, tokens[begin:end], states[begin - same : end - same])
            if not self._decode():
                self.forget(ask.seq)
                return None
        text.tokens[same:] = tokens[same:]
        text.verified = len(tokens)
        plain = ask.sampling.for_drafts(top_logprobs=0)
        return _GrowingDraft(ask, text, plain, tokens[last:], states[last - same :])

    def _same(self, text: _SlotText, tokens: Sequence[int]) -> int:
        """Return how many tokens need not be read again. The last one always is, for its logits."""
        same = min(text.verified, len(tokens) - 1)
        if self.states is not None:
            # A head reads accepted draft tokens again, with the model's states.
            return same
        limit = min(len(text.tokens), len(tokens) - 1)
        while same < limit and text.tokens[same] == tokens[same]:
            same += 1
        return same

    def _goes_on(
        self, draft: _GrowingDraft, logits: NDArray[np.float32], state: NDArray[np.float32]
    ) -> bool:
        """Sample the next token of a draft. Return whether another one should follow."""
        ask = draft.ask
        position = ask.start + len(ask.tokens) + len(draft.tokens)
        drawn = self._sampler.draw(logits, draft.sampling, position, None)
        if not 0 <= drawn.token < self._shared:
            return False
        draft.text.tokens[len(ask.tokens) :] = draft.tokens
        draft.tokens.append(drawn.token)
        assert drawn.logprob is not None, "the sampling asks for log probabilities"
        draft.chances.append(math.exp(drawn.logprob))
        draft.unread = draft.tokens[-1:]
        draft.states = state
        return len(draft.tokens) < ask.limit and ask.goes_on(draft.chances[-1])

    def forget(self, seq: int) -> None:
        """Empty the slot of a sequence."""
        text = self._texts.pop(seq, None)
        if text is not None:
            self._slots.drop(text.slot)
            self._free.append(text.slot)

    def close(self) -> None:
        """Release context and weights. Idempotent."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = 0
            if self._weights is not None:
                self._weights.close()

    def _text_of(self, seq: int, start: int) -> _SlotText | None:
        text = self._texts.get(seq)
        if text is not None and text.start != start:
            self.forget(seq)
            text = None
        if text is None and self._free:
            text = self._texts[seq] = _SlotText(self._free.pop(), start)
        return text

    def _add(self, slot: int, tokens: Sequence[int], states: NDArray[np.float32]) -> None:
        """Append tokens of a slot to the batch, with the logits of the last."""
        start = self._slots.lengths[slot]
        self._batch.add(slot, start, tokens, [len(tokens) - 1], states)
        self._slots.lengths[slot] = start + len(tokens)

    def _decode(self) -> bool:
        """Compute the batch. False without room."""
        if self._api.llama_decode(self._context, self._batch.native):
            return False
        self._api.llama_synchronize(self._context)
        return True

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """Return the logits (rows, V) of the last decode, in the library's buffer."""
        address = self._api.llama_get_logits(self._context)
        return float_array(address, (rows, self._vocab_size))[:, : self._shared]

    def _new_states(self) -> NDArray[np.float32]:
        """Return a head's own states (T, E) of the last decode, in the library's buffer."""
        if self.states is None:
            return np.empty((self._batch.size, 0), np.float32)
        address = self._api.llama_get_embeddings_nextn(self._context)
        return float_array(address, (self._batch.size, self._width))
