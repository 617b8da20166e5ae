"""HTTP that is allowed but rare, and HTTP that is forbidden but seen."""

import json
import re
import socket
from dataclasses import replace

import pytest

from localchat.server import uvicorn_http
from localchat.server.uvicorn_http import HEAD_BYTES, Connection
from tests.support.http_server import (
    UNHURRIED,
    Reply,
    Stage,
    Wire,
    ask,
    contents,
    serving,
    settled,
)
from tests.support.scripted_engine import ScriptedAnswer

ENDLESS = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
HELLO = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("headers", [{}, {"connection": "upgrade", "upgrade": "h2c"}])
@pytest.mark.parametrize("behind", [b"\r\n", HELLO])
def test_client_that_leaves_is_noticed_whatever_it_sent_after_its_request(
    behind: bytes, headers: dict[str, str]
) -> None:
    with serving(replace(UNHURRIED, loop_guard=False)) as stage:
        stage.scripts["endless"] = ENDLESS
        with Wire(stage.port) as wire:
            wire.ask("/v1/completions", {"prompt": "endless"}, headers=headers)
            assert settled(lambda: len(stage.engine.requests) == 1)
            (connection,) = stage.server.server_state.connections
            assert isinstance(connection, Connection)
            wire.send(behind)
            assert settled(lambda: connection.conn.trailing_data[0] == behind)
        assert settled(lambda: stage.engine.cancelled == 1)


def test_requests_in_a_row_are_answered_in_their_order(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.ask("/tokenize", {"content": "abc"})
        wire.send(HELLO * 2)
        assert wire.reply().json["count"] == 3
        assert wire.reply().json == wire.reply().json == {"status": "ok"}


def test_empty_lines_before_a_request_are_passed_over(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        for _ in range(2):
            wire.send(b"\r\n\r\n" + HELLO)
            assert wire.reply().json == {"status": "ok"}


def test_empty_line_after_a_body_gets_no_answer(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.ask("/tokenize", b'{"content":"abc"}\r\n', headers={"content-length": "17"})
        assert wire.reply().json["count"] == 3
        assert wire.closed()


def test_data_after_the_last_request_of_a_connection_is_ignored(stage: Stage) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("a ", "b ", "c"), gap_s=0.2)
    with Wire(stage.port) as wire:
        asked = len(stage.engine.requests)
        wire.ask("/v1/completions", {"prompt": "slow"}, headers={"connection": "close"})
        assert settled(lambda: len(stage.engine.requests) == asked + 1)
        wire.send(b"\r\n")
        assert wire.reply().json["choices"][0]["text"] == "a b c"
        assert wire.closed()


def test_too_large_headers_are_refused_with_the_reason(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * HEAD_BYTES)
        reply = wire.reply()
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
        assert str(HEAD_BYTES) in reply.error["message"]
        assert wire.closed()


def test_unknown_transfer_encoding_is_refused_with_the_reason(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.ask("/v1/completions", b"{}", headers={"transfer-encoding": "gzip, chunked"})
        reply = wire.reply()
        assert (reply.status, reply.error["code"]) == (501, "not_supported")


def test_a_body_of_two_lengths_is_the_last_of_its_connection(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        headers = {"transfer-encoding": "chunked", "content-length": "5"}
        wire.ask("/tokenize", b'11\r\n{"content":"abc"}\r\n0\r\n\r\n' + HELLO, headers=headers)
        assert wire.reply().json["count"] == 3
        assert wire.closed()


def test_a_header_that_is_none_is_no_matter_of_hosts(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n")
        reply = wire.reply()
        assert (reply.status, reply.error["code"]) == (400, None)


def test_a_body_that_breaks_after_the_answer_gets_no_second_one(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        headers = {"transfer-encoding": "chunked", "content-type": "text/csv"}
        wire.ask("/v1/completions", b"2\r\n{}\r\n", headers=headers)
        assert wire.reply().status == 415
        wire.send(b"no size\r\n")
        assert wire.closed()


def test_a_body_that_stays_away_after_its_answer_ends_the_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_http, "_LINGER_S", 0.05)
    with Wire(stage.port) as wire:
        headers = {"content-length": "100", "content-type": "text/csv"}
        wire.ask("/v1/completions", b"{}", headers=headers)
        assert wire.reply().status == 415
        assert wire.closed()


def test_a_request_that_is_cut_off_ends_its_connection(stage: Stage) -> None:
    with Wire(stage.port) as wire:
        wire.ask("/v1/completions", b"{", headers={"content-length": "100"})
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.closed()


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_closes_only_its_sending_side_is_answered(stage: Stage, stream: bool) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("a ", "b"), gap_s=0.1)
    with Wire(stage.port) as wire:
        wire.ask("/v1/completions", {"prompt": "slow", "stream": stream})
        wire.socket.shutdown(socket.SHUT_WR)
        received = b""
        while piece := wire.socket.recv(4096):
            received += piece
    interim, answer = received.split(b"HTTP/1.1 200 OK\r\n")
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n" * interim.count(b"100")
    # Pieces of a stream are joined where the client or the machine is slow.
    assert b"".join(re.findall(rb'"text":"([^"]*)"', answer)) == b"a b"


def test_requests_in_a_row_are_answered_after_the_sending_side_is_closed(stage: Stage) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("a ", "b"), gap_s=0.1)
    with Wire(stage.port) as wire:
        wire.ask("/v1/completions", {"prompt": "slow"})
        wire.send(HELLO * 2 + b"\r\n")
        wire.socket.shutdown(socket.SHUT_WR)
        received = b""
        while piece := wire.socket.recv(4096):
            received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.endswith(b'{"status":"ok"}')


STREAMED = {"messages": [{"role": "user", "content": "a"}], "stream": True}


def test_pieces_of_a_stream_have_the_bytes_that_the_http_library_writes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = ask(stage, "/v1/chat/completions", STREAMED)
    monkeypatch.setattr(Connection, "write_piece", lambda self, piece: False)
    whole = ask(stage, "/v1/chat/completions", STREAMED)

    def constant(reply: Reply) -> list[bytes]:
        return [
            re.sub(rb'"id":"[^"]*"|"created":[0-9]+|"timings":{[^}]*}', b"", chunk)
            for chunk in reply.chunks
        ]

    assert b"".join(constant(direct)) == b"".join(constant(whole))
    assert len(direct.events) == 6


def test_client_without_chunks_gets_the_same_stream(stage: Stage) -> None:
    body = json.dumps(STREAMED).encode()
    with Wire(stage.port) as wire:
        wire.send(
            b"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        status, headers = wire.head()
        assert status == 200 and "transfer-encoding" not in headers
        whole = wire.until(b"data: [DONE]\n\n")
        assert wire.closed()
    assert whole.startswith(b"data: {") and whole.count(b"\n\n") == 6


def test_slow_client_gets_every_piece_in_order() -> None:
    pieces = tuple(" ".join(map(str, range(at, at + 20_000))) for at in range(80))
    with serving() as stage:
        stage.scripts["a"] = ScriptedAnswer(pieces)
        with Wire(stage.port) as wire:
            wire.ask("/v1/chat/completions", STREAMED)
            wire.head()
            (connection,) = stage.server.server_state.connections
            assert isinstance(connection, Connection)
            assert settled(lambda: connection.flow.write_paused)
            texts = [json.loads(event) for event in wire.reply_rest() if event != "[DONE]"]
    assert contents(texts) == "".join(pieces)
