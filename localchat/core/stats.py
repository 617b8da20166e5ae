"""Counters of an engine since its load, and the stats read from them.

The engine core's thread writes the counts of steps and tokens. Input threads count ends of requests too, so
those take a lock. A reader may see the counts of half a step, but never half a number.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

import psutil

from localchat.core.sequence import RequestState, State
from localchat.engine.events import EngineStats, MetricsSnapshot, RunningRequest
from localchat.errors import LocalchatError

_REMEMBERED_TOKENS = 512


class EngineCounters:
    """Counts since the load. EngineStats explains each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: Counter[str] = Counter()
        self._cancelled = 0
        self._finished = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.draft_steps = 0
        self._tpot_ms: deque[float] = deque(maxlen=_REMEMBERED_TOKENS)

    def record_finish(self) -> None:
        """Count a finished request."""
        with self._lock:
            self._finished += 1

    def record_cancel(self) -> None:
        """Count a cancelled request."""
        with self._lock:
            self._cancelled += 1

    def record_failure(self, error: LocalchatError) -> None:
        """Count a failed request, in the core or before."""
        with self._lock:
            self._failed[error.code] += 1

    def record_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the prompt of a request after its first step."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def record_embed(self, tokens: int) -> None:
        """Count an embedding request of `tokens`."""
        self.steps += 1
        self.prompt_tokens += tokens
        self.record_finish()

    def record_tokens(self, tokens: int, tpot_ms: Iterable[float]) -> None:
        """Count a choice's new tokens, with the time of each."""
        self.completion_tokens += tokens
        self._tpot_ms.extend(tpot_ms)

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count a verified row with drafts."""
        self.draft_steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def stats(
        self,
        now: MetricsSnapshot,
        requests: Iterable[RequestState],
        *,
        preemptions: int = 0,
        evictions: int = 0,
    ) -> EngineStats:
        """Return all counts, with the requests in the engine."""
        now_s = time.perf_counter()
        with self._lock:
            ends = (self._finished, self._cancelled, dict(self._failed))
        return EngineStats(
            now,
            *ends,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            draft_steps=self.draft_steps,
            preemptions=preemptions,
            evictions=evictions,
            # The copy is one operation of the interpreter, so no other thread writes in between.
            tpot_ms=tuple(self._tpot_ms.copy()),
            requests=tuple(running(request_state, now_s) for request_state in requests),
            process_bytes=int(psutil.Process(os.getpid()).memory_info().rss),
        )


def running(request_state: RequestState, now_s: float) -> RunningRequest:
    """Return the current progress of a request."""
    waiting = (State.WAITING, State.FORKING)
    tokens = request_state.completion_tokens
    phase: Literal["queued", "prefill", "decode"] = "prefill"
    if tokens:
        phase = "decode"
    elif all(sequence.state in waiting for sequence in request_state.sequences):
        phase = "queued"
    return RunningRequest(
        phase=phase,
        prompt_tokens=request_state.prompt_tokens,
        cached_tokens=request_state.cached,
        completion_tokens=tokens,
        age_s=now_s - request_state.timer.arrived_s,
        user=request_state.request.user,
    )
