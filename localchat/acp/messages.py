"""Messages of a client: one JSON-RPC object a line on stdin and stdout.

The protocol's library ends at a line that is not an object. Here such a line is answered with an error, as
JSON-RPC demands, and the next line is read. The protocol has no batches.
"""

import asyncio
import json
import math
from contextlib import suppress
from typing import Any, Final, TypeAlias

from acp import RequestError

Message: TypeAlias = dict[str, Any]
MAX_LINE_BYTES: Final = 1 << 28


class MessageStream:
    """A transport of the protocol's library over byte streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`reader` sets the limit of a line, in bytes."""
        self._reader = reader
        self._writer = writer

    async def receive(self) -> Message | None:
        """Return the next message. None at the end of the input."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                await self._reject(RequestError.parse_error({"details": "the line is too long"}))
                continue
            if not line:
                return None
            if not line.strip():
                continue
            try:
                return parsed(line)
            except RequestError as error:
                await self._reject(error)

    async def send(self, message: Message) -> None:
        """Write a message."""
        try:
            text = _encoded(message)
        except (RecursionError, TypeError, ValueError):
            if "error" not in message:
                raise
            # The error quotes what the client sent, which may be nested too deeply for the encoder.
            error = {key: message["error"].get(key) for key in ("code", "message")}
            text = _encoded({**message, "error": error})
        self._writer.write(text.encode())
        await self._writer.drain()

    async def close(self) -> None:
        """Wait until everything is written."""
        with suppress(OSError):
            await self._writer.drain()

    async def _reject(self, error: RequestError) -> None:
        # The id is null, because a line without a valid message has none.
        await self.send({"jsonrpc": "2.0", "id": None, "error": error.to_error_obj()})


def parsed(line: bytes) -> Message:
    """Return the message in a line. Raises RequestError unless it is a request, notification or response."""
    try:
        message = json.loads(line.decode())
    except RecursionError as problem:
        raise RequestError.parse_error({"details": "the JSON is nested too deeply"}) from problem
    except ValueError as problem:
        raise RequestError.parse_error({"details": str(problem)}) from problem
    if isinstance(message, list):
        raise _invalid("batches are not supported; send one message per line")
    if not isinstance(message, dict):
        raise _invalid("a message must be a JSON object")
    if "id" in message and not _is_id(message["id"]):
        raise _invalid("the id must be a string, a number or null")
    if message.get("method") is None and "id" not in message:
        raise _invalid("a message needs a method or an id")
    if not isinstance(message.get("method") or "", str):
        raise _invalid("the method must be a string")
    if not isinstance(message.get("error") or {}, dict):
        raise _invalid("the error of a response must be an object")
    return message


def _is_id(value: object) -> bool:
    if isinstance(value, float):
        # An infinite id could not be written as JSON.
        return math.isfinite(value)
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _invalid(details: str) -> RequestError:
    return RequestError.invalid_request({"details": details})


def _encoded(message: Message) -> str:
    return json.dumps(message, separators=(",", ":"), allow_nan=False) + "\n"
