"""Times of one request, in seconds of time.perf_counter."""

from localchat import metrics
from localchat.engine.events import Timings


class RequestTimer:
    """Measures one request. The first token counts for TTFT, whichever choice it belongs to."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.load_s = 0.0
        self._ready_s = arrived_s
        self._admitted_s: float | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._visible_s: float | None = None
        self._tpot_ms: list[float] = []
        self._tokens = 0
        self._last_of: dict[int, float] = {}

    def loaded(self, at_s: float) -> None:
        """Record when the engine became ready. Waiting before that counts as loading, not queueing."""
        if at_s > self.arrived_s:
            self._ready_s = at_s
            self.load_s = at_s - self.arrived_s

    def admitted(self, at_s: float) -> bool:
        """Record the start of a step of the request. Return True for the first."""
        first = self._admitted_s is None
        if first:
            self._admitted_s = at_s
        return first

    def step(self, choice: int, tokens: int, at_s: float) -> list[float]:
        """Record the tokens that a step gave one choice.

        Divides the time since the choice's last step among them. Returns the milliseconds of each token, or an
        empty list for the first step.
        """
        if tokens <= 0:
            return []
        shared: list[float] = []
        if choice in self._last_of:
            elapsed_s = at_s - self._last_of[choice]
            shared = metrics.shared_tpot_ms(elapsed_s, tokens)
            self._tpot_ms += shared
        self._last_of[choice] = at_s
        if self._first_s is None:
            self._first_s = at_s
        self._last_s = at_s
        self._tokens += tokens
        return shared

    def token(self, choice: int, at_s: float) -> float:
        """Record one token of a choice that had tokens before. Return its milliseconds."""
        elapsed_ms = (at_s - self._last_of[choice]) * 1000
        self._tpot_ms.append(elapsed_ms)
        self._last_of[choice] = at_s
        self._last_s = at_s
        self._tokens += 1
        return elapsed_ms

    def visible(self, at_s: float) -> None:
        """Record that text was sent."""
        if self._visible_s is None:
            self._visible_s = at_s

    @property
    def ttft_s(self) -> float | None:
        if self._visible_s is None:
            return None
        return self._visible_s - self._ready_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        if self._first_s is None or self._last_s is None:
            return None
        return metrics.decode_rate(self._tokens, self._first_s, self._last_s)

    def timings(self, prompt_tokens: int, cached: int, now_s: float) -> Timings:
        """Return all times at the end of the request."""
        prefill = None
        if self._admitted_s is not None and self._first_s is not None:
            elapsed_s = self._first_s - self._admitted_s
            prefill = metrics.prefill_rate(prompt_tokens, cached, elapsed_s)
        started_s = now_s if self._admitted_s is None else self._admitted_s
        # Sorting a sorted list again costs nothing.
        self._tpot_ms.sort()
        p50, p95, p99 = (metrics.percentile(self._tpot_ms, share) for share in (0.5, 0.95, 0.99))
        return Timings(
            load_s=self.load_s,
            queue_s=max(0.0, started_s - self._ready_s),
            ttft_s=self.ttft_s,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=self.decode_tokens_per_s,
            tpot_ms_p50=p50,
            tpot_ms_p95=p95,
            tpot_ms_p99=p99,
            total_s=now_s - self._ready_s,
        )
