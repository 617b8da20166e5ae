"""Clients that leave, clients that are slow, a server that stops."""

import asyncio
import gc
import json
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, pairwise

import pytest

from localchat.engine.events import Finished, Text
from localchat.engine.interface import Vectors
from localchat.errors import EngineClosed
from localchat.server import uvicorn_server
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.leases import AsyncLease
from localchat.server.uvicorn_http import Connection
from tests.support.http_server import (
    UNHURRIED,
    Reply,
    Stage,
    StageEngine,
    Wire,
    chat,
    running,
    serving,
    settled,
)
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.single_engine import SingleEngine

ENDLESS = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
BODY = {"messages": [{"role": "user", "content": "endless"}]}


def test_server_that_is_told_to_stop_does_not_wait_for_its_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uvicorn_server, "_TICK_S", 3600.0)
    with running(ScriptedEngine()) as (port, _), Wire(port) as wire:
        wire.ask("/v1/embeddings", {})
        assert wire.reply().status == 400
    # The end of the block waited for the server's thread.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(stage: Stage, stream: bool) -> None:
    stage.scripts["endless"] = ENDLESS
    before, asked = stage.engine.cancelled, len(stage.engine.requests)
    with Wire(stage.port) as wire:
        wire.ask("/v1/chat/completions", {**BODY, "stream": stream})
        if stream:
            wire.until(b"word ")
        assert settled(lambda: len(stage.engine.requests) == asked + 1)
    assert settled(lambda: stage.engine.cancelled == before + 1)


def test_all_prompts_of_a_request_are_cancelled_with_it(stage: Stage) -> None:
    stage.scripts["endless"] = ENDLESS
    before, asked = stage.engine.cancelled, len(stage.engine.requests)
    with Wire(stage.port) as wire:
        wire.ask("/v1/completions", {"prompt": ["endless"] * 3})
        assert settled(lambda: len(stage.engine.requests) == asked + 3)
    assert settled(lambda: stage.engine.cancelled == before + 3)


def test_a_client_that_leaves_in_a_silence_is_noticed_too(stage: Stage) -> None:
    word = stage.plays("silent", Text(0, "a"), Finished(0, "stop"), gap_s=6.0)
    before = stage.engine.cancelled
    with Wire(stage.port) as wire:
        messages = [{"role": "user", "content": word}]
        wire.ask("/v1/chat/completions", {"messages": messages, "stream": True})
        wire.until(b"assistant")
    assert settled(lambda: stage.engine.cancelled == before + 1)


def test_an_answer_that_goes_round_in_circles_is_ended(stage: Stage) -> None:
    stage.scripts["loop"] = ScriptedAnswer(("the same again. ",) * 1000)
    reply = chat(stage, "loop")
    choice = reply.json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")
    assert 600 <= len(choice["message"]["content"]) < 700
    assert reply.json["usage"]["completion_tokens"] == len(choice["message"]["content"]) // 16
    last = chat(stage, "loop", stream=True).chunks_json[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "repetition")


def test_the_guard_against_circles_can_be_off() -> None:
    with serving(ServerConfig(loop_guard=False)) as stage:
        stage.scripts["loop"] = ScriptedAnswer(("the same again. ",) * 1000)
        assert len(chat(stage, "loop").json["choices"][0]["message"]["content"]) == 16_000


def test_headers_that_come_a_byte_at_a_time_are_cut_off() -> None:
    with (
        serving(ServerConfig(limits=ServerLimits(header_s=0.3))) as stage,
        Wire(stage.port) as wire,
    ):
        stopped = threading.Event()

        def trickle() -> None:
            for byte in (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 999
            ):
                if stopped.wait(0.02):
                    return
                try:
                    wire.send(bytes([byte]))
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        reply = wire.reply()
        stopped.set()
        thread.join()
        assert (reply.status, reply.error["code"]) == (408, "timeout")
        assert wire.closed()


def test_silent_connection_is_closed() -> None:
    with (
        serving(ServerConfig(limits=ServerLimits(header_s=0.1))) as stage,
        Wire(stage.port) as wire,
    ):
        assert wire.reply().status == 408


