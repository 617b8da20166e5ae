"""Answers recomputed while the engine is idle, so that the next turn reuses their KV."""

import random
from pathlib import Path
from typing import Any

import pytest

from localchat.backend_api.interface import StepPlan
from localchat.engine.request import GenerateRequest
from localchat.kv_store.store import KVStore
from tests.support.engine_core_bench import (
    Bench,
    capabilities,
    check_received,
    peaked,
    periodic,
    request,
)
from tests.support.scripted_backend import EOS

QUESTION = (*b"abcdefghijabcdefghij", EOS)
ANSWER_TOKENS = 90
SEEDED: dict[str, Any] = {"seed": 1, "max_tokens": ANSWER_TOKENS}


def turn(bench: Bench, prompt: tuple[int, ...], **changes: Any) -> tuple[int, ...]:
    """Ask, and return the prompt of the next turn up to its question."""
    id_ = bench.ask(request(prompt, **{**SEEDED, **changes}))
    bench.run_until_idle()
    answer = bench.requests[id_].sequences[0].tokens
    if answer[-1] == EOS:
        return tuple(answer)
    return (*answer, EOS)


def recomputed(bench: Bench) -> list[StepPlan]:
    """Return the plans with recomputed tokens."""
    return [plan for plan in bench.runner.steps if any(row.seq < 0 for row in plan.rows)]


