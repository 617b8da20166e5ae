"""Contract of every engine, whichever backend runs under it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from localchat.engine.events import Prefill
from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling, TextPrompt
from localchat.errors import ContextExceeded, UsageError
from tests.support.answers import Answer, ask, told_apart
from tests.support.contract_engines import Open
from tests.support.greedy import NEARLY_GREEDY

CHAIN = "abcdefghijklmnopqrstuvwxyz 0123456789.,;:!?"
GREEDY = Sampling(temperature=NEARLY_GREEDY)
EXACT = (Sampling(temperature=0), Sampling(temperature=1.0, top_p=1.0, min_p=0.0, seed=11))


def request(text: str = CHAIN, tokens: int = 40, **fields: object) -> GenerateRequest:
    chosen = {"sampling": GREEDY, "max_tokens": tokens, "ignore_eos": True, **fields}
    return GenerateRequest(TextPrompt(text), **chosen)  # type: ignore[arg-type]


def test_events_come_in_order_and_the_figures_add_up(start: Open) -> None:
    answer = ask(start(), request(tokens=12))
    assert [kind for kind, _ in answer.phases()] == [
        "accepted",
        "prefill",
        "text",
        "finished",
        "done",
    ]
    assert answer.accepted.max_tokens == 12
    done = answer.done
    assert (done.usage.completion_tokens, answer.reasons) == (12, ["length"])
    assert done.usage.prompt_tokens == answer.accepted.prompt_tokens
    assert done.timings.ttft_s is not None
    assert 0 < done.timings.ttft_s <= done.timings.total_s
    assert done.kv_used_tokens >= done.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_gives_the_same_text_each_time(start: Open, temperature: float) -> None:
    engine = start()
    sampling = Sampling(temperature=temperature, top_p=1.0, min_p=0.0, seed=11)
    one, other = (ask(engine, request(CHAIN * 3, 120, sampling=sampling, salt=s)) for s in "ab")
    assert one.text == other.text


@pytest.mark.parametrize("sampling", EXACT, ids=["greedy", "seeded"])
def test_an_exact_request_gives_one_text_cold_warm_and_without_drafts(
    start: Open, sampling: Sampling
) -> None:
    engine = start()
    answers = [
        ask(engine, request(CHAIN * 4, 60, sampling=sampling, speculation=on, logprobs=0))
        for on in (True, True, False)
    ]
    for other in answers[1:]:
        assert other.logprobs == answers[0].logprobs


@pytest.mark.parametrize("sampling", EXACT, ids=["greedy", "seeded"])
def test_an_exact_request_uses_no_kv_of_another_shape(start: Open, sampling: Sampling) -> None:
    cold = ask(start(), request(CHAIN * 4, 40, sampling=sampling, logprobs=0))
    engine = start()
    ask(engine, request(CHAIN * 4, 40))
    beside = ask(engine, request(CHAIN * 4, 40, sampling=sampling, logprobs=0))
    assert beside.logprobs == cold.logprobs


def test_drafts_change_a_text_only_at_a_near_tie(start: Open) -> None:
    engine = start()
    drafted, plain = (
        ask(engine, request(CHAIN * 3, 120, salt=salt, logprobs=2, speculation=on))
        for salt, on in (("a", True), ("b", False))
    )
    assert told_apart(plain, drafted) < 0.1
    assert plain.done.speculation.drafted == 0


def test_drafts_are_made_and_accepted_on_text_that_repeats(
    backend: tuple[str, object], start: Open
) -> None:
    if "llamacpp" not in backend[0]:
        pytest.skip("hashed text never repeats")
    # A busy machine may be slow in the first step with drafts, which then wait; not ten times.
    answers = (ask(start(), request(CHAIN * 3, 120)) for _ in range(10))
    assert any(answer.done.speculation.accepted > 20 for answer in answers)


def test_a_warm_cache_changes_text_only_at_a_near_tie(start: Open) -> None:
    engine = start()
    cold = ask(engine, request(CHAIN * 4, 60, logprobs=2))
    warm = ask(engine, request(CHAIN * 4, 60, logprobs=2))
    assert cold.done.usage.cached_tokens == 0
    assert warm.done.usage.cached_tokens == warm.done.usage.prompt_tokens - 1
    assert told_apart(cold, warm) < 0.1


def test_neighbours_change_text_only_at_a_near_tie(start: Open) -> None:
    engine = start()
    alone = ask(engine, request(CHAIN * 2, 60, logprobs=2, salt="alone"))
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, engine, request(CHAIN[:n] * 3, 60)) for n in (7, 20, 30)]
        beside = pool.submit(
            ask, engine, request(CHAIN * 2, 60, logprobs=2, salt="beside")
        ).result()
        assert all(len(other.result().text) > 0 for other in others)
    assert told_apart(alone, beside) < 0.1


def test_the_next_turn_computes_only_its_new_tokens(start: Open) -> None:
    engine = start()
    first = ask(engine, request(CHAIN * 4, 10))
    prompt = CHAIN * 4 + first.text + "\nabc"
    second = ask(engine, request(prompt, 10))
    usage = second.done.usage
    # The last sampled token of an answer was told and never computed.
    assert usage.prompt_tokens - usage.cached_tokens <= len("\nabc") + 2


def test_equal_text_under_another_salt_shares_nothing(start: Open) -> None:
    engine = start()
    ask(engine, request(CHAIN * 4, 4, salt="one"))
    other = ask(engine, request(CHAIN * 4, 4, salt="two"))
    assert other.done.usage.cached_tokens == 0


def test_choices_differ_and_share_their_prompt(start: Open) -> None:
    sampling = Sampling(temperature=1.5, top_p=1.0, min_p=0.0, seed=5)
    answer = ask(start(), request(CHAIN, 40, n=3, sampling=sampling))
    assert len(set(answer.texts)) == 3
    assert answer.done.usage.completion_tokens == 120
    assert answer.reasons == ["length"] * 3


def test_a_stop_string_ends_the_answer_and_is_not_shown(start: Open) -> None:
    engine = start()
    exact = Sampling(temperature=0, seed=1)
    free = ask(engine, request(CHAIN, 30, sampling=exact, salt="free")).text
    stop = free[8:11]
    answer = ask(engine, request(CHAIN, 30, sampling=exact, salt="stopped", stop=(stop,)))
    assert answer.text == free[: free.index(stop)]
    assert answer.reasons == ["stop"]
    assert answer.stops == [stop]


def test_logprobs_come_with_their_text_and_the_prompts_own_too(start: Open) -> None:
    answer = ask(start(), request(CHAIN, 10, logprobs=3, prompt_logprobs=0))
    assert b"".join(entry.text for entry in answer.logprobs).decode() == answer.text
    assert all(entry.top[0][2] >= entry.logprob - 1e-6 for entry in answer.logprobs)
    assert len(answer.prompt_logprobs) == answer.done.usage.prompt_tokens - 1
    assert all(entry.logprob <= 0 for entry in answer.prompt_logprobs)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(start: Open) -> None:
    with pytest.raises(ContextExceeded) as caught:
        ask(start(), request("x" * 5000))
    assert caught.value.details["context_tokens"] == 2048
    assert int(caught.value.details["prompt_tokens"] or 0) >= 2048


def test_an_impossible_value_is_a_usage_error(start: Open) -> None:
    with pytest.raises(UsageError, match="top_p"):
        ask(start(), request(sampling=Sampling(top_p=2.0)))


def test_a_closed_stream_leaves_nothing_running(start: Open) -> None:
    engine = start()
    stream = engine.generate(request(CHAIN, 1500))
    for _ in stream:
        break
    stream.close()
    assert ask(engine, request(CHAIN, 5)).done.usage.completion_tokens == 5
    _wait_idle(engine)


def test_questions_are_answered_while_a_step_runs(start: Open) -> None:
    engine = start()
    stream = engine.generate(request(CHAIN, 200))
    next(event for event in stream if isinstance(event, Prefill))
    tokens = engine.tokenize("hello wörld")
    assert engine.detokenize(tokens) == "hello wörld"
    rendered = engine.render(Messages((Message("user", "hello"),)))
    assert "hello" in rendered
    assert engine.info().context_tokens == 2048
    assert engine.info().max_rows > 0
    stream.close()


def _wait_idle(engine: LocalEngine) -> None:
    for _ in range(1000):
        figures = engine.stats().now
        if figures.running == figures.waiting == 0:
            assert figures.kv_used_tokens == 0
            return
    raise AssertionError("the engine never became idle")


def test_an_answer_reads_as_one(start: Open) -> None:
    answer: Answer = ask(start(), request(CHAIN, 8))
    assert answer.text == "".join(answer.pieces)
