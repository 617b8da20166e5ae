"""Anthropic's Messages API over a real loop: what its cache serves, and what is counted."""

import json
import re
from collections.abc import Iterator

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from tests.support.http_server import Wire, running

USER = [{"role": "user", "content": "hi"}]
HEADER = "x-anthropic-billing-header: cc_version=2.1.%d; cc_entrypoint=cli; cch=%05x;"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    model = tmp_path_factory.mktemp("model") / "hashed.script"
    model.write_text(json.dumps({"reply": None}))
    options = EngineOptions(
        model,
        load=LoadOptions(context_tokens=4096),
        backend="tests.support.scripted_backend:ScriptedBackend",
    )
    made = LocalEngine(options, notify=lambda text: None)
    yield made
    made.close()


def test_the_second_request_of_claude_code_is_served_from_the_cache(engine: LocalEngine) -> None:
    system = "You are a programmer who answers in few words. " * 20
    with running(engine) as (port, _):
        usages = []
        for turn in range(2):
            header = {"type": "text", "text": HEADER % (turn, 7919 * turn)}
            body = {
                "max_tokens": 4,
                "system": [header, {"type": "text", "text": system}],
                "messages": USER,
                "stream": turn == 1,
            }
            with Wire(port) as wire:
                wire.ask("/v1/messages", body)
                reply = wire.reply()
            usages.append(reply.named_events[-2][1]["usage"] if turn else reply.json["usage"])
            start = reply.named_events[0][1]["message"]["usage"] if turn else {}
    first, second = usages
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > len(system)
    whole = second["input_tokens"] + second["cache_read_input_tokens"]
    assert first["input_tokens"] == whole == start["input_tokens"]
    assert 0 < second["input_tokens"] < 32


def test_counted_tokens_equal_those_of_an_answer(engine: LocalEngine) -> None:
    asked = {
        "system": "Be brief.",
        "messages": [*USER, {"role": "assistant", "content": "é"}, *USER],
    }
    with running(engine) as (port, _), Wire(port) as wire:
        wire.ask("/v1/messages/count_tokens", {**asked, "model": "m"})
        counted = wire.reply().json
        wire.ask("/v1/messages", {**asked, "max_tokens": 1})
        usage = wire.reply().json["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know(
    engine: LocalEngine,
) -> None:
    with running(engine) as (port, _), Wire(port) as wire:
        wire.ask(
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 2000}]},
        )
        reply = wire.reply()
    assert (reply.status, reply.anthropic_error["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(
        r"prompt is too long: 1\d{4} tokens > 4096 maximum", reply.anthropic_error["message"]
    )
