"""Input of a batch: OpenAI's batch format, short JSON objects, or a prompt a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"prompt": "Sum this up: ...", "schema": {"type": "object", ...}, "max_tokens": 200}
    What does EXDEV mean?

The file is streamed: of each line only its hash is kept, so a million lines cost eight megabytes.
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from localchat.errors import LocalchatError, UsageError, reason

CHAT: Final = "/v1/chat/completions"
PATHS: Final = (CHAT, "/v1/completions", "/v1/embeddings")
_NOT_SENT: Final = ("stream", "stream_options")
"""Answers of a batch are never streamed."""
_SAMPLED_LINES: Final = 1000
"""Lines that are searched for the names of models."""
_BOM: Final = b"\xef\xbb\xbf"


class RawLine:
    """A line that is not empty, as it stands in the file."""

    __slots__ = ("content", "number")

    def __init__(self, number: int, content: bytes) -> None:
        self.number = number
        """Of the line in the file, from 1."""
        self.content = content
        """Without white space at its ends."""

    @property
    def hash(self) -> int:
        """64 bits of its content, never 0."""
        return _hash(self.content)


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    number: int
    custom_id: str
    path: str = CHAT
    body: dict[str, Any] = {}
    problem: str = ""
    """Why it cannot be asked, a sentence."""


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """Given for the whole batch; what a line says itself comes first."""

    system: str = ""
    """Instructions before prompts that are chats of one message."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of chats and completions."""


class BatchInput:
    """A file of requests, read as often as needed."""

    def __init__(self, path: Path, defaults: LineDefaults | None = None) -> None:
        self.path = path
        self._defaults = defaults or LineDefaults()

    def lines(self) -> Iterator[RawLine]:
        """Every line that is not empty. Raises UsageError where the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    content = (line.removeprefix(_BOM) if number == 1 else line).strip()
                    if content:
                        yield RawLine(number, content)
        except OSError as problem:
            raise UsageError(f"{self.path} cannot be read: {reason(problem)}") from problem

    def hashes(self) -> "array[int]":
        """The hash of every line by its number; 0: an empty one.

        Raises UsageError where two lines have the same custom_id."""
        found = array("Q", [0])
        ids = array("Q")
        for line in self.lines():
            found.extend([0] * (line.number - len(found)))
            found.append(line.hash)
            if given := _custom_id(line):
                ids.append(_hash(given.encode("utf-8", "surrogatepass")))
        if twice := _repeated(ids):
            self._refuse_repeated(twice)
        return found

    def named_models(self) -> frozenset[str]:
        """Return the models that the first lines name. Raises UsageError where the file cannot be read."""
        names = set()
        objects = (line for line in self.lines() if line.content.startswith(b"{"))
        for line in islice(objects, _SAMPLED_LINES):
            with suppress(LocalchatError):
                fields = _object(line.content)
                body = fields.get("body", fields)
                name = body.get("model") if isinstance(body, dict) else None
                if isinstance(name, str) and name:
                    names.add(name)
        return frozenset(names)

    def parse(self, line: RawLine) -> BatchLine:
        """The request of a line; one that is none says why in `problem`."""
        if not line.content.startswith(b"{"):
            return self._text(line)
        custom_id = f"line-{line.number}"
        try:
            fields = _object(line.content)
            custom_id = _custom_id(line) or custom_id
            path, body = self._request(fields)
        except LocalchatError as problem:
            return BatchLine(line.number, custom_id, problem=problem.message)
        return BatchLine(line.number, custom_id, path, self._filled(path, body))

    def _text(self, line: RawLine) -> BatchLine:
        custom_id = f"line-{line.number}"
        try:
            text = line.content.decode("utf-8")
        except UnicodeDecodeError:
            return BatchLine(line.number, custom_id, problem="the line is not UTF-8")
        body = self._chat([{"role": "user", "content": text}])
        return BatchLine(line.number, custom_id, CHAT, self._filled(CHAT, body))

    def _request(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Path and body of a JSON object. Raises UsageError."""
        if "body" in fields or "url" in fields:
            path = fields.get("url", CHAT)
            body = fields.get("body")
            if path not in PATHS:
                raise UsageError(f"unsupported url {path!r}; use one of {', '.join(PATHS)}")
            if fields.get("method", "POST") != "POST":
                raise UsageError(f"the method is {fields['method']!r}; it has to be POST")
            if not isinstance(body, dict):
                raise UsageError("the body is not a JSON object")
            return path, dict(body)
        rest = {key: value for key, value in fields.items() if key != "custom_id"}
        if "input" in rest:
            return "/v1/embeddings", rest
        schema = rest.pop("schema", None)
        system = rest.pop("system", "")
        if "messages" not in rest:
            prompt = rest.pop("prompt", None)
            if not isinstance(prompt, str):
                raise UsageError('this line has no "prompt", "messages", "input" or "body"')
            rest |= self._chat([{"role": "user", "content": prompt}], system)
        if schema is not None:
            named = {"name": "answer", "schema": schema, "strict": True}
            rest["response_format"] = {"type": "json_schema", "json_schema": named}
        return CHAT, rest

    def _chat(self, messages: list[dict[str, str]], system: object = "") -> dict[str, Any]:
        if told := system or self._defaults.system:
            messages = [{"role": "system", "content": str(told)}, *messages]
        return {"messages": messages}

    def _filled(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A body with the defaults of the batch, and without what a batch cannot have."""
        for name in _NOT_SENT:
            body.pop(name, None)
        if path == "/v1/embeddings":
            return body
        defaults = dict(self._defaults.fields)
        if "max_completion_tokens" in body:
            defaults.pop("max_tokens", None)
        return defaults | body

    def _refuse_repeated(self, wanted: int) -> None:
        places: dict[str, int] = {}
        for line in self.lines():
            name = _custom_id(line)
            if not name or _hash(name.encode("utf-8", "surrogatepass")) != wanted:
                continue
            if name in places:
                raise UsageError(
                    f"{self.path}: lines {places[name]} and {line.number} have the same custom_id {name!r}",
                    hint="give each line its own custom_id, or none",
                )
            places[name] = line.number


def _object(content: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises UsageError."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"the line begins with {{ and is not valid JSON: {problem}") from problem
    assert isinstance(found, dict)
    return found


def _custom_id(line: RawLine) -> str:
    """The custom_id that a line gives itself; empty without one, and where it is no JSON."""
    if not line.content.startswith(b"{") or b'"custom_id"' not in line.content:
        return ""
    try:
        given = _object(line.content).get("custom_id")
    except UsageError:
        return ""
    if isinstance(given, str):
        return given
    if given is None:
        return ""
    return str(given)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _repeated(hashes: "array[int]") -> int:
    """One hash that occurs twice; 0 without one."""
    import numpy as np

    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if len(twice) else 0
