"""Odd ways to write a legal request, as clients in the field do: they mean what they mean elsewhere."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from localchat.engine.events import Finished, Prefill, Text
from localchat.engine.request import Grammar, Sampling, TokenIds
from localchat.engine.request import TextPrompt as Prompt
from localchat.errors import ContextExceeded
from tests.support.http_server import NAME, Reply, Stage, ask, chat, message, respond

LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
WAIT = {"name": "wait", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (LOOK, WAIT)]


# ---------------------------------------------------------------------------- numbers


def test_a_whole_number_may_be_written_with_a_point_or_an_exponent(stage: Stage) -> None:
    body = (
        b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":5.0,"seed":1e3,"top_k":4E1,'
        b'"logit_bias":{"5":-1.0}}'
    )
    assert ask(stage, "/v1/chat/completions", body).status == 200
    assert stage.last.max_tokens == 5
    assert stage.last.sampling == Sampling(seed=1000, top_k=40, logit_bias={5: -1.0})
    assert ask(stage, "/v1/completions", b'{"prompt":"a","seed":1e18}').status == 200
    assert stage.last.sampling.seed == 10**18
    assert ask(stage, "/v1/completions", b'{"prompt":[1.0,2]}').status == 200
    assert stage.last.prompt == TokenIds((1, 2))


@pytest.mark.parametrize("number", ["5.5", "1e300", "-0.5"])
def test_what_is_no_whole_number_is_refused(stage: Stage, number: str) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":%b}' % number.encode()
    error = ask(stage, "/v1/chat/completions", body).error
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_type")
    assert "got float" in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_nothing_is_refused_by_the_name_it_was_given(stage: Stage, name: str) -> None:
    fields: Any = {name: 0}
    reply = chat(stage, **fields)
    assert (reply.status, reply.error["param"]) == (400, name)
    assert name in reply.error["message"]


def test_no_likeliest_tokens_may_be_asked_for_without_log_probabilities(stage: Stage) -> None:
    assert chat(stage, logprobs=False, top_logprobs=0).status == 200
    assert stage.last.logprobs is None


# ---------------------------------------------------------------------------- the choice of a tool


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("any", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "function", "name": "wait"}, "wait"),
    ],
)
def test_a_choice_in_another_apis_words_is_understood(stage: Stage, choice: Any, sent: str) -> None:
    assert chat(stage, tools=TOOLS, tool_choice=choice).status == 200
    assert stage.prompt.tool_choice == sent
    assert len(stage.prompt.tools) == 2


@pytest.mark.parametrize(("mode", "sent"), [("auto", "auto"), ("required", "required")])
def test_some_of_the_tools_may_be_allowed(stage: Stage, mode: str, sent: str) -> None:
    allowed = {"mode": mode, "tools": [TOOLS[1]]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert chat(stage, tools=TOOLS, tool_choice=choice).status == 200
    assert [tool["function"]["name"] for tool in stage.prompt.tools] == ["wait"]
    assert stage.prompt.tool_choice == sent


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "x"}}]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [], "mode": "required"}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"type": "allowed_tools"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "web_search"}, "tool_choice"),
        ("look", "tool_choice"),
    ],
)
def test_a_choice_that_is_none_is_refused(stage: Stage, choice: Any, param: str) -> None:
    reply = chat(stage, tools=TOOLS, tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_refusal_of_a_tool_without_function_names_the_field(stage: Stage) -> None:
    error = chat(stage, tools=[{"type": "function", "name": "look"}]).error
    assert error["param"] == "tools[0].function"
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "fields", [{"functions": [LOOK]}, {"messages": [{"role": "user", "function_call": LOOK}]}]
)
def test_functions_before_tools_are_refused(stage: Stage, fields: dict[str, Any]) -> None:
    reply = chat(stage, **fields)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_choice_among_no_functions_has_no_effect(stage: Stage, choice: str) -> None:
    assert chat(stage, functions=[], function_call=choice).status == 200


# ---------------------------------------------------------------------------- other protocols


@pytest.mark.parametrize("place", ["output_format", "output_config"])
def test_anthropics_form_of_the_answer_binds_it_from_either_place(stage: Stage, place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    given = form if place == "output_format" else {"format": form}
    assert message(stage, **{place: given}).status == 200
    assert stage.last.grammar == Grammar("json_schema", '{"type":"object"}', "output_config.format")


def test_a_form_that_the_engine_refuses_is_named_as_in_the_clients_protocol(stage: Stage) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert respond(stage, text={"format": form}).status == 200
    assert stage.last.grammar == Grammar("json_schema", '{"type":"object"}', "text.format")


@pytest.mark.parametrize("send", [respond, message])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (
            {"structured_outputs": {"regex": "a+"}},
            Grammar("regex", "a+", "structured_outputs.regex"),
        ),
        ({"grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"', "grammar")),
        ({"json_schema": {"a": 1}}, Grammar("json_schema", '{"a":1}', "json_schema")),
    ],
    ids=str,
)
def test_a_form_in_another_servers_field_binds_in_every_protocol(
    stage: Stage, send: Callable[..., Reply], fields: dict[str, Any], grammar: Grammar
) -> None:
    assert send(stage, **fields).status == 200
    assert stage.last.grammar == grammar


@pytest.mark.parametrize("send", [respond, message])
def test_openais_response_format_binds_in_every_protocol(
    stage: Stage, send: Callable[..., Reply]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}
    assert send(stage, response_format=form).status == 200
    assert stage.last.grammar is not None
    assert stage.last.grammar.source == '{"a":1}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
def test_the_progress_of_the_prompt_is_sent_on_request(stage: Stage, path: str) -> None:
    word = stage.plays("far", Prefill(4, 1, 9), Text(0, "a"), Finished(0, "stop"))
    said = {"messages": [{"role": "user", "content": word}], "prompt": word, "stream": True}
    events = ask(stage, path, {**said, "return_progress": True}).chunks_json
    sent = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert {**sent[1], "time_ms": 0} == {"total": 9, "cache": 1, "processed": 4, "time_ms": 0}
    assert sent[0]["processed"] == sent[0]["total"]  # what the scripted engine always sends
    plain = ask(stage, path, said).chunks_json
    assert not any("prompt_progress" in event for event in plain)
    whole = ask(stage, path, {**said, "return_progress": True, "stream": False}).json
    assert "prompt_progress" not in whole


@pytest.mark.parametrize("stream", [True, False])
def test_keywords_that_the_grammar_does_not_hold_are_in_a_header(
    stage: Stage, stream: bool
) -> None:
    word = stage.plays("relax", Text(0, "[]"), Finished(0, "stop"), relaxed=("uniqueItems", "not"))
    name = "x-localchat-schema-relaxed"
    assert chat(stage, word, stream=stream).headers[name] == "uniqueItems, not"
    assert name not in chat(stage, "hi", stream=stream).headers


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "document",
                "title": "T",
                "source": {"type": "content", "content": [{"type": "text", "text": "Inside."}]},
            },
            "T\nInside.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": "Inside."}},
            "Inside.",
        ),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "https://x.example",
                "content": [{"type": "text", "text": "Found."}],
            },
            "T\nhttps://x.example\nFound.",
        ),
    ],
)
def test_what_holds_text_is_read(stage: Stage, block: Any, text: str) -> None:
    assert message(stage, [block]).status == 200
    assert stage.prompt.messages[-1].content == text


@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "url": "https://x.example"},
        {"type": "base64", "data": "AA=="},
        {"type": "content", "content": [{"type": "image", "source": {"type": "url"}}]},
        "https://x.example",
    ],
)
def test_a_document_that_is_no_text_is_refused(stage: Stage, source: Any) -> None:
    reply = message(stage, [{"type": "document", "source": source}])
    assert (reply.status, reply.anthropic_error["type"]) == (400, "invalid_request_error")
    assert re.search(
        "is not a data URL|does not fetch URLs|which cannot be read|cannot be read here",
        reply.anthropic_error["message"],
    )


def test_anthropics_clients_find_the_models_in_their_own_words(stage: Stage) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = ask(stage, "/v1/models", headers=headers).json
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, NAME, NAME)
    for sent in (listed["data"][0], ask(stage, f"/v1/models/{NAME}", headers=headers).json):
        assert (sent["type"], sent["display_name"]) == ("model", NAME)
        assert sent["created_at"] == "2023-11-14T22:13:20Z"
    assert "has_more" not in ask(stage, "/v1/models").json


def test_the_greatest_effort_has_two_names(stage: Stage) -> None:
    assert chat(stage, reasoning_effort="max").status == 200
    assert stage.prompt.template_options == {"reasoning_effort": "xhigh"}


def test_tokens_have_their_pieces_on_request(stage: Stage) -> None:
    plain = ask(stage, "/tokenize", {"content": "aba"}).json["tokens"]
    sent = ask(stage, "/tokenize", {"content": "aba", "with_pieces": True}).json["tokens"]
    assert [one["id"] for one in sent] == plain
    assert "".join(one["piece"] for one in sent) == "aba"


def test_llamacpps_prompt_may_stand_in_a_list(stage: Stage) -> None:
    assert ask(stage, "/completion", {"prompt": ["Once"]}).status == 200
    assert stage.last.prompt == Prompt("Once", special=True)
    for prompt in (["a", "b"], [1, "a"]):
        error = ask(stage, "/completion", {"prompt": prompt}).error
        assert (error["param"], error["code"]) == ("prompt", "invalid_type")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long"}]}, "messages"),
        ("/v1/completions", {"prompt": "long"}, "prompt"),
        ("/completion", {"prompt": "long"}, "prompt"),
        ("/v1/responses", {"input": "long"}, "input"),
    ],
)
def test_what_is_too_long_is_called_what_it_was_called(
    stage: Stage, path: str, fields: Any, param: str
) -> None:
    error = ContextExceeded("too long", prompt_tokens=9, context_tokens=8)
    stage.engine.refusals["long"] = [error]
    sent = ask(stage, path, fields).error
    assert (sent["code"], sent["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/responses/resp_1", 404), ("/v1/chat/completions", 405)]
)
def test_a_route_that_is_not_there_is_named_as_it_was_asked_for(
    stage: Stage, path: str, status: int
) -> None:
    reply = ask(stage, path)
    assert reply.status == status
    assert path in reply.error["message"]


# ---------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("fields", "thinking", "options"),
    [
        ({"enable_thinking": False}, "off", {}),
        ({"thinking": {"type": "disabled"}}, "off", {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "on", {}),
        ({"thinking": True}, "on", {}),
        ({"reasoning": {"enabled": False}}, "off", {}),
        ({"reasoning": {"effort": "high"}}, "on", {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, "off", {}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "on", {"reasoning_effort": "high"}),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "on", {}),
        ({"reasoning_effort": ""}, "auto", {}),
        ({"thinking": "maybe", "reasoning": [1], "enable_thinking": 7}, "auto", {}),
        ({"thinking": None, "reasoning": {"effort": "huge"}}, "auto", {}),
    ],
)  # fmt: skip
def test_thinking_is_switched_in_every_servers_words(
    stage: Stage, fields: Any, thinking: str, options: Any
) -> None:
    assert chat(stage, **fields).status == 200
    assert (stage.prompt.thinking, stage.prompt.template_options) == (thinking, options)


def test_nothing_of_a_stream_comes_before_its_first_token(stage: Stage) -> None:
    word = stage.plays("late", Text(0, "Hel"), Text(0, "lo"), Finished(0, "stop"))
    reply = chat(stage, word, stream=True)
    assert b'"role":"assistant"' in reply.chunks[0] and b'"content":"Hel"' in reply.chunks[0]
    deltas = [chunk["choices"][0]["delta"] for chunk in reply.chunks_json]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]


def test_choices_of_a_stream_have_their_roles_even_without_a_token(stage: Stage) -> None:
    word = stage.plays("mute", Text(1, "Yes."), Finished(1, "stop"), Finished(0, "stop"))
    choices = [one["choices"][0] for one in chat(stage, word, stream=True, n=2).chunks_json]
    first = {index: next(one for one in choices if one["index"] == index) for index in (0, 1)}
    assert [one["delta"]["role"] for one in first.values()] == ["assistant"] * 2
