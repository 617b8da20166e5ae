"""Counters of an engine since its load, and the stats read from them.

The engine core's thread writes the counts of steps and tokens; ends of requests come from input threads too
and take a lock. A reader may see a step half counted and never half a number.
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
    """Counts since the load; EngineStats explains each."""

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
        """Count a request that came to its end."""
        with self._lock:
            self._finished += 1

    def record_cancel(self) -> None:
        """Count a request that its reader cancelled."""
        with self._lock:
            self._cancelled += 1

    def record_failure(self, error: LocalchatError) -> None:
        """Count a request that ended with an error, before or in the core."""
        with self._lock:
            self._failed[error.code] += 1

    def record_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the prompt of a request whose first step came back."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def record_embed(self, tokens: int) -> None:
        """Count an embedding request of so many tokens."""
        self.steps += 1
        self.prompt_tokens += tokens
        self.record_finish()

    def record_tokens(self, tokens: int, tpot_ms: Iterable[float]) -> None:
        """Count the tokens that a step gave one choice, with the time of each."""
        self.completion_tokens += tokens
        self._tpot_ms.extend(tpot_ms)

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count a row with drafts that came back."""
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
        """All counts, with the requests that the engine holds."""
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
            # The copy is one step of the interpreter: no other thread writes in between.
            tpot_ms=tuple(self._tpot_ms.copy()),
            requests=tuple(running(request_state, now_s) for request_state in requests),
            process_bytes=int(psutil.Process(os.getpid()).memory_info().rss),
        )


def running(request_state: RequestState, now_s: float) -> RunningRequest:
    """A request as it stands now."""
    waits = all(one.state in (State.WAITING, State.FORKING) for one in request_state.sequences)
    tokens = request_state.completion_tokens
    phase: Literal["queued", "prefill", "decode"] = "decode" if tokens else "prefill"
    return RunningRequest(
        phase="queued" if waits and not tokens else phase,
        prompt_tokens=request_state.prompt_tokens,
        cached_tokens=request_state.cached,
        completion_tokens=tokens,
        age_s=now_s - request_state.timer.arrived_s,
        user=request_state.request.user,
    )
