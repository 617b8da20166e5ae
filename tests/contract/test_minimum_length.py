"""Minimum lengths and stop tokens, whatever runs under the loop."""

import pytest

from localchat.engine.request import GenerateRequest, Grammar, Sampling, TextPrompt
from localchat.errors import UsageError
from tests.support.answers import ask
from tests.support.contract_engines import Open

GREEDY = Sampling(temperature=0.0)


def request(**fields: object) -> GenerateRequest:
    chosen = {"sampling": GREEDY, "max_tokens": 60, **fields}
    return GenerateRequest(TextPrompt("abc " * 10), **chosen)  # type: ignore[arg-type]


def test_answer_has_its_minimum_length_with_and_without_drafts(start: Open) -> None:
    engine = start()
    answers = [
        ask(engine, request(min_tokens=40, speculation=speculation))
        for speculation in (True, False)
    ]
    assert all(answer.done.usage.completion_tokens >= 40 for answer in answers)
    assert answers[0].text == answers[1].text


def test_stop_token_ends_an_answer_after_the_minimum(start: Open) -> None:
    engine = start()
    whole = ask(engine, request(ignore_eos=True, logprobs=0))
    tokens = [entry.token for entry in whole.logprobs]
    stop = tokens[10]
    ended = ask(engine, request(ignore_eos=True, stop_tokens=(stop,)))
    assert ended.done.usage.completion_tokens == tokens.index(stop) + 1
    assert whole.text.startswith(ended.text)
    later = ask(engine, request(ignore_eos=True, stop_tokens=(stop,), min_tokens=30))
    assert later.done.usage.completion_tokens >= 30


def test_grammar_obeys_the_minimum_while_it_allows_more(start: Open) -> None:
    grammar = Grammar("regex", "[a-z ]*")
    answer = ask(start(), request(grammar=grammar, min_tokens=30, max_tokens=50))
    assert answer.done.usage.completion_tokens >= 30
    short = ask(start(), request(grammar=Grammar("regex", "[a-c]{3}"), min_tokens=30))
    assert len(short.text) == 3


def test_minimum_above_the_limit_is_rejected(start: Open) -> None:
    with pytest.raises(UsageError, match="min_tokens is 61"):
        ask(start(), request(min_tokens=61))


def test_stop_token_beyond_the_vocabulary_is_rejected(start: Open) -> None:
    with pytest.raises(UsageError, match="stop_token_ids"):
        ask(start(), request(stop_tokens=(1 << 30,)))
