"""Ollama's /api/chat, /api/generate and /api/embed: lines of JSON, whole answers, every option."""

import json
from typing import Any, ClassVar

import pytest

from localchat.engine.events import (
    Done,
    Finished,
    Reasoning,
    Speculation,
    Text,
    Timings,
    ToolCall,
    Usage,
)
from localchat.engine.request import (
    CalledTool,
    Grammar,
    Infill,
    Message,
    Messages,
    Sampling,
    TextPrompt,
)
from localchat.errors import EngineDied
from localchat.pool.entry import NEVER
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.leases import AsyncLease
from localchat.server.ollama.answers import OllamaFormatter
from localchat.server.ollama.requests import keep_alive_s
from tests.support.http_server import NAME, Reply, Stage, Wire, ask, running, serving
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.single_engine import SingleEngine

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
METRICS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}


def talk(stage: Stage, said: str = "hi", **fields: Any) -> Reply:
    messages = fields.pop("messages", [{"role": "user", "content": said}])
    return ask(stage, "/api/chat", {"model": NAME, "messages": messages, **fields})


def lines(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    *found, last = reply.body.decode().split("\n")
    assert last == ""
    return [json.loads(line) for line in found]


def test_a_stream_has_a_line_for_each_piece_and_metrics_in_the_last(stage: Stage) -> None:
    *pieces, last = lines(talk(stage))
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": text} for text in ("Hel", "lo", ".")
    ]
    for piece in pieces:
        assert set(piece) == {"model", "created_at", "message", "done"} and not piece["done"]
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", NAME)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert set(last) >= METRICS and last["eval_count"] == 3
    assert all(isinstance(last[name], int) for name in METRICS)


def test_a_whole_answer_has_thoughts_and_calls(stage: Stage) -> None:
    word = stage.plays(
        "whole",
        Reasoning(0, "hm"),
        Text(0, "So."),
        ToolCall(0, 0, id="c1", name="look", arguments='{"a":'),
        ToolCall(0, 0, arguments="1}"),
        Finished(0, "stop"),
    )
    function = {"index": 0, "name": "look", "arguments": {"a": 1}}
    call = {"id": "c1", "index": 0, "function": function}
    whole = talk(stage, word, tools=[TOOL], stream=False).json
    message = {"role": "assistant", "content": "So.", "thinking": "hm", "tool_calls": [call]}
    assert whole["message"] == message
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    streamed = [line["message"] for line in lines(talk(stage, word, tools=[TOOL]))]
    assert streamed == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]


def test_arguments_that_are_no_object_reach_the_client_inside_of_one(stage: Stage) -> None:
    call = ToolCall(0, 0, id="c1", name="look", arguments="{a: 1}")
    word = stage.plays("broken", call, Finished(0, "stop"))
    whole = talk(stage, word, tools=[TOOL], stream=False).json
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"arguments": "{a: 1}"}


def test_calls_of_one_answer_are_numbered(stage: Stage) -> None:
    word = stage.plays(
        "two",
        ToolCall(0, 0, id="c1", name="look", arguments="{}"),
        ToolCall(0, 1, id="c2", name="look", arguments="{}"),
        Finished(0, "stop"),
    )
    messages = [line["message"] for line in lines(talk(stage, word, tools=[TOOL]))]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    # LiteLLM joins calls that have no index beside the function.
    assert [(call["index"], call["function"]["index"]) for call in calls] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("tokens", "rate"), [(1, None), (2, 10.0), (50, 500.0)])
def test_phases_take_no_longer_than_the_request(tokens: int, rate: float | None) -> None:
    timings = Timings(2.0, 0.3, 0.5, 100.0, rate, None, None, None, 1.45)
    done = Done(Usage(20, 0, tokens), timings, 0, 0, Speculation(), "")
    formatter = OllamaFormatter(NAME, lambda piece: {}, with_logprobs=False)
    last = json.loads(formatter.finish(done.usage, done))
    phases = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(last[name] for name in phases) <= last["total_duration"]
    assert (last["load_duration"], last["prompt_eval_duration"]) == (2 * 10**9, 2 * 10**8)
    # Programs divide by it.
    assert last["eval_duration"] > 0


def test_an_answer_that_was_cut_off_says_so(stage: Stage) -> None:
    word = stage.plays("cut", Text(0, "a"), Finished(0, "length"))
    assert lines(talk(stage, word))[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, None),
        ({"seed": 7}, Sampling(seed=7)),
        ({"repeat_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"num_ctx": 8192, "num_gpu": 1, "mirostat": 0}, Sampling()),
    ],
    ids=str,
)
def test_options_reach_the_engine(stage: Stage, options: Any, sampling: Sampling | None) -> None:
    talk(stage, options={**options, "num_predict": 9, "stop": ["x"]})
    expected = Sampling(**options) if sampling is None else sampling
    assert stage.last.sampling == expected
    assert (stage.last.max_tokens, stage.last.stop) == (9, ("x",))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("length", [0, -1, -2])
