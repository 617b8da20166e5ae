"""Requests as they reach the engine: API fields translated, conversations normalized."""

from typing import Any

import pytest

from localchat.engine.events import (
    Finished,
    PromptLogprobs,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
)
from localchat.engine.request import (
    CalledTool,
    GenerateRequest,
    Grammar,
    Infill,
    Message,
    Messages,
    Sampling,
    TokenIds,
)
from localchat.engine.request import TextPrompt as Prompt
from localchat.errors import TemplateError
from localchat.server.chat.options import CLIENTS
from localchat.server.config import ServerLimits
from tests.support.http_server import Stage, ask, chat, message, respond
from tests.support.scripted_engine import ScriptedAnswer

LONGEST = ServerLimits().answer_tokens
TOOL = {"type": "function", "function": {"name": "look"}}


def conversation(stage: Stage) -> Messages:
    prompt = stage.last.prompt
    assert isinstance(prompt, Messages)
    return prompt


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {}),
        (
            {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "typical_p": 0.9},
            {"sampling": Sampling(temperature=0, top_p=0.5, top_k=0, min_p=0.1, typical_p=0.9)},
        ),
        (
            {"frequency_penalty": 1, "presence_penalty": -1, "repeat_penalty": 1.1},
            {
                "sampling": Sampling(
                    frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.1
                )
            },
        ),
        ({"repetition_penalty": 1.2}, {"sampling": Sampling(repetition_penalty=1.2)}),
        ({"logit_bias": {"5": -100}}, {"sampling": Sampling(logit_bias={5: -100})}),
        (
            {"logit_bias": {"Hello": -5, "7": False}},
            {"sampling": Sampling(logit_bias={7: -1e9}, text_bias={"Hello": -5})},
        ),
        (
            {"logit_bias": [[5, 1.5], ["a b", -2], [6, False]]},
            {"sampling": Sampling(logit_bias={5: 1.5, 6: -1e9}, text_bias={"a b": -2})},
        ),
        ({"seed": 7}, {"sampling": Sampling(seed=7)}),
        ({"seed": -1}, {"sampling": Sampling(seed=(1 << 64) - 1)}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": 10**9}, {}),
        ({"max_tokens": None, "stop": None, "tools": None, "tool_choice": None, "n": None}, {}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
        ({"n": 3}, {"n": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": False}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"grammar": Grammar("json_object", field="response_format")},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"grammar": Grammar("json_schema", '{"a":1}', "response_format")},
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            {"grammar": Grammar("json_schema", '{"a":1}', "response_format")},
        ),
        ({"grammar": "start: /a/"}, {"grammar": Grammar("lark", "start: /a/", "grammar")}),
        ({"regex": "a+"}, {"grammar": Grammar("regex", "a+", "regex")}),
        *(
            ({"json_schema": value}, {"grammar": Grammar("json_schema", '{"a":1}', "json_schema")})
            for value in ({"a": 1}, '{"a": 1}', {"name": "x", "schema": {"a": 1}})
        ),
        (
            {"structured_outputs": {"json": {"a": 1}, "regex": None, "disable_fallback": True}},
            {"grammar": Grammar("json_schema", '{"a":1}', "structured_outputs.json")},
        ),
        (
            {"structured_outputs": {"choice": ["yes", 'n"o']}},
            {"grammar": Grammar("lark", 'start: "yes" | "n\\"o"', "structured_outputs.choice")},
        ),
        (
            {"structured_outputs": {"grammar": "x"}},
            {"grammar": Grammar("lark", "x", "structured_outputs.grammar")},
        ),
        (
            {"structured_outputs": {"json_object": True}},
            {"grammar": Grammar("json_object", field="structured_outputs.json_object")},
        ),
        ({"structured_outputs": {"json_object": False}, "guided_json": None}, {}),
        ({"cache_salt": "x"}, {"salt": "x"}),
        ({"speculation": False}, {"speculation": False}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"vendor": {"deep": [1]}, "id_slot": 3, "cache_prompt": True, "store": True}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_field_reaches_the_engine(stage: Stage, fields: Any, asked: dict[str, Any]) -> None:
    assert chat(stage, "x", **fields).status == 200
    assert stage.last.user == ""
    prompt = Messages((Message("user", "x"),))
    limits = ("max_tokens", "max_completion_tokens", "n_predict")
    limited = any(fields.get(name) is not None for name in limits)
    wanted = {"max_tokens": LONGEST, "owner": CLIENTS, "default_limit": not limited, **asked}
    assert stage.last == GenerateRequest(prompt, **wanted)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 5}, 5),
        ({"n_predict": 7}, 7),
        ({"max_tokens": -1}, LONGEST),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, 0),
        ({"suffix": "x"}, 16),
    ],
)
def test_a_completion_without_a_limit_has_openais(stage: Stage, fields: Any, limit: int) -> None:
    assert ask(stage, "/v1/completions", {"prompt": "a", **fields}).status == 200
    assert stage.last.max_tokens == limit
    assert ask(stage, "/completion", {"prompt": "a"}).status == 200
    assert stage.last.max_tokens == LONGEST


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"reasoning": {"max_tokens": 8}}, 8),
        ({"reasoning": {"effort": "low"}, "thinking": True}, None),
        *(
            ({name: 9}, 9)
            for name in ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget")
        ),
        ({"chat_template_kwargs": {"thinking_budget": 10}}, 10),
        ({"thinking_budget": 0}, 0),
        ({"thinking_budget": -1}, None),
    ],
    ids=str,
)
def test_a_thinking_budget_has_many_names(stage: Stage, fields: Any, budget: int | None) -> None:
    assert chat(stage, "x", **fields).status == 200
    assert conversation(stage).think_budget == budget


