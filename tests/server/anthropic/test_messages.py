"""Anthropic's Messages API over a real socket: what it takes, and what it answers byte by byte."""

import re
from typing import Any

import msgspec
import pytest

from localchat.engine.events import Finished, Reasoning, Text, ToolCall
from localchat.engine.request import CalledTool, Message
from localchat.errors import (
    EngineDied,
)
from localchat.server.config import ServerConfig
from tests.support.http_server import (
    Reply,
    Stage,
    Wire,
    ask,
    heard_until,
    message,
    serving,
    settled,
)
from tests.support.scripted_engine import ScriptedAnswer

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


# ---------------------------------------------------------------------------- answers


def test_the_bytes_of_a_whole_stream(stage: Stage) -> None:
    reply = message(stage, stream=True)
    size = len(repr(stage.last.prompt))
    id_ = reply.named_events[0][1]["message"]["id"]
    assert re.fullmatch("msg_[0-9a-f]{24}", id_)
    usage = (
        f'{{"input_tokens":{size},"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens":%d,"output_tokens_details":{"thinking_tokens":0}}'
    )
    delta = '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}'
    assert [block.partition("\ndata: ")[2] for block in reply.body.decode().split("\n\n")] == [
        f'{{"type":"message_start","message":{{"id":"{id_}","type":"message","role":"assistant",'
        '"model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":'
        + usage % 0
        + "}}",
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        delta % "Hel",
        delta % "lo",
        delta % ".",
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":'
        + usage % 3
        + "}",
        '{"type":"message_stop"}',
        "",
    ]
    assert size > 0 and b"[DONE]" not in reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_each_block_is_closed_before_the_next_is_opened(stage: Stage) -> None:
    word = stage.plays(
        "blocks",
        Reasoning(0, "h"),
        Reasoning(0, "m"),
        Text(0, ""),
        Text(0, "So."),
        ToolCall(0, 0, id="call_a", name="look", arguments=""),
        ToolCall(0, 0, arguments='{"city":'),
        ToolCall(0, 0, arguments='"Rome"}'),
        ToolCall(0, 1, id="call_b", name="wait", arguments="{}"),
        Text(0, "Done."),
        Finished(0, "stop"),
    )
    events = message(stage, word, stream=True, tools=[TOOL]).named_events
    assert [event.get("index") for _, event in events[1:-2]] == [
        *([0] * 5),
        *([1] * 3),
        *([2] * 3),
        *([3] * 3),
        *([4] * 3),
    ]
    blocks = [event["content_block"] for name, event in events if name == "content_block_start"]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "wait", "input": {}},
        {"type": "text", "text": ""},
    ]
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "h"},
        {"type": "thinking_delta", "thinking": "m"},
        {"type": "signature_delta", "signature": "localchat"},
        {"type": "text_delta", "text": "So."},
        {"type": "input_json_delta", "partial_json": '{"city":"Rome"}'},
        {"type": "input_json_delta", "partial_json": "{}"},
        {"type": "text_delta", "text": "Done."},
    ]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("arguments", ["{city: 'Rome'}", "[1]"])
def test_arguments_that_are_no_object_reach_the_client_inside_of_one(
    stage: Stage, arguments: str
) -> None:
    word = stage.plays(
        "broken",
        ToolCall(0, 0, id="call_a", name="look", arguments=arguments),
        Finished(0, "stop"),
    )
    whole = message(stage, word, tools=[TOOL]).json
    assert whole["content"][0]["input"] == {"arguments": arguments}
    events = message(stage, word, stream=True, tools=[TOOL]).named_events
    (delta,) = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert msgspec.json.decode(delta["partial_json"]) == {"arguments": arguments}


