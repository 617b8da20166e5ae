"""OpenAI's Responses API over a real socket: what it takes, the exact order of its events, what it refuses."""

import re
from typing import Any

import pytest

from localchat.engine.events import Finished, Reasoning, Text, TokenLogprob, ToolCall
from localchat.engine.request import CalledTool, Message
from localchat.errors import EngineDied
from localchat.server.config import ServerConfig
from tests.support.http_server import (
    Reply,
    Stage,
    Wire,
    ask,
    heard_until,
    respond,
    serving,
    settled,
)
from tests.support.scripted_engine import ScriptedAnswer

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object"},
}


def names(reply: Reply) -> list[str]:
    return [name.removeprefix("response.") for name, _ in reply.named_events]


# ---------------------------------------------------------------------------- answers


def test_the_bytes_of_a_whole_stream(stage: Stage) -> None:
    reply = respond(stage, stream=True)
    size = len(repr(stage.last.prompt))
    response = reply.named_events[0][1]["response"]
    id_ = response["id"]
    item = reply.named_events[2][1]["item"]["id"]
    assert re.fullmatch("resp_[0-9a-f]{24}", id_) and re.fullmatch("msg_[0-9a-f]{24}", item)
    head = f'"response":{{"id":"{id_}","object":"response","created_at":{response["created_at"]},"status":'
    tail = (
        '"instructions":null,"error":null,"incomplete_details":null,"max_output_tokens":null,"metadata":{},'
        '"parallel_tool_calls":true,"previous_response_id":null,"reasoning":{"effort":null,"summary":null},'
        '"store":false,"temperature":null,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],'
        '"top_p":null,"truncation":"disabled","usage":'
    )
    at = f'"item_id":"{item}","output_index":0,"content_index":0,'
    part = '{"type":"output_text","annotations":[],"logprobs":[],"text":"%s"}'
    message = f'{{"id":"{item}","type":"message","status":"%s","role":"assistant","content":[%s]}}'
    whole = message % ("completed", part % "Hello.")
    usage = (
        f'{{"input_tokens":{size},"input_tokens_details":{{"cached_tokens":0,"cache_write_tokens":0}},"output_tokens":3,'
        f'"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{size + 3}}}'
    )
    begun = head + '"in_progress","model":"m","output":[],' + tail + "null}"
    expected = [
        ("created", begun),
        ("in_progress", begun),
        ("output_item.added", '"output_index":0,"item":' + message % ("in_progress", "")),
        ("content_part.added", f'{at}"part":{part % ""}'),
        *(
            ("output_text.delta", f'{at}"delta":"{text}","logprobs":[]')
            for text in ("Hel", "lo", ".")
        ),
        ("output_text.done", f'{at}"text":"Hello.","logprobs":[]'),
        ("content_part.done", f'{at}"part":{part % "Hello."}'),
        ("output_item.done", f'"output_index":0,"item":{whole}'),
        ("completed", f'{head}"completed","model":"m","output":[{whole}],{tail}{usage}}}'),
    ]
    assert reply.body.decode().split("\n\n") == [
        *(
            f'event: response.{name}\ndata: {{"type":"response.{name}","sequence_number":{number},{rest}}}'
            for number, (name, rest) in enumerate(expected)
        ),
        "",
    ]


def test_items_come_in_order_each_done_before_the_next(stage: Stage) -> None:
    word = stage.plays(
        "items",
        Reasoning(0, "h"),
        Reasoning(0, "m"),
        Text(0, "So."),
        ToolCall(0, 0, id="call_a", name="look", arguments='{"city":'),
        ToolCall(0, 0, arguments='"Rome"}'),
        ToolCall(0, 1, id="call_b", name="wait"),
        Finished(0, "stop"),
    )
    reply = respond(stage, word, stream=True, tools=[TOOL])
    assert names(reply) == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    events = [event for _, event in reply.named_events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for name, event in reply.named_events if name.endswith("item.done")]
    added = [event["item"] for name, event in reply.named_events if name.endswith("item.added")]
    assert events[-1]["response"]["output"] == done
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [item["id"].partition("_")[0] for item in done] == ["rs", "msg", "fc", "fc"]
    assert (
        done[0]["summary"] == [{"type": "summary_text", "text": "hm"}] and not added[0]["summary"]
    )
    assert (added[2]["arguments"], added[2]["status"]) == ("", "in_progress")
    assert {name: each for name, each in done[2].items() if name != "id"} == {
        "type": "function_call",
        "status": "completed",
        "arguments": '{"city":"Rome"}',
        "call_id": "call_a",
        "name": "look",
    }
    of = {event["item_id"]: event["output_index"] for event in events if "item_id" in event}
    assert of == {item["id"]: at for at, item in enumerate(done)}


