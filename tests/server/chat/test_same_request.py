"""One conversation in four protocols reaches the engine as one request."""

from typing import Any

import pytest

from localchat.engine.request import CalledTool, Message, Messages
from tests.support.http_server import Stage, ask

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "description": "Read a file.", "parameters": PARAMETERS}
ARGUMENTS = '{"path":"a.txt"}'

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a.txt."},
        {
            "role": "assistant",
            "content": "Reading.",
            "reasoning_content": "A file.",
            "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "text"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "parallel_tool_calls": False,
    "max_tokens": 50,
    "temperature": 0.5,
}
MESSAGES: dict[str, Any] = {
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read a.txt."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file.", "signature": "s"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "c", "name": "read", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "text"}],
        },
    ],
    "tools": [{"name": "read", "description": "Read a file.", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "max_tokens": 50,
    "temperature": 0.5,
}
RESPONSE: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Read a.txt."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A file."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c", "output": "text"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "parallel_tool_calls": False,
    "max_output_tokens": 50,
    "temperature": 0.5,
}
OLLAMA: dict[str, Any] = {
    "messages": [
        *CHAT["messages"][:2],
        {
            "role": "assistant",
            "content": "Reading.",
            "thinking": "A file.",
            "tool_calls": [
                {"id": "c", "function": {"name": "read", "arguments": {"path": "a.txt"}}}
            ],
        },
        CHAT["messages"][3],
    ],
    "tools": CHAT["tools"],
    "options": {"num_predict": 50, "temperature": 0.5},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", RESPONSE),
        ("/api/chat", OLLAMA),
    ],
)
def test_a_conversation_is_the_same_request_in_every_protocol(
    stage: Stage, path: str, body: dict[str, Any]
) -> None:
    assert ask(stage, path, {"model": "scripted", "stream": False, **body}).status == 200
    single_call = path != "/api/chat"  # Ollama's API has no such field
    assert stage.prompt == Messages(
        messages=(
            Message("system", "Be brief."),
            Message("user", "Read a.txt."),
            Message("assistant", "Reading.", "A file.", (CalledTool("read", ARGUMENTS, "c"),)),
            Message("tool", "text", tool_call_id="c", name="read"),
        ),
        tools=({"type": "function", "function": FUNCTION},),
        parallel_tool_calls=not single_call,
    )
    assert stage.last.max_tokens == 50
    assert stage.last.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("path", "body", "choice"),
    [
        ("/v1/chat/completions", CHAT, {"type": "function", "function": {"name": "read"}}),
        ("/v1/messages", MESSAGES, {"type": "tool", "name": "read"}),
        ("/v1/responses", RESPONSE, {"type": "function", "name": "read"}),
    ],
)
def test_a_named_tool_is_called_exactly_once(
    stage: Stage, path: str, body: dict[str, Any], choice: dict[str, Any]
) -> None:
    body = {**body, "parallel_tool_calls": True, "tool_choice": choice}
    assert ask(stage, path, body).status == 200
    assert (stage.prompt.tool_choice, stage.prompt.parallel_tool_calls) == ("read", False)
