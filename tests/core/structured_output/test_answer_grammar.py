"""Grammars of answers: reasoning, tool calls and forms together, in every family's syntax; limits; endings."""

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from localchat.chat_format import ChatFormat
from localchat.core.structured_output import compiler as grammar_module
from localchat.core.structured_output.compiler import (
    GrammarCompiler,
    grammar_spec,
    llguidance_tokenizer,
    relaxed_keywords,
)
from localchat.core.structured_output.matcher import GrammarMatcher
from localchat.core.structured_output.tool_grammar import answer_grammar
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages, TextPrompt
from localchat.errors import UsageError
from tests.support.answer_grammars import ONE, SCHEMA, SIGNS
from tests.support.chat_templates import chat_format
from tests.support.scripted_backend import VOCAB, ScriptedTokenizer
from tests.support.tool_calls import NAMED, TOOLS

TOKENIZER = ScriptedTokenizer()
LEXICON = llguidance_tokenizer(TOKENIZER)
GRAMMARS = GrammarCompiler(TOKENIZER)
BARE = tuple(style for style in SIGNS if NAMED[style].syntax.notation in ("tags", "gemma"))
"""Where strings stand bare: any letter is one of theirs."""


def template(sign: str, end: str = "") -> ChatFormat:
    said = f"{{% if tools %}}{{{{ {sign!r} }}}}{{% endif %}}"
    return chat_format(said + "{{ messages[0].content }}" + end)


def whole(chat: ChatFormat, text: str, grammar: Grammar | None = None, **fields: Any) -> bool:
    """Whether a whole answer may be `text`."""
    prompt = Messages((Message("user", "hi"),), **fields)
    request = GenerateRequest(prompt, grammar=grammar)
    source = answer_grammar(request, chat.render(prompt), chat, TOKENIZER)
    assert source is not None
    GRAMMARS.grammar_matcher(source, room=1000)
    matcher = LLMatcher(LEXICON, source.source, log_level=0)
    tokens = TOKENIZER.encode(text, special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("style", SIGNS)
def test_required_calls_are_written_as_the_family_writes_them(style: str) -> None:
    chat = template(SIGNS[style])
    assert chat.tool_call_family.name == style
    assert whole(chat, ONE[style], tools=TOOLS, tool_choice="required")
    assert not whole(chat, "Hello.", tools=TOOLS, tool_choice="required")
    assert (
        not whole(chat, ONE[style].replace("Köln", "Köln\\q"), tools=TOOLS, tool_choice="required")
        or style in BARE
    )
    assert not whole(chat, ONE[style].replace("get_", "got_"), tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("style", [style for style in SIGNS if style != "llama3"])
def test_calls_are_one_or_several_and_of_the_tool_that_was_named(style: str) -> None:
    chat = template(SIGNS[style])
    assert not whole(
        chat, ONE[style], tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert not whole(chat, ONE[style], tools=TOOLS, tool_choice="get_time")


@pytest.mark.parametrize("style", SIGNS)
def test_with_grammar_and_tools_the_answer_is_either_of_both(style: str) -> None:
    chat = template(SIGNS[style])
    call = ("<|python_tag|>" if style == "llama3" else "") + ONE[style]
    assert whole(chat, '{"a": 1}', SCHEMA, tools=TOOLS)
    assert whole(chat, call, SCHEMA, tools=TOOLS)
    assert not whole(chat, "Hello.", SCHEMA, tools=TOOLS)
    assert not whole(chat, call, SCHEMA, tools=TOOLS, tool_choice="none")
    assert not whole(chat, '{"a": 1}', SCHEMA, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("style", SIGNS)
def test_strict_tools_leave_text_free_and_bind_calls(style: str) -> None:
    chat = template(SIGNS[style])
    tools = ({**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1])
    assert whole(chat, "Hello, {you} <there>!\n", tools=tools)
    assert whole(chat, ONE[style], tools=tools)
    assert not whole(chat, ONE[style].replace("days", "nights"), tools=tools) or style not in BARE
    if style != "llama3":
        assert whole(chat, f"Look:\n{ONE[style]}\nDone.", tools=tools)


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        (None, True),
        ({}, True),
        ({"type": "object", "properties": {}, "required": [], "title": "now"}, True),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {}, "patternProperties": {"^a": {}}}, False),
        ({"type": "object", "properties": {}, "required": ["a"]}, False),
    ],
    ids=str,
)
def test_a_tool_without_parameters_is_called_without_arguments(
    parameters: Any, is_closed: bool
) -> None:
    tools = ({"type": "function", "function": {"name": "now", "parameters": parameters}},)
    chat = template(SIGNS["hermes"])
    call = '<tool_call>\n{{"name": "now", "arguments": {}}}\n</tool_call>'
    invented = whole(chat, call.format('{"a": 1}'), tools=tools, tool_choice="required")
    assert invented is not is_closed
    if is_closed:
        assert whole(chat, call.format("{}"), tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("Hello, {you} <there>!\n", True),
        (ONE["hermes"], True),
        (ONE["hermes"].replace("days", "nights"), False),
        ('I look:\n```json\n{"name": "get_weather", "arguments": {"days": 3}}\n```\nDone.', True),
        ('```json\n{\n  "name": "get_weather",\n  "arguments": {"days": 3}\n}\n```', True),
        ('```json\n{"name": "get_weather", "arguments": {"nights": 3}}\n```', False),
        ('{"name": "get_weather", "parameters": {"days": "three"}}', False),
        ('{"name": "Ann", "arguments": {"nights": 3}}', True),
    ],
)
def test_bound_arguments_leave_text_free_and_bind_calls_with_and_without_tags(
    answer: str, fits: bool
) -> None:
    assert whole(template(SIGNS["hermes"]), answer, tools=TOOLS, bind_arguments=True) is fits


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("Hello, {you} <there>!\n", True),
        ('{"city": "Rome", "days": 3}', True),
        ('{"name": "Ann", "parameters": {"nights": 3}}', True),
        ('{"name": "get_weather", "days": 3}', True),
        ("{}", True),
        ("{", True),
        (ONE["llama3"], True),
        (ONE["llama3"].replace("days", "nights"), False),
        ('{\n "name": "get_weather",\n "parameters": {"days": "three"}}', False),
        ('Look: {"name": "get_weather", "parameters": {"nights": 3}}', True),
    ],
)
def test_bound_arguments_of_a_family_without_tags_leave_other_objects_free(
    answer: str, fits: bool
) -> None:
    assert whole(template(SIGNS["llama3"]), answer, tools=TOOLS, bind_arguments=True) is fits


