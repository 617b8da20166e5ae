"""Counters of servers: names of each server, growth and peaks."""

import pytest

from localchat.measure.server_metrics import WatchedCounters, parse_counters


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (
            '# HELP x y\nlocalchat_engine_preemptions_total{model="a"} 2.0\n'
            'localchat_engine_preemptions_total{model="b"} 3.0\nother 5\n',
            {"preemptions": 5.0},
        ),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.25\n', {"kv_used_share": 0.25}),
        ("sglang:token_usage 1e-1\n", {"kv_used_share": 0.1}),
        ("<html>", {}),
    ],
)
def test_counters_of_each_server_are_read(page: str, found: dict[str, float]) -> None:
    assert parse_counters(page) == found


def test_counters_grow_and_gauges_peak() -> None:
    watched = WatchedCounters({"preemptions": 2.0, "kv_used_tokens": 0.0})
    watched.update({"preemptions": 4.0, "kv_used_tokens": 90.0})
    watched.update({"preemptions": 5.0, "kv_used_tokens": 10.0})
    assert watched.growth("preemptions") == 3
    assert watched.growth("drafted") is None
    assert watched.peak["kv_used_tokens"] == 90