def test_a_whole_answer_is_one_message(stage: Stage) -> None:
    word = stage.plays(
        "whole",
        Reasoning(0, "hm"),
        Text(0, "So."),
        ToolCall(0, 0, id="call_a", name="look", arguments='{"city":"Rome"}'),
        Finished(0, "stop"),
    )
    reply = message(stage, word, tools=[TOOL])
    whole = reply.json
    assert re.fullmatch("msg_[0-9a-f]{24}", whole.pop("id"))
    assert whole == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "localchat"},
            {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "call_a", "name": "look", "input": {"city": "Rome"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(repr(stage.last.prompt)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 1},
        },
    }
    assert b": " not in reply.body


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished(0, "stop"), "end_turn", None),
        (Finished(0, "stop", "###"), "stop_sequence", "###"),
        (Finished(0, "length"), "max_tokens", None),
        (Finished(0, "length", limit="context"), "model_context_window_exceeded", None),
    ],
)
def test_answer_has_its_stop_reason(
    stage: Stage, finished: Finished, reason: str, sequence: str | None
) -> None:
    word = stage.plays("ends", Text(0, "a"), finished)
    whole = message(stage, word, stop_sequences=["###"]).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert stage.last.stop == ("###",)
    delta = message(stage, word, stream=True).named_events[-2][1]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_in_circles_ends_as_one_that_is_too_long(stage: Stage) -> None:
    stage.scripts["loop"] = ScriptedAnswer(("the same again. ",) * 1000)
    assert message(stage, "loop").json["stop_reason"] == "max_tokens"


def test_a_call_that_was_cut_off_shows_its_start(stage: Stage) -> None:
    word = stage.plays("cut", ToolCall(0, 0, name="look", arguments='{"ci'), Finished(0, "length"))
    whole = message(stage, word, tools=[TOOL]).json
    cut = {"arguments": '{"ci'}
    assert (whole["content"][0]["input"], whole["stop_reason"]) == (cut, "max_tokens")


def test_an_empty_answer_has_one_empty_text(stage: Stage) -> None:
    word = stage.plays("nothing", Finished(0, "stop"))
    assert message(stage, word).json["content"] == [{"type": "text", "text": ""}]
    names = [name for name, _ in message(stage, word, stream=True).named_events]
    assert names[1:3] == ["content_block_start", "content_block_stop"]


def _beats(reply: Reply) -> set[bytes]:
    return {chunk for chunk in reply.chunks if chunk.startswith((b":", b"event: ping"))}


def test_silence_is_broken_by_comments_and_by_pings() -> None:
    with serving(ServerConfig(heartbeat_s=0.05, event_s=0.12)) as stage:
        word = stage.plays("slow", Text(0, "a"), Finished(0, "stop"), gap_s=0.4)
        reply = heard_until(
            lambda: message(stage, word, stream=True), lambda reply: len(_beats(reply)) == 2
        )
    assert _beats(reply) == {b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'}
    assert reply.chunks[0].startswith(b"event: message_start\n")


def test_a_failure_in_the_middle_is_an_error_event_and_nothing_after(stage: Stage) -> None:
    stage.scripts["dies"] = ScriptedAnswer(
        ("half",), error=EngineDied("log: /secret", signal="SIGKILL")
    )
    reply = message(stage, "dies", stream=True)
    *_, (name, error) = reply.named_events
    assert name == "error" and error["error"]["type"] == "overloaded_error"
    assert error["request_id"] == reply.headers["request-id"]
    assert b"message_stop" not in reply.body and b"/secret" not in reply.body


def test_a_client_that_leaves_cancels_its_request(stage: Stage) -> None:
    stage.scripts["endless"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    before = stage.engine.cancelled
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "endless"}], "stream": True}
    with Wire(stage.port) as wire:
        wire.ask("/v1/messages", body)
        wire.until(b"text_delta")
    assert settled(lambda: stage.engine.cancelled == before + 1)


# ---------------------------------------------------------------------------- what is asked


def test_a_conversation_with_tools_reaches_the_engine(stage: Stage) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "c"},
                {"type": "document", "source": {"type": "text", "data": "d"}, "title": "D"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    assert message(stage, messages=messages, system=system, tools=[TOOL]).status == 200
    calls = (CalledTool("look", '{"city":"Rome"}', "t1"), CalledTool("look", "{}", "t2"))
    assert stage.prompt.messages == (
        Message("system", "Be\nbrief."),
        Message("user", "a"),
        Message("assistant", "b", "hm", calls),
        Message("tool", "sunny", tool_call_id="t1", name="look"),
        Message("tool", "Error: no city", tool_call_id="t2", name="look"),
        Message("user", "c\nD\nd"),
    )
    (tool,) = stage.prompt.tools
    assert tool["function"] == {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object"},
    }


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "data": "d"}, "About.\nD.txt\nd"),
        ({"type": "content", "content": "d"}, "About.\nD.txt\nd"),
        (
            {"type": "base64", "media_type": "text/plain", "data": "ZA=="},
            "About.\nD.txt:\n```\nd\n```",
        ),
    ],
)
def test_the_context_of_a_document_comes_first(
    stage: Stage, source: dict[str, str], text: str
) -> None:
    document = {"type": "document", "source": source, "title": "D.txt", "context": "About."}
    reply = message(stage, messages=[{"role": "user", "content": [document]}])
    assert reply.status == 200, reply.json
    assert stage.prompt.messages == (Message("user", text),)


