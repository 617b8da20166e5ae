"""Patterns of JSON schemas bind, or are named."""

import json

import pytest

from localchat.core.structured_output.compiler import grammar_spec, relaxed_keywords
from localchat.core.structured_output.patterns import plain_pattern
from localchat.core.structured_output.relaxation import relax
from localchat.engine.request import Grammar
from localchat.errors import UsageError

UNREADABLE = ("(unclosed", "^[z-a]+$", "[", "(?!x)y", r"(a)\1", r"(?<=a+)b", 5, None, ["a"])


def schema_of(pattern: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


@pytest.mark.parametrize("pattern", UNREADABLE)
def test_pattern_that_the_grammar_cannot_read_is_left_out_and_named(pattern: object) -> None:
    assert relax(schema_of(pattern)).dropped == ("pattern",)


def test_hyphen_beside_a_class_is_respelled_so_that_the_pattern_binds() -> None:
    for pattern in (r"^[\w-.]+$", r"^[\w-\d]+$", r"^[^]+$"):
        assert relax(schema_of(pattern)).dropped == ()
    assert plain_pattern(r"[\w-.]") == r"[\w\-.]"
    assert plain_pattern(r"[a-z]\-\d") == r"[a-z]\-\d"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "(?!x)y"}, "pattern"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_strict_schema_fails_if_a_keyword_is_not_enforced(
    schema: dict[str, object], keyword: str
) -> None:
    source = json.dumps({"type": "object", "properties": {"a": schema}})
    assert relaxed_keywords(grammar_spec(Grammar("json_schema", source))) == (keyword,)
    strict = grammar_spec(Grammar("json_schema", source, "response_format", strict=True))
    with pytest.raises(UsageError, match=keyword) as caught:
        relaxed_keywords(strict)
    assert caught.value.details["field"] == "response_format"
