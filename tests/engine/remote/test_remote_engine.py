"""A remote engine over real sockets: what servers send well, badly, late, and not at all."""

import json
import threading
import time

import pytest

from localchat.engine.events import Accepted, Done, Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from localchat.engine.request import (
    GenerateRequest,
    Grammar,
    Message,
    Messages,
    Sampling,
    TokenIds,
)
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    ModelMissing,
    NetworkError,
    UsageError,
)
from tests.support.remote_server import ASK, Exchange, Open, Server, events, piece, text_of


def test_an_answer_comes_as_our_events_with_usage_and_times(opened: Open) -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 5},
    }

    def answer(exchange: Exchange) -> None:
        exchange.stream(
            piece(role="assistant", content=""),
            piece(reasoning_content="hm"),
            piece(content="Hel"),
            piece(content="lo"),
            piece("stop"),
            {"choices": [], "usage": usage},
        )

    engine, server = opened(answer, key="secret")
    found = events(engine)
    assert isinstance(found[0], Accepted)
    assert text_of(found) == "Hello"
    assert [event.text for event in found if isinstance(event, Reasoning)] == ["hm"]
    assert found[-2] == Finished(0, "stop")
    done = found[-1]
    assert isinstance(done, Done)
    assert (done.usage.prompt_tokens, done.usage.cached_tokens) == (9, 5)
    assert done.usage.completion_tokens == 4
    assert done.timings.ttft_s is not None and done.timings.total_s >= done.timings.ttft_s
    path, body, headers = server.seen[-1]
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True} and body["model"] == "m"
    assert "temperature" not in body, "a server's own defaults stay in force"
    assert headers["Authorization"] == "Bearer secret"


