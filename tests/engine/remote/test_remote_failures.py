"""Remotes that stall, drop, err in the middle, or refuse in their own words."""

import json
import threading
import time

import pytest

from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.remote.client import base_url
from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from localchat.engine.remote.errors import error_from_status
from localchat.engine.request import GenerateRequest, Grammar, Sampling, TextPrompt
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    LocalchatError,
    NetworkError,
    UsageError,
)
from tests.support.remote_server import ASK, Exchange, Open, events, piece, text_of

# ---------------------------------------------------------------------------- stalls and drops


def test_heartbeats_and_empty_pieces_are_no_answer_so_a_drop_behind_them_is_tried_again(
    opened: Open, said: list[str]
) -> None:
    def answer(exchange: Exchange) -> None:
        if len(exchange.seen) < 3:
            exchange.stream(piece(role="assistant", content=""), piece(content=None), end=False)
        else:
            exchange.stream(piece("stop", content="now"))

    engine, server = opened(answer)
    found = events(engine)
    assert text_of(found) == "now"
    assert [event for event in found if isinstance(event, Accepted)] == [found[0]]
    assert len(server.seen) == 3
    assert len(said) == 2 and "before its first word" in said[0]


def test_heartbeats_keep_a_slow_server_from_being_given_up(opened: Open) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream(end=False)
        for _ in range(12):
            exchange.wfile.write(b": keep-alive\n\n")
            exchange.wfile.flush()
            time.sleep(0.05)
        exchange.wfile.write(f"data: {json.dumps(piece('stop', content='late'))}\n\n".encode())

    engine, _ = opened(answer, silence_s=0.5)
    assert text_of(events(engine)) == "late"


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancel_reaches_a_silent_server(opened: Open, begun: bool) -> None:
    """In its prefill, before any header, and in the middle of an answer."""
    asked, gone = threading.Event(), threading.Event()

    def answer(exchange: Exchange) -> None:
        if begun:
            exchange.stream(piece(content="a"), end=False)
        asked.set()
        exchange.connection.settimeout(90)
        if exchange.connection.recv(1) == b"":
            gone.set()

    engine, _ = opened(answer)
    stream = engine.generate(ASK)
    assert asked.wait(90)
    if begun:
        next(event for event in stream if isinstance(event, Text))
    stream.close()
    assert gone.wait(90)


def test_values_that_json_cannot_express_are_a_usage_error(opened: Open) -> None:
    engine, server = opened(lambda exchange: exchange.send(200, {"tokens": []}))
    with pytest.raises(UsageError, match="cannot be sent"):
        engine.tokenize("\ud800")
    with pytest.raises(UsageError, match="cannot be sent"):
        events(engine, GenerateRequest(TextPrompt("a"), Sampling(logit_bias={1: float("nan")})))
    assert not server.seen


def test_half_of_an_emoji_in_an_answer_is_replaced(opened: Open) -> None:
    function = {"name": "f\ud800", "arguments": "\udfff"}

    def answer(exchange: Exchange) -> None:
        exchange.stream(
            piece(content="a\ud83d"),
            piece(tool_calls=[{"index": 0, "id": "1", "function": function}]),
            piece("stop"),
        )

    engine, _ = opened(answer)
    received = events(engine)
    assert text_of(received) == "a?"
    assert [event for event in received if isinstance(event, ToolCall)] == [
        ToolCall(0, 0, "1", "f?", "?")
    ]


def test_an_unexpected_fault_ends_the_request(opened: Open) -> None:
    engine, _ = opened(lambda exchange: exchange.send(200, {}))
    with pytest.raises(LocalchatError, match="JSONDecodeError"):
        events(engine, GenerateRequest(TextPrompt("a"), grammar=Grammar("json_schema", "{")))