def test_a_thinking_budget_of_the_other_protocols(stage: Stage) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert message(stage, thinking=thinking, max_tokens=2048).status == 200
    assert (conversation(stage).think_budget, conversation(stage).thinking) == (1024, "on")
    assert respond(stage, reasoning={"max_tokens": 5}).status == 200
    assert conversation(stage).think_budget == 5


def test_a_conversation_is_carried_whole(stage: Stage) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    reply_logits = {"function": {"name": "look", "arguments": {"b": 2}}}
    reply = chat(
        stage,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, "b"]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
            {"role": "assistant", "content": [], "tool_calls": [reply_logits], "reasoning": "so"},
            {"role": "tool", "content": "7", "name": "look"},
            {"role": "user", "content": "And?", "name": "ann"},
        ],
    )
    assert reply.status == 200
    assert conversation(stage).messages == (
        Message("system", "Be brief."),
        Message("user", "a\nb"),
        Message("assistant", reasoning="hm", tool_calls=(CalledTool("look", '{"a":1}', "c1"),)),
        Message("tool", "42", tool_call_id="c1", name="look"),
        Message("assistant", reasoning="so", tool_calls=(CalledTool("look", '{"b":2}'),)),
        Message("tool", "7", name="look"),
        Message("user", "And?", name="ann"),
    )


def test_what_an_answer_refused_stays_its_text(stage: Stage) -> None:
    part = {"type": "refusal", "refusal": "Never."}
    refusals: list[dict[str, Any]] = [{"refusal": "No."}, {"content": [part]}]
    user = {"role": "user", "content": "x"}
    given = [one for each in refusals for one in (user, {"role": "assistant", **each})]
    assert chat(stage, messages=[*given, user]).status == 200
    assert [message.content for message in conversation(stage).messages] == [
        *("x", "No.", "x", "Never.", "x")
    ]


def test_neighbours_of_one_role_are_joined(stage: Stage) -> None:
    roles = ["system", "developer", "user", "user", "assistant", "assistant", "user"]
    chat(stage, messages=[{"role": role, "content": str(at)} for at, role in enumerate(roles)])
    assert [(m.role, m.content) for m in conversation(stage).messages] == [
        ("system", "0\n\n1"),
        ("user", "2\n\n3"),
        ("assistant", "4\n\n5"),
        ("user", "6"),
    ]


