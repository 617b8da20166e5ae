"""Custom tools of the Responses API: the client runs them, and they take a text in place of arguments."""

from typing import Any

import pytest

from localchat.engine.events import Finished, ToolCall
from localchat.engine.request import CalledTool
from tests.support.http_server import Stage, respond

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Change files.", "format": GRAMMAR}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def plays(stage: Stage, arguments: str, finish: Any = "stop") -> str:
    return stage.plays(
        "patches",
        ToolCall(0, 0, "call_1", "patch"),
        ToolCall(0, 0, arguments=arguments),
        Finished(0, finish),
    )


def test_the_model_knows_a_custom_tool_as_a_function_of_one_text(stage: Stage) -> None:
    assert respond(stage, tools=[PATCH, LOOK]).status == 200
    patch, look = (tool["function"] for tool in stage.prompt.tools)
    assert (patch["name"], look["name"]) == ("patch", "look")
    assert list(patch["parameters"]["properties"]) == patch["parameters"]["required"] == ["input"]
    assert patch["description"] == (
        "Change files.\n\nThe input must follow this lark grammar:\nstart: /.+/"
    )
    respond(stage, tools=[{"type": "custom", "name": "patch", "format": {"type": "text"}}])
    assert "description" not in stage.prompt.tools[0]["function"]


def test_its_call_comes_as_the_text_that_it_takes(stage: Stage) -> None:
    word = plays(stage, '{"input": "*** a\\n\\"b\\""}')
    whole = respond(stage, word, tools=[PATCH]).json
    (item,) = whole["output"]
    assert item.pop("id")
    assert item == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "patch",
        "input": '*** a\n"b"',
    }
    assert whole["tools"] == [PATCH]


def test_its_call_is_streamed_by_events_of_its_own(stage: Stage) -> None:
    word = plays(stage, '{"input": "abc"}')
    sent = [
        (name, data)
        for name, data in respond(stage, word, tools=[PATCH], stream=True).named_events
        if name not in ("response.created", "response.in_progress")
    ]
    assert [name for name, _ in sent] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, delta, done, item, completed = (data for _, data in sent)
    assert (added["item"]["type"], added["item"]["input"]) == ("custom_tool_call", "")
    assert (delta["delta"], done["input"], item["item"]["input"]) == ("abc", "abc", "abc")
    assert delta["item_id"] == done["item_id"] == added["item"]["id"] == item["item"]["id"]
    assert completed["response"]["output"] == [item["item"]]


def test_what_came_of_a_call_that_was_cut_off_is_kept(stage: Stage) -> None:
    word = plays(stage, '{"input": "ab', "length")
    (item,) = respond(stage, word, tools=[PATCH]).json["output"]
    assert (item["input"], item["status"]) == ('{"input": "ab', "incomplete")


def test_a_custom_tool_can_be_asked_for_and_allowed(stage: Stage) -> None:
    named = {"type": "custom", "name": "patch"}
    assert respond(stage, tools=[PATCH, LOOK], tool_choice=named).status == 200
    assert stage.prompt.tool_choice == "patch"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    assert respond(stage, tools=[PATCH, LOOK], tool_choice=allowed).status == 200
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["patch"]


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_an_answer_goes_back_as_it_came(stage: Stage, kind: str) -> None:
    word = plays(stage, '{"input": "abc"}')
    tool = PATCH if kind == "custom" else {**LOOK, "name": "patch"}
    (item,) = respond(stage, word, tools=[tool]).json["output"]
    back = "custom_tool_call_output" if kind == "custom" else "function_call_output"
    output = {"type": back, "call_id": "call_1", "output": "done"}
    said = [{"role": "user", "content": "x"}, item, output]
    assert respond(stage, said, tools=[tool]).status == 200
    (call,) = stage.prompt.messages[1].tool_calls
    assert (call.name, call.id) == ("patch", "call_1")
    assert call.arguments.replace(" ", "") == CalledTool("patch", '{"input":"abc"}').arguments
