"""Tool calls out of streamed answers: every family's form, small deviations, and what is no call."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.chat_format.answer_parser import AnswerParser, make_answer_parser
from localchat.chat_format.parser import Answer, Call, Part, Thought
from localchat.chat_format.reasoning_parser import THINK, ReasoningFamily, ReasoningParser
from localchat.chat_format.tool_calls.families import TOOL_CALL_FAMILIES, UNKNOWN, family_of
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.chat_format.tool_calls.parser import CallParser
from localchat.engine.request import Message, Messages
from tests.support.chat_templates import chat_format
from tests.support.tool_calls import (
    BOTH,
    FORMS,
    NAMED,
    TOOLS,
    gather,
    parser,
    whole,
)

CODER = "qwen3-coder"


@pytest.mark.parametrize("style", FORMS)
def test_every_family_is_read(style: str) -> None:
    assert whole(parser(style), FORMS[style]) == ("", BOTH)


@pytest.mark.parametrize("style", FORMS)
def test_text_before_and_behind_calls_is_told_and_markup_is_not(style: str) -> None:
    text, calls = whole(parser(style), f"Let me look.\n\n{FORMS[style]}\n\nThat is all.")
    assert calls == BOTH
    assert text == "Let me look.\n\nThat is all."


@pytest.mark.parametrize("style", FORMS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_say_what_the_whole_says(style: str, data: st.DataObject) -> None:
    said = data.draw(st.sampled_from(["", "Hi ", "`x` <to ", "```\n"])) + FORMS[style]
    said += data.draw(st.sampled_from(["", "\n", " Bye.", "\n```\nEnd", "\n\n```py\nx\n```"]))
    end = data.draw(st.integers(0, len(said)))
    said = said[: data.draw(st.sampled_from([end, len(said)]))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=30)))
    one = parser(style)
    parts: list[Part] = []
    for begin, stop in zip([0, *cuts], [*cuts, len(said)], strict=True):
        parts += one.feed(said[begin:stop])
    parts += one.finish()
    assert gather(parts) == whole(parser(style), said)
    assert all(part != Answer("") for part in parts)


PIECES = st.lists(
    st.sampled_from(
        [
            *dict.fromkeys(tag for style in TOOL_CALL_FAMILIES for tag in style.markup),
            *(
                "get_weather",
                "get_time",
                "(",
                ")",
                "{",
                "}",
                "[",
                "]",
                '"',
                "'",
                ",",
                ":",
                "\n",
                " ",
                "x",
                "```",
            ),
            *(
                '{"name": "',
                '", "arguments": {',
                "town=",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "all\n",
            ),
        ]
    ),
    max_size=14,
)


@given(st.sampled_from([*TOOL_CALL_FAMILIES, UNKNOWN]), PIECES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_hostile_text_is_read_alike_in_pieces(
    style: ToolCallFamily, said: list[str], opened: bool
) -> None:
    family = (
        ReasoningFamily("harmony", (), ("<think>",), ("</think>",))
        if style.name == "harmony"
        else THINK
    )
    one = make_answer_parser(family, style, TOOLS, opened=opened)
    other = make_answer_parser(family, style, TOOLS, opened=opened)
    parts = [part for piece in said for letter in piece for part in one.feed(letter)] + one.finish()
    whole_parts = [*other.feed("".join(said)), *other.finish()]
    assert gather(parts) == gather(whole_parts)
    thoughts = [
        "".join(part.text for part in told if isinstance(part, Thought))
        for told in (parts, whole_parts)
    ]
    assert thoughts[0] == thoughts[1]


@pytest.mark.parametrize("style", FORMS)
def test_a_call_comes_once_it_is_complete(style: str) -> None:
    one = parser(style)
    cut = FORMS[style].index("Köl") + 3
    assert gather(one.feed(FORMS[style][:cut])) == ("", [])
    assert gather([*one.feed(FORMS[style][cut:]), *one.finish()]) == ("", BOTH)


@pytest.mark.parametrize(
    "cut",
    [
        '<tool_call>{"name": "get_time"',
        '<tool_call>{"name": "get_time", "arguments": {"a": 1',
        '<tool_call>{"name": "get_time", "arguments": {"a": "x',
        '```json\n{"name": "get_time"',
        '```\n{\n  "name": "get_time",\n  "arguments": {"a": "x',
    ],
)
def test_a_call_that_is_cut_off_is_dropped(cut: str) -> None:
    assert whole(parser("hermes"), f"Well.\n{cut}") == ("Well.", [])


@pytest.mark.parametrize(
    ("style", "cut"),
    [
        ("hermes", '{"name": "get_time", "arguments": {"a": "x'),
        ("llama3", '[get_weather(city="Köl'),
    ],
)
def test_a_call_without_a_tag_that_is_cut_off_is_dropped(style: str, cut: str) -> None:
    assert whole(parser(style), cut) == ("", [])


@given(st.text(max_size=60), st.integers(0, 9999), st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_arguments_come_through_as_they_are(town: str, days: int, before: str) -> None:
    arguments = json.dumps({"town": town, "days": days, "where": {"a": [town]}})
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    _, calls = whole(parser("hermes"), before.replace("<", "").replace("{", "") + "." + call)
    assert [(name, json.loads(said)) for name, said in calls] == [
        ("get_weather", json.loads(arguments))
    ]


@given(st.text("ab<>\n/=", max_size=40).filter(lambda text: "</parameter>" not in text))
@settings(max_examples=60, deadline=None)
def test_any_string_parameter_comes_through(town: str) -> None:
    said = f"<function=get_weather>\n<parameter=town>\n{town}\n</parameter>\n</function>"
    _, calls = whole(parser("qwen3-coder"), said)
    assert json.loads(calls[0][1]) == {"town": town}


@pytest.mark.parametrize(
    ("style", "said", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 1}}', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 1}', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 1}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": [1,],},}</tool_call>', {"a": [1]}),
        ("hermes", '<tool_call>\n```json\n{"name": "get_time", "parameters": {}}\n```\n</tool_call>', {}),
        ("hermes", '```json\n{"name": "get_time", "arguments": {"a": 1}}\n```', {"a": 1}),
        ("hermes", '{"arguments": {"a": 1}, "name": "get_time"}', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": null}}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', {}),
        ("hermes", '<tool_call>[{"name": "get_time", "arguments": {"a": 1}}]</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": "x\ny"}}</tool_call>', {"a": "x\ny"}),
        ("hermes", '<tool_call>{"type": "x", "function": {"name": "get_time", "arguments": {}}}', {}),
        ("llama3", '{"name": "get_time", "parameters": {"a": 1}}', {"a": 1}),
        ("llama3", '{"type": "function", "name": "get_time", "parameters": {"a": 1}}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]get_time[CALL_ID]abcdef123[ARGS]{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]get_time{"a": 1}', {"a": 1}),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]", {}),
        ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {"a": 1}}]', {"a": 1}),
        ("deepseek-v3.1", '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"a": 1}', {"a": 1}),
        (CODER, "<function=get_time>\n<parameter=a>\nb\n<parameter=c>\nd\n</function>", {"a": "b", "c": "d"}),
        (CODER, "<tool_call>\n<function=get_weather>\n<parameter=unit>\nnull\n</parameter>", {"unit": None}),
        (CODER, "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>", {"days": "many"}),
        (CODER, "<function=get_weather>\n<parameter=unit>\n3\n</parameter>\n</function>", {"unit": "3"}),
        (CODER, '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>', {}),
        ("unknown", '<tool_call>{"name": "get_time", "arguments": {"a": 1}}</tool_call>', {"a": 1}),
    ],
)  # fmt: skip
def test_small_deviations_are_forgiven(style: str, said: str, arguments: Any) -> None:
    text, calls = whole(parser(style), said)
    assert text == ""
    assert len(calls) == 1
    assert json.loads(calls[0][1]) == arguments


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("hermes", "<tool_call>hello</tool_call> there"),
        ("hermes", '<tool_call>{"age": 3}</tool_call>'),
        ("hermes", '{"name": "Bob", "arguments": {"a": 1}} is what you asked for'),
        ("hermes", '{"a": 1}'),
        ("hermes", '{"name": 3}'),
        ("hermes", "{not json}"),
        ("hermes", "a < b, <tool and `x`"),
        ("hermes", "```python\nprint(1)\n```\n"),
        ("hermes", '   {"name"'),
        ("mistral", "[TOOL_CALLS]I would call {x}"),
        ("mistral", "[1, 2] and [TOOL"),
        (CODER, "<function=\n>"),
        ("llama3", '<|python_tag|>print("x")'),
    ],
)
def test_what_is_no_call_is_told_whole(style: str, said: str) -> None:
    assert whole(parser(style), said) == (said, [])


@pytest.mark.parametrize("cut", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>{"name": "get_'])
def test_the_mere_beginning_of_a_call_is_dropped(cut: str) -> None:
    assert whole(parser("hermes"), f"Well.\n{cut}") == ("Well.", [])


@pytest.mark.parametrize("said", ['{"answer": [1, 2', '{"name": "Bob", "a', '{"name": "Bob"'])
def test_json_that_is_no_call_is_told_while_it_is_written(said: str) -> None:
    assert gather(parser("hermes").feed(said)) == (said, [])


def test_ids_are_unique_and_as_long_as_the_family_wants() -> None:
    def ids(style: str) -> list[str]:
        one = parser(style)
        parts = [*one.feed(FORMS[style]), *one.finish()]
        return [part.id for part in parts if isinstance(part, Call) and part.id]

    first, second = ids("hermes")
    assert first != second
    assert first.startswith("call_")
    assert len(first) == 29
    short, other = ids("mistral")
    assert short != other
    assert len(short) == len(other) == 9
    assert short.isalnum()


def test_calls_are_looked_for_behind_reasoning_only() -> None:
    one = AnswerParser(ReasoningParser(THINK), parser("hermes"))
    said = f"<think>Shall I {FORMS['hermes']}?</think>\n\n{FORMS['hermes']}"
    parts = [*one.feed(said), *one.finish()]
    assert gather(parts) == ("", BOTH)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    assert thought == f"Shall I {FORMS['hermes']}?"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("… within <tool_call></tool_call> XML tags …", "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3-coder"),
        ('Respond in the format {"name": function name, "parameters": …}', "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS][ARGS]", "mistral"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral-list"),
        ("<｜tool▁sep｜>' + name + '\\n```json", "deepseek-r1"),
        ("<｜tool▁sep｜>", "deepseek-v3.1"),
        ("<|tool_call|>", "phi"),
        ("{{ messages }}", "unknown"),
    ],
)
def test_the_template_shows_the_family(template: str, style: str) -> None:
    found: ToolCallFamily = family_of(template)
    assert found.name == style


def test_a_model_without_a_template_is_read_too() -> None:
    chat = chat_format(None)
    rendered = chat.render(Messages((Message("user", "hi"),), tools=TOOLS))
    one = chat.answer_parser(rendered)
    assert whole(one, FORMS["hermes"]) == ("", BOTH)
    none = chat.answer_parser(chat.render(Messages((Message("user", "hi"),))))
    assert whole(none, FORMS["hermes"])[1] == []


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        (
            'Let me look.\n\n```json\n{"name": "get_time", "arguments": {}}\n```',
            "Let me look.",
            [("get_time", "{}")],
        ),
        (
            'First:\n```\n{"name": "get_time", "arguments": {}}\n```\nand\n'
            '```json\n{"name": "get_time", "arguments": {}}\n```',
            None,
            [("get_time", "{}"), ("get_time", "{}")],
        ),
        ('{{"name": "get_time", "arguments": {}}}', "", [("get_time", "{}")]),
        (
            '<tool_call>\n{{"name": "get_time", "arguments": {}}}\n</tool_call>',
            "",
            [("get_time", "{}")],
        ),
        ('{{"name": "Ann", "arguments": {}}}', "same", []),
        ('So:\n```json\n{"name": "Ann", "age": 7}\n```', "same", []),
        ('So:\n```json\n{"name": "get_t", "arguments": {}}\n```\nEnd.', "same", []),
        ("So:\n```python\nprint({1: 2})\n```", "same", []),
    ],
)
def test_calls_in_code_blocks_after_text_count(
    answer: str, text: str | None, calls: list[tuple[str, str]], pieces: int
) -> None:
    parser = CallParser(NAMED["hermes"], TOOLS)
    parts = []
    for start in range(0, len(answer), pieces):
        parts += parser.feed(answer[start : start + pieces])
    parts += parser.finish()
    written, found = gather(parts)
    assert found == calls
    if text is not None:
        assert written.strip() == (answer if text == "same" else text)