def cached(bench: Bench, asked: GenerateRequest) -> int:
    id_ = bench.ask(asked)
    bench.run_until_idle()
    check_received(bench, id_, periodic)
    return bench.received[id_].done.usage.cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_next_turn_reuses_all_tokens_of_a_recomputed_answer(depth: int) -> None:
    bench = Bench(capabilities(depth=depth), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    assert cached(bench, request((*text, *QUESTION), seed=1)) == 0
    bench = Bench(capabilities(depth=depth), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    assert bench.recompute()
    assert not bench.recompute()
    assert cached(bench, request((*text, *QUESTION), seed=1)) == len(text)


def test_recomputed_chunks_are_those_of_a_fresh_prompt() -> None:
    bench = Bench(capabilities(), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    bench.recompute()
    rows = [(row.start, row.width) for plan in recomputed(bench) for row in plan.rows]
    assert all(plan.exact and not plan.positions for plan in recomputed(bench))
    fresh = Bench(capabilities(), periodic)
    fresh.say(request((*text, *QUESTION), seed=1, max_tokens=1))
    chunks = [(row.start, row.width) for plan in fresh.runner.steps for row in plan.rows]
    assert rows
    assert set(rows) <= set(chunks)


def test_short_question_reuses_the_answer_too() -> None:
    bench = Bench(capabilities(), periodic)
    text = turn(bench, (*QUESTION, *b"x:"), max_tokens=20)
    bench.recompute()
    assert cached(bench, request((*text, *b"b?", EOS, *b"x:"), seed=1)) == len(text)


@pytest.mark.parametrize(
    "changes",
    [{"seed": None, "temperature": 1.0}, {"max_tokens": 8}, {"n": 2}],
    ids=["not deterministic", "short", "choices"],
)
def test_other_answers_are_not_recomputed(changes: dict[str, Any]) -> None:
    bench = Bench(capabilities(), periodic)
    turn(bench, QUESTION, **changes)
    assert not bench.recompute()


def test_answer_with_reasoning_is_not_recomputed() -> None:
    bench = Bench(capabilities(), periodic)
    id_ = bench.ask(request(QUESTION, **SEEDED))
    bench.step(20)
    bench.requests[id_].sequences[0].output.reasoning_tokens = 5
    bench.run_until_idle()
    assert not bench.recompute()


@pytest.mark.parametrize("kind", [{"block_tokens": 4}, {"rewind": "checkpoint", "state_bytes": 10}])
def test_other_caches_are_left_alone(kind: dict[str, Any]) -> None:
    bench = Bench(capabilities(**kind), periodic)
    turn(bench, QUESTION)
    assert not bench.recompute()


def test_recomputed_answer_goes_to_the_disk_once(tmp_path: Path) -> None:
    def start() -> Bench:
        return Bench(
            capabilities(exports="range"), periodic, disk=KVStore(tmp_path / "kv", 1 << 30)
        )

    bench = start()
    text = turn(bench, (*QUESTION, *b"x:"), owner="chat")
    bench.recompute()
    bench.store()
    assert bench.disk_tier is not None
    store = bench.disk_tier._store
    assert store.writer.drain(60)
    # A range has 8 tokens.
    assert len(list(store.files())) == -(-len(text) // 8)
    bench = start()
    assert cached(bench, request((*text, *QUESTION), seed=1)) == len(text)


def test_a_chunk_without_result_is_computed_again() -> None:
    bench = Bench(capabilities(), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    steps = bench.core._scheduler.step_number
    # After the aborted chunk, a step truncates the slot.
    bench.runner._halt = frozenset([steps + 1])
    bench.recompute()
    bench.run_until_idle()
    assert cached(bench, request((*text, *QUESTION), seed=1)) == len(text)


def test_without_memory_the_answer_is_given_up() -> None:
    bench = Bench(capabilities(), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    bench.runner._stumble = frozenset([bench.core._scheduler.step_number + 1])
    bench.recompute()
    bench.run_until_idle()
    assert len(recomputed(bench)) == 1
    assert cached(bench, request((*text, *QUESTION), seed=1)) == 0


@pytest.mark.parametrize("continues", [True, False])
def test_only_a_request_that_needs_no_such_chunk_aborts_it(
    *, continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(capabilities(), periodic)
    text = turn(bench, (*QUESTION, *b"x:"))
    following = request((*text, *QUESTION), seed=1)
    if not continues:
        following = request("another", seed=1)
    aborts = []
    monkeypatch.setattr(bench.runner, "abort", lambda: aborts.append(True))
    collect = bench.runner.collect

    def submit_first() -> Any:
        if not bench.received.get(2):
            bench.ask(following)
        return collect()

    monkeypatch.setattr(bench.runner, "collect", submit_first)
    bench.recompute(1)
    assert len(aborts) == int(not continues)
    bench.run_until_idle()
    check_received(bench, 2, periodic)
    assert len(aborts) == int(not continues)


def test_an_idle_engine_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(capabilities(), peaked)
    bench.say(request(QUESTION, ignore_eos=True, **SEEDED))
    compute_next = bench.core._answer_kv.compute_next

    def compute_and_stop() -> bool:
        more = compute_next()
        if not more:
            bench.core.stop()
        return more

    monkeypatch.setattr(bench.core._answer_kv, "compute_next", compute_and_stop)
    bench.core.run()
    assert recomputed(bench)


@pytest.mark.parametrize("number", range(20))
def test_random_conversations_are_answered_as_without_recomputed_answers(number: int) -> None:
    draw = random.Random(number)
    kind: dict[str, Any] = draw.choice(
        [{}, {"rewind": "last_n", "rewind_tokens": 20}, {"depth": 2}]
    )
    short_steps = [draw.sample(range(2, 80), 3) for _ in range(2)]
    bench = Bench(
        capabilities(**kind),
        peaked,
        ram=draw.choice([0, 300, 100_000]),
        stumble=short_steps[0],
        halt=short_steps[1],
    )
    texts: list[list[int]] = [[]]
    for _ in range(6):
        text = draw.choice(texts)
        prompt = [*text, *draw.choices(b"abc", k=draw.randint(1, 30)), EOS, 97]
        if len(prompt) > 300:
            continue
        seed = draw.choice([None, 3])
        id_ = bench.ask(request(prompt, temperature=1.0, seed=seed, max_tokens=60))
        bench.run_until_idle()
        check_received(bench, id_, peaked)
        texts.append(bench.requests[id_].sequences[0].tokens)
        bench.recompute(draw.choice([0, 1, 100]))
        bench.run_until_idle()
