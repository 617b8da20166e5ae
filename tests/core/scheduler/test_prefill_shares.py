"""How prompts share a step: few at once, none a scrap, none left out."""

import pytest

from localchat.backend_api.interface import Widths
from localchat.core.scheduler.scheduler import PromptShares
from tests.support.engine_core_bench import Bench, capabilities, check_received, request
from tests.support.scripted_backend import hashed


def test_of_many_prompts_the_first_end_first_and_few_go_on_at_once() -> None:
    """Each with an equal part, all of them would end in the last step."""
    bench = Bench(
        capabilities(
            max_rows=12, max_slots=12, kv_tokens=20480, max_step_tokens=512, step_target_s=1e9,
            context_tokens=2048,
        ),
        hashed,
    )  # fmt: skip
    ids = [bench.ask(request(f"{n:03}" * 500, max_tokens=2, salt=str(n))) for n in range(10)]
    bench.run_until_idle()
    numbers = {bench.requests[id_].sequences[0].number: place for place, id_ in enumerate(ids)}
    ended: dict[int, int] = {}
    for plan in bench.runner.steps:
        pieces = [row for row in plan.rows if row.width > 1]
        assert len(pieces) <= 5  # four, and what the last of them leaves
        for row in pieces:
            ended[numbers[row.seq]] = plan.number
    ends = [ended[place] for place in range(len(ids))]
    assert ends == sorted(ends)
    assert ends[0] <= ends[-1] // 2
    for id_ in ids:
        check_received(bench, id_, hashed)


def test_prompts_of_a_burst_end_one_after_the_other() -> None:
    """With equal parts, each of them would have its first token when four are computed."""
    bench = Bench(
        capabilities(
            max_rows=12, max_slots=12, kv_tokens=20480, max_step_tokens=384, step_target_s=1e9,
            context_tokens=2048,
        ),
        hashed,
    )  # fmt: skip
    bench.say(request("warm" * 100, max_tokens=1))
    first = len(bench.runner.steps)
    for n in range(8):
        bench.ask(request(f"{n:03}" * 100, max_tokens=2, salt=str(n)))
    bench.run_until_idle()
    unended: set[int] = set()
    for plan in bench.runner.steps[first:]:
        pieces = [row for row in plan.rows if row.width > 1]
        ended = {row.seq for row in pieces if row.start + row.width >= 300}
        unended = (unended | {row.seq for row in pieces}) - ended
        assert len(unended) <= 1


def test_a_short_prompt_passes_a_long_one_which_keeps_its_part() -> None:
    bench = Bench(
        capabilities(
            max_rows=12, max_slots=12, kv_tokens=20480, max_step_tokens=256, step_target_s=1e9,
            context_tokens=4096,
        ),
        hashed,
    )  # fmt: skip
    long = bench.ask(request("abcd" * 500, max_tokens=2))
    bench.step(2)
    for n in range(6):
        bench.ask(request(f"{n:03}" * 40, max_tokens=2, salt=str(n)))
    before = len(bench.runner.steps)
    bench.step(3)
    rows = [row for plan in bench.runner.steps[before:] for row in plan.rows if row.width > 1]
    number = bench.requests[long].sequences[0].number
    assert sum(row.seq != number and row.width == 120 for row in rows) >= 2
    for plan in bench.runner.steps[before:]:
        assert max(row.width for row in plan.rows if row.seq == number) >= 256 // 4


def test_a_runner_that_pads_gives_no_prompt_less_than_its_smallest_width() -> None:
    widths = Widths((64, 128), (0, 8), (64, 128))
    bench = Bench(
        capabilities(
            max_rows=12, max_slots=12, kv_tokens=8192, max_step_tokens=128, step_target_s=1e9,
            context_tokens=2048, widths=widths,
        ),
        hashed,
    )  # fmt: skip
    ids = [bench.ask(request(f"{n:03}" * 60, max_tokens=2, salt=str(n))) for n in range(10)]
    bench.run_until_idle()
    for id_ in ids:
        number = bench.requests[id_].sequences[0].number
        rows = [row for plan in bench.runner.steps for row in plan.rows if row.seq == number]
        pieces = [row.width for row in rows if row.width > 1]
        assert all(piece >= 64 for piece in pieces[:-1]), pieces
        check_received(bench, id_, hashed)


@pytest.mark.parametrize(("left", "wanted"), [(512, 4), (128, 2), (64, 1), (10, 1)])
def test_as_many_share_a_step_as_get_their_least_part(left: int, wanted: int) -> None:
    shares = PromptShares(capabilities(max_step_tokens=4096, widths=Widths((64, 128), (0,), (64,))))
    assert shares.prompts_per_step(left) == wanted
    assert shares.tokens_each(left, wanted) >= min(64, left)


def test_the_least_part_is_no_more_than_a_step() -> None:
    assert PromptShares(capabilities(max_step_tokens=8)).min_tokens == 8
    assert PromptShares(capabilities(max_step_tokens=512)).min_tokens == 32


def test_no_prompt_leaves_a_rest_of_a_few_tokens() -> None:
    """Its step would be padded to many more."""
    bench = Bench(
        capabilities(
            kv_tokens=8192, max_step_tokens=256, step_target_s=1e9, context_tokens=2048,
            widths=Widths((64, 128, 256), (0, 8), (64, 128, 256)),
        ),
        hashed,
    )  # fmt: skip
    id_ = bench.ask(request("abcdefgh" * 65 + "ijkl", max_tokens=2))  # 2 steps of 256 and 12 tokens
    bench.run_until_idle()
    pieces = [row.width for plan in bench.runner.steps for row in plan.rows if row.width > 1]
    assert sum(pieces) == 524 and min(pieces) >= 64, pieces
    check_received(bench, id_, hashed)


def test_a_prompt_behind_one_that_ends_in_flight_takes_a_step_that_others_can_wait_for() -> None:
    """The first's next token would wait for a step of the longest kind."""
    bench = Bench(
        capabilities(
            block_tokens=4, depth=2, max_rows=4, max_slots=4, kv_tokens=20480, max_step_tokens=512,
            context_tokens=2048, step_target_s=100.0, shared_step_target_s=1e-6,
        ),
        hashed,
    )  # fmt: skip
    bench.say(request("warm" * 100, max_tokens=2))
    first = len(bench.runner.steps)
    bench.ask(request("a" * 400, max_tokens=4, salt="a"))
    bench.core.step()
    bench.ask(request("b" * 1500, max_tokens=4, salt="b"))
    bench.run_until_idle()
    widths = [
        max(row.width for row in plan.rows) for plan in bench.runner.steps[first:] if plan.rows
    ]
    assert widths[0] >= 400 and max(widths[1:4]) <= 64, widths
