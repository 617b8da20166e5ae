"""Lines of a client that are not messages: each is answered with an error, and the next line is read."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from acp import RequestError

from localchat.acp.messages import MessageStream, parsed

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
PROBE = b'{"jsonrpc":"2.0","id":"probe","method":"initialize","params":{"protocolVersion":1}}'


def code_of(line: bytes) -> int:
    with pytest.raises(RequestError) as caught:
        parsed(line)
    return caught.value.code


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"hello",
        b'{"id": 1, "method": "initialize"',
        b'{"id": 1, "method": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"id": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_line_without_valid_json_is_a_parse_error(line: bytes) -> None:
    assert code_of(line) == PARSE_ERROR


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'[{"jsonrpc":"2.0","id":1,"method":"initialize"}]',
        b"7",
        b'"text"',
        b"null",
        b"true",
        b"{}",
        b'{"jsonrpc":"2.0"}',
        b'{"id": [1], "method": "initialize"}',
        b'{"id": {}}',
        b'{"id": true, "result": {}}',
        b'{"id": 1e999, "result": {}}',
        b'{"id": 1, "method": 5}',
        b'{"id": 1, "method": ["initialize"]}',
        b'{"id": 0, "error": "no"}',
    ],
)
def test_json_that_is_no_message_is_an_invalid_request(line: bytes) -> None:
    assert code_of(line) == INVALID_REQUEST


def test_requests_notifications_and_responses_are_messages() -> None:
    for message in (
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}},
        {"jsonrpc": "2.0", "id": None, "method": "initialize"},
        {"jsonrpc": "2.0", "method": "session/cancel"},
        {"jsonrpc": "2.0", "id": "a", "result": None},
        {"jsonrpc": "2.0", "id": 1.0, "error": {"code": 1, "message": "no"}},
    ):
        assert parsed(json.dumps(message).encode()) == message


class Writer:
    sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        pass


def test_a_line_above_the_limit_is_answered_and_the_next_one_is_read() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader(limit=100)
        writer = Writer()
        stream = MessageStream(reader, cast(Any, writer))
        reader.feed_data(b'"' + b"x" * 300 + b'"\n{"id":1,"method":"initialize"}\n')
        reader.feed_eof()
        assert await stream.receive() == {"id": 1, "method": "initialize"}
        assert await stream.receive() is None
        assert json.loads(writer.sent)["error"]["code"] == PARSE_ERROR
        assert json.loads(writer.sent)["id"] is None

    asyncio.run(run())


def test_an_error_that_quotes_deep_json_is_sent_without_it() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    async def run() -> None:
        writer = Writer()
        stream = MessageStream(asyncio.StreamReader(), cast(Any, writer))
        error = {"code": INVALID_PARAMS, "message": "Invalid params", "data": deep}
        await stream.send({"jsonrpc": "2.0", "id": 1, "error": error})
        assert json.loads(writer.sent)["error"]["code"] == INVALID_PARAMS

    asyncio.run(run())


@pytest.mark.process
def test_the_command_answers_every_line_and_goes_on(tmp_path: Path) -> None:
    lines = [
        b"{broken",
        b"[1, 2]",
        b"3",
        b"[" * 100_000,
        b'{"id": [1], "result": 1}',
        b'{"jsonrpc":"2.0","id":7,"method":"initialize","params":3}',
        b'{"jsonrpc":"2.0","id":8,"method":"no/such"}',
        b'{"jsonrpc":"2.0","method":"no/such"}',
        PROBE,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.server_program", "acp", "-m", "guide"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LOCALCHAT_DATA_DIR": str(tmp_path)},
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"\n".join([*lines, b""]))
        process.stdin.flush()
        replies = [json.loads(process.stdout.readline()) for _ in range(len(lines) - 1)]
        process.stdin.close()
        assert process.wait() == 0
        assert process.stderr.read() == b""
    unknown = [reply["error"]["code"] for reply in replies if reply["id"] is None]
    assert unknown == [PARSE_ERROR, *[INVALID_REQUEST] * 2, PARSE_ERROR, INVALID_REQUEST]
    by_id = {reply["id"]: reply for reply in replies}
    assert by_id[7]["error"]["code"] == INVALID_PARAMS
    assert by_id[8]["error"]["code"] == METHOD_NOT_FOUND
    assert by_id["probe"]["result"]["protocolVersion"] == 1