def test_optional_tools_constrain_nothing() -> None:
    chat = template(SIGNS["hermes"])
    prompt = Messages((Message("user", "hi"),), tools=TOOLS)
    assert answer_grammar(GenerateRequest(prompt), chat.render(prompt), chat, TOKENIZER) is None
    assert answer_grammar(GenerateRequest(TextPrompt("x")), None, chat, TOKENIZER) is None


def test_a_model_may_reason_before_it_is_bound() -> None:
    thinks = template("<think></think>")
    assert whole(thinks, '{"a": 1}', SCHEMA)
    assert whole(thinks, '<think>what {now}</think>\n\n{"a": 1}', SCHEMA)
    assert not whole(thinks, "<think>what {now}</think>\n\nHello", SCHEMA)
    assert not whole(thinks, "<think>what", SCHEMA)
    assert not whole(template("x"), '<think>a</think>{"a": 1}', SCHEMA)


def test_reasoning_that_the_template_opened_or_closed_is_known() -> None:
    opened = template("", "<think>\n")
    assert whole(opened, 'so</think>{"a": 1}', SCHEMA)
    assert not whole(opened, '{"a": 1}', SCHEMA)
    close_objects = template("", "<think>\n\n</think>\n\n")
    assert whole(close_objects, '{"a": 1}', SCHEMA)
    assert not whole(close_objects, '<think>so</think>{"a": 1}', SCHEMA)


def test_tags_that_are_no_control_tokens_are_text() -> None:
    chat = template("[THINK][/THINK]")
    assert whole(chat, '[THINK]so[/THINK]{"a": 1}', SCHEMA)
    assert not whole(chat, '[THINK]so{"a": 1}', SCHEMA)


