"""Calls and results of earlier turns, as templates of several habits take them."""

from typing import Any

import pytest

from localchat.chatformat import chat_format
from localchat.engine.request import CalledTool, Message, Messages

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
