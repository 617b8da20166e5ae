"""Every answer and every event against the types of OpenAI's client library, validated strictly."""

import json
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from localchat.engine.events import Finished, Reasoning, Text, TokenLogprob, ToolCall
from tests.support.http_server import Stage, ask

LOGPROBS = (TokenLogprob(1, b"a", -0.5, ((1, b"a", -0.5), (2, b"b", -1.0))),)
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture
def words(stage: Stage) -> None:
    stage.plays("sure", Text(0, "a", LOGPROBS), Finished(0, "stop"))
    stage.plays(
        "calls",
        Reasoning(0, "hm"),
        Text(0, "So."),
        ToolCall(0, 0, id="c1", name="look", arguments='{"a":'),
        ToolCall(0, 0, arguments="1}"),
        Finished(0, "stop"),
    )


def valid(kind: Any, data: str | bytes) -> None:
    TypeAdapter(kind).validate_json(data, strict=True)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("hi", {}),
        ("hi", {"n": 2}),
        ("sure", {"logprobs": True, "top_logprobs": 2}),
        ("calls", {"tools": [TOOL]}),
    ],
    ids=str,
)
def test_chats_are_of_their_types(stage: Stage, word: str, fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": word}], **fields}
    valid(ChatCompletion, ask(stage, "/v1/chat/completions", body).body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = ask(stage, "/v1/chat/completions", streamed).events
    assert len(events) > 3
    for event in events[:-1]:
        valid(ChatCompletionChunk, event)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("hi", {}),
        ("calls", {"tools": [{"type": "function", "strict": True, **FUNCTION}]}),
        ("sure", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (
            "hi",
            {
                "temperature": 1,
                "max_output_tokens": 20,
                "reasoning": {"effort": "low"},
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
                "instructions": "Be.",
                "metadata": {"a": "b"},
            },
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_responses_are_of_their_types(stage: Stage, word: str, fields: dict[str, Any]) -> None:
    body = {"model": "m", "input": word, **fields}
    valid(Response, ask(stage, "/v1/responses", body).body)
    events = ask(stage, "/v1/responses", {**body, "stream": True}).named_events
    assert len(events) > 5
    for _, event in events:
        valid(ResponseStreamEvent, json.dumps(event))


def test_other_answers_are_of_their_types(stage: Stage) -> None:
    valid(Completion, ask(stage, "/v1/completions", {"prompt": "a", "logprobs": 1}).body)
    valid(CreateEmbeddingResponse, ask(stage, "/v1/embeddings", {"input": "a"}).body)
    valid(Model, ask(stage, "/v1/models/scripted").body)
