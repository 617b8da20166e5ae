"""The server over an engine in a process of its own: what is left of sixteen streams when that dies."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from tests.support.http_server import Wire, running

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    model = tmp_path_factory.mktemp("model") / "hashed.script"
    model.write_text(json.dumps({"reply": None, "context_tokens": 16384}))
    options = EngineOptions(
        model,
        load=LoadOptions(context_tokens=16384),
        backend="tests.support.scripted_backend:ScriptedBackend",
    )
    made = LocalEngine(options, notify=lambda text: None)
    yield made
    made.close()


def test_streams_of_an_engine_that_is_killed_end_with_an_error_and_the_next_is_served(
    engine: LocalEngine,
) -> None:
    with running(engine) as (port, _):
        ends: list[str] = []

        def read() -> None:
            with Wire(port) as wire:
                wire.ask("/v1/chat/completions", BODY)
                wire.until(b'"content":"')
                begun.wait()
                ends.append(wire.reply_rest()[-1])

        begun = threading.Barrier(17)
        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        begun.wait()
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        for thread in threads:
            thread.join(90)
        assert len(ends) == 16
        assert {json.loads(end)["error"]["code"] for end in ends} == {"engine_died"}
        with Wire(port) as wire:
            wire.ask("/v1/chat/completions", {**BODY, "stream": False, "max_tokens": 5})
            assert wire.reply().json["usage"]["completion_tokens"] == 5


def test_a_prompt_longer_than_the_context_is_a_real_status(engine: LocalEngine) -> None:
    with running(engine) as (port, _), Wire(port) as wire:
        long = {"role": "user", "content": "word " * 20_000}
        wire.ask("/v1/chat/completions", {"messages": [long], "stream": True})
        reply = wire.reply()
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 16384 tokens" in reply.error["message"]


def test_what_an_engine_cannot_read_is_a_real_status(engine: LocalEngine) -> None:
    with running(engine) as (port, _), Wire(port) as wire:
        wire.ask("/v1/completions", {"prompt": [2**31 - 1]})
        assert wire.reply().status == 400
        wire.ask("/v1/completions", {"prompt": "a", "regex": "("})
        assert wire.reply().status == 400
        wire.ask("/v1/embeddings", {"input": "a"})
        assert wire.reply().status == 400