def test_parts_of_a_user_are_lines_and_those_of_an_assistant_one_text(stage: Stage) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    chat(stage, messages=messages)
    assert [each.content for each in stage.prompt.messages] == ["Wh\nill", "Whill"]
    outputs = [{"type": "output_text", "text": each["text"]} for each in parts]
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": outputs}]
    assert ask(stage, "/v1/responses", {"input": items}).status == 200
    assert stage.prompt.messages[-1].content == "Whill"


def test_results_of_tools_and_calls_are_never_joined(stage: Stage) -> None:
    calls = [{"id": id_, "function": {"name": id_}} for id_ in "ab"]
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls),
        *({"role": "tool", "tool_call_id": id_, "content": id_} for id_ in "ab"),
        {"role": "user", "content": "y", "name": "ann"},
        {"role": "user", "content": "z"},
    ]
    chat(stage, messages=given)
    sent = conversation(stage).messages
    assert [m.role for m in sent] == [str(m["role"]) for m in given]
    assert [m.content for m in sent if m.role == "tool"] == ["a", "b"]


def test_the_last_words_of_the_assistant_are_gone_on_from(stage: Stage) -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    chat(stage, messages=begun)
    assert conversation(stage).continue_last
    refusal = TemplateError("cannot go on", reason="input")
    stage.engine.refusals["It is"] = [refusal, refusal]
    assert chat(stage, messages=begun).status == 200
    assert not conversation(stage).continue_last
    stage.engine.refusals["It is"] = [refusal]
    chat(stage, messages=begun)
    assert conversation(stage).continue_last and conversation(stage).thinking == "off"


@pytest.mark.parametrize(
    ("fields", "is_continued"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": False}, True),
        ({"add_generation_prompt": True}, True),
        ({"continue_final_message": False}, False),
    ],
)
def test_fields_of_vllm_and_llamacpp_continue_the_last_message(
    stage: Stage, fields: dict[str, Any], is_continued: bool
) -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    reply = chat(stage, messages=begun, **fields)
    assert reply.status == 200 and "x-localchat-ignored" not in reply.headers
    assert conversation(stage).continue_last is is_continued


@pytest.mark.parametrize(
    ("role", "fields"),
    [("user", {}), ("assistant", {"continue_final_message": False})],
)
def test_an_answer_without_a_beginning_is_refused(
    stage: Stage, role: str, fields: dict[str, Any]
) -> None:
    begun = [{"role": "user", "content": "a"}, {"role": role, "content": "It is"}]
    error = chat(stage, messages=begun, add_generation_prompt=False, **fields).error
    assert (error["param"], error["code"]) == ("add_generation_prompt", "unsupported_parameter")


@pytest.mark.parametrize("content", ["", None, []])
def test_an_empty_last_answer_is_none(stage: Stage, content: Any) -> None:
    chat(
        stage,
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": content}],
    )
    assert conversation(stage).messages == (Message("user", "a"),)
    assert not conversation(stage).continue_last


@pytest.mark.parametrize(
    ("fields", "thinking", "options"),
    [
        ({}, "auto", {}),
        ({"reasoning_effort": "none"}, "off", {}),
        ({"reasoning_effort": "minimal"}, "off", {"reasoning_effort": "low"}),
        ({"reasoning_effort": "high"}, "on", {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off", {}),
        ({"chat_template_kwargs": {"thinking": True}}, "on", {}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
            "off",
            {"reasoning_effort": "high"},
        ),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, "auto", {}),
    ],
)
def test_thinking_switches_are_understood(
    stage: Stage, fields: Any, thinking: str, options: Any
) -> None:
    chat(stage, **fields)
    assert conversation(stage).thinking == thinking
    assert conversation(stage).template_options == options


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "look"}}, "look"),
    ],
)
def test_tools_and_the_choice_among_them(stage: Stage, choice: Any, sent: str) -> None:
    chat(stage, tools=[TOOL], tool_choice=choice)
    empty = {"type": "object", "properties": {}}
    described = {"type": "function", "function": {"name": "look", "parameters": empty}}
    assert conversation(stage).tools == (described,)
    assert conversation(stage).tool_choice == sent


