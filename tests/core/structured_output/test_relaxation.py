"""Schemas beyond the grammar: the rest of them binds, and what does not is named."""

import json
import sys
from enum import Enum
from string import ascii_lowercase
from typing import Annotated, Any, Literal

import jsonschema_specifications  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field, TypeAdapter, conlist

from localchat.core.structured_output.compiler import (
    GrammarCompiler,
    grammar_spec,
    llguidance_tokenizer,
    relaxed_keywords,
)
from localchat.core.structured_output.gbnf import lark_from_gbnf
from localchat.core.structured_output.relaxation import is_possible, relax
from localchat.engine.request import Grammar
from localchat.errors import UsageError
from tests.support.scripted_backend import ScriptedTokenizer

TOKENIZER = ScriptedTokenizer()
LEXICON = llguidance_tokenizer(TOKENIZER)
GRAMMARS = GrammarCompiler(TOKENIZER)
BOTH_COUNTS = ("minProperties", "maxProperties")


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema, which must compile, takes this text."""
    spec = grammar_spec(Grammar("json_schema", json.dumps(schema)))
    GRAMMARS.grammar_matcher(spec, room=1000)
    matcher = LLMatcher(LEXICON, spec.source, log_level=0)
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def relaxed(schema: dict[str, Any]) -> tuple[str, ...]:
    return relaxed_keywords(grammar_spec(Grammar("json_schema", json.dumps(schema))))


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]


class Sum(BaseModel):
    op: Literal["+"] = "+"
    parts: "list[Annotated[Sum | Number, Field(discriminator='op')]]"


class Number(BaseModel):
    op: Literal["n"] = "n"
    value: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Order(BaseModel):
    tags: set[str]
    animal: Animal
    note: str | None = None
    size: Literal["s", "m"]
    prices: conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]


class Node(BaseModel):
    value: int
    children: "list[Node]" = []


def test_many_name_patterns_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def counted(schema: str) -> bool:
        checks.append(schema)
        return is_possible(schema)

    names = {f"^p{number}x[0-9]+$": {"type": "integer"} for number in range(60)}
    monkeypatch.setattr("localchat.core.structured_output.relaxation.is_possible", counted)
    assert relax({"patternProperties": names}).schema == {"patternProperties": names}
    # One by one, 200 patterns took 22 s.
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("type_", "right", "wrong", "dropped"),
    [
        (set[int], "[1, 2]", '["a"]', ("uniqueItems",)),
        (frozenset[Colour], '["red"]', '["green"]', ("uniqueItems",)),
        (set[Colour], '["red", "blue"]', '["red", "blue", "red"]', ("uniqueItems",)),
        (set[Literal["a", "b"]], '["b", "a"]', '["b", "b", "b"]', ("uniqueItems",)),
        (Animal, '{"kind": "cat", "lives": 9}', '{"kind": "dog", "lives": 9}', ()),
        (Animal, '{"kind": "dog", "name": "Rex"}', '{"name": "Rex"}', ()),
        (Cat | Dog, '{"kind": "dog", "name": "Rex"}', '{"kind": "cow", "name": "Rex"}', ()),
        (
            Sum,
            '{"op": "+", "parts": [{"op": "n", "value": 1}, {"op": "+", "parts": []}]}',
            '{"op": "+", "parts": [{"op": "+", "value": 1}]}',
            (),
        ),
        (
            Order,
            '{"tags": ["a"], "animal": {"kind": "cat", "lives": 1}, "note": null, "size": "m", '
            '"prices": [1]}',
            '{"tags": ["a"], "animal": {"kind": "cat", "lives": 1}, "size": "x", "prices": [1]}',
            ("uniqueItems",),
        ),
        (conlist(int, min_length=1, max_length=2), "[1]", "[1, 2, 3]", ()),
        (Node, '{"value": 1, "children": [{"value": 2}]}', '{"value": "1"}', ()),
        (dict[Colour, int], '{"red": 1}', '{"green": 1}', ()),
        (dict[Literal["a"], int], '{"a": 1}', '{"b": 1}', ()),
        (
            dict[Annotated[str, Field(pattern="^x_[a-z]+$")], int],
            '{"x_a": 1}',
            '{"y": 1}',
            (),
        ),
        (Annotated[dict[str, int], Field(min_length=1)], '{"a": 1}', "{}", ()),
        (tuple[int, str], '[1, "a"]', '["a", 1]', ()),
        (str | int | None, "null", "true", ()),
    ],
    ids=str,
)
def test_a_pydantic_type_binds_and_its_answer_validates(
    type_: Any, right: str, wrong: str, dropped: tuple[str, ...]
) -> None:
    adapter = TypeAdapter(type_)
    schema = adapter.json_schema()
    adapter.validate_json(right)
    assert takes(schema, right)
    assert not takes(schema, wrong)
    assert relaxed(schema) == dropped


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
A = '{"a": 1}'
WRONG = '{"a": "x"}'


def test_a_union_whose_discriminator_was_removed_is_tagged_all_the_same() -> None:
    alternatives = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["n"],
        }
        for kind in ("cat", "dog")
    ]
    named = {"$defs": {"Cat": alternatives[0]}, "anyOf": [{"$ref": "#/$defs/Cat"}, alternatives[1]]}
    for schema in ({"anyOf": alternatives}, {"oneOf": [*alternatives, {"type": "null"}]}, named):
        assert takes(schema, '{"kind": "cat", "n": 1}') and takes(schema, '{"kind": "dog", "n": 1}')
        assert not takes(schema, '{"n": 1}')


@pytest.mark.parametrize(
    ("keywords", "dropped"),
    [
        ({"not": {"required": ["b"]}}, ("not",)),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}}, ("if", "then", "else")),
        ({"propertyNames": {"maxLength": 3}}, ("propertyNames",)),
        ({"dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"dependentSchemas": {"a": {}}}, ("dependentSchemas",)),
        ({"unevaluatedProperties": False}, ()),
        ({"unevaluatedProperties": {"type": "null"}}, ("unevaluatedProperties",)),
        ({"minProperties": 1}, ()),
        ({"$schema": "http://example.org/own#"}, ()),
        ({"patternProperties": {"^(?!a)": True}}, ("patternProperties",)),
        ({"patternProperties": {"^x": True, "^xy": True}}, ("patternProperties",)),
    ],
    ids=str,
)  # fmt: skip
def test_a_keyword_that_cannot_be_held_leaves_the_rest(
    keywords: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    schema = {**OBJECT, **keywords}
    assert takes(schema, A) and not takes(schema, WRONG)
    assert set(relaxed(schema)) == set(dropped)


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "dropped"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}},
            "[2]",
            '["a"]',
            ("contains",),
        ),
        ({"type": "string", "pattern": r"^(?=.*\d).+$"}, '"a"', "1", ("pattern",)),
        ({"type": "string", "pattern": r"(a)\1"}, '"aa"', "1", ("pattern",)),
        ({"type": "string", "pattern": "^[a-z]+$"}, '"a"', '"A"', ()),
        (
            {"type": "OBJECT", "properties": {"a": {"type": ["INTEGER", "NULL"]}}},
            '{"a": null}',
            WRONG,
            (),
        ),
        (
            {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
            "5",
            '"a"',
            ("oneOf",),
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_value_that_cannot_be_held_leaves_the_rest(
    schema: dict[str, Any], right: str, wrong: str, dropped: tuple[str, ...]
) -> None:
    assert takes(schema, right) and not takes(schema, wrong)
    assert relaxed(schema) == dropped


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "dropped"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-7", '"a"', ()),
        ({"type": "integer", "minimum": 10**30}, "1", '"a"', ("minimum",)),
        ({"type": ["number", "null"], "minimum": 0, "maximum": 3.4e38}, "7.5", "-1", ("maximum",)),
        ({"type": "number", "exclusiveMinimum": 5e-324}, "1", '"a"', ("exclusiveMinimum",)),
        ({"type": "string", "minLength": 1, "maxLength": 2**53 - 1}, '"a"', '""', ()),
        ({"type": "array", "minItems": 1, "maxItems": 2**64}, "[1]", "[]", ()),
        ({"type": "object", "maxProperties": 1e30}, "{}", "[]", ()),
    ],
    ids=str,
)
def test_bounds_beyond_64_bits_leave_the_rest(
    schema: dict[str, Any], right: str, wrong: str, dropped: tuple[str, ...]
) -> None:
    assert takes(schema, right) and not takes(schema, wrong)
    assert relaxed(schema) == dropped


@pytest.mark.parametrize("schema", [{"minimum": "5"}, {"minimum": 5, "maximum": 3}])
def test_bounds_that_are_wrong_are_refused(schema: dict[str, Any]) -> None:
    assert not _compiles({"type": "integer", **schema})


@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_a_reference_without_its_hash_refers_to_the_root(definitions: str) -> None:
    schema = {
        "type": "object",
        "properties": {"pets": {"type": "array", "items": {"$ref": f"/{definitions}/Pet"}}},
        definitions: {"Pet": OBJECT},
    }
    assert takes(schema, f'{{"pets": [{A}]}}')
    assert not takes(schema, f'{{"pets": [{WRONG}]}}')


def test_a_set_of_choices_behind_an_escaped_reference_is_bounded() -> None:
    colors = {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "uniqueItems": True}
    schema = {"$defs": {"a/b": {"enum": ["red", "blue"]}}, "properties": {"colors": colors}}
    assert relax(schema).schema["properties"]["colors"]["maxItems"] == 2


def test_what_is_data_or_a_name_is_no_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"type": "OBJECT", "pattern": "(?=a)"}}, "type": {}},
        "required": ["not"],
    }
    assert relax(schema) == (schema, ())
    assert takes(schema, '{"not": {"type": "OBJECT", "pattern": "(?=a)"}, "type": 1}')


def test_every_keyword_of_every_draft_is_held_or_dropped() -> None:
    """None is refused as unknown."""
    keywords: set[str] = set()
    for place in jsonschema_specifications.REGISTRY:
        schema = jsonschema_specifications.REGISTRY.contents(place)
        keywords |= set(schema.get("properties", {})) if isinstance(schema, dict) else set()
    assert {"uniqueItems", "dependencies", "contains"} <= keywords
    references = {key for key in keywords if key.startswith("$") or key == "id"}
    for keyword in sorted(keywords - references):
        values: tuple[Any, ...] = ({}, True, [], 1, "string", {"a": {}}, [{}])
        assert any(_compiles({keyword: value}) for value in values), keyword


def _compiles(schema: dict[str, Any]) -> bool:
    try:
        GRAMMARS.grammar_matcher(grammar_spec(Grammar("json_schema", json.dumps(schema))), room=9)
    except UsageError:
        return False
    return True


def test_an_error_names_the_clients_field() -> None:
    grammar = Grammar("json_schema", '{"type": "ink"}', "response_format")
    with pytest.raises(UsageError, match=r"the JSON schema in 'response_format'.*ink") as caught:
        GRAMMARS.grammar_matcher(grammar_spec(grammar), room=9)
    assert caught.value.details == {"field": "response_format"}
    assert "coerce" not in str(caught.value)


def test_an_error_repeats_only_the_start_of_a_long_grammar() -> None:
    source = f"start: /{'(' * 5_000}a{')' * 5_000}/"
    with pytest.raises(UsageError) as caught:
        GRAMMARS.grammar_matcher(grammar_spec(Grammar("lark", source)), room=9)
    assert len(caught.value.message) < 1_000


@pytest.mark.parametrize(
    ("bounds", "right", "wrong", "dropped"),
    [
        ({"minProperties": 1}, '{"b": null}', "{}", ()),
        ({"minProperties": 2}, '{"b": null}', "{}", ("minProperties",)),
        ({"minProperties": 1, "maxProperties": 1}, '{"b": null}', "{}", ()),
        ({"minProperties": 1, "maxProperties": 2}, '{"b": null}', '{"c": null}', BOTH_COUNTS),
        ({"minProperties": 2, "required": ["a"]}, '{"a": null, "b": null}', '{"a": null}', ()),
    ],
)
def test_a_count_of_optional_properties_is_enforced_as_far_as_possible(
    bounds: dict[str, Any], right: str, wrong: str, dropped: tuple[str, ...]
) -> None:
    properties = {"a": {"type": "null"}, "b": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **bounds}
    assert takes(schema, right) and not takes(schema, wrong)
    assert set(relaxed(schema)) == set(dropped)


def test_bounds_that_cannot_be_combined_with_a_pattern_are_dropped() -> None:
    schema = {"type": "string", "pattern": r"^\w+( \w+){2,}$", "maxLength": 400}
    assert takes(schema, '"one two three"') and not takes(schema, '"one two"')
    assert relaxed(schema) == ("maxLength",)
    possible = {
        "type": "string",
        "pattern": "[A-Z]",
        "minLength": 8,
        "allOf": [{"pattern": "[0-9]"}],
    }
    assert takes(possible, '"Password1"') and not takes(possible, '"Pass1"')
    assert relaxed(possible) == ()
    look_ahead = {"type": "string", "pattern": "^(?=a)b?"}
    referring = {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": look_ahead}}
    assert takes(referring, '"xy"') and relaxed(referring) == ("pattern",)


@pytest.mark.parametrize("nested", [False, True])
def test_patterns_whose_combination_grows_exponentially_are_dropped(nested: bool) -> None:
    patterns: list[Any] = [{"pattern": f"[a-z]*{letter}[a-z]*"} for letter in ascii_lowercase]
    if nested:
        patterns = [{"allOf": patterns[start : start + 2]} for start in range(0, 26, 2)]
    schema = {"type": "string", "allOf": patterns}
    assert takes(schema, '"abc"') and not takes(schema, '"b"')
    assert relaxed(schema) == ("pattern",)


def test_patterns_of_definitions_that_cannot_be_combined_are_refused() -> None:
    definitions = {letter: {"pattern": f"[a-z]*{letter}[a-z]*"} for letter in ascii_lowercase}
    references = [{"$ref": f"#/$defs/{letter}"} for letter in definitions]
    schema = {"type": "string", "allOf": references, "$defs": definitions}
    with pytest.raises(UsageError, match="cannot be combined"):
        relax(schema)


def test_a_keyword_of_null_is_absent() -> None:
    """Programs in Go write an empty list as null."""
    schema = {
        **OBJECT,
        "required": None,
        "description": None,
        "items": None,
        "additionalProperties": None,
    }
    assert takes(schema, A) and not takes(schema, WRONG)
    assert takes({"const": None}, "null") and not takes({"const": None}, "1")


@pytest.mark.parametrize(
    ("gbnf", "right", "wrong"),
    [
        ('root ::= "yes" | "no"', "yes", "maybe"),
        ('root ::= item+\nitem ::= "- " [a-z ]+ "\\n"', "- a b\n- c\n", "a"),
        ('# a list\nroot ::= "[" [0-9]{1,3} ("," [0-9]{1,3})* "]"', "[12,345]", "[1234]"),
        ("root ::= no-vowel\nno-vowel ::= [^aeiou]+", "xyz", "abc"),
        # Characters by number, in a text and in a set.
        (r'root ::= "\u0063af\xe9" [^\u0000-\u0020]', "caf\xe9!", "caf\xe9 "),
        # Characters that regular expressions read as operators.
        ("root ::= [&~^a-c-]+ [.]", "&&a-^b.", "x."),
        ("root ::= . .", "a\n", "a"),
        # A rule of the name that Lark has for the root, and names that differ only in a hyphen or in case.
        ('root ::= start\nstart ::= "a" start | "b"', "aab", "aa"),
        (
            'root ::= a-b a_b A_b 1st\na-b ::= "x"\na_b ::= "y"\nA_b ::= "z"\n1st ::= "1"',
            "xyz1",
            "xxx1",
        ),
        ('root ::= a rule_3_a A\nrule_3_a ::= "x"\na ::= "y"\nA ::= "z"', "yxz", "yzz"),
        # An empty alternative, and alternatives on lines of their own.
        ('root ::= "a" end\nend ::= | "\t"\n  | ("b" | )', "a", "ac"),
        ('root ::= "a"{2} "b"{1,} "c"{ 0 , 1 } # "d"', "aabb", "abc"),
    ],
)
def test_gbnf_is_converted(gbnf: str, right: str, wrong: str) -> None:
    spec = grammar_spec(Grammar("lark", gbnf))
    for text, taken in ((right, True), (wrong, False)):
        matcher = LLMatcher(LEXICON, spec.source, log_level=0)
        tokens = TOKENIZER.encode(text)
        whole = matcher.try_consume_tokens(tokens) == len(tokens)
        assert (whole and matcher.is_accepting()) is taken, text


def test_gbnf_without_recursion_becomes_one_terminal() -> None:
    """As rules, overlapping sets exceed llguidance's limit of items after a few dozen characters."""
    source = lark_from_gbnf("root ::= [^x]+ b\nb ::= [a-z]").source
    assert source.splitlines()[-1] == "start: ROOT"


