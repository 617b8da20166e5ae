"""Recomputes the KV of answers in prompt chunks while the engine is idle.

At temperature 0 or with a seed, a request reuses only KV with the bits of a fresh computation. The kernels of a
CPU give other bits for single tokens, so the KV of an answer cannot be reused as it was generated. Without this
module, the next turn of a conversation would compute the answer again before its first token.
"""

import threading
from collections import deque
from collections.abc import Container
from typing import NamedTuple

from localchat.backend_api.interface import Enter, Runner, SamplingParams, StepPlan, StepRow
from localchat.core.kv_cache.manager import KVCacheManager, PrefixHit, ValidTokens
from localchat.core.scheduler.exact_chunks import TurnCuts, find_at_cut
from localchat.core.scheduler.scheduler import Scheduler
from localchat.core.sequence import RequestState, Sequence
from localchat.fit.hardware import on_battery

_MIN_ANSWER_TOKENS = 16
"""The next turn computes shorter answers itself, at the cost of a narrow step."""
_MAX_TEXTS = 4
_NUMBER = -1
"""Sequence number of the recomputed text, in the KV cache manager and the runner."""


class _Text(NamedTuple):
    """A conversation up to the end of its last answer."""

    tokens: tuple[int, ...]
    cuts: TurnCuts
    exact: int
    """Leading tokens that had the bits of a fresh computation when the answer ended."""
    request_state: RequestState

    @property
    def salt(self) -> str:
        return self.request_state.request.salt


class AnswerKV:
    """Answers to recompute. Used by the engine core's thread, except for `give_way`."""

    def __init__(
        self,
        runner: Runner,
        kv_cache: KVCacheManager,
        scheduler: Scheduler,
        turn_ends: Container[int],
    ) -> None:
        """`turn_ends`: ids of the tokens that end a turn of a conversation."""
        self._runner = runner
        self._kv_cache = kv_cache
        self._scheduler = scheduler
        self._turn_ends = turn_ends
        self._texts: deque[_Text] = deque(maxlen=_MAX_TEXTS)
        self._lock = threading.Lock()
        self._computing: tuple[str, tuple[int, ...]] | None = None
        """Salt and tokens of the chunk in the runner, with all tokens before it."""

    def add(self, sequence: Sequence) -> None:
        """Queue the answer of an ended sequence, if a later turn cannot reuse its KV."""
        request_state = sequence.request_state
        answer_tokens = sequence.known - request_state.prompt_tokens
        if (
            request_state.cuts is None
            or not sequence.exact_mode
            or len(request_state.sequences) > 1
        ):
            return
        if answer_tokens < _MIN_ANSWER_TOKENS or on_battery():
            return
        if request_state.reasoning_tokens:
            # Most templates leave the reasoning of earlier answers out.
            return
        tokens = self._with_turn_end(tuple(sequence.tokens), request_state.prompt_tokens)
        if self._kv_cache.never_fits(len(tokens)):
            return
        cuts = self._scheduler.turn_cuts(tokens, continues=True)
        self._texts.append(_Text(tokens, cuts, cuts.floor(sequence.exact), request_state))

    def _with_turn_end(self, tokens: tuple[int, ...], prompt_tokens: int) -> tuple[int, ...]:
        """Return the tokens with an end of the turn, which templates add to unfinished answers."""
        if tokens[-1] in self._turn_ends:
            return tokens
        for token in reversed(tokens[:prompt_tokens]):
            if token in self._turn_ends:
                return (*tokens, token)
        return tokens

    def give_way(self, request_state: RequestState) -> None:
        """Abort the running chunk unless a new request starts with its tokens. From any thread."""
        # Hold the lock during the abort, so that it cannot reach the first step of the request.
        with self._lock:
            if self._computing is None:
                return
            salt, tokens = self._computing
            starts_with = request_state.tokens[: len(tokens)] == tokens
            if salt != request_state.request.salt or not starts_with:
                self._runner.abort()

    def compute_next(self) -> bool:
        """Compute one chunk of the newest answer. Return False if none is left."""
        while (step := self._scheduler.schedule()) is not None:
            # Run the memory operations of the previous chunk.
            self._runner.launch(step.plan)
            self._runner.collect()
        while self._texts:
            text = self._texts[-1]
            # A search leaves the last token of a text out.
            hit = find_at_cut(self._kv_cache, (*text.tokens, 0), text.salt, text.cuts)
            if text.exact <= hit.cached < text.cuts.last and self._compute(text, hit):
                return True
            self._texts.pop()
        return False

    def _compute(self, text: _Text, hit: PrefixHit) -> bool:
        """Compute the chunk after a cached prefix. Return False without room for it."""
        request = text.request_state.request
        update = self._kv_cache.allocate(_NUMBER, text.tokens, hit, text.salt, request.owner)
        if update is None:
            return False
        end = text.cuts.end(hit.cached)
        slot = self._kv_cache.slot(_NUMBER)
        if self._kv_cache.extend(_NUMBER, end) is None:
            self._scheduler.add_memory_ops(update.memory)
            self._release(keep=True)
            return False
        self._scheduler.step_number += 1
        plan = StepPlan(
            number=self._scheduler.step_number,
            rows=(StepRow(_NUMBER, slot, hit.cached, text.tokens[hit.cached : end]),),
            memory=update.memory,
            enter=(
                Enter(
                    _NUMBER,
                    slot,
                    text.tokens,
                    len(text.tokens),
                    SamplingParams(temperature=0.0),
                    adapters=text.request_state.adapters,
                ),
            ),
            exact=True,
        )
        with self._lock:
            self._computing = (text.salt, text.tokens[:end])
        self._runner.launch(plan)
        result = self._runner.collect()
        with self._lock:
            self._computing = None
        if result.status == "ok":
            earliest = result.earliest[0] if result.earliest else 0
            valid = ValidTokens(end, earliest, exact=end)
            update = self._kv_cache.commit(_NUMBER, text.tokens, valid)
            self._scheduler.add_memory_ops(update.memory)
        self._scheduler.leave_runner(_NUMBER)
        self._release(keep=slot not in result.lost_slots)
        return result.status != "out_of_memory"

    def _release(self, *, keep: bool) -> None:
        self._scheduler.add_memory_ops(self._kv_cache.release(_NUMBER, keep=keep).memory)
