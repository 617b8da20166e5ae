"""Calls and results of earlier turns, as templates of several habits take them."""

from typing import Any

import pytest

from localchat.chat_format.template_format import TOOLS_AS_TEXT
from localchat.engine.request import CalledTool, Message, Messages
from tests.support.chat_templates import chat_format

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SAID = (
    Message("user", "where?"),
    Message(
        "assistant",
        "Well.",
        tool_calls=(
            CalledTool("look", '{"at": "a"}', id="call_0123456789abcdef"),
            CalledTool("look", '{"at": "b"}', id="call_fedcba9876543210"),
        ),
    ),
    Message("tool", "found b", tool_call_id="call_fedcba9876543210"),
    Message("tool", "found a", tool_call_id="call_0123456789abcdef"),
)

_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}RULE{% for c in m.tool_calls %}"
    "{{ '\\n[' + c.id + '] ' + m.content + ' ' + c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{% elif m.role == 'tool' %}{{ '\\n(' + m.tool_call_id + ') ' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if tools %}{{ '\\n' + tools | tojson }}{% endif %}"
)


def rendered(rule: str) -> str:
    chat = chat_format(_CALLS.replace("RULE", rule))
    return chat.render(Messages(SAID, tools=(TOOL,))).text


def test_calls_and_results_reach_a_template_that_has_no_rules() -> None:
    text = rendered("")
    assert '[call_0123456789abcdef] Well. look {"at": "a"}' in text
    assert '[call_fedcba9876543210] Well. look {"at": "b"}' in text
    assert "(call_fedcba9876543210) found b" in text


def test_ids_are_shortened_for_a_template_that_wants_nine_characters() -> None:
    rule = (
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}"
    )
    lines = rendered(rule).splitlines()[:-1]
    calls = [line[1:10] for line in lines if line.startswith("[")]
    results = [line[1:10] for line in lines if line.startswith("(")]
    assert len(set(calls)) == 2
    assert all(call.isalnum() for call in calls)
    assert results == calls[::-1]


def test_calls_are_taken_apart_for_a_template_that_takes_one_at_a_time() -> None:
    rule = "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    said = [line[line.index(" ") + 1 :] for line in rendered(rule).splitlines()[1:5]]
    assert said == ['Well. look {"at": "a"}', "found a", ' look {"at": "b"}', "found b"]


def test_arguments_of_a_call_that_was_cut_off_reach_a_template_that_takes_mappings_only() -> None:
    pairs = (
        "{% for name, value in c.function.arguments | items %}{{ name }}={{ value }};{% endfor %}"
    )
    source = _CALLS.replace("{{ c.function.arguments | tojson }}", pairs).replace("RULE", "")
    broken = '{"at": "a'
    for arguments, shown in (('{"at": "a"}', "at=a;"), (broken, f"arguments={broken};")):
        call = CalledTool("look", arguments, id="c1")
        said = (Message("user", "?"), Message("assistant", tool_calls=(call,)))
        assert shown in chat_format(source).render(Messages(said)).text
        text = chat_format(_CALLS.replace("RULE", "")).render(Messages(said)).text
        assert "arguments" not in text  # a template that prints text gets the text


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "look"},
        {"type": "function", "function": {"name": "look"}},
        {"type": "function", "function": {"name": "look", "description": None, "parameters": None}},
    ],
)
def test_a_tool_lacks_nothing_that_a_template_reads(tool: dict[str, Any]) -> None:
    source = (
        "{% for t in tools %}{{ t.type + ' ' + t.function.name + ':' + t.function.description }}"
        "{% for p in t.function.parameters.properties %}{% endfor %}{% endfor %}"
    )
    said = chat_format(source).render(Messages((Message("user", "x"),), tools=(tool,))).text
    assert said == "function look:"


# ---------------------------------------------------------------------------- templates that leave things out

CALLED = (
    Message("user", "where?"),
    Message(
        "assistant",
        "Well.",
        tool_calls=(
            CalledTool("look", '{"at": "a"}', id="c1"),
            CalledTool("look", '{"at": "b"}', id="c2"),
        ),
    ),
    Message("tool", "found a", tool_call_id="c1", name="look"),
    Message("tool", "found b", tool_call_id="c2", name="look"),
    Message("user", "and now?"),
)


def lines(source: str, *, marks: str = "") -> list[str]:
    """Lines rendered by a template that carries its family's markers in a comment."""
    chat = chat_format(f"{{# {marks} tool #}}{source}")
    return chat.render(Messages(CALLED)).text.splitlines()