def test_the_second_request_of_a_connection_has_its_own_time() -> None:
    with serving() as stage, Wire(stage.port) as wire:
        wire.ask("/health")
        assert wire.reply().status == 200
        (connection,) = stage.server.server_state.connections
        assert isinstance(connection, Connection)
        assert settled(lambda: connection._header_timer is None), "none runs between two requests"
        vars(connection)["limits"] = ServerLimits(header_s=0.1)
        wire.ask("/health")
        assert wire.reply().status == 200
        wire.send(b"GET /health HT")
        assert wire.reply().status == 408


def test_idle_connection_is_closed_even_if_its_body_came_after_the_answer() -> None:
    with serving(ServerConfig(limits=ServerLimits(idle_s=0.0))) as stage, Wire(stage.port) as wire:
        wire.ask("/nothing", b"{", headers={"content-length": "2"})
        assert wire.reply().status == 404
        wire.send(b"}")
        assert wire.closed()


def test_a_body_that_does_not_come_is_cut_off() -> None:
    with serving(ServerConfig(limits=ServerLimits(body_s=0.2))) as stage, Wire(stage.port) as wire:
        wire.ask("/v1/chat/completions", b"{", headers={"content-length": "100"})
        reply = wire.reply()
        assert (reply.status, reply.error["code"]) == (408, "timeout")
        assert wire.closed()


def test_a_body_that_is_too_large_is_refused_before_and_while_it_comes() -> None:
    with serving(ServerConfig(limits=ServerLimits(media_body_bytes=1000))) as stage:
        with Wire(stage.port) as wire:
            wire.ask("/v1/chat/completions", b"{", headers={"content-length": "2000"})
            assert wire.reply().error["code"] == "request_too_large"
        with Wire(stage.port) as wire:
            chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
            wire.ask("/v1/chat/completions", chunk, headers={"transfer-encoding": "chunked"})
            reply = wire.reply()
            assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_too_many_connections_are_refused() -> None:
    with serving(ServerConfig(limits=ServerLimits(connections=2))) as stage:
        with Wire(stage.port) as one, Wire(stage.port) as two:
            one.ask("/health")
            two.ask("/health")
            assert one.reply().status == two.reply().status == 200
            with Wire(stage.port) as three:
                three.ask("/v1/models")
                reply = three.reply()
                assert (reply.status, reply.error["code"]) == (503, "server_busy")
                assert reply.headers["retry-after"] == "1"
        assert settled(lambda: _healthy(stage))


def test_probes_are_answered_while_half_open_connections_hold_all_places() -> None:
    limits = ServerLimits(connections=2, probe_connections=2)
    with serving(ServerConfig(limits=limits)) as stage, ExitStack() as stack:
        for _ in range(8):
            half_open = stack.enter_context(Wire(stage.port))
            half_open.socket.sendall(b"GET /health HT")
        for path in ("/health", "/metrics", "/health"):
            with Wire(stage.port) as probe:
                probe.ask(path)
                assert probe.reply().status == 200


def test_probes_are_answered_while_answered_probes_hold_all_places() -> None:
    limits = replace(UNHURRIED.limits, connections=2, probe_connections=2)
    with serving(replace(UNHURRIED, limits=limits)) as stage, ExitStack() as stack:
        for _ in range(8):
            probe = stack.enter_context(Wire(stage.port))
            probe.ask("/health")
            assert probe.reply().status == 200


def _healthy(stage: Stage) -> bool:
    with Wire(stage.port) as wire:
        wire.ask("/health")
        return wire.reply().status == 200


def test_a_slow_reader_slows_nobody_else(stage: Stage) -> None:
    stage.scripts["flood"] = ScriptedAnswer((("x" * 1000 + "y") * 10,) * 2000)
    with Wire(stage.port) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        messages = [{"role": "user", "content": "flood"}]
        slow.ask("/v1/chat/completions", {"messages": messages, "stream": True})
        slow.until(b"assistant")
        for _ in range(5):
            assert chat(stage).json["choices"][0]["message"]["content"] == "Hello."


def test_a_reader_that_takes_nothing_is_dropped() -> None:
    with serving(ServerConfig(limits=ServerLimits(stall_s=0.2), loop_guard=False)) as stage:
        stage.scripts["flood"] = ScriptedAnswer((("x" * 1000 + "y") * 100,) * 2000)
        with Wire(stage.port) as slow:
            messages = [{"role": "user", "content": "flood"}]
            slow.ask("/v1/chat/completions", {"messages": messages, "stream": True})
            assert settled(lambda: _landed(stage) == 1)


