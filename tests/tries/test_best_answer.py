"""Tries: gathered from events, and the one that is kept."""

import pytest

from localchat.engine.events import (
    Done,
    Event,
    Finished,
    FinishReason,
    MetricsSnapshot,
    Text,
    TokenLogprob,
)
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import EngineClosed, UsageError
from localchat.tries.best_answer import Tries, best_answer
from localchat.tries.spec import TriesSpec
from localchat.tries.vote import last_number
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine


def _text(choice: int, text: str, logprob: float | None = None) -> Text:
    given = () if logprob is None else (TokenLogprob(1, text.encode(), logprob),)
    return Text(choice, text, given)


def _end(tries: Tries, choice: int, text: str, reason: FinishReason = "stop") -> None:
    tries.add(_text(choice, text))
    tries.add(Finished(choice, reason))


def _decided(tries: Tries) -> bool:
    return tries.decided


def test_a_vote_ends_early_and_keeps_a_try_with_the_winning_answer() -> None:
    tries = Tries(5, "vote", last_number)
    _end(tries, 2, "it is 4")
    _end(tries, 0, "it is 5")
    _end(tries, 4, "maybe 4.0")
    assert not _decided(tries)
    _end(tries, 1, "4")
    assert _decided(tries)  # 3 to 1, and one is left
    report = tries.as_json()
    assert (report["chosen"], report["answer"], report["votes"]) == (1, "4", {"4": 3, "5": 1})
    assert "3 say 4, 1 say 5, 1 cancelled, the first alone differs" in tries.sentence()


def test_a_try_that_was_cut_off_has_no_vote() -> None:
    tries = Tries(3, "vote", last_number)
    _end(tries, 0, "first 3 then", "length")
    _end(tries, 1, "8")
    _end(tries, 2, "9", "length")
    assert tries.vote.counts == {"8": 1}
    assert tries.chosen == 1


def test_the_best_is_the_likeliest_whole_answer_by_token_and_not_in_sum() -> None:
    tries = Tries(3, "best_of")
    for choice, logprobs in enumerate([[-1.0], [-0.5, -0.4, -0.6], [-0.1]]):
        for logprob in logprobs:
            tries.add(_text(choice, "x", logprob))
    tries.add(Finished(0, "stop"))
    tries.add(Finished(1, "stop"))
    assert not _decided(tries)
    tries.add(Finished(2, "length"))
    assert _decided(tries)
    assert tries.chosen == 1
    assert "try 2 has mean log probability -0.500, the first has -1.000" in (tries.sentence())


def test_tokens_are_those_that_the_engine_counts() -> None:
    tries = Tries(2, "vote")
    tries.add(_text(0, "several tokens"))
    tries.add(MetricsSnapshot("decode", completion_tokens=7))
    assert tries.tokens == 7


def _engine(*events: Event, gap_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(lambda request: ScriptedAnswer(events=events, gap_s=gap_s))


def _request() -> GenerateRequest:
    return GenerateRequest(prompt=Messages((Message("user", "2 + 2?"),)))


def test_a_decided_vote_cancels_the_engine_and_ends_without_done() -> None:
    four: list[Event] = []
    for choice in (0, 1):
        four += [Text(choice, "4"), Finished(choice, "stop")]
    engine = _engine(*four, *(Text(2, "x ") for _ in range(1000)), gap_s=0.01)
    best = best_answer(engine, _request(), TriesSpec(3, "vote"))
    events = list(best.stream)
    assert [event.text for event in events if isinstance(event, Text)] == ["4"]
    assert not any(isinstance(event, Done) for event in events)
    assert best.usage.completion_tokens >= 2
    assert engine.cancelled == 1


def test_a_stopped_answer_reports_the_tries_so_far() -> None:
    long_try = [Text(1, "x ") for _ in range(1000)]
    events: tuple[Event, ...] = (Text(0, "a"), Finished(0, "stop"), *long_try)
    engine = _engine(*events, gap_s=0.01)
    best = best_answer(engine, _request(), TriesSpec(2, "best_of"), live=True)
    for event in best.stream:
        if isinstance(event, Text) and event.choice == 1:
            break
    best.stop()
    assert engine.cancelled == 1
    assert best.chosen == 0
    report = best.report
    assert report is not None and report.as_json()["ended"] == 1


def test_a_refused_request_fails_before_its_first_event() -> None:
    engine = ScriptedEngine()
    engine.close()
    with pytest.raises(EngineClosed):
        list(best_answer(engine, _request(), TriesSpec(2, "vote")).stream)


def test_tries_that_would_all_be_equal_are_refused() -> None:
    request = GenerateRequest(prompt=Messages(()), sampling=Sampling(temperature=0.0))
    with pytest.raises(UsageError, match="every try gives the same"):
        best_answer(ScriptedEngine(), request, TriesSpec(2, "vote"))