@pytest.mark.parametrize("answering", [False, True])
def test_a_closed_engine_lets_nobody_wait(opened: Open, answering: bool) -> None:
    """Whether it waits for the server, or for the time of its next try."""
    asked, release = threading.Event(), threading.Event()

    def answer(exchange: Exchange) -> None:
        asked.set()
        if answering:
            release.wait(90)
        else:
            exchange.send(503, {}, Retry_After="20")

    engine, _ = opened(answer)
    stream = engine.generate(ASK)
    assert asked.wait(90)
    closing = threading.Timer(0.05, engine.close)
    closing.start()
    with pytest.raises(EngineClosed):
        list(stream)
    release.set()
    with pytest.raises(EngineClosed):
        list(engine.generate(ASK))


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "key_env"), (429, "limits of your account"), (503, "try again soon")],
)
def test_a_status_says_what_can_be_done(opened: Open, status: int, words: str) -> None:
    engine, _ = opened(
        lambda one: one.send(status, {"error": {"message": "no"}}, x_should_retry="false")
    )
    with pytest.raises(NetworkError, match=f"answered {status}: no") as caught:
        events(engine)
    assert words in caught.value.hint


def test_a_server_that_forbids_retries_is_not_asked_again(opened: Open) -> None:
    engine, server = opened(
        lambda one: one.send(500, {"error": "template"}, x_should_retry="false")
    )
    with pytest.raises(NetworkError, match="template"):
        events(engine)
    assert len(server.seen) == 1


# ---------------------------------------------------------------------------- errors in the stream


@pytest.mark.parametrize(
    ("chunk", "kind", "words"),
    [
        ({"error": {"message": "boom"}}, NetworkError, "boom"),
        ({"error": "plain words"}, NetworkError, "plain words"),
        ({"object": "error", "message": "old vLLM", "code": 400}, UsageError, "old vLLM"),
        ({"error": {"message": "bad key", "code": 401}}, NetworkError, "bad key"),
        (
            {
                "error": {
                    "code": 400,
                    "type": "exceed_context_size_error",
                    "message": "the request exceeds the available context size",
                    "n_prompt_tokens": 9000,
                    "n_ctx": 4096,
                }
            },
            ContextExceeded,
            "exceeds",
        ),
    ],
)
def test_an_error_before_the_first_token_is_a_refusal(
    opened: Open, chunk: object, kind: type[LocalchatError], words: str
) -> None:
    engine, server = opened(lambda one: one.stream(chunk))
    with pytest.raises(kind, match=words) as caught:
        events(engine)
    assert len(server.seen) == 1
    if isinstance(caught.value, ContextExceeded):
        assert caught.value.details == {"context_tokens": 4096, "prompt_tokens": 9000}


@pytest.mark.parametrize(
    "chunk",
    [
        {"object": "error", "message": "out of memory"},
        {"error": {"message": "out of memory: the context length is 10", "code": 400}},
        piece("content_filter"),
        piece("error"),
        piece("abort"),
        {"choices": [{"index": 5, "delta": {"content": "x"}}]},
    ],
)
def test_an_early_end_is_an_error_after_the_partial_answer(opened: Open, chunk: object) -> None:
    engine, _ = opened(lambda one: one.stream(piece(content="half"), chunk))
    got: list[Event] = []
    with pytest.raises(NetworkError):
        got.extend(engine.generate(ASK))
    assert text_of(got) == "half"


def test_ends_of_lines_that_only_unicode_knows_are_text(opened: Open) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"

    def answer(exchange: Exchange) -> None:
        exchange.stream(end=False)
        raw = json.dumps(piece("stop", content=odd), ensure_ascii=False).replace(
            "\\u2028", "\u2028"
        )
        exchange.wfile.write(f"data: {raw}\r\n\r\ndata: [DONE]\r\n\r\n".encode())

    engine, _ = opened(answer)
    assert text_of(events(engine)) == odd


def test_an_endless_line_is_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.engine.remote.client._MAX_LINE_BYTES", 10_000)

    def answer(exchange: Exchange) -> None:
        exchange.stream(end=False)
        while True:
            exchange.wfile.write(b"x" * 5000)

    engine, _ = opened(answer)
    with pytest.raises(NetworkError, match="10000 bytes"):
        events(engine)


