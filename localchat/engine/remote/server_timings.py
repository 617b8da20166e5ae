"""What a server tells of itself beside an answer: its usage, and the figures of llama-server and of another
localchat. What it does not tell stays unknown."""

from dataclasses import dataclass, replace
from typing import Any, Final

from localchat import metrics, units
from localchat.engine.events import Speculation

_NOTHING: Final = Speculation(off=metrics.NOT_REPORTED)


@dataclass(frozen=True, slots=True)
class ServerTimings:
    """Zero, None or empty where nothing was told. ttft_s, decode_tokens_per_s: as the server measured them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    speculation: Speculation = _NOTHING
    fingerprint: str = ""

    def updated(self, chunk: dict[str, Any]) -> "ServerTimings":
        """With what this chunk tells."""
        own = self
        if isinstance(timings := chunk.get("timings"), dict):
            own = _llamacpps(own, timings) if "prompt_n" in timings else _localchats(own, timings)
        if isinstance(usage := chunk.get("usage"), dict):
            own = _usage(own, usage)
        return own

    @property
    def sentence(self) -> str:
        """The times that it measured itself; empty for none."""
        told = []
        if self.ttft_s is not None:
            told.append(f"TTFT {units.decimal(self.ttft_s, 2)} s")
        if self.decode_tokens_per_s is not None:
            told.append(f"{units.decimal(self.decode_tokens_per_s, 1)} tok/s")
        return " · ".join(told)


def count(value: object) -> int:
    """A number of something; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _time(value: object) -> float | None:
    """Seconds or a rate; None for what is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else None  # type: ignore[arg-type, operator]


def _usage(own: ServerTimings, usage: dict[str, Any]) -> ServerTimings:
    details = usage.get("prompt_tokens_details")
    prompt = count(usage.get("prompt_tokens")) or own.prompt_tokens
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return replace(
        own,
        prompt_tokens=prompt,
        cached_tokens=min(cached or own.cached_tokens, prompt),
        completion_tokens=count(usage.get("completion_tokens")) or own.completion_tokens,
    )


def _llamacpps(own: ServerTimings, timings: dict[str, Any]) -> ServerTimings:
    cached = count(timings.get("cache_n"))
    drafted = count(timings.get("draft_n"))
    off = "" if "draft_n" in timings else metrics.NOT_REPORTED
    prompt_ms = _time(timings.get("prompt_ms"))
    return replace(
        own,
        prompt_tokens=own.prompt_tokens or cached + count(timings.get("prompt_n")),
        cached_tokens=own.cached_tokens or cached,
        completion_tokens=own.completion_tokens or count(timings.get("predicted_n")),
        ttft_s=None if prompt_ms is None else prompt_ms / 1e3,
        prefill_tokens_per_s=_time(timings.get("prompt_per_second")) or None,
        decode_tokens_per_s=_time(timings.get("predicted_per_second")) or None,
        speculation=Speculation(drafted, count(timings.get("draft_n_accepted")), off=off),
    )


def _localchats(own: ServerTimings, timings: dict[str, Any]) -> ServerTimings:
    off = timings.get("speculation_off")
    known = "drafted" in timings
    return replace(
        own,
        load_s=_time(timings.get("load_s")) or 0.0,
        queue_s=_time(timings.get("queue_s")) or 0.0,
        ttft_s=_time(timings.get("ttft_s")),
        prefill_tokens_per_s=_time(timings.get("prefill_tokens_per_s")),
        decode_tokens_per_s=_time(timings.get("decode_tokens_per_s")),
        kv_used_tokens=count(timings.get("kv_used_tokens")),
        kv_total_tokens=count(timings.get("kv_total_tokens")),
        speculation=Speculation(
            count(timings.get("drafted")),
            count(timings.get("accepted")),
            _time(timings.get("speedup")),
            (off if isinstance(off, str) else "") if known else metrics.NOT_REPORTED,
        ),
        fingerprint=str(timings.get("fingerprint") or ""),
    )