def test_an_error_names_the_tool() -> None:
    bad = {"name": "draw", "parameters": {"type": "object", "properties": {"x": {"type": "ink"}}}}
    chat = template(SIGNS["hermes"])
    with pytest.raises(UsageError, match=r"the parameters of the tool 'draw' cannot be used.*ink"):
        whole(chat, "x", tools=(*TOOLS, bad), tool_choice="required")


@pytest.mark.parametrize(
    ("part", "dropped"),
    [
        ({"type": "string", "pattern": r"^(?=.*\d).+$"}, ("pattern",)),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "OBJECT", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    ],
    ids=str,
)
def test_a_tool_that_must_be_called_is_relaxed_and_not_refused(
    part: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    parameters = {"type": "object", "properties": {"x": part}}
    chat = template(SIGNS["hermes"])
    prompt = Messages(
        (Message("user", "hi"),),
        tools=({"name": "draw", "parameters": parameters},),
        tool_choice="required",
    )
    spec = answer_grammar(GenerateRequest(prompt), chat.render(prompt), chat, TOKENIZER)
    assert spec is not None
    GRAMMARS.grammar_matcher(spec, room=1000)
    assert relaxed_keywords(spec) == dropped


def test_a_compilation_that_takes_too_long_is_refused_and_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = grammar_module._build_matcher
    over = threading.Event()

    def slow(words: Any, source: str) -> Any:
        if "slow" in source:
            over.wait()
        return real(words, source)

    monkeypatch.setattr(grammar_module, "_build_matcher", slow)
    monkeypatch.setattr(grammar_module, "COMPILE_S", 0.1)
    grammars = GrammarCompiler(TOKENIZER)
    with pytest.raises(UsageError, match=r"the regular expression takes more than 0\.1 s"):
        grammars.grammar_matcher(grammar_spec(Grammar("regex", "slow")), room=9)
    monkeypatch.setattr(grammar_module, "COMPILE_S", 90.0)
    assert (
        grammars.grammar_matcher(grammar_spec(Grammar("regex", "quick")), room=9).forced is not None
    )
    over.set()


@pytest.mark.parametrize("inside", ["object", "array"])
def test_a_schema_may_have_thousands_of_optional_properties(inside: str) -> None:
    schema: Any = {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(3000)},
    }
    text = b'{"p7": 1, "p2999": 2}'
    if inside == "array":
        schema = {"type": "array", "items": schema}
        text = b"[%b, %b]" % (text, text)
    one = GRAMMARS.grammar_matcher(
        grammar_spec(Grammar("json_schema", json.dumps(schema))), room=1000
    )
    for token in text:
        assert one.accept(token), one.error
    assert one.ended


def test_a_fault_of_the_compiler_itself_is_reported_without_its_dump() -> None:
    source = f'start: {"a? " * 70_000}\na: "x"'
    with pytest.raises(UsageError, match="the grammar cannot be used: it is too large"):
        GRAMMARS.grammar_matcher(grammar_spec(Grammar("lark", source)), room=9)


def test_a_schema_may_say_how_its_json_is_written() -> None:
    loose = Grammar("json_schema", '{"enum": [[1, 2]], "x-guidance": {"item_separator": ","}}')
    source = grammar_spec(loose)
    matcher = LLMatcher(LEXICON, source.source, log_level=0)
    assert matcher.try_consume_tokens(list(b"[1,2]")) == 5


# ---------------------------------------------------------------------------- one choice


