"""The engine core, case by case: ends, failures, drafts, exact mode, events."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.backend_api.interface import StepPlan
from localchat.engine.events import MetricsSnapshot, Prefill, PromptLogprobs, Queued
from localchat.engine.request import Grammar
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError
from tests.support.engine_core_bench import (
    Bench,
    Received,
    capabilities,
    check_received,
    peaked,
    periodic,
    request,
)
from tests.support.scripted_backend import EOS, VOCAB, hashed

AHEAD: dict[str, Any] = {"block_tokens": 4, "depth": 2}
KINDS: tuple[dict[str, Any], ...] = ({}, AHEAD, {"depth": 2})
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def nothing_after(tokens: int) -> Any:
    """Logits that are no numbers once a text has so many tokens."""

    def logits(text: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        return np.full(VOCAB, np.nan, np.float32) if len(text) >= tokens else periodic(text, 0)

    return logits


@pytest.mark.parametrize("kind", [*KINDS, {"block_tokens": 4}])
@pytest.mark.parametrize("n", [1, 3])
def test_logits_that_are_no_numbers_end_the_request_and_leave_no_prefix(
    kind: dict[str, Any], n: int
) -> None:
    bench = Bench(capabilities(**kind), nothing_after(60))
    broken = bench.say(request(ALPHABET * 2 + "a" * 5, n=n, max_tokens=30))
    assert isinstance(broken.error, LocalchatError)
    assert "no usable logits" in broken.error.message
    again = bench.ask(request(ALPHABET, max_tokens=3))
    bench.run_until_idle()
    assert bench.received[again].text() == "abc"
    assert bench.received[again].done.usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("kv_types", "plain", "small"),
    [
        (("bf16", "fp8"), "bf16", "or fp8 KV (--kv-type fp8)"),
        (("f32", "f16", "q8_0"), "f16", "or q8_0 KV (--kv-type q8_0)"),
        (("f16",), "f16", ""),
    ],
)
def test_hints_name_the_kv_types_that_there_are(
    kv_types: tuple[str, ...], plain: str, small: str
) -> None:
    bench = Bench(capabilities(kv_type=plain, kv_types=kv_types), nothing_after(60))
    broken = bench.say(request(ALPHABET * 2 + "a" * 5, max_tokens=30))
    assert broken.error is not None
    assert f"(--kv-type {plain})" in broken.error.hint
    assert bench.core.output_processor.or_smaller_kv.strip() == small


@pytest.mark.parametrize("kind", KINDS)
def test_periodic_text_is_drafted_and_metrics_show_it(kind: dict[str, Any]) -> None:
    bench = Bench(capabilities(**kind), periodic)
    received = bench.say(request(ALPHABET * 3, max_tokens=100))
    assert received.text() == (ALPHABET * 4)[:100]
    drafts = received.done.speculation
    assert drafts.accepted > 50
    assert drafts.accepted <= drafts.drafted
    assert drafts.speedup is not None and drafts.speedup > 1
    assert drafts.off == ""
    assert len(bench.runner.steps) < 60


def test_no_drafts_where_they_are_not_asked_for() -> None:
    for asked, engine in ((False, True), (True, False)):
        bench = Bench(logits=periodic, speculation=engine)
        received = bench.say(request(ALPHABET * 3, max_tokens=60, speculation=asked))
        assert received.done.speculation.drafted == 0
        assert not any(row.drafts for plan in bench.runner.steps for row in plan.rows)


@pytest.mark.parametrize("target_s", [0.25, 0.1])
def test_drafts_have_up_to_31_tokens_on_slow_and_fast_runners(target_s: float) -> None:
    bench = Bench(capabilities(step_target_s=target_s), periodic)
    bench.say(request(ALPHABET * 3, max_tokens=200))
    assert max(len(row.drafts) for plan in bench.runner.steps for row in plan.rows) == 31


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_off_while_many_sequences_run_and_come_back_after(kind: dict[str, Any]) -> None:
    drafting = capabilities().draft_rows
    many = drafting + 1
    can = capabilities(
        **kind, kv_tokens=16_000, max_slots=many, max_rows=many, max_step_tokens=2048
    )
    bench = Bench(can, periodic)
    bench.ask(request(ALPHABET * 3, max_tokens=120, speculation=False))
    for _ in range(many - 1):
        bench.ask(request(ALPHABET * 3, max_tokens=60))
    last = bench.ask(request(ALPHABET * 3, max_tokens=120))
    bench.run_until_idle()
    check_received(bench, last, periodic)
    drafted = [plan for plan in bench.runner.steps if any(row.drafts for row in plan.rows)]
    assert drafted
    assert all(len(plan.rows) <= drafting for plan in drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_a_seed_there_are_no_drafts_and_the_answer_says_so(temperature: float) -> None:
    bench = Bench(capabilities(), periodic)
    asked = request(ALPHABET * 3, seed=1, temperature=temperature, max_tokens=60)
    assert bench.say(asked).done.speculation.off == "off with a seed"
    assert not any(row.drafts for plan in bench.runner.steps for row in plan.rows)


@pytest.mark.parametrize("step_s", [0.0, 3.0])
def test_the_chunks_of_a_seeded_prompt_that_runs_alone_depend_on_no_measured_time(
    step_s: float,
) -> None:
    bench = Bench(capabilities(max_step_tokens=128))
    bench.core._scheduler._token_budget.observe(40, step_s)
    bench.say(request("ab" * 75, seed=1, max_tokens=1))
    assert [row.width for plan in bench.runner.steps for row in plan.rows] == [64, 64, 22]


def test_seeded_prompts_share_a_step_with_others_within_its_budget() -> None:
    bench = Bench(capabilities(max_step_tokens=64))
    numbers = [bench.ask(request(letter * 100, seed=1, max_tokens=5)) for letter in "abc"]
    bench.run_until_idle()
    for number in numbers:
        check_received(bench, number, peaked)
    assert any(len(plan.rows) > 1 for plan in bench.runner.steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_no_answer_asked_ends_when_the_prompt_is_computed(kind: dict[str, Any], n: int) -> None:
    bench = Bench(capabilities(**kind, max_step_tokens=16))
    received = bench.say(request("ab" * 30, n=n, max_tokens=0, prompt_logprobs=1))
    assert received.text() == ""
    assert {one.reason for one in received.finished().values()} == {"length"}
    assert len(received.all(PromptLogprobs)[0].tokens) == 59
    assert received.done.usage.completion_tokens == 0


def test_prompt_logprobs_of_a_single_token_are_empty() -> None:
    received = Bench().say(request("a", prompt_logprobs=2))
    assert received.all(PromptLogprobs) == [PromptLogprobs(())]


@pytest.mark.parametrize("halt", [[], [1], [2, 3]])
def test_prompt_logprobs_are_complete_and_in_order(halt: list[int]) -> None:
    bench = Bench(capabilities(max_step_tokens=8), halt=halt)
    received = bench.say(request("abcabcabcabcabc", prompt_logprobs=0))
    entries = received.all(PromptLogprobs)[0].tokens
    assert bytes(entry.token for entry in entries) == b"bcabcabcabcabc"


def test_each_token_sent_has_one_logprob() -> None:
    bench = Bench()
    number = bench.ask(request("ab", logprobs=1, max_tokens=25, ignore_eos=True))
    bench.run_until_idle()
    check_received(bench, number, peaked)
    tokens = [entry.token for entry in bench.received[number].logprobs()]
    assert tokens == bench.requests[number].sequences[0].tokens[2:]


def test_second_turn_computes_only_what_is_new() -> None:
    bench = Bench()
    first = bench.ask(request("ab" * 40, max_tokens=10, ignore_eos=True))
    bench.run_until_idle()
    whole = bench.requests[first].sequences[0].tokens
    received = bench.say(request([*whole, 97, 98, 99]))
    assert received.done.usage.cached_tokens == len(whole) - 1
    other = bench.say(request([*whole, 97, 98, 99], salt="other"))
    assert other.done.usage.cached_tokens == 0


def test_priority_goes_before_arrival_and_equals_keep_theirs() -> None:
    bench = Bench(capabilities(max_rows=1), periodic)
    numbers = [
        bench.ask(request(prompt, max_tokens=5, priority=priority))
        for prompt, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 0))
    ]
    bench.run_until_idle()
    first = {plan.rows[0].seq: plan.number for plan in reversed(bench.runner.steps) if plan.rows}
    order = sorted(numbers, key=lambda number: first[bench.requests[number].sequences[0].number])
    assert [numbers.index(number) for number in order] == [2, 0, 1, 3]
    assert bench.received[numbers[3]].all(Queued)


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    bench = Bench(capabilities(context_tokens=400, kv_tokens=100))
    large, small = bench.ask(request("a" * 200)), bench.ask(request("a"))
    growing = bench.ask(request("ab" * 40, max_tokens=None, ignore_eos=True))
    bench.run_until_idle()
    assert isinstance(bench.received[large].error, DoesNotFit)
    check_received(bench, small, peaked)
    assert isinstance(bench.received[growing].error, DoesNotFit)
    assert bench.received[growing].text()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_never_comes_back_is_one_error_for_each_request(
    kind: dict[str, Any], seed: int | None
) -> None:
    bench = Bench(capabilities(**kind), stumble=range(1, 1000))
    numbers = [bench.ask(request("ab" * 20, seed=seed)) for _ in range(4)]
    bench.run_until_idle()
    for number in numbers:
        assert isinstance(bench.received[number].error, DoesNotFit)


@pytest.mark.parametrize("short", ["stumble", "halt"])
def test_a_row_cancelled_behind_a_short_step_leaves_no_prefix_that_was_never_computed(
    short: str,
) -> None:
    for step in range(1, 8):
        steps: dict[str, Any] = {short: [step]}
        bench = Bench(capabilities(**AHEAD, max_step_tokens=5), **steps)
        first = bench.ask(request(ALPHABET))
        while bench.core._scheduler.step_number <= step:
            bench.step()
        bench.step()  # the short step came back; the one behind it is in flight
        bench.core.cancel(first)
        second = bench.ask(request(ALPHABET))
        bench.run_until_idle()
        check_received(bench, second, peaked)


def test_metrics_are_sent_at_each_phase_and_at_the_end() -> None:
    received: Received = Bench().say(request("ab" * 50, ignore_eos=True))
    figures = received.all(MetricsSnapshot)
    assert {one.phase for one in figures} == {"prefill", "decode"}
    assert figures[-1].completion_tokens == received.done.usage.completion_tokens == 20
    assert received.done.timings.ttft_s is not None


def test_cached_tokens_stay_those_of_the_first_admission_after_a_preemption() -> None:
    bench = Bench(capabilities(kv_tokens=100, context_tokens=100, max_step_tokens=8))
    numbers = [bench.ask(request(letter * 60, max_tokens=30)) for letter in "ab"]
    bench.run_until_idle()
    for number in numbers:
        check_received(bench, number, peaked)
        assert bench.received[number].done.usage.cached_tokens == 0
        assert {one.cached for one in bench.received[number].all(Prefill)} == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_stopping_fails_what_is_under_way(kind: dict[str, Any]) -> None:
    bench = Bench(capabilities(**kind))
    number = bench.ask(request("ab", max_tokens=50, ignore_eos=True))
    bench.step(4)
    bench.core.stop()
    bench.core.run()
    assert isinstance(bench.received[number].error, EngineClosed)


def test_a_cancelled_request_sends_no_more_events() -> None:
    bench = Bench(capabilities(**AHEAD))
    number = bench.ask(request("ab", n=3, max_tokens=50, ignore_eos=True))
    bench.step()
    bench.core.cancel(number)
    received = len(bench.received[number].events)
    bench.run_until_idle()
    assert len(bench.received[number].events) == received


@pytest.mark.parametrize(("wait_s", "together"), [(0.0, True), (9.0, False)])
def test_a_grammar_is_in_each_step_unless_the_wait_for_its_token_costs_others_more(
    wait_s: float, together: bool
) -> None:
    bench = Bench(capabilities(depth=2))
    bench.core._step_costs._gap_s = wait_s
    grammar = Grammar("regex", "[ab]{40}")
    for how in ({"grammar": grammar}, {}, {}, {}):
        bench.ask(request(ALPHABET, max_tokens=40, ignore_eos=True, speculation=False, **how))
    bench.run_until_idle()
    whole = [plan for plan in bench.runner.steps if len(plan.rows) == 4]
    assert (len(whole) > 30) is together


def test_a_prompt_cancelled_with_two_steps_in_flight_stays_as_far_as_they_go() -> None:
    bench = Bench(capabilities(depth=2, max_step_tokens=16))
    cancelled = bench.ask(request(ALPHABET * 4, max_tokens=3))
    bench.step()
    bench.core.cancel(cancelled)
    bench.run_until_idle()
    again = bench.ask(request(ALPHABET * 4, max_tokens=3))
    bench.run_until_idle()
    assert bench.received[again].done.usage.cached_tokens == 32


def test_a_cancel_ends_a_step_that_is_computed_as_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(capabilities())
    number = bench.ask(request("ab", max_tokens=50))
    launch, aborted = bench.runner.launch, threading.Event()

    def launched(plan: StepPlan) -> None:
        bench.core.cancel(number)
        launch(plan)

    monkeypatch.setattr(bench.runner, "launch", launched)
    monkeypatch.setattr(bench.runner, "abort", aborted.set)
    bench.step()
    assert aborted.is_set()


def test_a_long_prompt_is_indexed_for_drafts_while_it_is_computed() -> None:
    can = replace(capabilities(), context_tokens=40_000, kv_tokens=40_000, max_step_tokens=8192)
    bench = Bench(can, periodic)
    number = bench.ask(request(ALPHABET * 1200, max_tokens=40))
    while not bench.requests[number].completion_tokens:
        bench.step()
    drafts = bench.requests[number].sequences[0].drafts
    assert drafts is not None
    assert drafts.ngrams.index()
    bench.run_until_idle()
    assert bench.received[number].done.speculation.accepted > 20


def test_end_token_is_an_end_unless_it_is_ignored() -> None:
    def ending(text: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        logits = periodic(text, 0) if text[-1] < 256 else np.zeros(VOCAB, np.float32)
        logits[EOS] = 50 if len(text) == 5 else 0
        return logits

    assert Bench(logits=ending).say(request("abc")).text() == "de"
    received = Bench(logits=ending).say(request("abc", max_tokens=3, ignore_eos=True, logprobs=0))
    assert received.text() == "de"
    assert [entry.token for entry in received.logprobs()] == [100, 101, EOS]


def test_a_prompt_advances_while_decoding_takes_the_whole_budget() -> None:
    """Steps that seem dear leave 32 tokens: as many as write already."""
    can = capabilities(max_rows=40, max_slots=40, kv_tokens=40_000, step_target_s=1e-9)
    bench = Bench(can, hashed)
    for letter in range(34):
        bench.ask(request(chr(97 + letter % 26) * 3, max_tokens=400, ignore_eos=True))
    bench.step(40)
    late = bench.ask(request("z" * 200, max_tokens=2))
    bench.step(30)
    assert bench.received[late].text()


def test_an_idle_engine_warms_up_until_nothing_is_left_and_no_longer_than_it_is_idle() -> None:
    bench, calls = Bench(), []

    def warm_up_next() -> bool:
        calls.append(bench.runner.steps[-1:])
        if len(calls) == 2:
            bench.ask(request("abc", max_tokens=2))
        if len(calls) < 4:
            return True
        threading.Timer(0.05, bench.core.stop).start()
        return False

    bench.runner.warm_up_next = warm_up_next  # type: ignore[method-assign]
    bench.core.run()
    assert [bool(steps) for steps in calls] == [False, False, True, True]
