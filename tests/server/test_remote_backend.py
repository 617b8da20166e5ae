"""A server over one on another machine that speaks less than ours do, as vLLM and hosted ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from localchat.engine.request import Message, Messages
from localchat.server.token_counts import estimated_tokens
from tests.support.http_server import Reply, Wire, running
from tests.support.remote_server import Exchange, Handler, Server, piece

USER = {"role": "user", "content": "hi"}


@contextmanager
def behind(answer: Handler) -> Iterator[tuple[int, Server]]:
    """The port of a server whose engine is a remote that answers chats so, and knows no other route."""

    def route(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(200, {"data": [{"id": "m", "max_model_len": 4096}]})
        elif exchange.path in ("/v1/chat/completions", "/v1/completions"):
            answer(exchange)
        else:
            exchange.send(404, {"detail": "Not Found"})

    server = Server(route)
    engine = RemoteEngine(RemoteOptions(server.url), notify=lambda _: None)
    try:
        with running(engine) as (port, _):
            yield port, server
    finally:
        engine.close()
        server.stop()


def asked(port: int, path: str, body: Any) -> Reply:
    with Wire(port) as wire:
        wire.ask(path, body)
        return wire.reply()


def hello(exchange: Exchange) -> None:
    exchange.stream(piece(content="Hello."), piece("stop"))


def test_a_late_system_message_needs_no_look_at_the_prompt_there() -> None:
    messages = [USER, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    with behind(hello) as (port, server):
        reply = asked(port, "/v1/chat/completions", {"messages": messages})
    assert reply.json["choices"][0]["message"]["content"] == "Hello."
    assert server.seen[-1][1]["messages"] == messages


def test_a_request_without_a_limit_is_answered_where_ours_finds_no_room() -> None:
    def answer(exchange: Exchange) -> None:
        expected = exchange.seen[-1][1]["max_tokens"]
        if expected > 4086:
            message = (
                f"This model's maximum context length is 4096 tokens. However, you requested {expected + 10} "
                f"tokens (10 in the messages, {expected} in the completion)."
            )
            exchange.send(400, {"object": "error", "message": message})
        else:
            hello(exchange)

    with behind(answer) as (port, _):
        reply = asked(port, "/v1/chat/completions", {"messages": [USER]})
    assert reply.status == 200


def test_tokens_that_nobody_can_count_are_guessed_for_who_watches_a_context() -> None:
    with behind(hello) as (port, _):
        reply = asked(port, "/v1/messages/count_tokens", {"messages": [USER]})
    guess = estimated_tokens(Messages((Message("user", "hi"),)))
    assert reply.json == {"input_tokens": guess} and guess > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x"}),
        ("/apply-template", {"messages": [USER]}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_what_is_not_offered_there_is_not_offered_here(path: str, body: Any) -> None:
    with behind(hello) as (port, _):
        reply = asked(port, path, body)
    assert (reply.status, reply.error["code"]) == (501, "not_supported")
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("status", "sent", "code", "said"),
    [
        (401, 502, "upstream_error", "answered with status 401"),
        (500, 502, "upstream_error", "answered with status 500"),
        (429, 503, "upstream_busy", "overloaded"),
    ],
)
def test_upstream_refusal_is_reported_without_names(
    status: int, sent: int, code: str, said: str
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send(status, {"error": {"message": "secret.host says no"}}, x_should_retry="false")

    with behind(answer) as (port, _):
        reply = asked(port, "/v1/chat/completions", {"messages": [USER]})
    assert (reply.status, reply.error["code"]) == (sent, code)
    assert said in reply.error["message"] and "secret" not in reply.error["message"]


def test_upstream_answer_that_breaks_off_ends_with_an_error() -> None:
    with behind(lambda exchange: exchange.stream(piece(content="half"), end=False)) as (port, _):
        reply = asked(port, "/v1/chat/completions", {"messages": [USER], "stream": True})
    *_, last = reply.chunks_json
    assert last["error"]["code"] == "upstream_error"
    assert "upstream server failed" in last["error"]["message"]


def test_log_probabilities_of_a_completion_come_through() -> None:
    sent = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}
    choice = {"index": 0, "text": "a", "logprobs": sent, "finish_reason": "stop"}
    with behind(lambda exchange: exchange.stream({"choices": [choice]})) as (port, _):
        reply = asked(port, "/v1/completions", {"prompt": "x", "logprobs": 1})
    assert reply.json["choices"][0]["logprobs"] == {**sent, "text_offset": [0]}


def test_an_address_in_a_sentence_keeps_its_letters() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send(400, {"error": {"message": "no such temperature"}})

    with behind(answer) as (port, server):
        error = asked(port, "/v1/chat/completions", {"messages": [USER]}).error
    assert error["message"] == f"{server.url} answered 400: no such temperature."


def test_a_template_there_that_knows_no_system_gets_its_text_from_the_user() -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.seen[-1][1]["messages"][0]["role"] == "system":
            exchange.send(400, {"object": "error", "message": "System role not supported"})
        else:
            hello(exchange)

    messages = [{"role": "system", "content": "Be brief."}, USER]
    with behind(answer) as (port, server):
        reply = asked(port, "/v1/chat/completions", {"messages": messages})
    assert reply.status == 200
    assert server.seen[-1][1]["messages"] == [{"role": "user", "content": "Be brief.\n\nhi"}]


def test_a_gap_is_filled_without_further_files_where_nobody_takes_them() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]})

    files = [{"filename": "a.py", "text": "a"}, {"filename": "b.py", "text": "b"}]
    gap = {"input_prefix": "def f(", "input_suffix": ")", "input_extra": files}
    with behind(answer) as (port, server):
        sent = asked(port, "/infill", gap).json
    assert (sent["content"], sent["truncated"]) == ("x", True)
    assert server.seen[-1][1]["suffix"] == ")"