_SAID = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_NO_TOOLS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
_ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def test_calls_that_a_template_has_no_place_for_are_written_as_the_family_does() -> None:
    assert lines(_SAID, marks="<tool_call>") == [
        "user: where?",
        "assistant: Well.",
        "<tool_call>",
        '{"name": "look", "arguments": {"at": "a"}}',
        "</tool_call>",
        "<tool_call>",
        '{"name": "look", "arguments": {"at": "b"}}',
        "</tool_call>",
        "tool: found a",
        "tool: found b",
        "user: and now?",
    ]
    python = lines(_SAID, marks="<|tool_call_start|>")
    assert python[2] == "<|tool_call_start|>[look(at='a'), look(at='b')]<|tool_call_end|>"


@pytest.mark.parametrize("source", [_NO_TOOLS, _ALTERNATING])
def test_results_that_a_template_has_no_place_for_are_the_users_next_words(source: str) -> None:
    said = lines(source, marks="<tool_call>")
    assert said[8:] == [
        "user: Result of look:",
        "found a",
        "",
        "Result of look:",
        "found b",
        "",
        "and now?",
    ]


_CALLS_ALONE = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "call: {{ c.function.arguments | tojson }}\n{% endfor %}"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
_FIRST_CALL = _CALLS_ALONE.replace("in m.tool_calls %}call", "in m.tool_calls[:1] %}call")
_TEXT_ALONE = _CALLS_ALONE.replace("{% if m.tool_calls %}", "{% if not m.content %}")


@pytest.mark.parametrize("source", [_CALLS_ALONE, _TEXT_ALONE])
def test_what_is_said_beside_calls_is_not_lost_where_a_template_shows_one_of_both(
    source: str,
) -> None:
    assert lines(source) == [
        "user: where?",
        "assistant: Well.",
        'call: {"at": "a"}',
        'call: {"at": "b"}',
        "tool: found a",
        "tool: found b",
        "user: and now?",
    ]


def test_a_template_that_shows_the_first_call_alone_gets_one_at_a_time() -> None:
    assert lines(_FIRST_CALL)[2:] == [
        'call: {"at": "a"}',
        "tool: found a",
        'call: {"at": "b"}',
        "tool: found b",
        "user: and now?",
    ]


def test_a_template_that_would_refuse_two_answers_in_a_row_is_not_given_them() -> None:
    alternating = (
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role != 'tool' and not m.tool_calls %}{% if m.role == ns.last %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}"
        "{% endif %}{% endfor %}"
    )
    chat = chat_format(alternating + _CALLS_ALONE)
    said = (*CALLED[:4], Message("assistant", "There."), CALLED[4])
    text = chat.render(Messages(said, tools=(TOOL,))).text
    assert 'call: {"at": "a"}' in text and "Well." not in text


LOOKED = CalledTool("look", '{"town": "Rome"}', id="call00001")
HARMONY_CALLS = """{% set later = namespace(answer=false) %}{% for m in messages[::-1] %}
{%- if m.role == 'assistant' and 'tool_calls' not in m %}{% set later.answer = true %}{% endif %}
{%- endfor %}{% for m in messages %}{% if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('one text') }}{% endif %}
{%- if m.content or m.thinking %}{% if not later.answer %}
analysis:{{ m.content or m.thinking }}{% endif %}{% endif %}
{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}{% else %}
{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"""


def test_text_before_a_call_is_not_an_answer_of_its_own() -> None:
    chat = chat_format(HARMONY_CALLS)
    text = chat.render(
        Messages(
            (
                Message("user", "Weather?"),
                Message("assistant", "Let me look.", "Rome, so", (LOOKED,)),
                Message("tool", "sunny", tool_call_id="call00001", name="look"),
            )
        )
    ).text
    assert "analysis:Rome, so\n\nLet me look." in text
    assert "assistant:" not in text


def test_a_template_may_queue_the_ids_of_calls_in_a_list() -> None:
    chat = chat_format(
        "{% set queue = namespace(ids=[]) %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set _ = queue.ids.append(c.function.name) %}"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %} of {{ queue.ids.pop(0) }}{% endif %}{% endfor %}"
    )
    asked = Message("assistant", tool_calls=(LOOKED,))
    result = Message("tool", "sunny", tool_call_id="call00001", name="look")
    rendered = chat.render(Messages((Message("user", "hi"), asked, result)))
    assert rendered.text == '[user]hi[assistant]{"town": "Rome"}[tool]sunny of look'


def test_a_template_without_tools_is_reported_after_a_call_too() -> None:
    chat = chat_format("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = Message("assistant", tool_calls=(LOOKED,))
    for history in ((), (asked, Message("tool", "sunny", name="look"))):
        messages = (Message("user", "hi"), *history, Message("user", "look again"))
        rendered = chat.render(Messages(messages, tools=(tool,)))
        assert rendered.warnings == (TOOLS_AS_TEXT,)