def test_a_whole_answer_is_the_object_that_ends_a_stream(stage: Stage) -> None:
    word = stage.plays(
        "whole",
        Reasoning(0, "hm"),
        Text(0, "So."),
        ToolCall(0, 0, id="call_a", name="look", arguments="{}"),
        Finished(0, "stop"),
    )
    whole = respond(stage, word, tools=[TOOL]).json
    ended = respond(stage, word, tools=[TOOL], stream=True).named_events[-1][1]["response"]
    for made in (whole, ended):
        for item in (made, *made["output"]):
            item.pop("id")
        made.pop("created_at")
    assert whole == ended
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert whole["error"] is None and whole["tools"] == [TOOL]


def test_an_answer_that_was_cut_off_is_incomplete(stage: Stage) -> None:
    word = stage.plays("cut", Text(0, "a"), Finished(0, "length"))
    whole = respond(stage, word, max_output_tokens=7).json
    assert stage.last.max_tokens == 7
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    name, last = respond(stage, word, stream=True).named_events[-1]
    assert (name, last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["usage"]["output_tokens"] == 1


def test_a_failure_in_the_middle_is_a_failed_response_and_nothing_after(stage: Stage) -> None:
    stage.scripts["dies"] = ScriptedAnswer(
        ("half",), error=EngineDied("log: /secret", signal="SIGKILL")
    )
    reply = respond(stage, "dies", stream=True)
    name, last = reply.named_events[-1]
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert set(last["response"]["error"]) == {"code", "message"}
    assert last["response"]["error"]["code"] == "server_error"
    assert b"/secret" not in reply.body and reply.body.count(b'"error":{') == 1


def test_an_empty_answer_has_one_empty_message(stage: Stage) -> None:
    word = stage.plays("nothing", Finished(0, "stop"))
    (item,) = respond(stage, word).json["output"]
    assert item["content"][0]["text"] == ""


def test_logprobs_ride_on_their_text(stage: Stage) -> None:
    entry = TokenLogprob(5, b"a", -0.5, ((5, b"a", -0.5),))
    word = stage.plays("probs", Text(0, "a", (entry,)), Finished(0, "stop"))
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    reply = respond(stage, word, stream=True, include=include, top_logprobs=1)
    sent = {"token": "a", "logprob": -0.5, "bytes": [97]}
    held = [event["logprobs"] for _, event in reply.named_events if "logprobs" in event]
    assert held == [[{**sent, "top_logprobs": [sent]}]] * 2
    assert stage.last.logprobs == 1


def test_silence_is_broken_by_comments_and_by_numbered_events() -> None:
    with serving(ServerConfig(heartbeat_s=0.05, event_s=0.12)) as stage:
        word = stage.plays("slow", Text(0, "a"), Text(0, "b"), Finished(0, "stop"), gap_s=0.3)
        reply = heard_until(
            lambda: respond(stage, word, stream=True),
            lambda reply: (
                b": keep-alive\n\n" in reply.chunks and names(reply).count("in_progress") > 2
            ),
        )
    assert b": keep-alive\n\n" in reply.chunks
    sent = names(reply)
    assert sent.count("in_progress") > 2 and sent[0] == "created" and sent[-1] == "completed"
    numbers = [event["sequence_number"] for _, event in reply.named_events]
    assert numbers == list(range(len(numbers)))


def test_a_client_that_leaves_cancels_its_request(stage: Stage) -> None:
    stage.scripts["endless"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    before = stage.engine.cancelled
    with Wire(stage.port) as wire:
        wire.ask("/v1/responses", {"input": "endless", "stream": True})
        wire.until(b"output_text.delta")
    assert settled(lambda: stage.engine.cancelled == before + 1)


# ---------------------------------------------------------------------------- what is asked


def test_items_become_the_turns_that_they_were(stage: Stage) -> None:
    def said(text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        return {"type": "message", "role": "assistant", "content": content}

    def called(name: str, call: str) -> dict[str, Any]:
        return {"type": "function_call", "name": name, "arguments": "{}", "call_id": call}

    def result(call: str, output: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call, "output": output}

    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "h"}],
    }
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {**thought, "encrypted_content": None},
        said("b"),
        called("look", "c1"),
        called("wait", "c2"),
        result("c1", "sunny"),
        result("c2", [{"type": "input_text", "text": "ok"}]),
        thought,
        called("look", "c3"),
        result("c3", "rain"),
        said("d"),
        thought,
        said("e"),
        said("g"),
        {"type": "message", "role": "user", "content": "f"},
    ]
    assert respond(stage, items, instructions="You help.").status == 200
    first = (CalledTool("look", "{}", "c1"), CalledTool("wait", "{}", "c2"))
    assert stage.prompt.messages == (
        Message("system", "You help.\n\nBe brief."),
        Message("user", "a"),
        Message("assistant", "b", "h", first),
        Message("tool", "sunny", tool_call_id="c1", name="look"),
        Message("tool", "ok", tool_call_id="c2", name="wait"),
        Message("assistant", "", "h", (CalledTool("look", "{}", "c3"),)),
        Message("tool", "rain", tool_call_id="c3", name="look"),
        Message("assistant", "d"),
        Message("assistant", "e", "h"),
        Message("assistant", "g"),
        Message("user", "f"),
    )


