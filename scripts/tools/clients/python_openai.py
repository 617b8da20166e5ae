"""Checks the openai library for Python, of any version: chat, stream, tools, structure, errors, cancel."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import openai

BASE = sys.argv[1]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
client: Any = openai.OpenAI(base_url=BASE, api_key="none")


def said(word: str) -> list[Any]:
    return [{"role": "user", "content": word}]


def chat() -> None:
    answer = client.chat.completions.create(model="m", messages=said("hi"))
    assert answer.choices[0].message.content == "Hello." and answer.usage.total_tokens > 3


def stream() -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="m", messages=said("hi"), stream=True, stream_options=options
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello."
    assert chunks[-1].usage.completion_tokens == 3


def tools() -> None:
    answer = client.chat.completions.create(model="m", messages=said("tools"), tools=[TOOL])
    calls = answer.choices[0].message.tool_calls
    assert [json.loads(c.function.arguments)["city"] for c in calls] == ["Rome", "Oslo"]
    assert answer.choices[0].finish_reason == "tool_calls"
    parts: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="m", messages=said("tools"), tools=[TOOL], stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            parts[call.index] = parts.get(call.index, "") + call.function.arguments
    assert parts == {0: '{"city":"Rome"}', 1: '{"city":"Oslo"}'}


def helper() -> None:
    chats = client.chat.completions if hasattr(client.chat.completions, "stream") else None
    chats = chats or client.beta.chat.completions
    with chats.stream(model="m", messages=said("tools"), tools=[TOOL]) as events:
        final = events.get_final_completion()
    assert len(final.choices[0].message.tool_calls) == 2


def structured() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    answer = client.chat.completions.create(
        model="m",
        messages=said("json"),
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content) == {"name": "Ann"}


def responses() -> None:
    if not hasattr(client, "responses"):
        return
    tool = {"type": "function", **TOOL["function"]}
    assert client.responses.create(model="m", input="hi").output_text == "Hello."
    with client.responses.stream(model="m", input="tools", tools=[tool]) as events:
        seen = [event.type for event in events]
        final = events.get_final_response()
    assert seen[0] == "response.created" and seen[-1] == "response.completed"
    message, *calls = final.output
    assert message.content[0].text == "Let me see."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    again = [{"role": "user", "content": "x"}, *(one.model_dump() for one in final.output)]
    answer = client.responses.create(model="m", input=[*again, *results], tools=[tool])
    assert answer.output_text == "Hello." and answer.usage.total_tokens > 3
    ask = partial(client.responses.create, model="m", input="x", previous_response_id="r")
    assert failure(ask, openai.BadRequestError) == "previous_response_not_found"
    *_, last = client.responses.create(model="m", input="dies", stream=True)
    assert last.type == "response.failed" and last.response.error.code == "server_error"


def errors() -> None:
    for word, code in (("long", "context_length_exceeded"), ("template", "chat_template_error")):
        ask = partial(client.chat.completions.create, model="m", messages=said(word))
        assert failure(ask, openai.BadRequestError) == code, word
    stream_ = client.chat.completions.create(model="m", messages=said("dies"), stream=True)
    assert failure(lambda: list(stream_), openai.APIError) == "engine_died"


def failure(ask: Callable[[], Any], kind: type[Exception]) -> str | None:
    """The code of the error that this raises; None if it raises none."""
    try:
        ask()
    except kind as error:
        return str(getattr(error, "code", None))
    return None


def cancel() -> None:
    before = gone()
    stream_ = client.chat.completions.create(model="m", messages=said("endless"), stream=True)
    next(iter(stream_))
    stream_.close()
    for _ in range(100):
        if gone() == before + 1:
            return
        time.sleep(0.05)
    raise AssertionError("the server did not notice")


def gone() -> float:
    """How many clients left, as the server counted."""
    with urllib.request.urlopen(BASE.removesuffix("/v1") + "/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("localchat_client_gone_total"):
                return float(line.split()[1])
    raise AssertionError("no such figure")


def rest() -> None:
    assert client.completions.create(model="m", prompt="x").choices[0].text == "Hello."
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.embeddings.create(model="m", input="ab").data[0].embedding == [2.0, 1.0]


def main() -> None:
    for check in (chat, stream, tools, helper, structured, responses, errors, cancel, rest):
        check()
        print(f"openai {openai.__version__} for Python: {check.__name__} ok")


main()
