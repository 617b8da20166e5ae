"""The choice of a chat format, messages as templates read them, and the plain fallback."""

import json
from datetime import datetime

import pytest

from localchat.chat_format.parser import Answer, Thought
from localchat.chat_format.plain_format import NO_TEMPLATE, NO_TOOLS
from localchat.chat_format.template_format import NO_THINKING_SWITCH, TOOLS_AS_TEXT
from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import TemplateError
from tests.support.chat_templates import chat_format

USER = Message("user", "hi")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = Message("assistant", tool_calls=(CalledTool("look", '{"at": "sky"}', id="c1"),))
DUMP = "{{ messages | tojson }}"


@pytest.mark.parametrize("template", [None, "", "  \n", {}])
def test_a_missing_template_is_said_and_never_guessed(template: str | None) -> None:
    rendered = chat_format(template).render(Messages((Message("system", "Be."), USER)))
    assert rendered.text == "Be.\n\nUser: hi\n\nAssistant:"
    assert rendered.warnings == (NO_TEMPLATE,)
    assert rendered.add_bos
    assert set(rendered.stop) == {"\nUser:", "\nAssistant:", "\nSystem:", "\nTool:"}
    assert "<|" not in rendered.text


def test_the_plain_format_goes_on_with_the_last_answer_and_tells_of_lost_tools() -> None:
    said = (USER, Message("assistant", "it is"))
    rendered = chat_format(None).render(Messages(said, tools=(TOOL,), continue_last=True))
    assert rendered.text.endswith("Assistant: it is")
    assert NO_TOOLS in rendered.warnings


def test_messages_take_the_shape_that_templates_expect() -> None:
    said = (
        USER,
        Message("assistant", "a", reasoning="r", tool_calls=CALL.tool_calls),
        Message("tool", "blue", tool_call_id="c1", name="look"),
    )
    shown = json.loads(chat_format(DUMP).render(Messages(said)).text)
    assert shown == [
        {"role": "user", "content": "hi"},
        {
            "thinking": "r",
            "role": "assistant",
            "content": "a",
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"at": "sky"}},
                }
            ],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "c1", "name": "look"},
    ]


@pytest.mark.parametrize("arguments", ["not json", "[1]", "{", "[" * 100_000])
def test_arguments_that_are_no_mapping_stay_text(arguments: str) -> None:
    said = (Message("assistant", tool_calls=(CalledTool("look", arguments),)),)
    shown = json.loads(chat_format(DUMP).render(Messages(said)).text)
    assert shown[0]["tool_calls"][0]["function"]["arguments"] == arguments


EACH_CALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "body", ["{{ c.function.arguments }}", "{{ 'call ' + c.function.arguments }}"]
)
def test_a_template_that_wants_arguments_as_text_gets_text(body: str) -> None:
    shown = chat_format(EACH_CALL.replace("BODY", body)).render(Messages((USER, CALL))).text
    assert shown.endswith('{"at": "sky"}')


def test_a_template_that_wants_null_beside_a_call_gets_null() -> None:
    body = "{% if m.content is none %}{{ c.function.arguments | tojson }}{% endif %}"
    shown = chat_format(EACH_CALL.replace("BODY", body)).render(Messages((USER, CALL))).text
    assert shown == '{"at": "sky"}'


def test_named_templates_are_chosen_by_whether_there_are_tools() -> None:
    both = chat_format({"default": "plain", "tool_use": "{{ tools | tojson }}"})
    assert both.render(Messages((USER,))).text == "plain"
    assert "look" in both.render(Messages((USER,), tools=(TOOL,))).text
    assert both.render(Messages((USER,), tools=(TOOL,), tool_choice="none")).text == "plain"


def test_several_templates_without_a_default_are_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="rag, terse"):
        chat_format({"terse": "a", "rag": "b"}).render(Messages((USER,)))


def test_tools_that_the_template_does_not_show_are_described_and_said() -> None:
    each = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    no_system = (
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    for template, start in ((each, "[system]You can call"), (no_system, "[user]You can call")):
        rendered = chat_format(template).render(Messages((USER,), tools=(TOOL,)))
        assert rendered.text.startswith(start)
        assert '"name": "look"' in rendered.text
        assert "<tool_call>" in rendered.text
        assert rendered.text.endswith("hi")
        assert rendered.warnings == (TOOLS_AS_TEXT,)
    rendered = chat_format("nothing").render(Messages((USER,), tools=(TOOL,)))
    assert "does not see them" in rendered.warnings[0]


def test_the_wish_about_thinking_goes_to_the_switch_of_the_template() -> None:
    switch = chat_format("{{ 'on' if enable_thinking else 'off' }}")
    assert switch.render(Messages((USER,), thinking="on")).text == "on"
    assert switch.render(Messages((USER,), thinking="off")).text == "off"
    kept = Messages((USER,), thinking="off", template_options={"enable_thinking": True})
    assert switch.render(kept).text == "on"


def test_a_template_without_a_switch_for_thinking_is_said() -> None:
    assert chat_format("x").render(Messages((USER,), thinking="off")).warnings == (
        NO_THINKING_SWITCH,
    )
    assert chat_format("x").render(Messages((USER,))).warnings == ()


def test_a_prompt_that_opens_reasoning_begins_the_answer_there() -> None:
    opening = chat_format("{{ messages[0].content }}<think>\n")
    rendered = opening.render(Messages((USER,)))
    assert rendered.opens_reasoning
    answer_parser = opening.answer_parser(rendered)
    assert answer_parser.feed("why</think>so") == [Thought("why"), Answer("so")]
    assert "</think>" in opening.markup


def test_going_on_inside_reasoning_begins_there() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    said = (USER, Message("assistant", reasoning="because"))
    rendered = chat_format(source).render(Messages(said, continue_last=True))
    assert rendered.text == "[user]hi[assistant]<think>because"
    assert rendered.opens_reasoning
    half = (USER, Message("assistant", "<think>hm"))
    assert chat_format(source).render(Messages(half, continue_last=True)).opens_reasoning


def test_going_on_needs_an_answer_to_go_on_with() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    rendered = chat_format(source).render(Messages((USER,), continue_last=True))
    assert rendered.text == "[user]hi[assistant]"


def test_a_broken_template_speaks_up_only_when_it_is_used() -> None:
    broken = chat_format("{% if %}")
    with pytest.raises(TemplateError, match="cannot be read"):
        broken.render(Messages((USER,)))


def test_no_messages_are_refused() -> None:
    with pytest.raises(TemplateError, match="no message"):
        chat_format("x").render(Messages(()))


@pytest.mark.parametrize(("options", "date"), [({}, "07 Mar 2026"), ({"date_string": "X"}, "X")])
def test_a_template_that_knows_no_clock_gets_todays_date(
    options: dict[str, str], date: str
) -> None:
    source = (
        "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "Today Date: {{ date_string }}"
    )
    chat = chat_format(source, now=lambda: datetime(2026, 3, 7))
    prompt = Messages((Message("user", "hi"),), template_options=options)
    assert chat.render(prompt).text == f"Today Date: {date}"


def test_an_answer_without_a_template_does_not_begin_with_white_space() -> None:
    chat = chat_format(None)
    parser = chat.answer_parser(chat.render(Messages((USER,))))
    parts = [*parser.feed(" "), *parser.feed(" Paris"), *parser.feed(" is"), *parser.finish()]
    assert parts == [Answer("Paris"), Answer(" is")]
    half = Messages((USER, Message("assistant", "So")), continue_last=True)
    assert chat.answer_parser(chat.render(half)).feed(" it is") == [Answer(" it is")]
