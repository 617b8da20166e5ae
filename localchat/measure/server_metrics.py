"""Counters of a server with Prometheus metrics: localchat, vLLM, SGLang or llama.cpp."""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx2

from localchat.http_transport import query_client

_POLL_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_LINE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_NAMES: Final[Mapping[str, str]] = {
    "localchat_engine_preemptions_total": "preemptions",
    "vllm:num_preemptions_total": "preemptions",
    "sglang:num_retracted_reqs": "preemptions",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "localchat_kv_used_tokens": "kv_used_tokens",
    "localchat_kv_total_tokens": "kv_total_tokens",
    "vllm:kv_cache_usage_perc": "kv_used_share",
    "vllm:gpu_cache_usage_perc": "kv_used_share",
    "sglang:token_usage": "kv_used_share",
    "llamacpp:kv_cache_usage_ratio": "kv_used_share",
}
"""Names of the servers, and ours."""

Counters = dict[str, float]
"""Values by our names, summed over the models of a server."""


def parse_counters(text: str) -> Counters:
    """Parse a metrics page."""
    counters: Counters = {}
    for name, value in _LINE.findall(text):
        if our_name := _NAMES.get(name):
            counters[our_name] = counters.get(our_name, 0.0) + float(value)
    return counters


def read_counters(url: str, key: str = "") -> Counters:
    """Read the current counters of a server; empty if it has no metrics page."""
    try:
        with query_client(key, _TIMEOUT_S) as client:
            return parse_counters(client.get(f"{url}/metrics").raise_for_status().text)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return {}


@dataclass(slots=True)
class WatchedCounters:
    """Counters of a server while a point runs."""

    before: Counters
    last: Counters = field(default_factory=dict)
    peak: Counters = field(default_factory=dict)

    def growth(self, name: str) -> int | None:
        """Return how much a counter has grown; None if the server does not have it."""
        if name not in self.last or name not in self.before:
            return None
        return round(self.last[name] - self.before[name])

    def update(self, counters: Counters) -> None:
        """Add a later reading."""
        self.last = counters
        for name, value in counters.items():
            self.peak[name] = max(self.peak.get(name, value), value)


@contextmanager
def watched_counters(url: str, key: str = "") -> Iterator[WatchedCounters]:
    """Read the counters before the block, every second during it, and after it."""
    watched = WatchedCounters(read_counters(url, key))
    if not watched.before:
        yield watched
        return
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_S):
            watched.update(read_counters(url, key))

    thread = threading.Thread(target=poll, name="server-counters", daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        ended.set()
        thread.join(_TIMEOUT_S)
        watched.update(read_counters(url, key))
