"""Votes: what each try answers, the leader, and when no open try can change it."""

from itertools import product

import pytest

from localchat.errors import UsageError
from localchat.tries.vote import Vote, extractor, json_text


def _vote(tries: int, *answers: str | None) -> Vote:
    vote = Vote(tries)
    for number, answer in enumerate(answers):
        vote.add(number, answer)
    return vote


def test_a_vote_is_decided_exactly_when_no_ending_can_equal_its_leader() -> None:
    for tries in range(1, 6):
        for ended in range(tries):
            for answers in product(("a", "b", None), repeat=ended):
                vote = _vote(tries, *answers)
                leader = vote.leader
                rest = product(("a", "b", "c"), repeat=tries - ended)
                counts = [_vote(tries, *answers, *end).counts for end in rest]
                safe = leader is not None and all(
                    count[leader] > max([n for a, n in count.items() if a != leader], default=0)
                    for count in counts
                )
                assert vote.decided == safe, (tries, answers)


def test_three_of_five_decide() -> None:
    assert not _vote(5, "a", "a").decided
    assert _vote(5, "a", "a", "a").decided


def test_an_equal_vote_goes_to_the_lowest_try_however_they_ended() -> None:
    vote = Vote(4)
    for number, answer in ((3, "b"), (1, "b"), (2, "a"), (0, "a")):
        vote.add(number, answer)
    assert (vote.leader, vote.chosen) == ("a", 0)


def test_tries_without_an_answer_are_no_votes() -> None:
    vote = _vote(3, None, None, "a")
    assert (vote.leader, vote.chosen, vote.decided) == ("a", 2, True)
    assert (_vote(2, None, None).leader, _vote(2, None, None).chosen) == (None, 0)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("number", "3 + 4 is 7.", "7"),
        ("number", "that is 1,250.50 euros", "1250.5"),
        ("number", "so -0.0", "0"),
        ("number", "it is -12", "-12"),
        ("number", "10-12", "12"),
        ("number", "100", "100"),
        ("number", "no idea", None),
        ("text", "  The  Red\nHouse. ", "the red house"),
        ("text", " \n", None),
        ("field:a.b", 'Sure: {"a": {"b": [2, 1]}} as asked', "[2, 1]"),
        ("field:a.1", '{"a": [1, "x"]}', '"x"'),
        ("field:c", '{"a": 1}', None),
        ("field:a", "{not json", None),
        (r"regex:answer: (\w+)", "answer: no\nthen\nanswer: yes", "yes"),
        (r"regex:[a-d]\b", "c or d", "d"),
        (r"regex:x+", "none", None),
    ],
)
def test_an_extractor_finds_what_a_text_says(kind: str, text: str, said: str | None) -> None:
    assert extractor(kind)(text) == said


def test_equal_json_is_one_answer_in_any_order_and_spacing() -> None:
    assert json_text('{"b": 1, "a": 2}') == json_text('```json\n{"a":2,\n"b":1}\n```')


@pytest.mark.parametrize("kind", ["", "words", "field", "field:", "regex:(", "number:2"])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(UsageError):
        extractor(kind)
