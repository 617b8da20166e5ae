"""Input of a batch: OpenAI's batch format, short JSON objects, or a prompt per line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"prompt": "Sum this up: ...", "schema": {"type": "object", ...}, "max_tokens": 200}
    {"prompt": "What is odd here?", "files": ["chart.png"]}
    What does EXDEV mean?

The file is streamed, and only the hash of each line is stored. A million lines take eight megabytes.
"""

import codecs
import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from localchat.errors import LocalchatError, UsageError, os_errors_as

CHAT: Final = "/v1/chat/completions"
_RESPONSES: Final = "/v1/responses"
PATHS: Final = (CHAT, "/v1/completions", "/v1/embeddings", _RESPONSES)
_NOT_SENT: Final = ("stream", "stream_options")
"""Fields that are removed, because answers of a batch are never streamed."""
_BOM: Final = b"\xef\xbb\xbf"


class RawLine:
    """A non-empty line of the file."""

    __slots__ = ("content", "number")

    def __init__(self, number: int, content: bytes) -> None:
        self.number = number
        """Line number in the file, from 1."""
        self.content = content
        """Content without white space at either end."""

    @property
    def hash(self) -> int:
        """64-bit hash of the content, never 0."""
        return _hash(self.content)


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch."""

    number: int
    custom_id: str
    path: str = CHAT
    body: dict[str, Any] = {}
    problem: str = ""
    """Error that prevents the request, as a sentence."""


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """Defaults for the whole batch. Fields of a line take precedence."""

    system: str = ""
    """System message of chats with a single prompt."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of chats and completions."""


class BatchInput:
    """A file of requests that can be read several times."""

    def __init__(self, path: Path, defaults: LineDefaults | None = None, name: str = "") -> None:
        """`name`: the file's name in errors, if not its path."""
        self.path = path
        self._name = name or str(path)
        self._defaults = defaults or LineDefaults()

    def lines(self) -> Iterator[RawLine]:
        """Yield the non-empty lines. Raises UsageError if the file is unreadable."""
        with os_errors_as(UsageError, f"{self._name} cannot be read"), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                content = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if content:
                    yield RawLine(number, content)

    def hashes(self) -> "array[int]":
        """Return the hash of each line by its number, 0 for empty lines.

        Raises UsageError if the file is not text, or two lines have the same custom_id.
        """
        hashes = array("Q", [0])
        ids = array("Q")
        for line in self.lines():
            self._check_text(line)
            hashes.extend([0] * (line.number - len(hashes)))
            hashes.append(line.hash)
            if custom_id := _custom_id(line):
                ids.append(_hash(custom_id.encode("utf-8", "surrogatepass")))
        if repeated := _repeated(ids):
            self._raise_repeated(repeated)
        return hashes

    def _check_text(self, line: RawLine) -> None:
        """Raise UsageError for a binary file or UTF-16, which both contain null bytes."""
        if line.content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UsageError(
                f"{self._name} is UTF-16, but a batch is UTF-8",
                hint="convert it first, for example with: iconv -f UTF-16 -t UTF-8",
            )
        if b"\0" in line.content:
            raise UsageError(
                f"{self._name} is not a text file: line {line.number} has null bytes",
                hint="the input is UTF-8 with a prompt or a request in each line",
            )

    def parse(self, line: RawLine) -> BatchLine:
        """Return the request of a line. An invalid line has a `problem`."""
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
        """Return the path and body of a JSON object. Raises UsageError."""
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
        body_fields = {key: value for key, value in fields.items() if key != "custom_id"}
        if "input" in body_fields:
            return "/v1/embeddings", body_fields
        schema = body_fields.pop("schema", None)
        system = body_fields.pop("system", "")
        if "messages" in body_fields:
            if unused := body_fields.keys() & {"prompt", "files"}:
                raise UsageError(f'"messages" and "{min(unused)}" cannot be combined')
            if system and isinstance(body_fields["messages"], list):
                instructions = {"role": "system", "content": str(system)}
                body_fields["messages"] = [instructions, *body_fields["messages"]]
        else:
            prompt = body_fields.pop("prompt", None)
            if prompt is None:
                raise UsageError('this line has no "prompt", "messages", "input" or "body"')
            if not isinstance(prompt, str):
                raise UsageError('"prompt" is not a string')
            content = self._content(prompt, body_fields.pop("files", None))
            body_fields |= self._chat([{"role": "user", "content": content}], system)
        if schema is not None:
            named = {"name": "answer", "schema": schema, "strict": True}
            body_fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return CHAT, body_fields

    def _content(self, prompt: str, files: object) -> str | list[dict[str, Any]]:
        """Return a prompt with the pictures and recordings before it. Raises LocalchatError."""
        if not files:
            return prompt
        if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
            raise UsageError('"files" is not a list of paths')
        from localchat.engine.attachments import read_media
        from localchat.engine.remote.request_body import media_part

        paths = [self.path.parent / name for name in files]
        return [*(media_part(read_media(path)) for path in paths), {"type": "text", "text": prompt}]

    def _chat(self, messages: list[dict[str, Any]], system: object = "") -> dict[str, Any]:
        if instructions := system or self._defaults.system:
            messages = [{"role": "system", "content": str(instructions)}, *messages]
        return {"messages": messages}

    def _filled(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Add the defaults of the batch to a body, and remove unsupported fields."""
        for name in _NOT_SENT:
            body.pop(name, None)
        if path == "/v1/embeddings":
            return body
        defaults = dict(self._defaults.fields)
        if "max_completion_tokens" in body:
            defaults.pop("max_tokens", None)
        if path == _RESPONSES and "max_tokens" in defaults:
            defaults["max_output_tokens"] = defaults.pop("max_tokens")
        return defaults | body

    def _raise_repeated(self, id_hash: int) -> None:
        line_numbers: dict[str, int] = {}
        for line in self.lines():
            name = _custom_id(line)
            if not name or _hash(name.encode("utf-8", "surrogatepass")) != id_hash:
                continue
            if name in line_numbers:
                raise UsageError(
                    f"{self._name}: lines {line_numbers[name]} and {line.number} have the same custom_id "
                    f"{name!r}",
                    hint="give each line its own custom_id, or none",
                )
            line_numbers[name] = line.number


def _object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises UsageError."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"the line starts with {{ but is not valid JSON: {problem}") from problem
    assert isinstance(value, dict)
    return value


def _custom_id(line: RawLine) -> str:
    """Return the custom_id of a line. Empty if it has none or is not valid JSON."""
    if not line.content.startswith(b"{") or b'"custom_id"' not in line.content:
        return ""
    try:
        custom_id = _object(line.content).get("custom_id")
    except UsageError:
        return ""
    return "" if custom_id is None else str(custom_id)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _repeated(hashes: "array[int]") -> int:
    """Return a hash that occurs twice, 0 if all differ."""
    import numpy as np

    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if len(repeated) else 0
