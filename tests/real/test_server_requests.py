"""Requests of real clients to a server with real weights."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from localchat.engine.local.engine import LocalEngine
from tests.support.http_server import Wire, running

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def port(smollm2_engine: LocalEngine) -> Iterator[int]:
    """The port of a server with SmolLM2."""
    with running(smollm2_engine) as (port, _):
        yield port


def post(port: int, path: str, **fields: Any) -> Any:
    with Wire(port) as wire:
        wire.ask(path, fields)
        return wire.reply()


def chat(port: int, content: str = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return post(port, CHAT, messages=messages, **{"max_tokens": 40, "temperature": 0, **fields})


def text(reply: Any) -> str:
    content: str = reply.json["choices"][0]["message"]["content"]
    return content


def test_answer_has_its_minimum_length(port: int) -> None:
    short = chat(port).json["usage"]["completion_tokens"]
    assert short < 30
    for fields in ({}, {"speculation": False}, {"n": 2}, {"stream": False, "seed": 3}):
        reply = chat(port, min_tokens=30, **fields)
        assert reply.json["usage"]["completion_tokens"] >= 30 * fields.get("n", 1)


def test_stop_token_and_stop_string_end_an_answer(port: int) -> None:
    question = "Write two sentences about rain."
    whole = text(chat(port, question))
    assert len(whole.split()) > 4, whole
    word = whole.split()[3]
    tokens = post(port, "/tokenize", content=f" {word}").json["tokens"]
    by_token = chat(port, question, stop_token_ids=tokens[:1], min_tokens=0)
    assert by_token.json["choices"][0]["finish_reason"] == "stop"
    assert whole.startswith(text(by_token)) and len(text(by_token)) < len(whole)
    by_string = text(chat(port, question, stop=[word]))
    assert word not in by_string
    assert text(chat(port, question, stop=[word], include_stop_str_in_output=True)).endswith(word)


def test_prompt_is_scored_without_an_answer(port: int) -> None:
    prompts = ["The capital of France is Paris", "The capital of France is Lyon"]
    fields = {"echo": True, "logprobs": 1, "temperature": 0}
    reply = post(port, "/v1/completions", prompt=prompts, max_tokens=0, **fields).json
    assert reply["usage"]["completion_tokens"] == 0
    scores = []
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        scores.append(sum(others))
        longer = post(port, "/v1/completions", prompt=prompt, max_tokens=1, **fields).json
        logprobs = longer["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[:-1] == [None, *(pytest.approx(value, abs=0.05) for value in others)]
    assert scores[0] > scores[1]


def test_banned_word_does_not_occur(port: int) -> None:
    first = text(chat(port)).split()[0].strip(",.!")
    assert first not in text(chat(port, bad_words=[first]))
    error = chat(port, bad_words=["antidisestablishmentarianism"]).error
    assert error["param"] == "bad_words"


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}},
    ],
)
def test_schema_binds_the_answer_wherever_it_stands(port: int, given: dict[str, Any]) -> None:
    answer = json.loads(text(chat(port, "Invent a person.", response_format=given)))
    assert set(answer) == {"name", "age"} and isinstance(answer["age"], int)


def test_regular_expression_in_a_response_format_binds(port: int) -> None:
    given = {"type": "regex", "value": "[A-Z]{3}-[0-9]{2}"}
    assert len(text(chat(port, "Invent a code.", response_format=given))) == 6


def test_invalid_pattern_is_an_error_in_every_protocol(port: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(x"}}}
    messages = [{"role": "user", "content": "hi"}]
    flat = {"type": "json_schema", "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    replies = (
        chat(port, response_format=flat),
        post(port, "/v1/completions", prompt="hi", json_schema=schema),
        post(port, "/v1/responses", input="hi", text={"format": {**flat, "name": "a"}}),
        post(port, "/v1/messages", messages=messages, max_tokens=9, output_format=flat),
        post(port, "/api/chat", model="m", messages=messages, format=schema),
        post(port, "/completion", prompt="hi", json_schema=schema),
        chat(port, regex="(x"),
        chat(port, grammar="start: /(x/"),
        chat(port, tools=[tool], tool_choice="required"),
    )
    assert [reply.status for reply in replies] == [400] * len(replies)


def test_strict_schema_is_rejected_if_it_cannot_be_enforced(port: int) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True}
    wrapped = {"name": "a", "schema": {**schema, "maxItems": 2}}
    relaxed = chat(port, response_format={"type": "json_schema", "json_schema": wrapped})
    assert relaxed.headers["x-localchat-schema-relaxed"] == "uniqueItems"
    strict = {"type": "json_schema", "json_schema": {**wrapped, "strict": True}}
    assert "uniqueItems" in chat(port, response_format=strict).error["message"]


def test_openai_client_streams_with_timings(port: int) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1/v1", api_key="none")
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=8,
            stream=True,
        )
    )
    assert all(chunk.choices for chunk in chunks)
    timings = chunks[-1].model_extra["timings"]  # type: ignore[index]
    assert timings["predicted_n"] > 0 and timings["predicted_per_second"] > 0
    with pytest.raises(BadRequestError, match="mirostat"):
        client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"mirostat": 2},
        )


def test_tokenizer_is_described_for_remote_harnesses(port: int) -> None:
    with Wire(port) as wire:
        wire.ask("/tokenizer_info")
        info = wire.reply().json
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_start|>" in info["chat_template"]
    vllm = {"add_special_tokens": False}
    assert post(port, "/tokenize", prompt=info["eos_token"], **vllm).json["tokens"] == [2]
    tokens = post(port, "/tokenize", prompt="Paris is large.", **vllm).json["tokens"]
    assert post(port, "/detokenize", tokens=tokens).json["prompt"] == "Paris is large."
    echoed = post(
        port, "/v1/completions", prompt=[tokens], max_tokens=1, echo=True, logprobs=1
    ).json["choices"][0]["logprobs"]
    assert len(echoed["token_logprobs"]) == len(tokens) + 1


def test_why_the_cache_missed_is_reported(port: int) -> None:
    shared = "The quick brown fox jumps over the lazy dog. " * 20
    chat(port, f"12:01 {shared}", max_tokens=1)
    timings = chat(port, f"12:02 {shared}", max_tokens=1, timings=True).json["timings"]
    assert timings["cache_n"] < timings["prompt_n"]
    assert timings["why_missed"]
    assert {"speedup", "speculation_off", "ttft_s"} <= set(timings)


def test_long_texts_to_count_do_not_delay_a_chat(smollm2_engine: LocalEngine, port: int) -> None:
    text = "word and text; " * 70_000
    with ThreadPoolExecutor(3) as threads:
        counts = [threads.submit(smollm2_engine.tokenize, text, special=False) for _ in range(3)]
        assert chat(port, max_tokens=1).status == 200
        assert not any(count.done() for count in counts)


def test_named_tool_is_called_exactly_once(port: int) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "weather"}}
    question = "What is the weather in Paris and in Rome?"
    reply = chat(port, question, tools=[tool], tool_choice=choice, max_tokens=200)
    (answer,) = reply.json["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather"]
