"""Objects whose properties are named have no others, unless their schema says so."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from localchat.core.structured_output.compiler import grammar_spec, llguidance_tokenizer
from localchat.core.structured_output.json_schema import close_objects
from localchat.engine.request import Grammar
from tests.support.scripted_backend import ScriptedTokenizer

TOKENIZER = ScriptedTokenizer()
LEXICON = llguidance_tokenizer(TOKENIZER)
A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
AB = '{"a": 1, "b": 2}'


def takes(schema: dict[str, Any], text: str) -> bool:
    source = grammar_spec(Grammar("json_schema", json.dumps(schema))).source
    matcher = LLMatcher(LEXICON, source, log_level=0)
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text", "taken"),
    [
        ({"type": "object", **A}, '{"a": 1}', True),
        ({"type": "object", **A}, AB, False),
        ({"type": "object", **A, "additionalProperties": True}, AB, True),
        ({"type": "object", **A, "additionalProperties": {"type": "integer"}}, AB, True),
        ({"type": "object"}, AB, True),
        ({"type": "object", "properties": {}}, AB, True),
        ({"type": "object", **A, "minProperties": 1}, AB, False),
        ({"type": "object", **A, "minProperties": 1}, "{}", False),
        ({"type": "object", **A, "required": ["b"]}, '{"a": 1, "b": 2}', True),
        ({"type": "array", "items": {"type": "object", **A}}, f"[{AB}]", False),
        ({"type": "object", "properties": {"x": {"type": "object", **A}}}, f'{{"x": {AB}}}', False),
        ({"anyOf": [{"type": "object", **A}, {"type": "object", **B}]}, AB, False),
        ({"anyOf": [{"type": "object", **A}, {"type": "object", **B}]}, '{"b": 2}', True),
        ({"type": "object", "allOf": [A, B]}, AB, True),
        ({"type": "object", **A, "if": {"required": ["a"]}, "then": {"maxProperties": 9}}, AB, False),
        ({"type": "object", **A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, AB, True),
        ({"type": "object", **A, "dependentSchemas": {"a": {"minProperties": 1}}}, AB, False),
        ({"type": "object", **A, "dependentSchemas": {"a": {"required": ["b"]}}}, AB, True),
        ({"type": "object", **A, "anyOf": [{"required": ["a"]}, {}]}, AB, False),
        ({"type": "object", **A, "anyOf": [{"required": ["a"]}, B]}, AB, True),
        ({"type": "object", **A, "allOf": [{"not": {"required": ["a"]}}]}, AB, False),
        ({"type": "object", **A, "allOf": [{"additionalProperties": {"type": "integer"}}]}, AB, True),
        ({"type": "object", **A, "unevaluatedProperties": False}, AB, False),
        ({"type": "object", "unevaluatedProperties": False}, AB, False),
        ({"type": "object", **A, "unevaluatedProperties": False, "allOf": [B]}, AB, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", **A}}}, AB, False),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"type": "object", **A}}}, AB, True),
    ],
)  # fmt: skip
def test_only_named_properties_are_allowed(schema: dict[str, Any], text: str, taken: bool) -> None:
    assert takes(schema, text) is taken


@pytest.mark.parametrize("format_", ["password", "cuid", "uri-reference", "int64"])
def test_formats_that_nobody_knows_ask_for_nothing(format_: str) -> None:
    part = {"type": "string", "format": format_}
    assert takes(part, '"any text"')
    assert takes({"type": "object", "properties": {"format": part}}, '{"format": "any text"}')
    assert takes({"anyOf": [part, {"type": "null"}]}, '"any text"')


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("date-time", "2026-11-22T10:00:00Z"),
        ("date", "2026-11-22"),
        ("time", "10:00:00Z"),
        ("duration", "P1D"),
        ("email", "a@b.org"),
        ("hostname", "b.org"),
        ("ipv4", "10.0.0.1"),
        ("ipv6", "::1"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
        ("uri", "https://b.org/a"),
    ],
)
def test_formats_that_are_known_bind(format_: str, text: str) -> None:
    assert takes({"type": "string", "format": format_}, f'"{text}"')
    assert not takes({"type": "string", "format": format_}, '" "')


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}])
def test_names_of_any_kind_ask_for_nothing(names: Any) -> None:
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert takes(record, AB)
    assert not takes(record, '{"a": "x"}')


def test_data_in_a_schema_is_no_schema() -> None:
    schema = {"const": {"properties": {"a": 1}}, "enum": [{"properties": {"a": 1}}], "default": A}
    assert close_objects(schema) == schema


def test_a_schema_stays_as_it_was_given() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "object", **A}}}
    before = json.dumps(schema)
    close_objects(schema)
    assert json.dumps(schema) == before


KEYS = st.sampled_from("ab")
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"$ref": "#/$defs/A"}, {"type": "object", **A}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(KEYS, inner, max_size=2)},
            optional={
                "required": st.lists(KEYS, unique=True),
                "allOf": st.lists(inner, min_size=1),
                "if": inner,
                "then": inner,
                "not": inner,
                "dependentSchemas": st.dictionaries(KEYS, inner, max_size=1),
                "unevaluatedProperties": st.booleans(),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"items": inner}),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.integers(0, 1) | st.just("x"),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=2) | st.lists(inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@given(SCHEMAS, VALUES)
@settings(max_examples=120, deadline=None)
def test_every_answer_of_the_closed_schema_satisfies_the_original(
    schema: dict[str, Any], value: object
) -> None:
    whole = {**schema, "$defs": {"A": {"type": "object", **A}}}
    strict = jsonschema.Draft202012Validator(close_objects(whole))
    if strict.is_valid(value):
        assert jsonschema.Draft202012Validator(whole).is_valid(value)