def test_deferred_tool_is_shown_once_a_result_refers_to_it(stage: Stage) -> None:
    tools = [TOOL, *({**TOOL, "name": name, "defer_loading": True} for name in ("wait", "go"))]
    message(stage, tools=tools)
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["look"]
    found = [{"type": "tool_reference", "tool_name": "wait"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    message(stage, messages=[*USER, *turns], tools=tools)
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["look", "wait"]
    assert stage.prompt.messages[-1].content == "The tool wait can be called now."


def test_an_answer_that_was_begun_is_gone_on_with(stage: Stage) -> None:
    message(stage, messages=[*USER, {"role": "assistant", "content": "The"}])
    assert stage.prompt.continue_last and stage.prompt.messages[-1].content == "The"


@pytest.mark.parametrize(
    ("choice", "meant", "several"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, "look", False),
        ({"type": "none"}, "none", True),
        (None, "auto", True),
    ],
)
def test_a_tool_can_be_asked_for(stage: Stage, choice: Any, meant: str, several: bool) -> None:
    message(stage, tools=[TOOL], tool_choice=choice)
    assert (stage.prompt.tool_choice, stage.prompt.parallel_tool_calls) == (meant, several)


@pytest.mark.parametrize(
    ("fields", "thinking", "options"),
    [
        ({}, "auto", {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            "on",
            {"thinking_budget": 2048},
        ),
        ({"thinking": {"type": "disabled"}}, "off", {}),
        ({"thinking": {"type": "adaptive"}}, "auto", {}),
        ({"output_config": {"effort": "max"}}, "auto", {"reasoning_effort": "xhigh"}),
    ],
)
def test_thinking_is_handed_to_the_template(
    stage: Stage, fields: Any, thinking: str, options: Any
) -> None:
    message(stage, **fields)
    assert (stage.prompt.thinking, stage.prompt.template_options) == (thinking, options)


def test_sampling_and_form_are_handed_on(stage: Stage) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    message(stage, temperature=0, top_p=0.5, top_k=7, output_config={"format": form})
    asked = stage.last
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0, 0.5, 7)
    assert asked.max_tokens == 50
    assert asked.grammar is not None and asked.grammar.kind == "json_schema"


def test_a_length_of_zero_only_fills_the_cache(stage: Stage) -> None:
    word = stage.plays("warm", Finished(0, "length"))
    reply = message(stage, word, max_tokens=0).json
    assert stage.last.max_tokens == 0
    assert reply["content"] == [{"type": "text", "text": ""}]
    assert reply["stop_reason"] == "max_tokens"


def test_a_seed_is_handed_on(stage: Stage) -> None:
    message(stage, stage.plays("seeded", Text(0, "x"), Finished(0, "stop")), seed=7)
    assert stage.engine.requests[-1].sampling.seed == 7


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "//v1//messages", "/messages/"])
def test_versions_betas_and_spellings_change_nothing(stage: Stage, path: str) -> None:
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "x-1,y-2"}
    body = {"max_tokens": 5, "messages": USER, "metadata": {"user_id": "u"}, "betas": ["z"]}
    assert ask(stage, path, body, headers=headers).json["content"][0]["text"] == "Hello."


HEADER = "x-anthropic-billing-header: cc_version=2.1.%d; cc_entrypoint=cli; cch=%05x;"


@pytest.mark.parametrize("blocks", [True, False])
def test_the_line_that_changes_with_every_request_is_left_out(stage: Stage, blocks: bool) -> None:
    header = HEADER % (7, 0xABC)
    text = {"type": "text"}
    system: Any = [{**text, "text": header}, {**text, "text": "You help."}]
    message(stage, system=system if blocks else f"{header}\nYou help.")
    assert stage.prompt.messages[0] == Message("system", "You help.")
    message(stage, system=f"You help. {header}")
    assert header in stage.prompt.messages[0].content
