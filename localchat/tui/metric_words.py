"""Names of states and metrics on the screen: plain words, or the terms of the field."""

from typing import Final

from localchat.engine.stats_line import (
    plain_drafts,
    plain_kv,
    plain_prefill_rate,
    plain_rate,
    plain_ttft,
)
from localchat.session.engine_status import EngineStatus
from localchat.units import decimal, percent, rate, used_of

_PLAIN: Final = {
    "weights": "model",
    "KV": "conversation",
    "compute": "work space",
    "overhead": "program",
    "KV cache": "Conversation memory",
    "live": "in use now",
    "cached": "kept for later",
    "swapped to RAM": "moved to RAM",
    "evictions": "dropped for room",
    "TTFT": "first word after",
    "decode": "writing",
    "prefill": "reading",
    "TPOT p50": "half the tokens within",
    "TPOT p95": "95% of them within",
    "TPOT p99": "99% of them within",
    "Speculation": "Guessing ahead",
    "accepted": "right guesses",
    "mean accepted": "right at once",
    "net gain": "faster by",
    "Prefix cache": "Prompt known already",
    "context": "longest chat",
    "running": "answers under way",
    "waiting": "waiting for a turn",
}
"""Plain words for the labels of the panel; others are plain already."""
_PHASES: Final = {"prefill": "reading", "decode": "writing", "queued": "waiting"}


class MetricWords:
    """Writes states and metrics, in plain words unless `technical`."""

    def __init__(self, *, technical: bool) -> None:
        self.technical = technical

    def label(self, term: str) -> str:
        """The label of a metric or a section, by its term."""
        return term if self.technical else _PLAIN.get(term, term)

    def explained(self, term: str, about: str) -> str:
        """The sentence about a metric; after plain words it begins with the term."""
        return about if self.label(term) == term else f"{term}: {about}"

    def tokens(self, count: str) -> str:
        """A number of tokens."""
        return f"{count} tok" if self.technical else f"{count} tokens"

    def state(self, status: EngineStatus) -> str:
        """What the engine does now."""
        prefill = status.prefill
        if self.technical or status.task or status.state not in ("prefill", "queued"):
            return status.label
        if status.state == "queued":
            if status.queued:
                return f"waiting, {status.queued.ahead} ahead"
            return "waiting"
        share = f" {percent(prefill.done, prefill.total)}" if prefill and prefill.total else ""
        return f"reading your prompt{share}"

    def phase(self, name: str) -> str:
        """The phase of a request."""
        return name if self.technical else _PHASES.get(name, name)

    def ttft(self, seconds: float) -> str:
        """Time to first token."""
        if self.technical:
            return f"TTFT {decimal(seconds, 2)} s"
        return plain_ttft(seconds)

    def decode_rate(self, status: EngineStatus) -> str:
        """The decode rate; in plain words that of the words so far, or empty if there are too few of them."""
        measured = status.decode_tokens_per_s
        if self.technical:
            if measured is not None:
                return f"{decimal(measured, 1)} tok/s"
            return ""
        return plain_rate(measured, status.words, status.completion_tokens)

    def prefill_rate(self, per_second: float) -> str:
        """The prefill rate."""
        if self.technical:
            return rate(per_second)
        return plain_prefill_rate(per_second)

    def kv(self, used: int, total: int) -> str:
        """KV cache in use."""
        if self.technical:
            return f"KV {used_of(used, total)}"
        return plain_kv(used, total)

    def kv_share(self, used: int, total: int) -> str:
        """KV cache in use, below its heading."""
        if self.technical:
            return used_of(used, total)
        return f"{percent(used, total)} full"

    def drafts(self, accepted: int, drafted: int) -> str:
        """Accepted drafts."""
        if self.technical:
            return f"drafts {accepted:,}/{drafted:,}"
        return plain_drafts(accepted, drafted)

    def placement(self, status: EngineStatus) -> str:
        """Where the model is computed."""
        info = status.info
        if self.technical or info is None or info.backend == "remote":
            return status.placement
        where = "on the GPU" if info.gpu_layers >= info.layers else "partly on the GPU"
        where = where if info.gpu_layers else "on the CPU"
        where += ", experts in RAM" if info.experts_on_cpu else ""
        return f"{where} · safe mode" if info.safe_mode else where
