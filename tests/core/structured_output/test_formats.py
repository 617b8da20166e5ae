"""Formats whose regular expression has no end are bounded."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from localchat.core.structured_output.compiler import grammar_spec
from localchat.core.structured_output.json_schema import close_objects
from localchat.engine.request import Grammar

TOKENIZER = LLTokenizer("byte")


def allows(kind: str, text: str) -> bool:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": kind}}}
    source = grammar_spec(Grammar("json_schema", json.dumps(schema | {"required": ["a"]}))).source
    matcher = LLMatcher(TOKENIZER, source)
    tokens = TOKENIZER.tokenize_str(json.dumps({"a": text}))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("time", "12:30:00Z"),
        ("time", "12:30:00.123456+01:00"),
        ("date-time", "2024-01-01T12:30:00Z"),
        ("date-time", "2024-01-01T12:30:00.123456-05:30"),
        ("duration", "P1Y2M3DT4H5M6S"),
        ("email", "someone@example.org"),
        ("hostname", "a.example.org"),
        ("uri", "https://example.org/a?b=c"),
    ],
)
def test_ordinary_values_pass(kind: str, text: str) -> None:
    assert allows(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("time", "12:30:00.1234567Z"),
        ("date-time", "2024-01-01T12:30:00.1234567Z"),
        ("duration", "P" + "9" * 100 + "Y"),
        ("email", "a" * 300 + "@example.org"),
        ("hostname", ".".join(["a" * 60] * 10)),
        ("uri", "https://example.org/" + "a" * 3000),
    ],
)
def test_endless_values_do_not_pass(kind: str, text: str) -> None:
    assert not allows(kind, text)


def test_bounds_of_the_schema_stay() -> None:
    assert close_objects({"format": "uri", "maxLength": 9})["maxLength"] == 9
    long = {"format": "uri", "minLength": 5000}
    assert close_objects(long) == long
    own = {"format": "time", "pattern": "^0"}
    assert close_objects(own)["pattern"] == "^0"