def test_a_server_without_usage_is_counted_by_its_chunks(opened: Open) -> None:
    engine, _ = opened(lambda one: one.stream(piece(content="a"), piece("stop", content="b")))
    done = events(engine)[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 2


def test_tool_calls_come_in_pieces(opened: Open) -> None:
    first = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":1}'}}
    engine, server = opened(
        lambda one: one.stream(
            piece(tool_calls=[first]), piece(tool_calls=[more]), piece("tool_calls")
        )
    )
    tools = ({"type": "function", "function": {"name": "f"}},)
    request = GenerateRequest(Messages((Message("user", "x"),), tools=tools, tool_choice="f"))
    found = events(engine, request)
    calls = [event for event in found if isinstance(event, ToolCall)]
    assert calls == [ToolCall(0, 0, "c1", "f", ""), ToolCall(0, 0, "", "", '{"a":1}')]
    assert Finished(0, "tool_calls") in found
    choice = server.seen[-1][1]["tool_choice"]
    assert choice == {"type": "function", "function": {"name": "f"}}


def test_everything_that_was_asked_for_is_sent(opened: Open) -> None:
    engine, server = opened(lambda one: one.stream(piece("stop")))
    sampling = Sampling(temperature=0.0, top_k=4, min_p=0.1, seed=7, logit_bias={5: -1.0})
    request = GenerateRequest(
        Messages((Message("user", "x"),), thinking="off"),
        sampling,
        n=1,
        max_tokens=9,
        stop=("END",),
        grammar=Grammar("json_schema", '{"type":"object"}'),
    )
    events(engine, request)
    body = server.seen[-1][1]
    assert (body["temperature"], body["top_k"], body["min_p"], body["seed"]) == (0.0, 4, 0.1, 7)
    assert (body["max_tokens"], body["stop"], body["logit_bias"]) == (9, ["END"], {"5": -1.0})
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_what_the_protocol_cannot_carry_is_refused_and_not_left_out(opened: Open) -> None:
    engine, server = opened(lambda one: one.stream(piece("stop")))
    request = GenerateRequest(ASK.prompt, grammar=Grammar("regex", "a+"))
    with pytest.raises(UsageError, match="regex"):
        events(engine, request)
    assert not server.seen


def test_token_ids_go_to_the_plain_route(opened: Open) -> None:
    engine, server = opened(
        lambda one: one.stream({"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}]})
    )
    assert text_of(events(engine, GenerateRequest(TokenIds((1, 2))))) == "ok"
    assert server.seen[-1][0] == "/v1/completions" and server.seen[-1][1]["prompt"] == [1, 2]


def test_a_busy_server_is_asked_again_after_the_time_it_names(
    opened: Open, said: list[str]
) -> None:
    tries: list[float] = []

    def answer(exchange: Exchange) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            exchange.send(503, {"error": {"message": "loading"}}, Retry_After="0.01")
        else:
            exchange.stream(piece("stop", content="now"))

    engine, _ = opened(answer)
    assert text_of(events(engine)) == "now"
    assert len(tries) == 3 and "loading" in said[0]


def test_a_drop_after_the_first_token_is_never_retried(opened: Open) -> None:
    engine, server = opened(lambda one: one.stream(piece(content="half"), end=False))
    got: list[Event] = []
    with pytest.raises(NetworkError, match="dropped mid-answer; the partial answer is kept"):
        got.extend(engine.generate(ASK))
    assert len(server.seen) == 1


def test_an_error_mid_answer_keeps_the_servers_words(opened: Open) -> None:
    engine, _ = opened(
        lambda one: one.stream(piece(content="a"), {"error": {"message": "out of memory"}})
    )
    with pytest.raises(NetworkError, match="out of memory"):
        events(engine)


@pytest.mark.parametrize(
    "chunk",
    ["{", '"text"', {"choices": [{"index": "x"}]}, {"choices": [3]}, {"choices": [{"delta": 4}]}],
)
def test_nonsense_in_the_stream_is_an_error_and_no_crash(opened: Open, chunk: object) -> None:
    engine, _ = opened(lambda one: one.stream(piece(content="a"), chunk, end=False))
    with pytest.raises(NetworkError):
        events(engine)


def test_a_stalling_server_is_given_up(opened: Open) -> None:
    release = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.stream(piece(content="a"), end=False)
        exchange.wfile.flush()
        release.wait(90)

    engine, _ = opened(answer, silence_s=0.2)
    with pytest.raises(NetworkError, match="in time, in the middle of an answer"):
        events(engine)
    release.set()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"message": "bad key"}}, NetworkError),
        (404, {"error": {"message": "no", "code": "model_not_found"}}, ModelMissing),
        (404, {"detail": "Not Found"}, NetworkError),
        (400, {"object": "error", "message": "temperature"}, UsageError),
        (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 10 tokens. However, you requested "
                    "21 tokens (20 in the messages, 1 in the completion).",
                    "code": "context_length_exceeded",
                }
            },
            ContextExceeded,
        ),
    ],
)
def test_refusals_become_our_errors(
    opened: Open, status: int, body: object, kind: type[Exception]
) -> None:
    engine, server = opened(lambda one: one.send(status, body))
    with pytest.raises(kind) as caught:
        events(engine)
    assert len(server.seen) == 1
    if isinstance(caught.value, ContextExceeded):
        assert caught.value.details == {"context_tokens": 10, "prompt_tokens": 20}


def test_closing_the_stream_hangs_up(opened: Open) -> None:
    gone = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.stream(piece(content="a"), end=False)
        try:
            while True:
                exchange.wfile.write(b"data: " + json.dumps(piece(content="b")).encode() + b"\n\n")
                time.sleep(0.01)
        except OSError:
            gone.set()

    engine, _ = opened(answer)
    with engine.generate(ASK) as stream:
        next(one for one in stream if isinstance(one, Text))
    assert gone.wait(90)
    with pytest.raises(EngineClosed):
        list(stream)


def test_the_models_card_gives_context_and_first_model(opened: Open) -> None:
    cards = [{"id": "big", "max_model_len": 4096, "meta": {"n_ctx_train": 8192}}]
    engine, _ = opened(lambda one: one.send(200, {"data": cards}), model="")
    info = engine.info()
    assert (info.model, info.context_tokens, info.context_train) == ("big", 4096, 8192)
    assert not info.warning


def test_nobody_there_is_a_network_error_and_a_wrong_address_a_usage_error(said: list[str]) -> None:
    server = Server(lambda one: None)
    server.stop()
    engine = RemoteEngine(RemoteOptions(server.url, "m"), notify=said.append)
    with pytest.raises(NetworkError, match="nothing listens there"):
        engine.info()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.info()
    with pytest.raises(UsageError):
        RemoteEngine(RemoteOptions("ftp://x"), notify=said.append)
