"""Schemas whose values contain themselves: some end, and the others are refused before anything is computed."""

import json
from typing import Any

import pytest

from localchat.core.structured_output.compiler import grammar_spec
from localchat.core.structured_output.endless_schema import finite_schema
from localchat.core.structured_output.tool_grammar import answer_grammar
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages
from localchat.errors import UsageError
from tests.support.answer_grammars import SIGNS
from tests.support.chat_templates import chat_format
from tests.support.scripted_backend import ScriptedTokenizer

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
SELF = {**NODE, "required": ["next"]}
A = {"$ref": "#/$defs/A"}
B = {"$ref": "#/$defs/B"}


def needs(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": schema}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"$ref": "#"},
        {**A, "$defs": {"A": needs(B), "B": {"anyOf": [A, needs(A)]}}},
        {**A, "$defs": {"A": {"anyOf": [needs(A), {"type": "array", "items": A, "minItems": 1}]}}},
        {"allOf": [{"description": "a node"}, SELF]},
        {"type": "array", "prefixItems": [{"type": "string"}, {"$ref": "#"}], "minItems": 2},
        {"type": ["object", "array"], "minItems": 1, "items": {"$ref": "#"}, "required": ["a"]}
        | {"additionalProperties": {"$ref": "#"}},
        {"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": needs({"$ref": "#"})}},
        # References as LiteLLM sends them.
        {"$ref": "/$defs/A", "$defs": {"A": needs({"$ref": "/$defs/A"})}},
    ],
)
def test_schema_whose_values_never_end_is_refused_by_its_name(schema: dict[str, Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(schema), "response_format")
    with pytest.raises(UsageError, match="'response_format' refers to itself without end") as info:
        grammar_spec(grammar)
    assert info.value.details["field"] == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"type": "string"},
        needs({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        needs({"type": "array", "items": {"$ref": "#"}}),
        needs({**SELF, "type": ["object", "null"]}),
        needs({"enum": [1], **SELF}),
        {**A, "$defs": {"A": needs(B), "B": needs({"oneOf": [A, {"type": "integer"}]})}},
        {"type": "array", "prefixItems": [{"$ref": "#"}]},
        # Without a type, any number satisfies it.
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#name", "$defs": {"A": {"$anchor": "name", "type": "integer"}}},
        # Wrong for a reason of their own.
        {"type": "object", "properties": {"a": False}, "required": ["a", ["b"]]},
        {"type": [None], "minItems": "1", "items": [3], "$ref": 5, "anyOf": {}},
    ],
)
def test_schema_with_a_value_that_ends_is_not_endless(schema: dict[str, Any]) -> None:
    assert finite_schema(schema) == schema


@pytest.mark.parametrize(
    ("inner", "finite"),
    [
        (A, False),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [False, {"type": "null"}]}),
        ({"type": "array", "items": A}, {"type": "array", "items": False}),
        ({"enum": [A]}, {"enum": [A]}),
    ],
)
def test_values_that_never_end_are_left_out(inner: Any, finite: Any) -> None:
    definitions = {"A": needs(B), "B": needs(A)}
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "null"}}}
    assert finite_schema({**schema, "$defs": definitions}) == {
        "type": "object",
        "properties": {"a": finite, "b": {"type": "null"}},
        "$defs": {"A": needs(False), "B": needs(False)},
    }


def test_long_chain_of_definitions_is_not_searched_forever() -> None:
    chain = {f"A{i}": needs({"$ref": f"#/$defs/A{i + 1}"}) for i in range(500)}
    schema = {"$ref": "#/$defs/A0", "$defs": {**chain, "A500": {"type": "null"}}}
    assert finite_schema(schema) == schema
    turned = dict(reversed(chain.items()))
    loop = {"$ref": "#/$defs/A0"}
    assert finite_schema({**schema, "$defs": {**turned, "A500": loop}}) is None


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": "look"}, {"bind_arguments": True}]
)
def test_tool_with_endless_parameters_is_refused_or_takes_any_object(fields: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SELF}}
    prompt = Messages((Message("user", "hi"),), tools=(tool,), **fields)
    chat = chat_format(SIGNS["hermes"])
    request = GenerateRequest(prompt)
    if "bind_arguments" in fields:
        # The tool of an MCP server must not end every answer.
        assert answer_grammar(request, chat.render(prompt), chat, ScriptedTokenizer()) is not None
        return
    with pytest.raises(UsageError, match="the tool 'look' refers to itself without end"):
        answer_grammar(request, chat.render(prompt), chat, ScriptedTokenizer())
