"""State and metrics of the engine, collected from the events of a stream."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec

from localchat.engine.events import (
    Accepted,
    Done,
    EngineStats,
    Event,
    Loading,
    MetricsSnapshot,
    Prefill,
    Queued,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.interface import EngineInfo
from localchat.metrics import prefill_rate
from localchat.session.prefill_time import PrefillSample, seconds_left
from localchat.units import sizes

State: TypeAlias = Literal[
    "starting",
    "ready",
    "sent",
    "queued",
    "loading",
    "prefill",
    "thinking",
    "writing",
    "asking",
    "calling",
    "broken",
]
"""`asking` and `calling`: the user decides about a tool call, or it runs."""
BUSY: Final = frozenset({"sent", "queued", "loading", "prefill", "thinking", "writing"})
_RATES_KEPT: Final = 60


class EngineStatus(msgspec.Struct):
    """State and metrics for the status bar and the metrics panel.

    Size: the status bar and the panel show each field.
    """

    state: State = "starting"
    model: str = ""
    info: EngineInfo | None = None
    queued: Queued | None = None
    """Event of the running request, or of the last one. The same for the next four fields."""
    loading: Loading | None = None
    prefill: Prefill | None = None
    metrics: MetricsSnapshot | None = None
    done: Done | None = None
    stats: EngineStats | None = None
    previous_kv: tuple[int, int] = (0, 0)
    """`kv` before the running request."""
    rates: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RATES_KEPT))
    """Decode rates in tokens per second, oldest first."""
    pulling: str = ""
    """Progress of a download, as a phrase."""
    task: str = ""
    """Work other than answering, as a phrase."""
    sent_s: float = 0.0
    """Time at which the running request was sent, on the monotonic clock."""
    prefill_started_s: float = 0.0
    """Time at which its prefill began, as far as events report it."""
    prefill_event_s: float = 0.0
    """Time of its last `Prefill` event."""
    prefill_samples: list[PrefillSample] = msgspec.field(default_factory=list)
    """Progress of the prefill over time."""

    @property
    def loaded(self) -> bool:
        """Whether the engine was described after its load, which measures its memory."""
        return self.info is not None and self.info.loaded

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return self.state in BUSY

    def forget_answer(self) -> None:
        """Drop the metrics of the last answer, before another conversation or model."""
        self.prefill = self.metrics = self.done = None
        self.previous_kv = (0, 0)

    def begin(self) -> None:
        """Reset for a new request, so that no old metrics look current."""
        self.state = "sent"
        self.previous_kv = self.kv
        self.queued = self.loading = self.prefill = self.metrics = self.done = None
        self.rates.clear()
        self.prefill_samples.clear()
        self.sent_s = self.prefill_started_s = self.prefill_event_s = time.monotonic()

    def update(self, event: Event) -> bool:
        """Update from an event. Return whether anything on the screen changed."""
        old_state = self.state
        match event:
            case Queued():
                self.queued = event
                self.state = "queued"
                self.prefill_started_s = time.monotonic()
            case Loading():
                self.loading = event
                self.state = "loading"
                self.prefill_started_s = time.monotonic()
            case Prefill():
                self.prefill = event
                self.state = "prefill"
                self.prefill_event_s = time.monotonic()
                elapsed_s = self.prefill_event_s - self.prefill_started_s
                self.prefill_samples.append(PrefillSample(event.done, elapsed_s))
            case Reasoning():
                self.state = "thinking"
            case Text() | ToolCall():
                self.state = "writing"
            case MetricsSnapshot():
                self._update_metrics(event)
                return True
            case Done():
                self.done = event
                self.state = "ready"
            case Accepted():
                self.prefill_started_s = time.monotonic()
                return False
            case _:
                return False
        return self.state != old_state or isinstance(event, Queued | Loading | Prefill)

    def _update_metrics(self, event: MetricsSnapshot) -> None:
        self.metrics = event
        if event.phase == "decode" and self.state == "prefill":
            # Tokens arrive, although their text is not complete yet.
            self.state = "writing"
        if event.decode_tokens_per_s is not None:
            self.rates.append(event.decode_tokens_per_s)

    def finish(self, *, broken: bool = False) -> None:
        """Reset after the end of a request."""
        if broken:
            self.state = "broken"
            self.previous_kv = (0, 0)
        else:
            self.state = "ready"

    @property
    def label(self) -> str:
        """State as a phrase, such as `prefill 1,536/6,200 of which 1,024 cached`."""
        if self.task:
            return self.task
        format_label = _LABELS.get(self.state)
        if format_label:
            return format_label(self)
        return self.state

    @property
    def ttft_s(self) -> float | None:
        """TTFT of the running request, or of the last one."""
        if self.done is not None:
            return self.done.timings.ttft_s
        if self.metrics:
            return self.metrics.ttft_s
        return None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decode rate of the running request, or of the last one."""
        if self.done is not None:
            return self.done.timings.decode_tokens_per_s
        if self.metrics:
            return self.metrics.decode_tokens_per_s
        return None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Rate of the running prefill so far. None before its first computed tokens."""
        if self.state != "prefill" or self.prefill is None:
            return None
        elapsed_s = self.prefill_event_s - self.prefill_started_s
        return prefill_rate(self.prefill.done, self.prefill.cached, elapsed_s)

    def prefill_left_s(self, now_s: float) -> float | None:
        """Return the estimated seconds until the prompt is computed. None if unknown.

        `now_s` is a time of the monotonic clock.
        """
        if self.state != "prefill" or self.prefill is None:
            return None
        left_s = seconds_left(self.prefill_samples, self.prefill.cached, self.prefill.total)
        if left_s is None:
            return None
        return max(0.0, left_s - (now_s - self.prefill_event_s))

    @property
    def kv(self) -> tuple[int, int]:
        """Used and total tokens of the KV cache. (0, 0) if unknown."""
        if self.done is not None:
            return self.done.kv_used_tokens, self.done.kv_total_tokens
        if self.metrics is not None:
            return self.metrics.kv_used_tokens, self.metrics.kv_total_tokens
        if any(self.previous_kv):
            return self.previous_kv
        if self.info is None or self.info.backend == "remote":
            return 0, 0  # A server reports its cache with an answer, if at all.
        return 0, self.info.context_tokens

    @property
    def drafts(self) -> tuple[int, int]:
        """Accepted and proposed draft tokens."""
        if self.done is not None:
            return self.done.speculation.accepted, self.done.speculation.drafted
        if self.metrics:
            return (self.metrics.accepted, self.metrics.drafted)
        return (0, 0)

    @property
    def placement(self) -> str:
        """Backend and offload: `llamacpp · CPU`, `llamacpp · GPU 28/28`."""
        if self.info is None:
            return ""
        info = self.info
        if info.backend == "remote":
            return info.backend
        devices = "CPU"
        if info.gpu_layers:
            count = len(info.gpu_parts)
            name = f"{count} GPUs" if count > 1 else "GPU"
            devices = f"{name} {info.gpu_layers}/{info.layers}"
        if info.experts_on_cpu:
            devices += f", experts of {info.experts_on_cpu} on CPU"
        if info.safe_mode:
            devices += " · safe mode"
        return f"{info.backend} · {devices}"


def _prefill_label(status: EngineStatus) -> str:
    if status.prefill is None:
        return "prefill"
    label = f"prefill {status.prefill.done:,}/{status.prefill.total:,}"
    if status.prefill.cached:
        label += f" of which {status.prefill.cached:,} cached"
    return label


def _loading_label(status: EngineStatus) -> str:
    if status.loading is None or not status.loading.total_bytes:
        return "loading"
    if status.loading.done_bytes >= status.loading.total_bytes:
        return "warming up"
    return f"loading {sizes(status.loading.done_bytes, status.loading.total_bytes)}"


def _queued_label(status: EngineStatus) -> str:
    if status.queued:
        return f"queued, {status.queued.ahead} ahead"
    return "queued"


_LABELS: Final[dict[str, Callable[[EngineStatus], str]]] = {
    "starting": lambda status: f"starting {status.model}".strip(),
    "queued": _queued_label,
    "loading": _loading_label,
    "prefill": _prefill_label,
    "asking": lambda status: "waiting for you",
    "calling": lambda status: "running a tool",
    "broken": lambda status: "engine stopped",
}
