"""Bodies that no client should send, made from good ones: types swapped, values stretched, bytes broken."""

import copy
import json
import random
from typing import Any

from tests.support.http_server import Reply

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 5,
        "n": 2,
        "stop": ["a"],
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "stream": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "cache_salt": "s",
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "reasoning": {"max_tokens": 9},
        "thinking_budget": 9,
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "max_tokens": 5,
        "echo": True,
        "logprobs": 1,
        "n": 1,
        "stop": "x",
        "structured_outputs": {"json": {"type": "object"}, "disable_fallback": True},
        "stream": False,
    },
    "/api/chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": "hi", "images": []},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "1", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "format": {"type": "object"},
        "options": {"temperature": 0.5, "num_predict": 5, "stop": ["a"], "seed": 1, "top_k": 2},
        "think": "low",
        "stream": False,
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "m", "prompt": "a", "suffix": "b", "system": "s", "stream": False},
    "/api/embed": {"model": "m", "input": ["a"], "dimensions": 2},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "1", "is_error": True},
                    {"type": "text", "text": "go"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "stop_sequences": ["a"],
        "temperature": 0.5,
        "top_k": 5,
        "stream": False,
    },
    "/v1/responses/input_tokens": {"input": "hi", "reasoning": {"max_tokens": 5}},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": False,
        "metadata": {"a": "b"},
    },
    "/infill": {
        "id_slot": 0,
        "input_prefix": "def f(",
        "input_suffix": "return 1",
        "input_extra": [{"text": "X", "filename": "x.py", "time": [1, 2]}],
        "prompt": "a",
        "n_predict": 5,
        "stop": ["\n"],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "t_max_predict_ms": 500,
        "json_schema": {"type": "object"},
        "response_fields": ["content", "timings/prompt_n"],
        "stream": False,
    },
    "/completion": {"prompt": "a", "n_predict": 5, "seed": -1, "samplers": "kt", "stream": False},
    "/api/show": {"model": "scripted", "verbose": True},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/tokenize": {"content": "abc", "parse_special": True},
    "/detokenize": {"tokens": [97, 98]},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
}
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 2**63, 2**64, -(2**63), 10**40, "", "x", "\0"),
    *("\ud800", "\ud83d\ude00", "x" * 5000, [], {}, [None], [[]], [1, "a"], {"a": {}}, {"": None}),
    *([[1, 2], "a"], {"type": "text"}, {"type": "image_url"}, "auto", "json_object", ["a"] * 70),
    *({"function": {"name": "f"}}, "<|im_start|>system", "{{ 7*7 }}", "\x1b[31m", -1.0, "1"),
)


def refusal(path: str, reply: Reply) -> str:
    """The type of a refusal, whose shape is the one of its protocol."""
    if path.startswith("/api/"):
        assert list(reply.json) == ["error"] and isinstance(reply.json["error"], str)
        return "invalid_request_error"
    error = reply.anthropic_error if path.startswith("/v1/messages") else reply.error
    kind: str = error["type"]
    return kind


def fuzzed(seed: int) -> tuple[str, bytes]:
    """A route and a body, the same for the same seed."""
    rng = random.Random(seed)
    path = rng.choice(list(GOOD))
    body = json.loads(json.dumps(GOOD[path]))
    for _ in range(rng.choice((1, 1, 2, 5))):
        body = _changed(body, rng)
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        raw = _broken(raw, rng)
    return path, raw


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_ODD))


def _changed(value: Any, rng: random.Random) -> Any:
    """One place of it changed: replaced, left out, doubled, or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                value.pop(key)
            case 1:
                value[key] = _odd(rng)
            case 2:
                value[str(rng.choice(("", "error", "x", "__class__")))] = _odd(rng)
            case _:
                value[key] = _changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                value.pop(at)
            case 1:
                value.append(_odd(rng))
            case _:
                value[at] = _changed(value[at], rng)
        return value
    return rng.choice((_odd(rng), [value], {"x": value}))


def _broken(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw) + 1)
    match rng.randrange(5):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        case 2:
            return raw[:at] + raw[at:] * 2
        case 3:
            return raw.replace(b'"', b"'")
    return b"[" * rng.randrange(2000) + raw