def test_a_page_of_html_is_no_answer(opened: Open) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send_response(200)
        exchange.send_header("Content-Type", "text/html; charset=utf-8")
        exchange.send_header("Content-Length", "6")
        exchange.end_headers()
        exchange.wfile.write(b"<html>")

    engine, server = opened(answer)
    with pytest.raises(NetworkError, match="HTML"):
        events(engine)
    assert len(server.seen) == 1


def test_an_answer_that_is_not_streamed_is_taken_whole(opened: Open) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "all "}, {"type": "text", "text": "of it"}],
        "reasoning": "hm",
        "tool_calls": [call, {**call, "id": "d"}],
    }
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    engine, _ = opened(lambda one: one.send(200, whole, Content_Type="application/json"))
    found = events(engine)
    assert text_of(found) == "all of it"
    assert [event.text for event in found if isinstance(event, Reasoning)] == ["hm"]
    assert [event for event in found if isinstance(event, ToolCall)] == [
        ToolCall(0, 0, "c", "f", '{"a": 1}'),
        ToolCall(0, 1, "d", "f", '{"a": 1}'),
    ]
    assert Finished(0, "tool_calls") in found
    assert isinstance(found[-1], Done) and found[-1].usage.prompt_tokens == 3


# ---------------------------------------------------------------------------- refusals


_OPENAI = "This model's maximum context length is 4096 tokens. However, "


@pytest.mark.parametrize(
    ("message", "details"),
    [
        (
            f"{_OPENAI}you requested 9001 tokens (9000 in the messages, 1 in the completion).",
            (4096, 9000),
        ),
        (f"{_OPENAI}your request has 9000 input tokens. Please reduce", (4096, 9000)),
        (f"{_OPENAI}you requested 9000 tokens in the messages, Please reduce", (4096, 9000)),
        (f"{_OPENAI}your messages resulted in 9,000 tokens.", (4096, 9000)),
        (f"{_OPENAI}you requested 9001 tokens.", (4096, None)),
        (
            "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
            (4096, 9000),
        ),
        ("prompt is too long: 9000 tokens > 4096 maximum", (4096, 9000)),
        ("the request exceeds the available context size, try increasing it", (None, None)),
    ],
)
def test_numbers_of_a_refusal_are_taken_where_it_is_plain_what_they_count(
    message: str, details: tuple[int | None, int | None]
) -> None:
    error = error_from_status(
        400, json.dumps({"error": {"message": message, "code": None}}), "http://x"
    )
    assert isinstance(error, ContextExceeded)
    found = error.details.get("context_tokens"), error.details.get("prompt_tokens")
    assert found == details


def test_an_answer_that_is_too_long_is_not_a_prompt_that_is(opened: Open) -> None:
    message = (
        "'max_tokens' is too large: 9000. This model's maximum context length is 4096 tokens and your "
        "request has 10 input tokens"
    )
    engine, _ = opened(lambda one: one.send(400, {"error": {"message": message}}))
    with pytest.raises(UsageError) as caught:
        events(engine)
    assert "--max-tokens" in caught.value.hint


@pytest.mark.parametrize("key", ["a\nb", "a b", "schlüssel", "a\x00"])
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        RemoteEngine(RemoteOptions("http://127.0.0.1:1", key=key), notify=print)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://u:p@x", "u:p@x:80", "http://x:99999", "http://x:y", "http://x:0"]
)
def test_an_address_that_is_none_or_holds_a_password_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        base_url(url)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    "route", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models", "/chat/completions"]
)
def test_a_pasted_address_may_have_the_route(route: str) -> None:
    assert base_url(f"http://127.0.0.1:8000/api{route}") == "http://127.0.0.1:8000/api"


def test_what_cannot_be_asked_there_is_refused(opened: Open) -> None:
    engine, server = opened(lambda one: one.stream(piece("stop")))
    with pytest.raises(UsageError, match="log probabilities"):
        events(engine, GenerateRequest(ASK.prompt, prompt_logprobs=0))
    assert not server.seen
