"""Timings and facts that a remote server reports, and those that are left unknown."""

from typing import Any

import pytest

from localchat.engine.events import (
    Done,
    MetricsSnapshot,
    Speculation,
    Text,
    Usage,
)
from localchat.engine.remote.engine import RemoteEngine
from localchat.engine.request import GenerateRequest, Infill
from localchat.engine.stats_line import stats_line
from localchat.errors import (
    NetworkError,
    UsageError,
)
from localchat.metrics import NOT_REPORTED
from tests.support.remote_server import ASK, Exchange, Open, events, piece, text_of


def done_of(engine: RemoteEngine, request: GenerateRequest = ASK) -> Done:
    last = events(engine, request)[-1]
    assert isinstance(last, Done)
    return last


# ---------------------------------------------------------------------------- what a server tells of itself


def test_unreported_values_are_not_shown(opened: Open) -> None:
    engine, _ = opened(lambda one: one.stream(piece(content="a"), piece("stop", content="b")))
    done = done_of(engine)
    assert (done.kv_used_tokens, done.kv_total_tokens, done.usage.prompt_tokens) == (0, 0, 0)
    assert done.speculation == Speculation(off=NOT_REPORTED)
    assert done.timings.prefill_tokens_per_s is None
    line = stats_line(done)
    assert "KV" not in line and "drafts" not in line and "TTFT" in line


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": "9", "completion_tokens": True, "prompt_tokens_details": 3},
        {
            "prompt_tokens": -1,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": -2},
        },
        {"prompt_tokens": None, "completion_tokens": 1.5},
        {"prompt_tokens_details": {"cached_tokens": 99}},
        {"completion_tokens_details": {"reasoning_tokens": "2"}},
        {},
        [],
        None,
    ],
)
def test_a_usage_that_is_none_counts_for_nothing(opened: Open, usage: object) -> None:
    engine, _ = opened(lambda one: one.stream(piece("stop", content="a"), {"usage": usage}))
    found = done_of(engine).usage
    assert found == Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=1)


def test_tokens_of_reasoning_are_taken_over(opened: Open) -> None:
    usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
    engine, _ = opened(lambda one: one.stream(piece("stop", content="a"), {"usage": usage}))
    assert done_of(engine).usage.reasoning_tokens == 3


def test_timings_of_llama_server_are_taken_over(opened: Open) -> None:
    timings = {
        "cache_n": 90,
        "prompt_n": 10,
        "prompt_ms": 50.0,
        "prompt_per_second": 200.0,
        "predicted_n": 2,
        "predicted_per_second": 33.0,
        "draft_n": 6,
        "draft_n_accepted": 4,
    }

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(200, {"data": [{"id": "m", "owned_by": "llamacpp"}]})
        else:
            exchange.stream(piece(content="a"), {**piece("stop"), "timings": timings})

    engine, _ = opened(answer)
    done = done_of(engine)
    assert (done.usage.prompt_tokens, done.usage.cached_tokens) == (100, 90)
    assert done.usage.completion_tokens == 2
    assert done.timings.prefill_tokens_per_s == 200.0
    assert done.speculation == Speculation(6, 4)


def test_only_a_localchat_server_is_asked_for_timings(opened: Open) -> None:
    timings: dict[str, Any] = {
        "queue_s": 0.5,
        "ttft_s": 1.5,
        "kv_used_tokens": 12,
        "kv_total_tokens": 4096,
        "drafted": 8,
        "accepted": 3,
        "speculation_off": "",
        "fingerprint": "abc",
    }

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(200, {"data": [{"id": "m", "owned_by": "localchat"}]})
        else:
            exchange.stream(piece("stop", content="a"), {"choices": [], "timings": timings})

    engine, server = opened(answer, model="")
    done = done_of(engine)
    assert server.seen[-1][1]["timings"] is True
    assert (done.kv_used_tokens, done.kv_total_tokens, done.fingerprint) == (12, 4096, "abc")
    assert (done.timings.queue_s, done.speculation) == (0.5, Speculation(8, 3))
    assert done.timings.ttft_s != 1.5, "that is measured here"
    other, strange = opened(lambda one: one.stream(piece("stop", content="a")))
    events(other)
    assert "timings" not in strange.seen[-1][1]


def test_chunks_of_many_tokens_give_no_time_per_token(opened: Open) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 40}
    engine, _ = opened(
        lambda one: one.stream(*[piece(content="many words")] * 5, piece("stop"), {"usage": usage})
    )
    assert done_of(engine).timings.tpot_ms_p50 is None


def test_metrics_come_with_the_first_token(opened: Open) -> None:
    engine, _ = opened(lambda one: one.stream(piece(content="a"), piece("stop", content="b")))
    found = events(engine)
    at = next(n for n, event in enumerate(found) if isinstance(event, MetricsSnapshot))
    assert isinstance(found[at - 1], Text) and isinstance(found[-1], Done)
    figures = found[at]
    assert isinstance(figures, MetricsSnapshot) and figures.ttft_s is not None


@pytest.mark.parametrize(
    ("card", "context"),
    [
        ({"max_model_len": 4096}, 4096),
        ({"max_model_len": 131_072, "meta": {"n_ctx": 8192, "n_ctx_train": 131_072}}, 8192),
        ({"max_model_len": True, "context_length": "many", "meta": []}, 0),
        ({"max_model_len": -1, "context_length": 2048}, 2048),
        ({}, 0),
    ],
)
def test_the_context_is_read_from_the_models_entry(
    opened: Open, card: dict[str, Any], context: int
) -> None:
    engine, _ = opened(lambda one: one.send(200, {"data": [{"id": "m", **card}]}))
    info = engine.info()
    assert info.context_tokens == context
    assert bool(info.warning) == (context == 0)


def test_without_a_list_of_models_the_users_name_is_used(opened: Open) -> None:
    engine, server = opened(lambda one: one.send(404, {"detail": "Not Found"}))
    assert (engine.info().model, engine.info().context_tokens) == ("m", 0)
    assert len(server.seen) == 1
    nameless, _ = opened(lambda one: one.send(404, {"detail": "Not Found"}), model="")
    with pytest.raises(NetworkError):
        nameless.info()


def test_trouble_with_the_list_of_models_spoils_no_answer(opened: Open) -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(500, {})
        else:
            exchange.stream(piece("stop", content="fine"))

    engine, _ = opened(answer)
    with pytest.raises(NetworkError):
        engine.info()
    assert text_of(events(engine)) == "fine"
    assert engine.info().model == "m"


# ---------------------------------------------------------------------------- gaps


def test_a_gap_is_a_completion_with_a_suffix(opened: Open) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream({"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]})

    engine, server = opened(answer)
    with pytest.raises(UsageError, match="context files"):
        events(engine, GenerateRequest(Infill("a(", ")", (("x.py", "X"),))))
    assert text_of(events(engine, GenerateRequest(Infill("a(", ")")))) == "b"
    path, body, _ = server.seen[-1]
    assert (path, body["prompt"], body["suffix"]) == ("/v1/completions", "a(", ")")
