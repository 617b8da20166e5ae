"""OpenAI's Responses API over a real socket: what it refuses, and what its own library reads."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from localchat.engine.events import Finished, Reasoning, Text, ToolCall
from localchat.engine.request import CalledTool, Message
from localchat.errors import ContextExceeded, EngineDied
from tests.support.http_server import Stage, ask, respond
from tests.support.scripted_engine import ScriptedAnswer

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object"},
}


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": []}, "missing_required_parameter", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": [{"content": "x"}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_value", "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "unsupported_value", "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_value",
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "missing_required_parameter",
            "input[0].call_id",
        ),
        ({"previous_response_id": "r"}, "previous_response_not_found", "previous_response_id"),
        ({"conversation": "c"}, "unsupported_value", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_value", "prompt"),
        ({"background": True}, "unsupported_value", "background"),
        ({"max_output_tokens": 0}, "unsupported_value", "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "unsupported_value", "tool_choice.type"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "xml"}}}, "unsupported_value", "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "unsupported_value", "reasoning.effort"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refused_is_refused_by_its_field(
    stage: Stage, fields: Any, code: str, param: str
) -> None:
    before = len(stage.engine.requests)
    reply = ask(stage, "/v1/responses", {"input": "hi", **fields})
    assert (reply.status, reply.error["code"]) == (400, code)
    assert reply.error["param"] == param
    assert "'reasoning_effort'" not in reply.error["message"]
    assert len(stage.engine.requests) == before


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know(stage: Stage) -> None:
    for stream in (False, True):
        stage.engine.refusals["long"] = [ContextExceeded("x", prompt_tokens=9, context_tokens=4)]
        reply = respond(stage, "long", stream=stream)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 4 tokens" in reply.error["message"]


# ---------------------------------------------------------------------------- the client's library


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stage.base}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_library_reads_an_answer(client: OpenAI) -> None:
    answer = client.responses.create(model="m", input="hi", instructions="Be brief.")
    assert (answer.output_text, answer.status) == ("Hello.", "completed")
    assert answer.usage is not None and answer.usage.output_tokens == 3


def test_the_librarys_stream_puts_a_response_together(stage: Stage, client: OpenAI) -> None:
    word = stage.plays(
        "thinks",
        Reasoning(0, "hm"),
        Text(0, "So"),
        ToolCall(0, 0, name="look", arguments='{"city":'),
        ToolCall(0, 0, arguments='"Rome"}'),
        Finished(0, "stop"),
    )
    tools: Any = [{**TOOL, "strict": True}]
    with client.responses.stream(model="m", input=word, tools=tools) as stream:
        final = stream.get_final_response()
    thought, message, call = final.output
    assert thought.type == "reasoning" and thought.summary[0].text == "hm"
    assert message.type == "message" and final.output_text == "So"
    assert call.type == "function_call" and call.parsed_arguments == {"city": "Rome"}
    again: Any = [
        {"role": "user", "content": word},
        *(item.model_dump() for item in final.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    client.responses.create(model="m", input=again, tools=tools)
    assert stage.prompt.messages[1:] == (
        Message("assistant", "So", "hm", (CalledTool("look", '{"city":"Rome"}', call.call_id),)),
        Message("tool", "sunny", tool_call_id=call.call_id, name="look"),
    )


def test_the_library_sees_failures(stage: Stage, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert refused.value.code == "previous_response_not_found"
    stage.scripts["dies"] = ScriptedAnswer(("a",), error=EngineDied("gone", signal="SIGKILL"))
    *_, last = client.responses.create(model="m", input="dies", stream=True)
    assert last.type == "response.failed" and last.response.error is not None