def test_one_call_is_enough_where_a_client_wants_one(stage: Stage) -> None:
    word = stage.plays(
        "calls",
        ToolCall(0, 0, name="look", arguments="{}"),
        ToolCall(0, 1, name="wait", arguments="{}"),
        Finished(0, "stop"),
    )
    whole = chat(stage, word, parallel_tool_calls=True).json["choices"][0]
    assert [c["function"]["name"] for c in whole["message"]["tool_calls"]] == ["look", "wait"]
    assert conversation(stage).parallel_tool_calls
    chat(stage, word, bind_arguments=True)
    assert conversation(stage).bind_arguments
    one = chat(stage, word, parallel_tool_calls=False).json["choices"][0]
    assert not conversation(stage).parallel_tool_calls
    assert [c["function"]["name"] for c in one["message"]["tool_calls"]] == ["look"]
    assert one["finish_reason"] == "tool_calls"


def test_a_whole_answer_has_its_form(stage: Stage) -> None:
    word = stage.plays(
        "whole",
        Reasoning(0, "hm"),
        ToolCall(0, 0, id="call_1", name="look", arguments='{"a":'),
        ToolCall(0, 0, arguments="1}"),
        Finished(0, "stop"),
    )
    whole = chat(stage, word).json
    assert list(whole) == [
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
        "timings",
    ]
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"a":1}'},
                    }
                ],
            },
            "finish_reason": "tool_calls",
            "logprobs": None,
        }
    ]


def test_an_empty_answer_has_a_text_all_the_same(stage: Stage) -> None:
    word = stage.plays("empty", Finished(0, "stop"))
    message = chat(stage, word).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}


def test_stop_string_is_reported(stage: Stage) -> None:
    word = stage.plays("stops", Text(0, "a"), Finished(0, "stop", "END"))
    assert chat(stage, word, stop="END").json["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"a": 1}', "tool_calls"), ("", "tool_calls"), ('{"a": 1', "stop"), ('{"a": "x', "stop")],
)
def test_a_call_that_a_stop_text_cut_is_none_to_run(
    stage: Stage, arguments: str, reason: str
) -> None:
    events = (
        ToolCall(0, 0, "call_1", "look", '{"b": 2}'),
        ToolCall(0, 1, "call_2", "look"),
        ToolCall(0, 1, arguments=arguments),
        Finished(0, "tool_calls", "END"),
    )
    sent = chat(stage, stage.plays("cut", *events), tools=[TOOL], stop="END").json["choices"][0]
    assert (sent["finish_reason"], sent["stop_reason"]) == (reason, "END")
    assert sent["message"]["tool_calls"][1]["function"]["arguments"] == arguments


