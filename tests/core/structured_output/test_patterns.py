"""Patterns of JSON schemas: invalid ones are rejected, others bind or are named."""

import json

import pytest

from localchat.core.structured_output.compiler import grammar_spec, relaxed_keywords
from localchat.core.structured_output.patterns import pattern_fault, plain_pattern
from localchat.core.structured_output.relaxation import relax
from localchat.engine.request import Grammar
from localchat.errors import UsageError

INVALID = ("(unclosed", "^[z-a]+$", "*a", "a{2,1}", "[", ")", "\\", "(?=x)(", "(?P<n>a", "a)(b")
UNSUPPORTED = ("(?!x)y", r"(a)\1", r"(?<=a+)b", r"(?<y>a)-\k<y>")
VALID = (r"^\p{Lu}+$", r"^\/a\-b$", r"[\w-.]+@[\w-.]+", r"[^]", r"\u{1F600}", r"^(?<year>\d{4})$")


def schema_of(pattern: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


@pytest.mark.parametrize("pattern", INVALID)
def test_invalid_pattern_is_rejected_with_its_fault(pattern: str) -> None:
    assert pattern_fault(pattern)
    with pytest.raises(UsageError, match="is not a regular expression") as caught:
        relax(schema_of(pattern), "response_format")
    assert caught.value.details["field"] == "response_format"


@pytest.mark.parametrize("pattern", [5, True, ["a"]])
def test_pattern_that_is_no_string_is_rejected(pattern: object) -> None:
    with pytest.raises(UsageError, match="not a string"):
        relax(schema_of(pattern))


@pytest.mark.parametrize("pattern", UNSUPPORTED)
def test_pattern_beyond_the_grammar_is_left_out_and_named(pattern: str) -> None:
    assert pattern_fault(pattern) == ""
    assert relax(schema_of(pattern)).dropped == ("pattern",)


@pytest.mark.parametrize("pattern", VALID)
def test_pattern_of_ecmascript_is_no_fault(pattern: str) -> None:
    assert pattern_fault(pattern) == ""


def test_hyphen_beside_a_class_is_respelled_so_that_the_pattern_binds() -> None:
    for pattern in (r"^[\w-.]+$", r"^[\w-\d]+$", r"^[^]+$"):
        assert relax(schema_of(pattern)).dropped == ()
    assert plain_pattern(r"[\w-.]") == r"[\w\-.]"
    assert plain_pattern(r"[a-z]\-\d") == r"[a-z]\-\d"


@pytest.mark.parametrize("pattern", ["(unclosed", "[z-a]"])
def test_invalid_pattern_of_names_is_rejected(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        relax({"type": "object", "patternProperties": {pattern: {"type": "string"}}})


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
