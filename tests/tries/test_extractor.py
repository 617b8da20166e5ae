"""Extractors: what an answer says, in one spelling."""

import pytest

from localchat.errors import UsageError
from localchat.tries.vote import extractor, json_text


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