def test_a_length_of_zero_or_less_is_no_limit(
    stage: Stage, path: str, raw: bool, length: int
) -> None:
    body = {"model": NAME, "options": {"num_predict": length}, "prompt": "hi", "raw": raw}
    messages = [{"role": "user", "content": "hi"}]
    assert ask(stage, path, {**body, "messages": messages}).status == 200
    assert stage.last.max_tokens == ServerLimits().answer_tokens


@pytest.mark.parametrize("fields", [{}, {"raw": True}, {"suffix": "b"}])
def test_alternatives_need_logprobs_in_every_kind_of_prompt(stage: Stage, fields: Any) -> None:
    body = {"model": NAME, "prompt": "a", "top_logprobs": 2, **fields}
    reply = ask(stage, "/api/generate", body)
    assert reply.status == 400
    assert "top_logprobs" in reply.json["error"]


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ("json", Grammar("json_object", field="format")),
        ({"type": "object"}, Grammar("json_schema", '{"type":"object"}', "format")),
        ("", None),
        (None, None),
    ],
)
def test_a_format_binds_the_answer(stage: Stage, given: Any, grammar: Grammar | None) -> None:
    talk(stage, format=given)
    assert stage.last.grammar == grammar


@pytest.mark.parametrize(
    ("think", "thinking", "options"),
    [
        (True, "on", {}),
        (False, "off", {}),
        ("low", "on", {"reasoning_effort": "low"}),
        (None, "auto", {}),
    ],
)
def test_thinking_is_switched(stage: Stage, think: Any, thinking: str, options: Any) -> None:
    talk(stage, think=think)
    assert (stage.prompt.thinking, stage.prompt.template_options) == (thinking, options)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_unknown_effort_is_refused_by_the_name_of_its_field(stage: Stage, path: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    reply = ask(stage, path, {"model": NAME, "prompt": "hi", "messages": messages, "think": "deep"})
    assert reply.status == 400
    assert "'think' must be true, false or one of none, minimal" in reply.json["error"]


def test_a_conversation_with_tools_is_carried_whole(stage: Stage) -> None:
    talk(
        stage,
        messages=[
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "hm",
                "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "A tree.", "tool_name": "look"},
        ],
        tools=[TOOL],
    )
    assert stage.prompt.messages == (
        Message("system", "Be."),
        Message("user", "look"),
        Message("assistant", "", "hm", (CalledTool("look", '{"a":1}'),)),
        Message("tool", "A tree.", name="look"),
    )
    assert stage.prompt.tools[0]["function"]["name"] == "look"


def test_a_prompt_is_a_message_a_text_or_a_gap(stage: Stage) -> None:
    def prompt_of(**fields: Any) -> Any:
        body = {"model": NAME, "stream": False, **fields}
        assert ask(stage, "/api/generate", body).json["response"] == "Hello."
        return stage.last.prompt

    assert prompt_of(prompt="hi", system="Be.") == Messages(
        (Message("system", "Be."), Message("user", "hi"))
    )
    assert prompt_of(prompt="hi", raw=True) == TextPrompt("hi", special=True)
    assert prompt_of(prompt="a", suffix="b") == Infill("a", "b")


def test_a_generated_stream_has_responses(stage: Stage) -> None:
    *pieces, last = lines(ask(stage, "/api/generate", {"model": NAME, "prompt": "hi"}))
    assert [piece["response"] for piece in pieces] == ["Hel", "lo", "."]
    assert (last["response"], last["done"]) == ("", True) and set(last) >= METRICS


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_for_nothing_loads_the_model(stage: Stage, path: str) -> None:
    asked = len(stage.engine.requests)
    whole = ask(stage, path, {"model": NAME, "keep_alive": 300}).json
    assert (whole["done"], whole["done_reason"]) == (True, "load")
    assert len(stage.engine.requests) == asked


def test_a_keep_alive_of_nothing_unloads_without_a_question(stage: Stage) -> None:
    for model in (NAME, "not here"):
        whole = ask(stage, "/api/generate", {"model": model, "keep_alive": 0}).json
        assert (whole["done"], whole["done_reason"]) == (True, "unload")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        (-1, NEVER),
        (1e300, NEVER),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        ("-1m", NEVER),
        ("-1", NEVER),
        ("60", 60),
        ("0", 0),
    ],
)
def test_a_keep_alive_is_a_number_or_a_time(given: Any, seconds: float | None) -> None:
    assert keep_alive_s(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["soon", "5 m", "5x", "--1", "1" * 99, "nan", [], {}])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("chat", {}),
        ("generate", {"prompt": "a"}),
        ("embed", {"input": "a"}),
    ],
)
def test_another_keep_alive_is_refused(stage: Stage, path: str, fields: Any, given: Any) -> None:
    reply = ask(stage, f"/api/{path}", {"model": NAME, "keep_alive": given, **fields})
    assert reply.status == 400 and "keep_alive" in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "stream": False}),
        ("chat", {}),
        ("generate", {"prompt": "a", "raw": True}),
        ("generate", {}),
    ],
)
def test_a_context_shorter_than_asked_for_is_said(stage: Stage, path: str, fields: Any) -> None:
    for wanted, said in ((4096, None), (4097, "4096"), (-1, None)):
        body = {"model": NAME, "options": {"num_ctx": wanted}, **fields}
        reply = ask(stage, f"/api/{path}", body)
        assert reply.status == 200
        assert reply.headers.get("x-localchat-context-tokens") == said