def test_a_reader_that_takes_only_the_beginning_of_its_answers_is_dropped() -> None:
    with (
        serving(replace(UNHURRIED, limits=replace(UNHURRIED.limits, stall_s=0.2))) as stage,
        Wire(stage.port) as slow,
    ):
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.ask("/health")
        assert slow.reply().status == 200
        state = stage.server.server_state
        (connection,) = state.connections
        assert isinstance(connection, Connection)

        def answered(requests: int) -> bool:
            return settled(lambda: state.total_requests >= requests)

        for number in count(2):
            if connection.transport.get_write_buffer_size():
                break
            slow.ask("/tokenize", {"content": "x" * 8000})  # 32 KB, less than asyncio's limit
            assert answered(number)
        assert settled(lambda: not state.connections)


def test_a_reader_that_is_slower_than_the_limit_but_reads_is_kept() -> None:
    with serving() as stage, Wire(stage.port) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        text = " ".join(map(str, range(1_000_000)))
        stage.scripts["long"] = ScriptedAnswer((text,))
        slow.ask("/health")
        assert slow.reply().status == 200
        (connection,) = stage.server.server_state.connections
        assert isinstance(connection, Connection)
        # A fixed size keeps the kernel from taking the whole answer as soon as the client reads.
        server_socket = connection.transport.get_extra_info("socket")
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        slow.ask("/v1/completions", {"prompt": "long"})
        slow.head()
        assert settled(lambda: connection.flow.write_paused)
        unsent = connection.transport.get_write_buffer_size()
        body = slow.exactly(len(text) - unsent + 100_000)
        assert settled(lambda: connection.transport.get_write_buffer_size() < unsent - 50_000)
        connection.loop.call_soon_threadsafe(connection._on_stalled)
        body += slow.exactly(len(text) - len(body))
        assert body.count(b" ") > 900_000


def _landed(stage: Stage) -> int:
    service = stage.server._service
    return int(len(stage.engine.requests) - service.tracker.running - service.tracker.waiting)


def test_stopping_server_ends_open_streams_with_an_error() -> None:
    with serving() as stage:
        stage.scripts["endless"] = ENDLESS
        wire = Wire(stage.port)
        wire.ask("/v1/chat/completions", {**BODY, "stream": True})
        wire.until(b"word ")
    rest = wire.reply_rest()
    assert json.loads(rest[-1])["error"]["code"] == "server_stopping"
    assert stage.engine.cancelled == 1


def test_a_server_that_stops_logs_no_failure_of_the_engine_that_it_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as stage:
        stage.scripts["endless"] = ENDLESS
        wire = Wire(stage.port)
        wire.ask("/v1/chat/completions", BODY)
        assert settled(lambda: stage.server._service.tracker.running == 1)
    with wire:
        assert wire.reply().error["code"] == "server_stopping"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_server_that_stops_answers_those_who_wait_for_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uvicorn_server, "_THREADS", 1)
    engine = Embedding()
    with running(engine, engines=Owned) as (port, _):
        wire = Wire(port)
        wire.ask("/v1/embeddings", {"input": "a"})
        assert engine.began.wait(90)
    with wire:
        assert wire.reply().error["code"] == "model_unloaded"


class Embedding(ScriptedEngine):
    """Embeds for as long as it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.ended = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        self.began.set()
        assert self.ended.wait(90)
        raise EngineClosed("the model was unloaded")

    def close(self, deadline_s: float = 2.0) -> None:
        self.ended.set()


class Owned(SingleEngine):
    """Closes its engine with the server."""

    def close(self) -> None:
        self.engine.close()


def test_a_server_that_stops_drops_readers_that_take_nothing_without_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "_CUT_OFF_S", 0.0)
    with serving(replace(UNHURRIED, loop_guard=False)) as stage:
        stage.scripts["flood"] = ScriptedAnswer((("x" * 1000 + "y") * 100,) * 2000)
        wire = Wire(stage.port)
        messages = [{"role": "user", "content": "flood"}]
        wire.ask("/v1/chat/completions", {"messages": messages, "stream": True})
        wire.until(b"assistant")
        (connection,) = stage.server.server_state.connections
        assert isinstance(connection, Connection)
        assert settled(lambda: connection.flow.write_paused)
    wire.socket.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_server_that_stops_does_not_wait_for_a_load() -> None:
    with serving() as stage:
        stage.server._service.engines = Loading()
        wire = Wire(stage.port)
        wire.ask("/v1/chat/completions", BODY)
        assert settled(lambda: stage.server._service.tracker.waiting == 1)
    with wire:
        assert wire.reply().error["code"] == "server_stopping"


class Loading(SingleEngine):
    """Takes for ever to lease."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(), "x")

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        await asyncio.sleep(3600)
        raise AssertionError


