"""Custom tools of the chat API: a text in place of arguments, whole and in streams."""

from typing import Any

import pytest
from openai import OpenAI
from openai.lib.streaming._deltas import accumulate_delta

from localchat.engine.events import Finished, Text, ToolCall
from localchat.engine.request import CalledTool
from tests.support.http_server import Stage, chat

PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Patch.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}},
    },
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def word(stage: Stage) -> str:
    return stage.plays(
        "calls",
        Text(0, "So."),
        ToolCall(0, 0, id="c0", name="patch", arguments='{"input": '),
        ToolCall(0, 0, arguments='"a\\nb"}'),
        ToolCall(0, 1, id="c1", name="look", arguments="{}"),
        Finished(0, "stop"),
    )


def test_a_custom_tool_is_a_function_with_one_text(stage: Stage) -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert chat(stage, tools=[PATCH, LOOK], tool_choice=choice).status == 200
    described = stage.prompt.tools[0]["function"]
    assert described["name"] == stage.prompt.tool_choice == "patch"
    assert described["parameters"]["required"] == ["input"]
    assert "Patch." in described["description"] and "start: /x/" in described["description"]


def test_a_whole_answer_has_the_text_of_the_call(stage: Stage, word: str) -> None:
    choice = chat(stage, word, tools=[PATCH, LOOK]).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]


def test_a_stream_has_the_text_in_one_piece(stage: Stage, word: str) -> None:
    chunks = chat(stage, word, tools=[PATCH, LOOK], stream=True).chunks_json
    deltas: list[Any] = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:] == [
        {"content": "So."},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "custom": {"input": "", "name": "patch"},
                    "id": "c0",
                    "type": "custom",
                }
            ]
        },
        {"tool_calls": [{"index": 0, "custom": {"input": "a\nb"}}]},
        {
            "tool_calls": [
                {
                    "index": 1,
                    "function": {"arguments": "", "name": "look"},
                    "id": "c1",
                    "type": "function",
                }
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]


def test_openais_library_puts_a_stream_together(stage: Stage, word: str) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{stage.port}/v1", api_key="none")
    tools: Any = [PATCH, LOOK]
    messages: Any = [{"role": "user", "content": word}]
    calls: dict[object, object] = {}
    for chunk in client.chat.completions.create(
        model="m", messages=messages, tools=tools, stream=True
    ):
        for delta in chunk.choices[0].delta.tool_calls or ():
            # Its types know functions only, and its own end of a stream fails on other calls.
            calls = accumulate_delta(calls, {"tool_calls": [delta.to_dict()]})
    assert calls["tool_calls"] == [
        {
            "index": 0,
            "id": "c0",
            "type": "custom",
            "custom": {"name": "patch", "input": "a\nb"},
        },
        {
            "index": 1,
            "id": "c1",
            "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        },
    ]


def test_a_call_comes_back_in_the_conversation(stage: Stage) -> None:
    call = {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": "a"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "ok"},
    ]
    assert chat(stage, messages=messages, tools=[PATCH]).status == 200
    assert stage.prompt.messages[1].tool_calls == (CalledTool("patch", '{"input":"a"}', "c0"),)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": ""}}, "tools[0].custom.name"),
    ],
)
def test_a_custom_tool_without_a_name_is_refused(stage: Stage, tool: Any, param: str) -> None:
    assert chat(stage, tools=[tool]).error["param"] == param
