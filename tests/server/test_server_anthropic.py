"""Anthropic's Messages API over a real socket: what it takes, what it answers byte by byte, what it refuses."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from localchat.engine.events import Finished, Reasoning, Text, ToolCall
from localchat.engine.local import EngineOptions, LocalEngine
from localchat.engine.request import CalledTool, Message, Messages
from localchat.engine.scripted import Answer
from localchat.errors import (
    ContextExceeded,
    EngineBusy,
    EngineDied,
    LocalchatError,
    ModelInvalid,
    TemplateError,
)
from localchat.server.config import Limits, ServerConfig
from tests.server.serving import Reply, Stage, Wire, ask, running, serving, settled

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def send(stage: Stage, content: Any = "hi", *, path: str = "/v1/messages", **fields: Any) -> Reply:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return ask(stage, path, {"model": "m", "max_tokens": 50, "messages": messages, **fields})


def prompt(stage: Stage) -> Messages:
    asked = stage.last.prompt
    assert isinstance(asked, Messages)
    return asked


# ---------------------------------------------------------------------------- answers


def test_the_bytes_of_a_whole_stream(stage: Stage) -> None:
    reply = send(stage, stream=True)
    size = len(repr(stage.last.prompt))
    id_ = reply.named_events[0][1]["message"]["id"]
    assert re.fullmatch("msg_[0-9a-f]{24}", id_)
    usage = (
        f'{{"input_tokens":{size},"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens":%d}'
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
    events = send(stage, word, stream=True, tools=[TOOL]).named_events
    assert [event.get("index") for _, event in events[1:-2]] == [
        *([0] * 5),
        *([1] * 3),
        *([2] * 4),
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
        {"type": "input_json_delta", "partial_json": '{"city":'},
        {"type": "input_json_delta", "partial_json": '"Rome"}'},
        {"type": "input_json_delta", "partial_json": "{}"},
        {"type": "text_delta", "text": "Done."},
    ]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_whole_answer_is_one_message(stage: Stage) -> None:
    word = stage.plays(
        "whole",
        Reasoning(0, "hm"),
        Text(0, "So."),
        ToolCall(0, 0, id="call_a", name="look", arguments='{"city":"Rome"}'),
        Finished(0, "stop"),
    )
    reply = send(stage, word, tools=[TOOL])
    message = reply.json
    assert re.fullmatch("msg_[0-9a-f]{24}", message.pop("id"))
    assert message == {
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
        },
    }
    assert b": " not in reply.body


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished(0, "stop"), "end_turn", None),
        (Finished(0, "stop", "###"), "stop_sequence", "###"),
        (Finished(0, "length"), "max_tokens", None),
    ],
)
def test_an_answer_says_why_it_ended(
    stage: Stage, finished: Finished, reason: str, sequence: str | None
) -> None:
    word = stage.plays("ends", Text(0, "a"), finished)
    whole = send(stage, word, stop_sequences=["###"]).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert stage.last.stop == ("###",)
    delta = send(stage, word, stream=True).named_events[-2][1]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_in_circles_ends_as_one_that_is_too_long(stage: Stage) -> None:
    stage.scripts["loop"] = Answer(("the same again. ",) * 1000)
    assert send(stage, "loop").json["stop_reason"] == "max_tokens"


def test_a_call_that_was_cut_off_has_no_input(stage: Stage) -> None:
    word = stage.plays("cut", ToolCall(0, 0, name="look", arguments='{"ci'), Finished(0, "length"))
    whole = send(stage, word, tools=[TOOL]).json
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")


def test_an_empty_answer_has_one_empty_text(stage: Stage) -> None:
    word = stage.plays("nothing", Finished(0, "stop"))
    assert send(stage, word).json["content"] == [{"type": "text", "text": ""}]
    names = [name for name, _ in send(stage, word, stream=True).named_events]
    assert names[1:3] == ["content_block_start", "content_block_stop"]


def test_silence_is_broken_by_comments_and_by_pings() -> None:
    with serving(ServerConfig(heartbeat_s=0.05, event_s=0.12)) as stage:
        word = stage.plays("slow", Text(0, "a"), Finished(0, "stop"), gap_s=0.4)
        reply = send(stage, word, stream=True)
    beats = [chunk for chunk in reply.chunks if chunk.startswith((b":", b"event: ping"))]
    assert set(beats) == {b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'}
    assert reply.chunks[0].startswith(b"event: message_start\n")


def test_a_failure_in_the_middle_is_an_error_event_and_nothing_after(stage: Stage) -> None:
    stage.scripts["dies"] = Answer(("half",), error=EngineDied("log: /secret", signal="SIGKILL"))
    reply = send(stage, "dies", stream=True)
    *_, (name, error) = reply.named_events
    assert name == "error" and error["error"]["type"] == "overloaded_error"
    assert error["request_id"] == reply.headers["request-id"]
    assert b"message_stop" not in reply.body and b"/secret" not in reply.body


def test_a_client_that_leaves_cancels_its_request(stage: Stage) -> None:
    stage.scripts["endless"] = Answer(("word ",) * 100_000, gap_s=0.01)
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
    assert send(stage, messages=messages, system=system, tools=[TOOL]).status == 200
    calls = (CalledTool("look", '{"city":"Rome"}', "t1"), CalledTool("look", "{}", "t2"))
    assert prompt(stage).messages == (
        Message("system", "Be\nbrief."),
        Message("user", "a"),
        Message("assistant", "b", "hm", calls),
        Message("tool", "sunny", tool_call_id="t1", name="look"),
        Message("tool", "Error: no city", tool_call_id="t2", name="look"),
        Message("user", "c\nD\nd"),
    )
    (tool,) = prompt(stage).tools
    assert tool["function"] == {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object"},
    }


def test_an_answer_that_was_begun_is_gone_on_with(stage: Stage) -> None:
    send(stage, messages=[*USER, {"role": "assistant", "content": "The"}])
    assert prompt(stage).continue_last and prompt(stage).messages[-1].content == "The"


@pytest.mark.parametrize(
    ("choice", "meant", "several"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, "look", True),
        ({"type": "none"}, "none", True),
        (None, "auto", True),
    ],
)
def test_a_tool_can_be_asked_for(stage: Stage, choice: Any, meant: str, several: bool) -> None:
    send(stage, tools=[TOOL], tool_choice=choice)
    assert (prompt(stage).tool_choice, prompt(stage).parallel_tool_calls) == (meant, several)


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
    send(stage, **fields)
    assert (prompt(stage).thinking, prompt(stage).template_options) == (thinking, options)


def test_sampling_and_form_are_handed_on(stage: Stage) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    send(stage, temperature=0, top_p=0.5, top_k=7, output_config={"format": form})
    asked = stage.last
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0, 0.5, 7)
    assert asked.max_tokens == 50
    assert asked.grammar is not None and asked.grammar.kind == "json_schema"


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
    send(stage, system=system if blocks else f"{header}\nYou help.")
    assert prompt(stage).messages[0] == Message("system", "You help.")
    send(stage, system=f"You help. {header}")
    assert header in prompt(stage).messages[0].content


# ---------------------------------------------------------------------------- over a real loop


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    model = tmp_path_factory.mktemp("model") / "hashed.script"
    model.write_text(json.dumps({"reply": None}))
    options = EngineOptions(
        model, backend="localchat.loop.scripted:ScriptedBackend", context_tokens=4096
    )
    made = LocalEngine(options, say=lambda text: None)
    yield made
    made.close()


def test_the_second_request_of_claude_code_is_served_from_the_cache(engine: LocalEngine) -> None:
    system = "You are a programmer who answers in few words. " * 20
    with running(engine) as (port, _):
        usages = []
        for turn in range(2):
            header = {"type": "text", "text": HEADER % (turn, 7919 * turn)}
            body = {
                "max_tokens": 4,
                "system": [header, {"type": "text", "text": system}],
                "messages": USER,
                "stream": turn == 1,
            }
            with Wire(port) as wire:
                wire.ask("/v1/messages", body)
                reply = wire.reply()
            usages.append(reply.named_events[-2][1]["usage"] if turn else reply.json["usage"])
            start = reply.named_events[0][1]["message"]["usage"] if turn else {}
    first, second = usages
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > len(system)
    whole = second["input_tokens"] + second["cache_read_input_tokens"]
    assert first["input_tokens"] == whole == start["input_tokens"]
    assert 0 < second["input_tokens"] < 32


def test_counted_tokens_are_those_that_an_answer_says(engine: LocalEngine) -> None:
    asked = {
        "system": "Be brief.",
        "messages": [*USER, {"role": "assistant", "content": "é"}, *USER],
    }
    with running(engine) as (port, _), Wire(port) as wire:
        wire.ask("/v1/messages/count_tokens", {**asked, "model": "m"})
        counted = wire.reply().json
        wire.ask("/v1/messages", {**asked, "max_tokens": 1})
        usage = wire.reply().json["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know(
    engine: LocalEngine,
) -> None:
    with running(engine) as (port, _), Wire(port) as wire:
        wire.ask(
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 2000}]},
        )
        reply = wire.reply()
    assert (reply.status, reply.anthropic_error["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(
        r"prompt is too long: 1\d{4} tokens > 4096 maximum", reply.anthropic_error["message"]
    )


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "judge"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "reads text only",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content.0.text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "0.name"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "effort"),
        ({"temperature": 99}, "temperature"),
        ({"stop_sequences": ["x"] * 65}, "stop"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_refused_by_its_field(stage: Stage, fields: Any, said: str) -> None:
    before = len(stage.engine.requests)
    reply = send(stage, **{"messages": USER, **fields})
    assert (reply.status, reply.anthropic_error["type"]) == (400, "invalid_request_error")
    assert said in reply.anthropic_error["message"]
    assert len(stage.engine.requests) == before


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextExceeded("x", prompt_tokens=9, context_tokens=4), 400, "invalid_request_error"),
        (TemplateError("roles must alternate"), 400, "invalid_request_error"),
        (EngineBusy("full", retry_after_s=3), 503, "overloaded_error"),
        (ModelInvalid("bad"), 500, "api_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_engine_refuses_is_a_status(
    stage: Stage, error: LocalchatError, status: int, kind: str
) -> None:
    for stream in (False, True):
        stage.engine.refusals["no"] = [error]
        reply = send(stage, "no", stream=stream)
        assert (reply.status, reply.anthropic_error["type"]) == (status, kind)
    if isinstance(error, ContextExceeded):
        assert reply.anthropic_error["message"] == "prompt is too long: 9 tokens > 4 maximum"


def test_whatever_refuses_speaks_this_protocol() -> None:
    config = ServerConfig(api_keys=("sk-01234567",), limits=Limits(body_bytes=1000))
    with serving(config) as stage:
        body = {"max_tokens": 5, "messages": USER}
        key = {"x-api-key": "sk-01234567"}
        assert ask(stage, "/v1/messages", body, headers=key).status == 200
        bearer = {"authorization": "Bearer sk-01234567"}
        assert ask(stage, "/v1/messages", body, headers=bearer).status == 200
        text = {**key, "content-type": "text/plain"}
        large = {**body, "system": "x" * 1000}
        for reply, status, kind in (
            (ask(stage, "/v1/messages", body), 401, "authentication_error"),
            (ask(stage, "/v1/messages", body, host="evil.example"), 403, "permission_error"),
            (ask(stage, "/v1/messages/batches", body, headers=key), 404, "not_found_error"),
            (ask(stage, "/v1/messages", headers=key), 405, "invalid_request_error"),
            (ask(stage, "/v1/messages", b"{", headers=key), 400, "invalid_request_error"),
            (ask(stage, "/v1/messages", body, headers=text), 415, "invalid_request_error"),
            (ask(stage, "/v1/messages", large, headers=key), 413, "request_too_large"),
        ):
            assert (reply.status, reply.anthropic_error["type"]) == (status, kind)


def test_tokens_are_counted_or_refused(stage: Stage) -> None:
    path = "/v1/messages/count_tokens"
    assert ask(stage, path, {"messages": USER}).json == {"input_tokens": len("user: hi\n")}
    changing = HEADER % (1, 2)
    assert ask(stage, path, {"messages": USER, "system": changing}).json == {"input_tokens": 9}
    assert ask(stage, path, {"messages": []}).anthropic_error["type"] == "invalid_request_error"


def test_these_requests_are_counted_in_the_figures(stage: Stage) -> None:
    def finished(page: str) -> float:
        found = re.search(r'^localchat_requests_total\{finish="stop"\} (\S+)', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = finished(ask(stage, "/metrics").body.decode())
    send(stage)
    send(stage, max_tokens=0)
    page = ask(stage, "/metrics").body.decode()
    assert finished(page) == before + 1
    assert 'localchat_errors_total{code="unsupported_value",status="400"}' in page