def test_reasoning_that_cannot_be_read_is_no_turn_of_its_own(stage: Stage) -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    user = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "b"}
    assert respond(stage, [user, sealed, user, sealed, answer, user]).status == 200
    assert [(message.role, message.content) for message in stage.prompt.messages] == [
        *(("user", "x\n\nx"), ("assistant", "b"), ("user", "x"))
    ]


def test_a_role_that_is_not_known_is_refused_by_its_place_in_the_input(stage: Stage) -> None:
    items = [{"role": "user", "content": "x"}, {"role": "judge", "content": "y"}]
    reply = respond(stage, items, instructions="Be brief.")
    assert (reply.status, reply.error["param"]) == (400, "input[1].role")


def test_a_custom_tool_is_left_out_and_named(stage: Stage) -> None:
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    reply = respond(stage, tools=[TOOL, custom])
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["look"]
    assert reply.headers["x-localchat-ignored"] == "tools.custom"


def test_instructions_alone_can_be_answered(stage: Stage) -> None:
    assert respond(stage, [], instructions="Say hello.").status == 200
    assert stage.prompt.messages == (Message("system", "Say hello."),)


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "look"}, "look"),
        (None, "auto"),
    ],
)
def test_a_tool_can_be_asked_for(stage: Stage, choice: Any, meant: str) -> None:
    whole = respond(stage, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).json
    assert (stage.prompt.tool_choice, stage.prompt.parallel_tool_calls) == (meant, False)
    assert whole["tool_choice"] == (choice or "auto")


def test_model_sees_allowed_tools_only(stage: Stage) -> None:
    named = {"type": "function", "name": "look"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    respond(stage, tools=[TOOL, {**TOOL, "name": "wait"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["look"]
    assert stage.prompt.tool_choice == "required"


def test_tools_of_other_machines_are_left_out(stage: Stage) -> None:
    tools = [{"type": "web_search"}, {"type": "code_interpreter", "container": {}}, TOOL]
    reply = respond(stage, tools=tools)
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["look"]
    # The response names the tools that the model had.
    assert [tool["type"] for tool in reply.json["tools"]] == ["function"]


def test_tools_of_other_machines_alone_are_refused(stage: Stage) -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    reply = respond(stage, tools=tools)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "tools.web_search, tools.custom" in reply.error["message"]
    assert respond(stage, tools=tools, tool_choice="none").status == 200


def test_a_function_of_a_namespace_comes_back_with_it(stage: Stage) -> None:
    word = stage.plays("spaced", ToolCall(0, 0, name="mcp__js__run"), Finished(0, "stop"))
    tools = [{"type": "namespace", "name": "mcp__js", "tools": [{**TOOL, "name": "run"}]}]
    (call,) = respond(stage, word, tools=tools).json["output"]
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["mcp__js__run"]
    assert (call["namespace"], call["name"]) == ("mcp__js", "run")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
    respond(stage, [{"role": "user", "content": "x"}, call, output], tools=tools)
    assert stage.prompt.messages[1].tool_calls[0].name == "mcp__js__run"


@pytest.mark.parametrize(
    ("effort", "thinking"), [("none", "off"), ("minimal", "off"), ("high", "on"), ("max", "on")]
)
def test_effort_is_handed_to_the_template(stage: Stage, effort: str, thinking: str) -> None:
    respond(stage, reasoning={"effort": effort, "summary": "auto"})
    assert stage.prompt.thinking == thinking


def test_form_and_sampling_are_handed_on(stage: Stage) -> None:
    form = {"type": "json_schema", "name": "p", "schema": {"type": "object"}, "strict": True}
    whole = respond(stage, text={"format": form, "verbosity": "low"}, temperature=0, top_p=0.5).json
    assert stage.last.grammar is not None and stage.last.grammar.kind == "json_schema"
    assert (stage.last.sampling.temperature, stage.last.sampling.top_p) == (0, 0.5)
    assert whole["text"] == {"format": form}


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "//v1//responses/"])
def test_what_a_server_with_a_memory_would_do_changes_nothing(stage: Stage, path: str) -> None:
    body = {"input": "hi", "store": True, "truncation": "auto", "prompt_cache_key": "k"}
    whole = ask(stage, path, {**body, "metadata": {"a": "b"}, "service_tier": "auto"}).json
    assert (whole["store"], whole["metadata"]) == (False, {"a": "b"})
    assert whole["output"][0]["content"][0]["text"] == "Hello."
