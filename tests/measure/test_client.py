"""The client of a benchmark against servers that frame, cut and end their streams as servers do."""

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from localchat.errors import ContextExceeded, LocalchatError, NetworkError, UsageError
from localchat.measure.client import BenchClient, RequestSample
from localchat.measure.load import LoadSpec, ask_each, run_disruption, run_load
from localchat.measure.statistics import LoadResult

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextmanager
def answering(*pieces: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends these bytes to everybody; yields its URL and the requests that came."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    wire, _ = listening.accept()
                except OSError:
                    return
                with wire:
                    requests.append(_read_request(wire))
                    for piece in pieces:
                        wire.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", requests


def _read_request(wire: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        found += wire.recv(65536)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += wire.recv(65536)
    return head + b"\r\n\r\n" + body


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str, name: str = "content") -> bytes:
    return event(choices=[{"index": 0, "delta": {name: text}}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
    timings={"drafted": 5, "accepted": 2, "kv_used_tokens": 7, "kv_total_tokens": 70},
)
STREAM = [
    said(""),
    said("a"),
    said("b", "reasoning_content"),
    said("c"),
    USAGE,
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def until_close(*pieces: bytes) -> bytes:
    return HEAD + b"Connection: close\r\n\r\n" + b"".join(pieces)


def cut_anywhere(*pieces: bytes) -> bytes:
    whole = b"".join(pieces)
    return chunked(*(whole[at : at + 7] for at in range(0, len(whole), 7)))


def asked(url: str) -> RequestSample:
    return ask_each(BenchClient(url), [BODY])[0]


@pytest.mark.parametrize("framed", [chunked, until_close, cut_anywhere])
def test_an_answer_is_counted_however_it_is_framed(framed: Callable[..., bytes]) -> None:
    with answering(framed(*STREAM)) as (url, _):
        found = asked(url)
    assert len(found.arrivals_s) == 3
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (12, 4, 3)
    assert (found.drafted, found.accepted) == (5, 2)
    assert (found.kv_used_tokens, found.kv_total_tokens) == (7, 70)
    assert 0 < found.ttft_s <= found.latency_s


def test_without_usage_the_arrivals_are_the_tokens() -> None:
    with answering(chunked(said("a"), said("b"), b"data: [DONE]\n\n")) as (url, _):
        found = asked(url)
    assert (found.completion_tokens, found.prompt_tokens, found.drafted) == (2, 0, None)


def test_the_drafts_of_llama_server_are_read() -> None:
    timings = event(choices=[], timings={"draft_n": 9, "draft_n_accepted": 3, "prompt_n": 1})
    with answering(chunked(said("a"), timings)) as (url, _):
        found = asked(url)
    assert (found.drafted, found.accepted) == (9, 3)


def test_key_and_path_are_sent() -> None:
    with answering(chunked(*STREAM)) as (url, requests):
        ask_each(BenchClient(url, "the-key"), [BODY])
    assert requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer the-key\r\n" in requests[0]
    assert json.loads(requests[0].partition(b"\r\n\r\n")[2]) == BODY


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (refusal(400, "no field ignore_eos"), UsageError, "no field ignore_eos"),
        (refusal(400, "maximum context length is 10"), ContextExceeded, "context length"),
        (refusal(503, "busy"), NetworkError, "busy"),
        (chunked(event(error={"message": "broken"})), NetworkError, "broken"),
        (chunked(USAGE), NetworkError, "without any text"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\ndata:", NetworkError, "in mid-answer"),
        (b"hello\r\n\r\n", NetworkError, "not answer with a stream of events"),
        (chunked(b"data: {oops\n\n"), NetworkError, "not answer with a stream of events"),
    ],
)
def test_what_is_no_answer_is_an_error(
    answer: bytes, kind: type[LocalchatError], words: str
) -> None:
    with answering(answer) as (url, _), pytest.raises(kind) as caught:
        asked(url)
    assert words in caught.value.message


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9 cannot be reached"):
        asked("http://127.0.0.1:9")


def test_each_client_sends_its_requests_one_after_the_other() -> None:
    bodies: list[tuple[int, int]] = []

    def body(client: int, number: int) -> dict[str, object]:
        bodies.append((client, number))
        return BODY

    counts: list[int] = []
    with answering(chunked(*STREAM)) as (url, _):
        found = run_load(
            BenchClient(url),
            LoadSpec(clients=2, requests=3),
            body,
            lambda progress: counts.append(len(progress.samples)),
        )
    assert sorted(bodies) == [(client, number) for client in range(2) for number in range(3)]
    assert counts == [1, 2, 3, 4, 5, 6]
    assert (len(found.samples), found.failed) == (6, 0)
    assert found.duration_s >= max(one.latency_s for one in found.samples)


def test_a_refused_request_ends_the_point() -> None:
    with answering(refusal(400, "too odd")) as (url, _), pytest.raises(UsageError, match="too odd"):
        run_load(
            BenchClient(url), LoadSpec(2, 5), lambda client, number: BODY, lambda progress: None
        )


def test_a_point_without_any_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.measure.load._AFTER_FAILURE_S", 0.0)
    with answering(refusal(503, "busy")) as (url, _), pytest.raises(NetworkError, match="busy"):
        run_load(
            BenchClient(url), LoadSpec(1, 2), lambda client, number: BODY, lambda progress: None
        )


def test_an_open_loop_sends_requests_at_random_times_of_its_seed() -> None:
    def numbers(seed: str, **spec: float) -> tuple[list[tuple[int, int]], LoadResult]:
        bodies: list[tuple[int, int]] = []

        def body(client: int, number: int) -> dict[str, object]:
            bodies.append((client, number))
            return BODY

        load = LoadSpec(0, rate=200.0, seed=seed, **spec)  # type: ignore[arg-type]
        with answering(chunked(*STREAM)) as (url, _):
            return bodies, run_load(BenchClient(url), load, body, lambda progress: None)

    bodies, found = numbers("a", requests=20)
    # Each request is a client of its own.
    assert sorted(bodies) == [(number, 0) for number in range(20)]
    assert len(found.samples) == 20
    draw = random.Random("a")
    assert found.duration_s >= sum(draw.expovariate(200.0) for _ in range(20))
    assert numbers("a", seconds=0.001)[0]  # at least one


def test_a_burst_waits_until_all_streams_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.measure.load._CALM_EVENTS", 2)
    with answering(chunked(*STREAM)) as (url, requests):
        found = run_disruption(BenchClient(url), [BODY], [{**BODY, "long": True}] * 2)
    assert [b"long" in request for request in requests] == [False, True, True]
    (stream,) = found.streams.samples
    assert len(found.burst) == 2
    assert found.burst_s >= stream.arrivals_s[1]
    with answering(refusal(400, "too odd")) as (url, _), pytest.raises(UsageError, match="too odd"):
        run_disruption(BenchClient(url), [BODY], [BODY])
