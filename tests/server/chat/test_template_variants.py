"""Templates are rigid: how a conversation is put to one that refuses it, without losing a word."""

from collections.abc import Callable

import pytest

from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import TemplateError
from tests.support.http_server import Stage, StageEngine, chat

REFUSAL = TemplateError("so not", reason="refused")
LATE = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "late"},
    {"role": "user", "content": "b"},
]


def test_a_late_system_message_stays_where_the_template_shows_it(stage: Stage) -> None:
    chat(stage, messages=LATE)
    assert [m.role for m in stage.prompt.messages] == ["user", "system", "user"]


def test_a_late_system_message_is_the_users_or_moves_where_the_template_refuses(
    stage: Stage,
) -> None:
    stage.engine.refusals["b"] = [REFUSAL]
    assert chat(stage, messages=LATE).status == 200
    assert stage.prompt.messages == (Message("user", "a\n\nlate\n\nb"),)
    stage.engine.refusals["b"] = [REFUSAL]
    stage.engine.refusals["a\n\nlate\n\nb"] = [REFUSAL]
    assert chat(stage, messages=LATE).status == 200
    assert [m.content for m in stage.prompt.messages] == ["late", "a\n\nb"]


def test_a_conversation_that_no_way_suits_is_the_templates_refusal(stage: Stage) -> None:
    refusal = TemplateError("only users may speak", reason="refused")
    for last in ("b", "a\n\nlate\n\nb", "a\n\nb", "late\n\na\n\nb"):
        stage.engine.refusals[last] = [refusal]
    reply = chat(stage, messages=LATE)
    assert (reply.status, reply.error["code"]) == (400, "chat_template_error")
    assert "Only users may speak" in reply.error["message"]


def shown_by(render: Callable[[Messages], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the template show of a conversation what this makes of it."""
    monkeypatch.setattr(StageEngine, "render", lambda self, messages: render(messages))


def test_a_template_that_shows_the_last_system_message_alone_gets_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown_by(
        lambda asked: [m for m in asked.messages if m.role == "system"][-1].content, monkeypatch
    )
    chat(stage, messages=[{"role": "system", "content": "first"}, *LATE])
    assert [m.content for m in stage.prompt.messages] == ["first", "a\n\nlate\n\nb"]


def test_a_template_that_gathers_system_messages_at_the_beginning_gets_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(asked: Messages) -> str:
        return " ".join(
            message.content for message in sorted(asked.messages, key=lambda m: m.role != "system")
        )

    shown_by(render, monkeypatch)
    chat(stage, messages=[{"role": "system", "content": "first"}, *LATE])
    assert [m.content for m in stage.prompt.messages] == ["first", "a\n\nlate\n\nb"]


def test_a_template_without_a_system_role_gets_its_text_from_the_user(stage: Stage) -> None:
    stage.engine.refusals["hi"] = [REFUSAL]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat(stage, messages=messages).status == 200
    assert stage.prompt.messages == (Message("user", "Be brief.\n\nhi"),)


def test_a_template_with_one_place_for_thoughts_and_words_gets_both_there(stage: Stage) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    messages = [{"role": "user", "content": "a"}, said, result]
    asked = Message("assistant", "b", "hm", (CalledTool("look", "{}", "c"),))
    assert chat(stage, messages=messages).status == 200
    assert stage.prompt.messages[1] == asked
    stage.engine.refusals["sunny"] = [REFUSAL]
    assert chat(stage, messages=messages).status == 200
    assert stage.prompt.messages[1] == Message("assistant", "", "hm\n\nb", asked.tool_calls)


def test_text_after_a_result_joins_it_if_the_template_wants_an_answer_between(
    stage: Stage,
) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": "b"},
    ]
    assert chat(stage, messages=messages).status == 200
    assert [m.role for m in stage.prompt.messages] == ["user", "assistant", "tool", "user"]
    stage.engine.refusals["b"] = [REFUSAL]
    assert chat(stage, messages=messages).status == 200
    assert [m.role for m in stage.prompt.messages] == ["user", "assistant", "tool"]
    assert stage.prompt.messages[-1].content == "sunny\n\nb"
