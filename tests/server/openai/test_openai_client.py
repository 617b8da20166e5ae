"""A real client library against the server: what it reads, and what it raises."""

import base64
import json
import threading
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from localchat.engine.events import Finished, Reasoning, Text, ToolCall
from localchat.engine.request import Attachment
from localchat.errors import ContextExceeded, EngineDied, ModelInvalid
from localchat.server.config import ServerConfig
from tests.support.http_server import Stage, serving, settled
from tests.support.media import png
from tests.support.scripted_engine import ScriptedAnswer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stage.base}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], temperature=0
    )
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_a_picture_in_a_chat_and_in_a_response(client: OpenAI, stage: Stage) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    client.chat.completions.create(
        model="m",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What?"},
                    {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                ],
            }
        ],
    )
    assert stage.prompt.messages[-1].attachments == (Attachment("image", png(), 5),)
    client.responses.create(
        model="m",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": url, "detail": "auto"}],
            }
        ],
    )
    assert stage.prompt.messages[-1].attachments == (Attachment("image", png()),)


def test_a_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello."
    assert chunks[-1].usage is not None and not chunks[-1].choices


def test_the_streaming_helper_puts_tool_calls_together(stage: Stage, client: OpenAI) -> None:
    word = stage.plays(
        "calls",
        Text(0, "Let me see."),
        ToolCall(0, 0, name="look", arguments='{"city":'),
        ToolCall(0, 0, arguments='"Rome"}'),
        ToolCall(0, 1, name="look", arguments='{"city":"Oslo"}'),
        Finished(0, "stop"),
    )
    with client.chat.completions.stream(
        model="m",
        messages=[{"role": "user", "content": word}],
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]


def test_reasoning_has_its_own_field(stage: Stage, client: OpenAI) -> None:
    word = stage.plays("thinks", Reasoning(0, "hm"), Text(0, "42"), Finished(0, "stop"))
    message = (
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": word}])
        .choices[0]
        .message
    )
    assert (message.content, getattr(message, "reasoning_content", None)) == ("42", "hm")


def test_structured_output_is_parsed(stage: Stage, client: OpenAI) -> None:
    word = stage.plays("json", Text(0, '{"name":"Ann"}'), Finished(0, "stop"))
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": word}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": {"type": "object"}, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Ann"}
    assert stage.last.grammar is not None and stage.last.grammar.kind == "json_schema"


def test_completions_models_and_embeddings(client: OpenAI) -> None:
    assert client.completions.create(model="m", prompt="x").choices[0].text == "Hello."
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    vectors = client.embeddings.create(model="m", input=["ab", "c"])
    assert [each.embedding for each in vectors.data] == [[2.0, 1.0], [1.0, 1.0]]


def test_errors_are_the_librarys_own(stage: Stage, client: OpenAI) -> None:
    stage.engine.refusals["long"] = [ContextExceeded("x", prompt_tokens=9, context_tokens=4)]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long"}])
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 4 tokens" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    stage.scripts["dies"] = ScriptedAnswer(("a",), error=EngineDied("gone", signal="SIGKILL"))
    with pytest.raises(openai.APIError) as broken:
        list(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "dies"}], stream=True
            )
        )
    assert broken.value.code == "engine_died"


def test_what_would_fail_again_is_not_tried_again(stage: Stage) -> None:
    stage.engine.refusals["bad"] = [ModelInvalid("bad")] * 5
    before = len(stage.engine.requests)
    with (
        OpenAI(base_url=f"{stage.base}/v1", api_key="x", max_retries=2) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "bad"}])
    assert len(stage.engine.requests) == before + 1


def test_closing_a_stream_cancels(stage: Stage, client: OpenAI) -> None:
    stage.scripts["endless"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    before = stage.engine.cancelled
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "endless"}], stream=True
    )
    next(iter(stream))
    stream.close()
    assert settled(lambda: stage.engine.cancelled == before + 1)


def test_a_key_is_sent_as_the_library_sends_it() -> None:
    with serving(ServerConfig(api_keys=("sk-01234567",))) as stage:
        with OpenAI(base_url=f"{stage.base}/v1", api_key="sk-01234567") as good:
            assert good.models.list().data
        with (
            OpenAI(base_url=f"{stage.base}/v1", api_key="wrong") as bad,
            pytest.raises(openai.AuthenticationError),
        ):
            bad.models.list()


def test_many_streams_at_once(stage: Stage, client: OpenAI) -> None:
    stage.scripts["some"] = ScriptedAnswer(("a",) * 20, gap_s=0.005)
    texts: list[str] = []

    def read() -> None:
        chunks = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "some"}], stream=True
        )
        texts.append("".join(c.choices[0].delta.content or "" for c in chunks))

    threads = [threading.Thread(target=read) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["a" * 20] * 32
