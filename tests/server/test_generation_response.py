"""The bytes of a stream: every rule of framing that clients depend on, over a real socket."""

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.types import Message

from localchat.engine.events import (
    Finished,
    MetricsSnapshot,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
)
from localchat.errors import EngineDied
from localchat.server.config import ServerConfig
from localchat.server.errors import timed_out
from localchat.server.generation_response import _while_connected
from localchat.server.tracker import TrackedRequest
from tests.support.http_server import (
    NAME,
    Reply,
    Stage,
    Wire,
    ask,
    chat,
    contents,
    heard_until,
    serving,
)


def test_a_stream_has_its_headers_and_no_others_that_matter(stage: Stage) -> None:
    reply = chat(stage, stream=True)
    assert reply.status == 200
    expected = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "transfer-encoding": "chunked",
        "x-content-type-options": "nosniff",
    }
    assert expected.items() <= reply.headers.items()
    assert re.fullmatch("req_[0-9a-f]{24}", reply.headers["x-request-id"])
    assert "content-encoding" not in reply.headers


def test_the_bytes_of_a_whole_stream(stage: Stage) -> None:
    reply = chat(stage, stream=True, stream_options={"include_usage": True})
    assert b"\r" not in reply.body
    lines = reply.body.split(b"\n\n")
    assert lines.pop() == b""
    assert all(re.fullmatch(rb"data: [^ \n][^\n]*", line) for line in lines)
    frame = json.loads(lines[0][6:])
    head = (
        f'{{"id":"{frame["id"]}","object":"chat.completion.chunk","created":{frame["created"]},'
        '"model":"m","system_fingerprint":"fp_scripted","choices":'
    )
    tail = '"finish_reason":null}]}'
    size = len(repr(stage.last.prompt))
    lines[-2], timings = lines[-2].split(b',"timings":')
    assert json.loads(timings.removesuffix(b"}"))["prompt_n"] == size
    lines[-2] += b"}"
    assert [line.decode().removeprefix("data: ") for line in lines] == [
        head + '[{"index":0,"delta":{"role":"assistant","content":""},' + tail,
        head + '[{"index":0,"delta":{"content":"Hel"},' + tail,
        head + '[{"index":0,"delta":{"content":"lo"},' + tail,
        head + '[{"index":0,"delta":{"content":"."},' + tail,
        head + '[{"index":0,"delta":{},"finish_reason":"stop"}]}',
        head
        + f'[],"usage":{{"prompt_tokens":{size},"completion_tokens":3,"total_tokens":{size + 3},'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}',
        "[DONE]",
    ]
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", frame["id"])


def test_only_whole_events_are_sent(stage: Stage) -> None:
    reply = chat(stage, stream=True)
    assert sum(chunk.count(b"data: ") for chunk in reply.chunks) == 6
    assert all(chunk.startswith(b"data: ") for chunk in reply.chunks)
    assert all(chunk.endswith(b"\n\n") for chunk in reply.chunks)


def test_usage_comes_only_where_it_was_asked_for(stage: Stage) -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        chunks = chat(stage, stream=True, **options).chunks_json
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_a_chunk_has_one_kind_of_delta_and_no_blank_ones(stage: Stage) -> None:
    word = stage.plays(
        "kinds",
        Reasoning(0, "hm"),
        Reasoning(0, ""),
        Text(0, "So."),
        Text(0, ""),
        MetricsSnapshot("decode"),
        ToolCall(0, 0, name="look", arguments='{"a":1}'),
        Finished(0, "stop"),
    )
    chunks = chat(stage, word, stream=True).chunks_json
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [list(delta) for delta in deltas] == [
        ["role", "content"],
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
        [],
    ]


def test_tool_calls_come_one_after_the_other_in_pieces(stage: Stage) -> None:
    word = stage.plays(
        "calls",
        ToolCall(0, 0, id="call_abc", name="look", arguments=""),
        ToolCall(0, 0, arguments='{"city":'),
        ToolCall(0, 0, arguments='"Rome"}'),
        ToolCall(0, 1, name="wait", arguments="{}"),
        Finished(0, "stop"),
    )
    chunks = chat(stage, word, stream=True).chunks_json
    calls = [c["choices"][0]["delta"].get("tool_calls") for c in chunks]
    pieces = [call[0] for call in calls if call]
    assert all(len(call) == 1 for call in calls if call)
    second = pieces[3].pop("id")
    assert re.fullmatch("call_[0-9a-f]{24}", second)
    assert pieces == [
        {
            "index": 0,
            "function": {"arguments": "", "name": "look"},
            "id": "call_abc",
            "type": "function",
        },
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
        {"index": 1, "function": {"arguments": "", "name": "wait"}, "type": "function"},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}


def test_answer_cut_by_length_reports_it_even_inside_a_call(stage: Stage) -> None:
    word = stage.plays("cut", ToolCall(0, 0, name="look", arguments='{"ci'), Finished(0, "length"))
    assert chat(stage, word, stream=True).chunks_json[-1]["choices"][0]["finish_reason"] == "length"


