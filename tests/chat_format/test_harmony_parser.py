"""Answers in channels: thoughts, words and calls as messages with headers, in pieces and cut off."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.chat_format.answer_parser import make_answer_parser
from localchat.chat_format.parser import Parser, Part, Thought
from localchat.chat_format.reasoning_parser import REASONING_FAMILIES, THINK
from localchat.chat_format.tool_calls.families import TOOL_CALL_FAMILIES
from localchat.engine.request import Message, Messages
from tests.support.chat_templates import chat_format
from tests.support.tool_calls import TOOLS, gather

FAMILY = {family.name: family for family in REASONING_FAMILIES}
STYLE = {style.name: style for style in TOOL_CALL_FAMILIES}
WEATHER = [("get_weather", '{"town": "Köln"}')]
THINKS = "<|channel|>analysis<|message|>Shall I?<|end|><|start|>assistant"
BODY = '<|message|>{"town": "Köln"}'


def parser(style: str, *, tools: bool = True, opened: bool = False) -> Parser:
    family = FAMILY.get(style, THINK)
    return make_answer_parser(family, STYLE[style], TOOLS if tools else (), opened=opened)


def heard(one: Parser, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, text and calls."""
    parts: list[Part] = []
    for piece in pieces:
        parts += one.feed(piece)
    parts += one.finish()
    text, calls = gather(parts)
    return "".join(part.text for part in parts if isinstance(part, Thought)), text, calls


CALLS = {
    "channel": THINKS
    + "<|channel|>commentary to=functions.get_weather <|constrain|>json"
    + BODY
    + "<|call|>",
    "role": THINKS + " to=functions.get_weather<|channel|>commentary json" + BODY + "<|call|>",
    "no constraint": THINKS + "<|channel|>commentary to=functions.get_weather" + BODY,
    "analysis": THINKS + "<|channel|>analysis to=functions.get_weather code" + BODY,
    "start again": "<|start|>assistant"
    + THINKS
    + "<|channel|>commentary to=functions.get_weather"
    + BODY,
    "twice": THINKS + "<|channel|>commentary to=get_weather<|channel|>commentary" + BODY,
}


@pytest.mark.parametrize("said", CALLS.values(), ids=CALLS)
def test_a_call_of_harmony_is_read_in_every_form(said: str) -> None:
    assert heard(parser("harmony"), said) == ("Shall I?", "", WEATHER)


def test_words_before_a_call_are_told_and_several_calls_are_several() -> None:
    said = (
        THINKS
        + "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
        + "<|channel|>commentary to=functions.get_weather <|constrain|>json"
        + BODY
        + "<|end|><|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{}"
    )
    assert heard(parser("harmony"), said) == (
        "Shall I?",
        "Let me look.",
        [*WEATHER, ("get_time", "{}")],
    )


@pytest.mark.parametrize(
    "said", [*CALLS.values(), THINKS + "<|channel|>final<|message|>It <rains|>.<|return|>"]
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_say_what_the_whole_says(said: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=30)))
    pieces = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert heard(parser("harmony"), *pieces) == heard(parser("harmony"), said)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("<|channel|>final<|message|>Hello.<|return|>", "Hello."),
        ("Hello.", "Hello."),
        ("to be or not to be", "to be or not to be"),
        ("  to", "  to"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("a <|end", "a "),
        ("<", "<"),
        ("", ""),
        ("<|channel|>commentary to=assistant<|channel|>final<|message|>Hi", "Hi"),
    ],
)
def test_what_is_said_is_told_without_its_markup(said: str, text: str) -> None:
    assert heard(parser("harmony"), said) == ("", text, [])


def test_a_header_without_end_is_told() -> None:
    said = "<|channel|>" + "x" * 400
    assert heard(parser("harmony"), said) == ("", said, [])


def test_without_tools_nothing_is_a_call_and_nothing_is_lost() -> None:
    said = THINKS + "<|channel|>commentary to=functions.get_weather" + BODY + "<|call|>"
    assert heard(parser("harmony", tools=False), said) == ("Shall I?", '{"town": "Köln"}', [])


def test_a_call_with_a_text_that_is_no_json_gets_it_as_a_string() -> None:
    said = "<|channel|>analysis to=python code<|message|>print(1 + 2)\nprint(3)<|call|>"
    assert heard(parser("harmony"), said)[2] == [("python", json.dumps("print(1 + 2)\nprint(3)"))]


def test_a_call_that_is_cut_off_is_dropped() -> None:
    one = parser("harmony")
    parts = [*one.feed(CALLS["channel"].partition("ln")[0]), *one.finish()]
    assert gather(parts)[1] == []


def test_a_prompt_that_ends_in_a_thought_goes_on_with_it() -> None:
    said = "and so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert heard(parser("harmony", opened=True), said) == ("and so", "Yes.", [])


def test_muse_thinks_to_itself_and_calls_with_tags() -> None:
    said = (
        " to=self<|message|>Shall I?<|eom|><|start|>assistant to=get_weather<|message|>"
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="town">Köln</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
    )
    assert heard(parser("muse"), said) == ("Shall I?", "", WEATHER)
    assert heard(parser("muse"), " to=user<|message|>Hello.<|eot|>") == ("", "Hello.", [])


def test_a_call_in_a_thought_that_nothing_followed_is_a_call() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Köln"}}\n</tool_call>'
    thinks = make_answer_parser(THINK, STYLE["hermes"], TOOLS, opened=True)
    thought, text, calls = heard(thinks, f"I need it.\n{call}\n{call}")
    assert (text, calls) == ("", WEATHER * 2)
    assert thought.startswith("I need it.")
    kept = make_answer_parser(THINK, STYLE["hermes"], TOOLS, opened=True)
    assert heard(kept, f"{call} or so, or rather\n{call}\nDone")[2] == WEATHER
    quoted = make_answer_parser(THINK, STYLE["hermes"], TOOLS, opened=True)
    assert heard(quoted, f"I could {call}.</think>No need.")[1:] == ("No need.", [])


def test_a_tag_of_calls_ends_a_thought_where_it_is_no_text() -> None:
    said = (
        "I need it.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"town": "Köln"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    thinks = make_answer_parser(THINK, STYLE["kimi-2"], TOOLS, opened=True)
    assert heard(thinks, *said) == ("I need it.", "", WEATHER)


def test_a_model_with_harmony_s_template_answers_in_channels() -> None:
    chat = chat_format(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if tools %}functions.{{ tools[0].function.name }}<|channel|>commentary{% endif %}"
        "{% if false %}<|channel|>analysis{% endif %}<|start|>assistant"
    )
    rendered = chat.render(Messages((Message("user", "hi"),), tools=TOOLS))
    assert heard(chat.answer_parser(rendered), CALLS["role"]) == ("Shall I?", "", WEATHER)
    plain = chat.render(Messages((Message("user", "hi"),)))
    assert heard(chat.answer_parser(plain), "<|channel|>final<|message|>Hi") == ("", "Hi", [])