def test_client_that_leaves_during_a_load_cancels_its_request() -> None:
    with serving() as stage:
        stage.server._service.engines = Loading()
        with Wire(stage.port) as wire:
            wire.ask("/v1/chat/completions", BODY)
            assert settled(lambda: stage.server._service.tracker.waiting == 1)
        assert settled(lambda: stage.server._service.tracker.waiting == 0)


def test_a_server_that_stops_lets_what_runs_end_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "localchat.server")
    with serving(drain_s=90.0) as stage:
        stage.scripts["short"] = ScriptedAnswer(("a", "b", "c"), gap_s=0.1)
        wire = Wire(stage.port)
        messages = [{"role": "user", "content": "short"}]
        wire.ask("/v1/chat/completions", {"messages": messages, "stream": True})
        wire.until(b"assistant")
    assert wire.reply_rest()[-1] == "[DONE]"
    assert "ending after 1 request in progress, or 90 s; Ctrl+C again" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_of_any_kind_skips_the_wait_for_requests(number: int) -> None:
    with serving(drain_s=600.0) as stage, Wire(stage.port) as wire:
        stage.scripts["slow"] = ScriptedAnswer(("a ",) * 1000, gap_s=0.1)
        wire.ask("/v1/completions", {"prompt": "slow"})
        assert settled(lambda: len(stage.engine.requests) == 1)
        for _ in range(2):
            stage.server.handle_exit(number, None)
        assert wire.reply().error["code"] == "server_stopping"


def test_a_server_that_stops_is_not_healthy_while_something_runs() -> None:
    with serving(drain_s=90.0) as stage:
        stage.scripts["endless"] = ENDLESS
        with Wire(stage.port) as wire, Wire(stage.port) as probe:
            wire.ask("/v1/chat/completions", {**BODY, "stream": True})
            wire.until(b"word ")
            stage.server.stop()
            assert settled(lambda: _health(probe).status == 503)
            assert _health(probe).error["code"] == "server_stopping"


def _health(probe: Wire) -> Reply:
    probe.ask("/health")
    return probe.reply()


def test_expect_continue_is_answered(stage: Stage) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    with Wire(stage.port) as wire:
        headers = {"expect": "100-continue", "content-length": str(len(raw))}
        headers |= {"content-type": "application/json"}
        wire.ask("/v1/chat/completions", method="POST", headers=headers)
        assert wire.head()[0] == 100
        wire.send(raw)
        assert wire.reply().status == 200


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_upgrade_request_is_ignored(
    stage: Stage, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    with Wire(stage.port) as wire:
        for _ in range(2):
            wire.send(
                b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\n"
                b"upgrade: " + protocol.encode() + b"\r\nhttp2-settings: AAEAAEAA\r\n\r\n"
            )
            assert wire.reply().status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_questions_that_take_long_keep_no_chat_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def tokenize(self: StageEngine, text: str, *, special: bool = False) -> list[int]:
        assert free.wait(90)
        return []

    monkeypatch.setattr(StageEngine, "tokenize", tokenize)
    wires = [Wire(stage.port) for _ in range(24)]
    try:
        for wire in wires:
            wire.ask("/tokenize", {"content": "a"})
        assert chat(stage).status == 200
    finally:
        free.set()
    for wire in wires:
        with wire:
            assert wire.reply().status == 200


def test_requests_leave_no_object_behind() -> None:
    with serving() as stage:

        def send(requests: int) -> int:
            """Objects that are left after so many requests, each with a name and a text of its own."""
            for number in range(requests):
                chat(stage, f"{requests} {number}", stream=bool(number % 2), model=f"m {number}")
                chat(stage, messages=[], model=f"n {number}")
            stage.engine.requests.clear()
            assert settled(lambda: not stage.server.server_state.connections)
            assert stage.server._service.tracker.running == 0
            gc.collect()
            return len(gc.get_objects())

        send(40)  # until threads, pools and counters are there
        counts = [send(60) for _ in range(4)]
        # A request that left an object would do so each time; a thread that ends late leaves some once.
        assert min(after - before for before, after in pairwise(counts)) < 30
