"""Tries: gathered from events, and the one that is kept."""

from localchat.engine.events import Finished, FinishReason, MetricsSnapshot, Text, TokenLogprob
from localchat.tries.best_answer import Tries
from localchat.tries.vote import last_number


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
