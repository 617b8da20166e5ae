"""Deterministic prompts in steps of several exact chunks, where a runner computes the same bits in them."""

import pytest

from tests.support.engine_core_bench import Bench, capabilities, check_received, peaked, request

WIDTHS = (32, 64)
"""Chunks are of 16 tokens here, the width of a step of these runners."""


def bench(**changes: object) -> Bench:
    can = capabilities(
        block_tokens=4, kv_tokens=800, max_step_tokens=64, depth=2, step_target_s=0.05, **changes
    )
    result = Bench(can)
    result.core._scheduler._exact_chunk = 16
    return result


def widths(at: Bench, first: int = 0) -> list[int]:
    return [row.width for plan in at.runner.steps[first:] for row in plan.rows if row.width > 1]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (150, [64, 64, 16, 6]),
        (128, [64, 64]),
        (90, [64, 16, 10]),
        (50, [32, 16, 2]),
        (20, [16, 4]),
        (8, [8]),
    ],
)
def test_whole_chunks_are_joined(tokens: int, wanted: list[int]) -> None:
    one = bench(exact_widths=WIDTHS)
    id_ = one.ask(request(b"ab" * (tokens // 2), temperature=0.0))
    one.run_until_idle()
    check_received(one, id_, peaked)
    assert widths(one) == wanted


def test_joined_chunks_are_reused_like_others() -> None:
    one = bench(exact_widths=WIDTHS)
    one.say(request(b"ab" * 60, temperature=0.0))
    first = len(one.runner.steps)
    received = one.say(request(b"ab" * 45 + b"c" * 40, temperature=0.0))
    # 90 tokens are the same: the chunks up to 80 are.
    assert received.done.usage.cached_tokens == 80
    assert widths(one, first) == [32, 16, 2]


def test_nothing_is_joined_without_such_widths() -> None:
    one = bench()
    one.say(request(b"ab" * 45, temperature=0.0))
    assert widths(one) == [16] * 5 + [10]
