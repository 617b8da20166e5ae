"""MCP servers of the operator in the Responses API, with OpenAI's own library and servers of the SDK."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from localchat.config.mcp_servers import McpServer
from localchat.engine.events import Finished, Text, ToolCall
from localchat.engine.request import GenerateRequest, Messages
from localchat.server.config import ServerLimits
from tests.support.http_server import UNHURRIED, Stage, ask, serving
from tests.support.scripted_engine import ScriptedAnswer

pytestmark = pytest.mark.process

SCRIPT = str(Path(__file__).parents[2] / "support" / "mcp_server.py")
DEMO: dict[str, Any] = {"type": "mcp", "server_label": "demo", "require_approval": "never"}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def server(name: str, kind: str, timeout_s: int = 30) -> McpServer:
    return McpServer(name, sys.executable, (SCRIPT, kind), ("PASSED_ON",), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    config = replace(
        UNHURRIED,
        mcp_servers=(
            server("demo", "good"),
            server("gone", "exit"),
            server("slow", "hang", timeout_s=1),
            server("frail", "die"),
            server("loud", "flood"),
        ),
        environ={"PATH": "/usr/bin:/bin", "PASSED_ON": "p", "SECRET": "s"},
        limits=replace(UNHURRIED.limits, tool_rounds=3),
    )
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stage.base}/v1", api_key="none", max_retries=0) as made:
        yield made


def calls(stage: Stage, word: str, *tools: tuple[str, str]) -> str:
    """Let a prompt of this word be answered by calls."""
    events = [
        ToolCall(0, number, f"call_{number}", name, arguments)
        for number, (name, arguments) in enumerate(tools)
    ]
    return stage.plays(word, *events, Finished(0, "tool_calls"))


def create(client: OpenAI, word: str | list[Any], *tools: Any, **fields: Any) -> Any:
    return client.responses.create(model="m", input=word, tools=list(tools), **fields)


def streamed(client: OpenAI, word: str, *tools: Any) -> list[Any]:
    """Return the events of a stream, as the library reads them."""
    with client.responses.stream(model="m", input=word, tools=list(tools)) as stream:
        return list(stream)


# ---------------------------------------------------------------------------- answers


def test_the_server_runs_a_call_and_answers_from_its_result(stage: Stage, client: OpenAI) -> None:
    calls(stage, "sum", ("demo_add", '{"a": 2, "b": 3}'))
    stage.plays("5", Text(0, "It is five."), Finished(0, "stop"))
    answer = create(client, "sum", DEMO)
    listing, call, message = answer.output
    assert listing.type == "mcp_list_tools"
    assert [tool.name for tool in listing.tools] == ["add", "act", "fail", "environment"]
    assert listing.tools[0].input_schema["required"] == ["a", "b"]
    assert (call.type, call.name, call.server_label) == ("mcp_call", "add", "demo")
    assert (call.status, call.output, call.error) == ("completed", "5", None)
    assert message.type == "message"
    assert answer.output_text == "It is five."
    assert answer.usage.input_tokens == sum(
        len(repr(request.prompt)) for request in stage.engine.requests[-2:]
    )
    first = stage.engine.requests[-2].prompt
    assert isinstance(first, Messages)
    assert first.bind_arguments
    assert [message.role for message in stage.prompt.messages][-2:] == ["assistant", "tool"]


def test_the_library_puts_a_stream_together(stage: Stage, client: OpenAI) -> None:
    calls(stage, "two", ("demo_add", '{"a": 1, "b": 1}'), ("demo_act", '{"text": "x"}'))
    stage.plays("acted: x", Text(0, "Done."), Finished(0, "stop"))
    events = streamed(client, "two", DEMO)
    final = events[-1].response
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"),
        "output_item.done",
        *("output_item.added", "mcp_call.in_progress"),
        *("mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("output_item.added", "mcp_call.in_progress"),
        *("mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done", "mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == [
        "mcp_list_tools",
        "mcp_call",
        "mcp_call",
        "message",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert done[1].output == "2"


def test_a_filter_leaves_some_tools(stage: Stage, client: OpenAI) -> None:
    for allowed in (["add"], {"tool_names": ["add"]}):
        answer = create(client, "hi", {**DEMO, "allowed_tools": allowed})
        assert [tool.name for tool in answer.output[0].tools] == ["add"]
        assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["demo_add"]
    with pytest.raises(openai.BadRequestError, match="no tool 'sub'"):
        create(client, "hi", {**DEMO, "allowed_tools": ["sub"]})


def test_functions_of_the_client_end_the_response(stage: Stage, client: OpenAI) -> None:
    calls(stage, "both", ("demo_add", '{"a": 2, "b": 2}'), ("look", "{}"))
    answer = create(client, "both", DEMO, FUNCTION)
    assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert answer.output[1].output == "4"


def test_a_choice_forces_the_first_answer_only(stage: Stage, client: OpenAI) -> None:
    calls(stage, "sum", ("demo_add", '{"a": 2, "b": 3}'))
    stage.plays("5", Text(0, "Five."), Finished(0, "stop"))
    create(client, "sum", DEMO, tool_choice="required")
    first, second = (request.prompt for request in stage.engine.requests[-2:])
    assert isinstance(first, Messages)
    assert isinstance(second, Messages)
    assert (first.tool_choice, second.tool_choice) == ("required", "auto")


# ---------------------------------------------------------------------------- protection


def test_rounds_end_with_an_answer_without_tools(stage: Stage, client: OpenAI) -> None:
    numbers = iter(range(100))

    def script(request: GenerateRequest) -> ScriptedAnswer:
        prompt = request.prompt
        assert isinstance(prompt, Messages)
        if prompt.tool_choice == "none":
            return ScriptedAnswer(("Enough.",))
        call = ToolCall(0, 0, "call_0", "demo_add", f'{{"a": {next(numbers)}, "b": 0}}')
        return ScriptedAnswer(events=(call, Finished(0, "tool_calls")))

    before = dict(stage.scripts)
    try:
        stage.engine.script, kept = script, stage.engine.script
        answer = create(client, "count", DEMO)
    finally:
        stage.engine.script = kept
    assert stage.scripts == before
    kinds = [item.type for item in answer.output]
    assert kinds == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert answer.output[3].output == "2"
    assert answer.output_text == "Enough."


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("slow", "did not answer within 1 s"),
        ("frail", "failed"),
        ("demo", "Error executing tool"),
    ],
)
def test_a_failing_call_becomes_an_error_and_the_model_goes_on(
    stage: Stage, client: OpenAI, label: str, said: str
) -> None:
    name = "fail" if label == "demo" else "trouble"
    word = calls(stage, f"fail {label}", (f"{label}_{name}", "{}"))
    answer = create(client, word, {**DEMO, "server_label": label})
    _, call, message = answer.output
    assert call.status == "failed"
    assert said in call.error.content[0]["text"]
    assert message.type == "message"


def test_a_server_that_died_starts_again_for_the_next_request(stage: Stage, client: OpenAI) -> None:
    for _ in range(2):
        word = calls(stage, "fail frail", ("frail_trouble", "{}"))
        answer = create(client, word, {**DEMO, "server_label": "frail"})
        assert answer.output[0].error is None
        assert answer.output[1].status == "failed"


def test_a_long_result_is_cut_for_the_model_and_the_client(stage: Stage, client: OpenAI) -> None:
    word = calls(stage, "flood", ("loud_trouble", "{}"))
    answer = create(client, word, {**DEMO, "server_label": "loud"})
    output = answer.output[1].output
    assert len(output) < 5000
    assert "characters are left out here" in output


def test_a_server_that_does_not_start_gets_a_listing_with_its_error(
    stage: Stage, client: OpenAI
) -> None:
    answer = create(client, "hi", {**DEMO, "server_label": "gone"})
    assert "no license" in answer.output[0].error
    assert answer.output_text == "Hello."
    kinds = [event.type for event in streamed(client, "hi", {**DEMO, "server_label": "gone"})]
    assert "response.mcp_list_tools.failed" in kinds


def test_a_client_that_leaves_stops_a_call(stage: Stage) -> None:
    word = calls(stage, "hang", ("slow_trouble", "{}"))
    with OpenAI(base_url=f"{stage.base}/v1", api_key="none", max_retries=0) as client:
        tool: Any = {**DEMO, "server_label": "slow"}
        with client.responses.create(model="m", input=word, tools=[tool], stream=True) as stream:
            for event in stream:
                if event.type == "response.mcp_call_arguments.done":
                    break
    assert ask(stage, "/v1/responses", {"input": "hi"}).status == 200


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"server_url": "http://127.0.0.1:1/mcp"}, "leave out 'server_url'"),
        ({"connector_id": "connector_gmail"}, "leave out 'connector_id'"),
        ({"headers": {"a": "b"}}, "leave out 'headers'"),
        ({"authorization": "k"}, "leave out 'authorization'"),
        ({"server_label": "other"}, "no MCP server 'other'"),
        ({"server_label": None}, "server_label"),
        ({"require_approval": None}, "'require_approval': 'never'"),
        ({"require_approval": "always"}, "'require_approval': 'never'"),
    ],
)
def test_a_server_that_the_operator_did_not_choose_is_refused(
    stage: Stage, fields: dict[str, Any], said: str
) -> None:
    before = len(stage.engine.requests)
    reply = ask(stage, "/v1/responses", {"input": "hi", "tools": [{**DEMO, **fields}]})
    assert reply.status == 400
    assert said in reply.error["message"]
    assert len(stage.engine.requests) == before


def test_a_server_without_mcp_says_how_it_is_started() -> None:
    config = replace(UNHURRIED, limits=ServerLimits())
    with serving(config) as plain:
        reply = ask(plain, "/v1/responses", {"input": "hi", "tools": [DEMO]})
        assert reply.status == 400
        assert "localchat serve --mcp NAME" in reply.error["message"]


def test_tools_of_servers_count_as_input_tokens(stage: Stage) -> None:
    path = "/v1/responses/input_tokens"
    body = {"input": "hi"}
    without = ask(stage, path, body).json["input_tokens"]
    assert ask(stage, path, {**body, "tools": [DEMO]}).json["input_tokens"] > without
