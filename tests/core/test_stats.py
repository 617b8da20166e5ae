"""Counters of an engine since its load: requests, tokens, drafts, and rows launched after a cancel."""

from typing import Any

import pytest

from localchat.backend_api.interface import StepPlan
from tests.support.engine_core_bench import Bench, capabilities, periodic, request

AHEAD: dict[str, Any] = {"block_tokens": 4, "depth": 2}
KINDS: tuple[dict[str, Any], ...] = ({}, AHEAD, {"depth": 2})
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_ends_and_tokens_are_counted_by_request() -> None:
    bench = Bench(capabilities(kv_tokens=400, context_tokens=400))
    for _ in range(2):
        bench.say(request("hello there, all of you", max_tokens=10, ignore_eos=True))
    gone = bench.ask(request("x", max_tokens=300, ignore_eos=True))
    bench.step(3)
    bench.core.cancel(gone)
    bench.run_until_idle()
    stats = bench.core.stats()
    assert (stats.finished, stats.cancelled, stats.failed) == (2, 1, {})
    assert stats.prompt_tokens == 2 * 23 + 1
    assert stats.cached_tokens == bench.received[2].done.usage.cached_tokens > 0
    assert 20 < stats.completion_tokens < 30
    assert stats.steps == len([plan for plan in bench.runner.steps if plan.rows])
    assert stats.requests == ()
    assert stats.process_bytes > 1_000_000


def test_drafts_are_counted_as_the_requests_count_them() -> None:
    bench = Bench(logits=periodic)
    done = [bench.say(request(ALPHABET * 3, max_tokens=60, salt=salt)).done for salt in "ab"]
    stats = bench.core.stats()
    assert stats.drafted == sum(one.speculation.drafted for one in done) > 0
    assert stats.accepted == sum(one.speculation.accepted for one in done)
    drafting = [row for plan in bench.runner.steps for row in plan.rows if row.drafts]
    assert stats.draft_steps == len(drafting)


def test_failure_in_a_step_is_counted_by_its_code_and_not_as_cancel() -> None:
    bench = Bench(capabilities(kv_tokens=64, context_tokens=512))
    bench.say(request("a" * 200))
    assert bench.core.stats().failed == {"does_not_fit": 1}
    assert bench.core.stats().cancelled == 0


def test_stats_list_requests_with_phase_age_and_user() -> None:
    bench = Bench(capabilities(max_rows=1, max_slots=1, max_step_tokens=16))
    bench.ask(request("a" * 40, max_tokens=50, ignore_eos=True, user="editor"))
    bench.ask(request("b" * 40, user="chat", salt="b"))
    bench.step()
    first, second = bench.core.stats().requests
    assert (first.user, first.phase, first.prompt_tokens) == ("editor", "prefill", 40)
    assert (second.user, second.phase) == ("chat", "queued")
    bench.step(6)
    first, second = bench.core.stats().requests
    assert first.phase == "decode" and first.completion_tokens > 0
    assert first.age_s >= second.age_s >= 0
    bench.run_until_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_last_tokens_have_their_times_and_no_more_than_512_of_them(kind: dict[str, Any]) -> None:
    bench = Bench(capabilities(kv_tokens=4096, context_tokens=2048, **kind))
    bench.say(request("abc", max_tokens=100, ignore_eos=True, speculation=False))
    assert len(bench.core.stats().tpot_ms) == 99
    bench.say(request("abc", max_tokens=700, ignore_eos=True, speculation=False))
    assert len(bench.core.stats().tpot_ms) == 512


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["collect", "launch"])
def test_cancel_during_a_step_keeps_the_request_out_of_the_next_plan(
    kind: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(capabilities(**kind))
    others = [bench.ask(request(letter * 9, max_tokens=90, salt=letter)) for letter in "ab"]
    gone = bench.ask(request("c" * 9, max_tokens=90, salt="c", ignore_eos=True))
    bench.step(8)
    plain = getattr(bench.runner, where)
    launched = len(bench.runner.steps)

    def interrupted(*arguments: StepPlan) -> object:
        monkeypatch.setattr(bench.runner, where, plain)
        bench.core.cancel(gone)
        return plain(*arguments)

    monkeypatch.setattr(bench.runner, where, interrupted)
    bench.step()
    sequence = bench.requests[gone].sequences[0].number
    after = bench.runner.steps[launched + (where == "launch") :]
    assert not any(row.seq == sequence for plan in after for row in plan.rows)
    bench.run_until_idle()
    assert all(bench.received[other].done for other in others)
