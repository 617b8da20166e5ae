"""What is true of the engine right now, gathered from the events of a stream. No textual here."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

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
from localchat.units import sizes

State: TypeAlias = Literal[
    "starting", "ready", "sent", "queued", "loading", "prefill", "thinking", "writing", "broken"
]
BUSY: Final = frozenset({"sent", "queued", "loading", "prefill", "thinking", "writing"})
_RATES_KEPT: Final = 60


@dataclass(slots=True)
class EngineStatus:
    """The figures that status line and panel draw. `rates`: decode rates as they came, oldest first.
    `pulling`, `task`: what else goes on, in words. `prefill`, `figures`, `done`: of the request
    that runs, or of the last one."""

    state: State = "starting"
    model: str = ""
    info: EngineInfo | None = None
    queued: Queued | None = None
    loading: Loading | None = None
    prefill: Prefill | None = None
    metrics: MetricsSnapshot | None = None
    done: Done | None = None
    stats: EngineStats | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES_KEPT))
    pulling: str = ""
    task: str = ""

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self.state in BUSY

    def begin(self) -> None:
        """A request goes out: what the last one measured is no longer shown as now."""
        self.state = "sent"
        self.queued = self.loading = self.prefill = self.metrics = self.done = None
        self.rates.clear()

    def update(self, event: Event) -> bool:
        """Note what an event says; returns whether anything to draw has changed."""
        before = self.state
        match event:
            case Queued():
                self.queued, self.state = event, "queued"
            case Loading():
                self.loading, self.state = event, "loading"
            case Prefill():
                self.prefill, self.state = event, "prefill"
            case Reasoning():
                self.state = "thinking"
            case Text() | ToolCall():
                self.state = "writing"
            case MetricsSnapshot():
                self._update_metrics(event)
                return True
            case Done():
                self.done, self.state = event, "ready"
            case Accepted() | _:
                return False
        return self.state != before or isinstance(event, Queued | Loading | Prefill)

    def _update_metrics(self, event: MetricsSnapshot) -> None:
        self.metrics = event
        if event.decode_tokens_per_s is not None:
            self.rates.append(event.decode_tokens_per_s)

    def finish(self, *, broken: bool = False) -> None:
        """The request is over, however it ended."""
        self.state = "broken" if broken else "ready"

    # ------------------------------------------------------------------ the figures, as they are shown

    @property
    def label(self) -> str:
        """The state in words: `loading 2.1/4.7 GB`, `prefill 1,536/6,200 of which 6,144 cached`."""
        if self.task:
            return self.task
        label = _WORDS.get(self.state)
        return label(self) if label else self.state

    @property
    def ttft_s(self) -> float | None:
        """Of the request that runs, or of the last one."""
        if self.done is not None:
            return self.done.timings.ttft_s
        return self.metrics.ttft_s if self.metrics else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the request that runs, or of the last one."""
        if self.done is not None:
            return self.done.timings.decode_tokens_per_s
        return self.metrics.decode_tokens_per_s if self.metrics else None

    @property
    def kv(self) -> tuple[int, int]:
        """Tokens used and in all; (0, 0) where it is not known yet."""
        if self.done is not None:
            return self.done.kv_used_tokens, self.done.kv_total_tokens
        if self.metrics is not None:
            return self.metrics.kv_used_tokens, self.metrics.kv_total_tokens
        if self.info is None or self.info.backend == "remote":
            return 0, 0  # a server's cache is known from what it tells with an answer
        return 0, self.info.context_tokens

    @property
    def drafts(self) -> tuple[int, int]:
        """Accepted and drafted."""
        if self.done is not None:
            return self.done.speculation.accepted, self.done.speculation.drafted
        return (self.metrics.accepted, self.metrics.drafted) if self.metrics else (0, 0)

    @property
    def placement(self) -> str:
        """Backend and offload: `llamacpp · CPU`, `llamacpp · GPU 28/28`."""
        if self.info is None:
            return ""
        info = self.info
        if info.backend == "remote":
            return info.backend
        place = f"GPU {info.gpu_layers}/{info.layers}" if info.gpu_layers else "CPU"
        return f"{info.backend} · {place}{' · safe mode' if info.safe_mode else ''}"


def _prefill_label(status: EngineStatus) -> str:
    if status.prefill is None:
        return "prefill"
    cached = f" of which {status.prefill.cached:,} cached" if status.prefill.cached else ""
    return f"prefill {status.prefill.done:,}/{status.prefill.total:,}{cached}"


def _loading_label(status: EngineStatus) -> str:
    if status.loading is None or not status.loading.total_bytes:
        return "loading"
    return f"loading {sizes(status.loading.done_bytes, status.loading.total_bytes)}"


def _queued_label(status: EngineStatus) -> str:
    return f"queued, {status.queued.ahead} ahead" if status.queued else "queued"


_WORDS: Final[dict[str, Callable[[EngineStatus], str]]] = {
    "starting": lambda status: f"starting {status.model}".strip(),
    "queued": _queued_label,
    "loading": _loading_label,
    "prefill": _prefill_label,
    "broken": lambda status: "engine stopped",
}
