"""The line of `--stats`."""

import msgspec

from localchat.engine.stats_line import stats_line
from tests.support.cli_program import DONE


def test_stats_line_has_ttft_decode_rate_kv_and_drafts() -> None:
    assert (
        stats_line(DONE)
        == "load 0.50 s · TTFT 0.41 s · 62.0 tok/s · KV 412/32,768 (1%) · drafts 34/51"
    )


def test_an_answer_of_calls_alone_has_no_ttft() -> None:
    timings = msgspec.structs.replace(DONE.timings, ttft_s=None)
    done = msgspec.structs.replace(DONE, timings=timings)
    assert stats_line(done).startswith("load 0.50 s · 62.0 tok/s · KV ")