class Keeper(SingleEngine):
    """Notes the keep-alive of each request that named one."""

    kept: ClassVar[list[float]] = []

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        lease = await SingleEngine.lease(self, model, user=user)
        lease.keep_alive = self.kept.append  # type: ignore[assignment]
        return lease


def test_a_keep_alive_reaches_the_pool() -> None:
    with running(ScriptedEngine(model=NAME), engines=Keeper) as (port, _), Wire(port) as wire:
        for path, fields in (
            ("chat", {"messages": [{"role": "user", "content": "a"}], "keep_alive": "1m"}),
            ("chat", {"keep_alive": 2}),
            ("generate", {"prompt": "a", "keep_alive": -1}),
            ("generate", {"prompt": "a"}),
            ("embed", {"input": "a", "keep_alive": "3s"}),
        ):
            wire.ask(f"/api/{path}", {"model": NAME, "stream": False, **fields})
            assert wire.reply().status == 200
    assert Keeper.kept == [60, 2, NEVER, 3]


def test_a_text_that_is_too_long_is_cut_unless_the_client_forbids_it(stage: Stage) -> None:
    body = {"model": NAME, "input": ["a" * 5000, "b"]}
    for fields in ({}, {"truncate": True}, {"truncate": None}):
        whole = ask(stage, "/api/embed", {**body, **fields}).json
        assert whole["embeddings"] == [[4096.0, 1.0], [1.0, 1.0]]
    refused = ask(stage, "/api/embed", {**body, "truncate": False})
    assert refused.status == 400 and "4096" in refused.json["error"]
    older = ask(stage, "/api/embeddings", {"model": NAME, "prompt": "a" * 5000})
    assert older.status == 400
    assert ask(stage, "/v1/embeddings", {"input": "a" * 5000}).status == 400


def test_embeddings_are_lists_by_both_routes(stage: Stage) -> None:
    whole = ask(stage, "/api/embed", {"model": NAME, "input": ["ab", "c"]}).json
    assert whole["embeddings"] == [[2.0, 1.0], [1.0, 1.0]]
    assert whole["prompt_eval_count"] == 3
    with_empty = ask(stage, "/api/embed", {"model": NAME, "input": ["ab", ""], "dimensions": 0})
    assert with_empty.json["embeddings"] == [[2.0, 1.0], [0.0, 1.0]]
    older = ask(stage, "/api/embeddings", {"model": NAME, "prompt": "ab"}).json
    assert older == {"embedding": [2.0, 1.0]}


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "images"),
        ("chat", {"messages": [{"role": "judge", "content": "a"}]}, "judge"),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "format": "xml"}, "xml"),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": 1}]}, "tools"),
        ("generate", {"prompt": "a", "template": "x"}, "template"),
        ("generate", {"prompt": "a", "options": {"temperature": -1}}, "temperature"),
        ("embed", {}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_in_ollamas_shape(
    stage: Stage, path: str, fields: Any, word: str
) -> None:
    reply = ask(stage, f"/api/{path}", {"model": NAME, **fields})
    assert reply.status == 400
    assert list(reply.json) == ["error"] and word in reply.json["error"]


def test_a_failure_in_the_middle_is_the_last_line(stage: Stage) -> None:
    stage.scripts["dies"] = ScriptedAnswer(
        ("half",), error=EngineDied("log: /secret", signal="SIGKILL")
    )
    first, last = lines(talk(stage, "dies"))
    assert first["message"]["content"] == "half"
    assert list(last) == ["error"] and "/secret" not in last["error"]


def test_a_silent_stream_has_no_comments() -> None:
    with serving(ServerConfig(heartbeat_s=0.01, event_s=0.01)) as stage:
        stage.scripts["slow"] = ScriptedAnswer(("a", "b"), gap_s=0.1)
        texts = [line["message"]["content"] for line in lines(talk(stage, "slow"))]
        assert texts == ["a", "b", ""]
