"""Counters of a server that has Prometheus metrics: ours, vLLM's, SGLang's and llama.cpp's names for them."""

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
"""The server's names, and ours."""

Counters = dict[str, float]
"""By our names; values of several models are added up."""


def parse_counters(text: str) -> Counters:
    """The counters on a page for scrapers."""
    found: Counters = {}
    for name, value in _LINE.findall(text):
        if ours := _NAMES.get(name):
            found[ours] = found.get(ours, 0.0) + float(value)
    return found


def read_counters(url: str, key: str = "") -> Counters:
    """The counters of a server now; empty where it shows none."""
    try:
        with query_client(key, _TIMEOUT_S) as client:
            return parse_counters(client.get(f"{url}/metrics").raise_for_status().text)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return {}


@dataclass(slots=True)
class WatchedCounters:
    """Counters over the length of a point."""

    before: Counters
    last: Counters = field(default_factory=dict)
    peak: Counters = field(default_factory=dict)

    def grown(self, name: str) -> int | None:
        """How much a counter has grown; None where the server does not show it."""
        if name not in self.last or name not in self.before:
            return None
        return round(self.last[name] - self.before[name])

    def update(self, counters: Counters) -> None:
        """Take over a later page."""
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