# ---------------------------------------------------------------------------- plain completions


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("x", [Prompt("x", special=True)]),
        (["x", "y"], [Prompt("x", special=True), Prompt("y", special=True)]),
        ([1, 2], [TokenIds((1, 2))]),
        ([[1], [2, 3]], [TokenIds((1,)), TokenIds((2, 3))]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_or_several(stage: Stage, prompt: Any, asked: Any) -> None:
    before = len(stage.engine.requests)
    reply = ask(stage, "/v1/completions", {"prompt": prompt})
    assert [request.prompt for request in stage.engine.requests[before:]] == asked
    choices = reply.json["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [
        (at, "Hello.") for at in range(len(asked))
    ]


def test_choices_of_several_prompts_are_numbered_through(stage: Stage) -> None:
    stage.scripts["p"] = ScriptedAnswer(events=(Text(1, "p1"), Text(0, "p0"), *_ends(2)))
    stage.scripts["q"] = ScriptedAnswer(events=(Text(0, "q0"), Text(1, "q1"), *_ends(2)))
    for stream in (False, True):
        reply = ask(stage, "/v1/completions", {"prompt": ["p", "q"], "n": 2, "stream": stream})
        chunks = reply.chunks_json if stream else [reply.json]
        texts = ["", "", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == ["p0", "p1", "q0", "q1"]


def _ends(count: int) -> list[Finished]:
    return [Finished(choice, "stop") for choice in range(count)]


def test_an_empty_suffix_is_none(stage: Stage) -> None:
    body = {"prompt": ["a", "b"], "suffix": "", "echo": True}
    reply = ask(stage, "/v1/completions", body).json
    assert [choice["text"] for choice in reply["choices"]] == ["aHello.", "bHello."]
    assert isinstance(stage.last.prompt, Prompt)


def test_a_suffix_makes_it_a_gap_to_fill_that_goes_first(stage: Stage) -> None:
    ask(stage, "/v1/completions", {"prompt": "def f(", "suffix": "return 1"})
    assert stage.last.prompt == Infill("def f(", "return 1")
    assert stage.last.priority > 0
    ask(stage, "/v1/completions", {"prompt": ["def g("], "suffix": "return 1"})
    assert stage.last.prompt == Infill("def g(", "return 1")
    ask(stage, "/v1/completions", {"prompt": "def f("})
    assert stage.last.priority == 0


def test_logprobs_of_a_completion_are_lists_a_token_each(stage: Stage) -> None:
    one = TokenLogprob(1, b" a", -0.1, ((1, b" a", -0.1), (2, b" b", -3.0)))
    word = stage.plays("p", Text(0, " a", (one,)), Text(0, " a", (one,)), Finished(0, "stop"))
    sent = ask(stage, "/v1/completions", {"prompt": word, "logprobs": 2}).json["choices"][0]
    assert sent["logprobs"] == {
        "tokens": [" a", " a"],
        "token_logprobs": [-0.1, -0.1],
        "top_logprobs": [{" a": -0.1, " b": -3.0}] * 2,
        "text_offset": [0, 2],
    }


def test_tokens_that_share_a_character_have_its_place_in_the_text(stage: Stage) -> None:
    pieces = (b"a", "é".encode()[:1], "é".encode()[1:], b"b")
    tokens = tuple(TokenLogprob(at, piece, -0.1) for at, piece in enumerate(pieces))
    word = stage.plays("p", Text(0, "aéb", tokens), Finished(0, "stop"))
    sent = ask(stage, "/v1/completions", {"prompt": word, "logprobs": 0}).json["choices"][0]
    assert sent["logprobs"]["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_comes_with_its_logprobs(stage: Stage, stream: bool) -> None:
    one = TokenLogprob(1, b"cd", -0.5)
    word = stage.plays("abcd", PromptLogprobs((one,)), Text(0, "e", (one,)), Finished(0, "stop"))
    body = {"prompt": word, "echo": True, "logprobs": 0, "max_tokens": 1, "stream": stream}
    reply = ask(stage, "/v1/completions", body)
    assert stage.last.prompt_logprobs == 0
    if stream:
        first, second = (c["choices"][0] for c in reply.chunks_json[:2])
        assert (first["text"], second["text"]) == ("abcd", "e")
        assert first["logprobs"]["tokens"] == ["ab", "cd"]
        assert second["logprobs"]["text_offset"] == [4]
        return
    sent = reply.json["choices"][0]
    assert sent["text"] == "abcde"
    assert sent["logprobs"]["tokens"] == ["ab", "cd", "cd"]
    assert sent["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert sent["logprobs"]["text_offset"] == [0, 2, 4]


def test_the_first_token_of_an_echo_may_be_a_part_of_a_character(stage: Stage) -> None:
    others = (TokenLogprob(1, "é".encode()[1:], -0.5), TokenLogprob(2, b"a", -0.5))
    word = stage.plays(
        "éa", PromptLogprobs(others), Text(0, "e", (others[1],)), Finished(0, "stop")
    )
    sent = ask(stage, "/v1/completions", {"prompt": word, "echo": True, "logprobs": 0})
    logprobs = sent.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a", "a"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]


def test_tokens_are_echoed_as_text(stage: Stage) -> None:
    reply = ask(stage, "/v1/completions", {"prompt": [104, 105], "echo": True})
    assert reply.json["choices"][0]["text"] == "hiHello."
