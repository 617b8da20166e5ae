"""Our own programs on a running server: everything an engine tells arrives, and leaving cancels at once."""

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localchat.engine.attached.protocol import PREFIX, AttachSpec
from localchat.engine.events import (
    Accepted,
    Done,
    Finished,
    Prefill,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
)
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.engine.request import TextPrompt as PlainText
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    EngineDied,
    LocalchatError,
    ModelMissing,
    UsageError,
)
from localchat.fit.load_options import LoadOptions
from tests.support.local_api_server import Running, running, until
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

ASKED = GenerateRequest(prompt=PlainText("hello"), sampling=Sampling(seed=3), user="me")
HELLO = Messages((Message("user", "hi"),))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[Running]:
    options = {"scripted": EngineOptions(Path("/models/scripted"))}
    with running(options, lambda options, say: engine) as server:
        yield server


def test_every_kind_of_event_arrives_unchanged(server: Running, engine: ScriptedEngine) -> None:
    sent = (
        Reasoning(0, "hm"),
        Text(0, "héllo \N{GRINNING FACE}", (TokenLogprob(5, b"\xff", -0.5, ((1, b"x", -1.0),)),)),
        ToolCall(0, 0, "id", "name", '{"a":1}'),
        Finished(0, "tool_calls"),
    )
    engine.script = lambda request: ScriptedAnswer(events=sent)
    events = list(server.attach("scripted").generate(ASKED))
    assert isinstance(events[0], Accepted) and events[0].seed == 3
    assert isinstance(events[1], Prefill)
    assert tuple(events[2:-1]) == sent
    assert isinstance(events[-1], Done)
    assert engine.requests == [ASKED]


def test_questions_are_answered_as_by_the_engine_itself(
    server: Running, engine: ScriptedEngine
) -> None:
    attached = server.attach("scripted")
    assert attached.tokenize("héllo", special=True) == engine.tokenize("héllo")
    assert attached.detokenize([104, 105]) == "hi"
    assert attached.render(HELLO) == engine.render(HELLO)
    assert attached.info() == engine.info()
    assert attached.stats() == engine.stats()
    vectors = attached.embed(["one", "three"])
    assert (list(vectors), vectors.tokens) == ([[3.0, 1.0], [5.0, 1.0]], (3, 5))
    assert server.pool.loaded()[0].clients == ()


def test_error_keeps_its_kind_hint_and_details(server: Running, engine: ScriptedEngine) -> None:
    error = ContextExceeded("too long", hint="shorten it", prompt_tokens=9, context_tokens=4)
    engine.script = lambda request: ScriptedAnswer(pieces=("so far",), error=error)
    stream = server.attach("scripted").generate(ASKED)
    with pytest.raises(ContextExceeded) as caught:
        list(stream)
    assert (caught.value.hint, caught.value.details) == (error.hint, error.details)


def test_unknown_model_is_refused_in_the_stream_and_in_a_question(server: Running) -> None:
    attached = server.attach("nobody")
    with pytest.raises(ModelMissing):
        list(attached.generate(ASKED))
    with pytest.raises(ModelMissing):
        attached.info()