def test_forced_tokens_need_no_mask_and_others_are_refused() -> None:
    one = GRAMMARS.grammar_matcher(grammar_spec(Grammar("regex", "abc(d|e)f")), room=50)
    said = []
    while one.forced is not None:
        said.append(one.forced)
        assert one.accept(one.forced)
    assert bytes(said) == b"abc"
    (words,) = one.masks(())
    assert np.flatnonzero(
        np.unpackbits(np.frombuffer(words(), np.uint8), bitorder="little")
    ).tolist() == [ord("d"), ord("e")]
    assert len(words()) == 4 * ((VOCAB + 31) // 32)
    ends = []
    for token in b"df":
        assert one.accept(token)
        ends.append(one.ended)
    assert ends == [False, True]
    other = GRAMMARS.grammar_matcher(grammar_spec(Grammar("regex", "[ab]c")), room=50)
    assert not other.accept(ord("x"))
    assert other.error


def test_drafts_are_limited_to_the_grammar_and_leave_the_matcher_unchanged() -> None:
    one = GRAMMARS.grammar_matcher(grammar_spec(Grammar("regex", "[ab]+cd[0-9]")), room=50)
    assert bytes(one.allowed_drafts(list(b"abacd7x"))) == b"abacd7"
    assert bytes(one.allowed_drafts(list(b"abx"))) == b"ab"
    assert bytes(one.allowed_drafts(list(b"abcx"))) == b"abc"
    masks = [words() for words in one.masks(tuple(b"abacd"))]
    assert len(masks) == 6
    assert one.accept(ord("a"))
    assert one.forced is None


def test_a_text_without_end_is_forced_in_portions() -> None:
    one = GRAMMARS.grammar_matcher(grammar_spec(Grammar("regex", "a{1000}b")), room=2000)
    for _ in range(1000):
        assert one.forced == ord("a")
        one.accept(ord("a"))
    assert one.forced == ord("b")


# ---------------------------------------------------------------------------- bad input

_KEYS = st.sampled_from(
    ["type", "properties", "items", "enum", "anyOf", "$ref", "required", "pattern", "minimum", "x"]
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/x", "(", "[a", "\0"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


def tried(make: Callable[[], GrammarMatcher]) -> GrammarMatcher | UsageError:
    try:
        return make()
    except UsageError as refused:
        return refused


@given(st.dictionaries(_KEYS, _VALUES, max_size=5))
@example({"properties": {"type": None}, "required": [[]]})
@settings(max_examples=80, deadline=None)
def test_any_schema_binds_or_is_refused_in_words(schema: dict[str, Any]) -> None:
    asked = Grammar("json_schema", json.dumps(schema))
    one = tried(lambda: GRAMMARS.grammar_matcher(grammar_spec(asked), room=60))
    if isinstance(one, UsageError):
        assert "the JSON schema" in one.message
        return
    for _ in range(20):
        if one.ended:
            break
        words = np.frombuffer(one.masks(())[0](), np.uint8)
        token = int(np.flatnonzero(np.unpackbits(words, bitorder="little"))[0])
        if token in TOKENIZER.eog:
            break
        assert one.accept(token), one.error


@given(st.lists(st.dictionaries(st.sampled_from(["function", "name", "x"]), _VALUES), max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_tools_bind_or_are_refused(tools: list[dict[str, Any]]) -> None:
    chat = template(SIGNS["hermes"])
    prompt = Messages((Message("user", "hi"),), tools=tuple(tools), tool_choice="required")

    def bound() -> GrammarMatcher:
        source = answer_grammar(GenerateRequest(prompt), chat.render(prompt), chat, TOKENIZER)
        assert source is not None
        return GRAMMARS.grammar_matcher(source, room=60)

    one = tried(bound)
    assert one.message if isinstance(one, UsageError) else not one.error


@pytest.mark.parametrize("kind", ["lark", "regex"])
@given(source=st.text("ab()[]{}|*+?/\\:\n\"'%@<>1, startTX", max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_grammar_binds_or_is_refused(kind: Any, source: str) -> None:
    one = tried(lambda: GRAMMARS.grammar_matcher(grammar_spec(Grammar(kind, source)), room=60))
    assert one.message if isinstance(one, UsageError) else not one.error


def test_a_gbnf_grammar_that_nests_too_deep_is_said_without_words_of_python() -> None:
    source = f'root ::= {"(" * 2000}"a"{")" * 2000}'
    with pytest.raises(
        UsageError, match=r"grammar in 'grammar' cannot be used: .*too deeply nested"
    ):
        GRAMMARS.grammar_matcher(grammar_spec(Grammar("lark", source, field="grammar")), room=9)