def test_a_long_chain_of_gbnf_rules_is_converted_in_linear_time() -> None:
    rules = "".join(f'r{index} ::= "x" r{index + 1} | "y"\n' for index in range(9_000))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        lark_from_gbnf(f'root ::= r0\n{rules}r9000 ::= "z"\n')
    finally:
        sys.setprofile(None)
    assert steps < 200 * 9_000


@pytest.mark.parametrize("gbnf", ["root ::= missing", 'rule ::= "a"'])
def test_gbnf_without_a_rule_is_refused(gbnf: str) -> None:
    with pytest.raises(UsageError, match=r"the grammar cannot be used: .*[Rr]ule"):
        grammar_spec(Grammar("lark", gbnf))


def test_broken_gbnf_is_refused_with_its_place() -> None:
    with pytest.raises(
        UsageError, match=r"the grammar in 'grammar' cannot be used.*line 2"
    ) as caught:
        grammar_spec(Grammar("lark", 'root ::= "a" b\nb ::= "x', "grammar"))
    assert "::=" in caught.value.hint


def test_gbnf_with_a_character_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"there is no character \\ud800"):
        grammar_spec(Grammar("lark", r"root ::= [\ud800]"))


def test_an_endless_rule_of_gbnf_is_named_as_the_client_named_it() -> None:
    with pytest.raises(UsageError, match="the rule 'Ever-More' refers to itself"):
        grammar_spec(Grammar("lark", 'root ::= Ever-More\nEver-More ::= "a" Ever-More'))