def test_closing_the_stream_cancels_on_the_server(server: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda request: ScriptedAnswer(pieces=("word ",) * 20_000, gap_s=0.01)
    with server.attach("scripted").generate(ASKED) as stream:
        next(one for one in stream if isinstance(one, Text))
        assert server.pool.loaded()[0].clients == ("me",)
    until(lambda: engine.cancelled == 1)
    until(lambda: server.pool.loaded()[0].clients == ())


def test_leaving_in_silence_cancels_too(server: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda request: ScriptedAnswer(gap_s=60.0)
    attached = server.attach("scripted")
    stream = attached.generate(ASKED)
    next(one for one in stream if isinstance(one, Prefill))
    attached.close()
    until(lambda: engine.cancelled == 1)
    with pytest.raises(EngineClosed):
        next(iter(attached.generate(ASKED)))


def test_stream_closed_before_it_began_asks_nothing_for_long(
    server: Running, engine: ScriptedEngine
) -> None:
    engine.script = lambda request: ScriptedAnswer(gap_s=60.0)
    server.attach("scripted").generate(ASKED).close()
    until(lambda: engine.cancelled == len(engine.requests))
    until(lambda: all(one.clients == () for one in server.pool.loaded()))


def test_what_cannot_be_sent_is_refused_here(server: Running) -> None:
    attached = server.attach("scripted")
    with pytest.raises(UsageError):
        attached.tokenize("\ud800")
    with pytest.raises(UsageError):
        list(attached.generate(GenerateRequest(prompt=PlainText("\ud800"))))


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer wrong", "Bearer the-token2"])
@pytest.mark.parametrize("route", ["generate", "query", "ps", "stop"])
def test_nobody_without_the_token_gets_anything(server: Running, token: str, route: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    verb = "GET" if route == "ps" else "POST"
    connection.request(verb, f"{PREFIX}/{route}", b"", {"Authorization": token})
    response = connection.getresponse()
    assert response.status == 403
    assert b"scripted" not in response.read()
    connection.close()
    assert not server.stopped.is_set()


def test_body_of_another_kind_is_refused(server: Running) -> None:
    for kind, body in (("application/json", b"{}"), ("application/vnd.localchat", b"\xc1")):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        head = {"Authorization": "Bearer the-token", "Content-Type": kind}
        connection.request("POST", f"{PREFIX}/stop", body, head)
        assert connection.getresponse().status == 400
        connection.close()


def test_ps_lists_models_and_clients(server: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda request: ScriptedAnswer(gap_s=60.0)
    stream = server.attach("scripted", "the terminal").generate(
        GenerateRequest(prompt=PlainText("x"))
    )
    next(iter(stream))
    body = server.server.loaded_models()
    assert body is not None
    (model,) = json.loads(body)["models"]
    assert model["name"] == "scripted" and model["clients"] == ["the terminal"]
    stream.close()


def test_stop_unloads_a_model_or_ends_the_server(server: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda request: ScriptedAnswer(gap_s=60.0)
    stream = server.attach("scripted").generate(ASKED)
    next(iter(stream))
    assert server.server.stop("scripted").ended == 1
    assert engine.closed
    assert server.server.stop("scripted").ended is None
    assert server.server.stop("nobody").ended is None
    assert not server.stopped.is_set()
    server.server.stop(None)
    until(server.stopped.is_set)


def test_server_that_is_gone_raises_an_error_with_the_reason(server: Running) -> None:
    from localchat.engine.attached.engine import AttachedEngine, ServerClient

    nowhere = ServerClient("http://127.0.0.1:1", "t")
    assert nowhere.loaded_models() is None
    attached = AttachedEngine(nowhere, AttachSpec(b"", "m"), "u")
    with pytest.raises(EngineDied, match="was lost") as lost:
        list(attached.generate(ASKED))
    assert isinstance(lost.value.__cause__, ConnectionRefusedError)
    with pytest.raises(EngineDied):
        attached.info()
    assert ServerClient(server.server.url, "wrong").loaded_models() is None
    with pytest.raises(LocalchatError, match="rejected"):
        list(
            AttachedEngine(
                ServerClient(server.server.url, "wrong"), AttachSpec(b"", "m"), "u"
            ).generate(ASKED)
        )


# ---------------------------------------------------------------------------- over a real child


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., EngineOptions]:
    def write(**script: object) -> EngineOptions:
        path = tmp_path / "model.script"
        path.write_text(json.dumps(script))
        backend = "tests.support.scripted_backend:ScriptedBackend"
        return EngineOptions(path, load=LoadOptions(max_slots=4), backend=backend)

    return write


def _local(options: EngineOptions, say: Callable[[str], None]) -> LocalEngine:
    return LocalEngine(options, notify=say)


def greedy(text: str, **more: object) -> GenerateRequest:
    more = {"max_tokens": 40, **more}
    sampling = Sampling(temperature=0.0)
    return GenerateRequest(prompt=PlainText(text), sampling=sampling, **more)  # type: ignore[arg-type]


def said(events: object) -> str:
    return "".join(one.text for one in events if isinstance(one, Text))  # type: ignore[attr-defined]


def test_greedy_text_is_the_one_of_an_engine_alone(script: Callable[..., EngineOptions]) -> None:
    options = script()
    alone = LocalEngine(options, notify=lambda text: None)
    try:
        expected = [said(alone.generate(greedy(word))) for word in ("one", "two", "three")]
    finally:
        alone.close()
    with running({"m": options}, _local) as server:
        streams = [server.attach("m").generate(greedy(word)) for word in ("one", "two", "three")]
        assert [said(stream) for stream in streams] == expected
        assert all(expected)


def test_cancel_reaches_the_step_in_which_it_comes(script: Callable[..., EngineOptions]) -> None:
    with running({"m": script(step_s=0.02)}, _local) as server:
        attached = server.attach("m")
        streams = [
            attached.generate(greedy("x" * 9, salt=str(i), max_tokens=3000)) for i in range(3)
        ]
        streams.append(attached.generate(greedy("x" * 9, salt="3")))
        for stream in streams:
            next(one for one in stream if isinstance(one, Text))
        for stream in streams[:3]:
            stream.close()
        until(lambda: attached.stats().cancelled == 3)
        assert said(streams[3])


def test_engine_killed_under_streams_ends_each_with_a_reason_and_serves_the_next(
    script: Callable[..., EngineOptions],
) -> None:
    with running({"m": script(step_s=0.02)}, _local) as server:
        attached = server.attach("m")
        endless = {"max_tokens": 3000}
        streams = [attached.generate(greedy("y" * 5, salt=str(i), **endless)) for i in range(4)]
        for stream in streams:
            next(one for one in stream if isinstance(one, Text))
        streams += [attached.generate(greedy("y" * 5, salt=str(i), **endless)) for i in range(4)]
        for stream in streams[4:]:
            next(one for one in stream if isinstance(one, Accepted))
        ((_, engine),) = server.pool.engines()
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDied, match="SIGKILL"):
                list(stream)
        assert said(attached.generate(greedy("again")))