def test_a_failure_in_the_middle_is_an_error_event_and_nothing_after(stage: Stage) -> None:
    stage.scripts["dies"] = broken = _dying()
    reply = chat(stage, "dies", stream=True)
    assert reply.status == 200
    *chunks, last = reply.events
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    error = json.loads(last)
    assert set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["code"] == "engine_died"
    assert broken.error is not None and "/secret/path" not in last
    assert b"[DONE]" not in reply.body


def _dying() -> Any:
    from tests.support.scripted_engine import ScriptedAnswer

    return ScriptedAnswer(
        ("half",), error=EngineDied("it ended; its log: /secret/path", signal="SIGKILL")
    )


def test_no_chunk_that_is_no_error_has_the_word_as_a_key(stage: Stage) -> None:
    for stream in (False, True):
        assert b'"error"' not in chat(stage, stream=stream).body


def test_a_connection_serves_request_after_request(stage: Stage) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with Wire(stage.port) as wire:
        for _ in range(3):
            wire.ask("/v1/chat/completions", body)
            assert wire.reply().events[-1] == "[DONE]"


def test_choices_stay_apart(stage: Stage) -> None:
    word = stage.plays(
        "two", Text(1, "b"), Text(0, "a"), Finished(1, "stop"), Text(0, "A"), Finished(0, "length")
    )
    chunks = chat(stage, word, stream=True, n=2).chunks_json
    sent = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks]
    first = {"role": "assistant", "content": ""}
    assert sent == [
        (1, first),
        (1, {"content": "b"}),
        (0, first),
        (0, {"content": "a"}),
        (1, {}),
        (0, {"content": "A"}),
        (0, {}),
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks][-3:] == ["stop", None, "length"]


def test_logprobs_ride_on_their_text(stage: Stage) -> None:
    entry = TokenLogprob(5, "é".encode(), -0.5, ((5, "é".encode(), -0.5), (6, b"\xff", -1.5)))
    word = stage.plays("probs", Text(0, "é", (entry,)), Text(0, "", (entry,)), Finished(0, "stop"))
    chunks = chat(stage, word, stream=True, logprobs=True, top_logprobs=2).chunks_json
    sent = {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                    {"token": "\ufffd", "logprob": -1.5, "bytes": [255]},
                ],
            }
        ],
        "refusal": None,
    }
    assert [c["choices"][0].get("logprobs") for c in chunks] == [None, sent, sent, None]
    assert stage.last.logprobs == 2


def test_metrics_of_the_request_come_where_they_were_asked_for(stage: Stage) -> None:
    *_, last = chat(stage, stream=True).chunks_json
    assert "ttft_s" not in last["timings"]
    *_, last = chat(stage, stream=True, timings=True).chunks_json
    assert last["choices"][0]["finish_reason"] == "stop" and "usage" not in last
    assert {"ttft_s", "decode_tokens_per_s", "queue_s"} <= set(last["timings"])


def _beats(reply: Reply) -> list[bytes]:
    return [chunk for chunk in reply.chunks if chunk.startswith(b":")]


def test_a_stream_is_silent_for_no_longer_than_the_heartbeat() -> None:
    with serving(ServerConfig(heartbeat_s=0.05)) as stage:
        word = stage.plays("slow", Text(0, "a"), Finished(0, "stop"), gap_s=0.3)
        reply = heard_until(
            lambda: chat(stage, word, stream=True), lambda reply: len(_beats(reply)) >= 3
        )
        assert set(_beats(reply)) == {b": keep-alive\n\n"} and len(_beats(reply)) >= 3
        assert contents(reply.chunks_json) == "a"


@pytest.mark.parametrize("path", ["/v1/completions", "/completions", "//v1//completions"])
def test_the_bytes_of_a_plain_stream(stage: Stage, path: str) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    reply = ask(stage, path, body)
    assert reply.events[-1] == "[DONE]"
    chunks = reply.chunks_json
    assert [c["choices"] for c in chunks[:-1]] == [
        [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}]
        for text, reason in (("Hel", None), ("lo", None), (".", None), ("", "stop"))
    ]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert {c["model"] for c in chunks} == {NAME}
    assert re.fullmatch("cmpl-[0-9a-f]{24}", chunks[0]["id"])


def test_of_requests_that_come_together_the_first_begins_before_the_last_is_read() -> None:
    """In a task of its own, its work would begin behind all others, and the engine would wait for them."""
    order: list[tuple[str, int]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")

    async def work(number: int) -> None:
        order.append(("begun", number))
        await asyncio.sleep(0)

    async def answer(number: int) -> None:
        order.append(("read", number))
        await _while_connected(work(number), receive, TrackedRequest(str(number)))

    async def answer_all() -> None:
        await asyncio.gather(*map(answer, range(3)))

    asyncio.run(answer_all())
    assert order == [(what, number) for number in range(3) for what in ("read", "begun")]


def test_a_cancellation_beside_that_of_the_server_is_not_lost() -> None:
    async def both() -> None:
        tracked = TrackedRequest("id")

        async def never() -> Message:
            await asyncio.sleep(3600)
            raise AssertionError

        work = _while_connected(asyncio.sleep(3600), never, tracked)
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        tracked.abort(timed_out(1.0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(both())
