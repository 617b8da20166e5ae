"""Frames between an engine and its process: length-prefixed msgpack, with one union of structs per direction.

A frame consists of four bytes of length (big endian) and a body. A malformed frame counts as a crash of its
sender.
"""

import select
import struct
import threading
from collections.abc import Iterator
from io import BufferedIOBase
from typing import IO, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from localchat.engine.events import EngineStats, Event
from localchat.engine.interface import EngineInfo
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import Detail, LocalchatError, UsageError, from_wire
from localchat.fit.load_options import LoadOptions

MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """Raised if the received bytes are not a frame."""


def sendable(text: str) -> str:
    """Replace everything that is not Unicode, such as bytes of a file name."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _sendable_values(value: Any) -> Any:  # noqa: ANN401 - plain values
    """Make all texts in nested lists and dicts sendable."""
    match value:
        case str():
            return sendable(value)
        case dict():
            return {_sendable_values(key): _sendable_values(item) for key, item in value.items()}
        case list() | tuple():
            return [_sendable_values(item) for item in value]
    return value


class Open(msgspec.Struct, frozen=True, tag="open", omit_defaults=True):
    """First frame: the model and its load options."""

    model: bytes
    """Path as bytes, because it may not be Unicode."""
    name: str
    backend: str | None
    load: LoadOptions = LoadOptions()
    speculation: bool = True
    safe_builds: tuple[str, ...] = ()
    """Builds that crashed on this machine (Backend.build_key)."""
    sampling: dict[str, float] = {}
    kv_folder: bytes = b""
    """Folder for the KV of conversations as bytes, empty for none."""
    kv_folder_bytes: int = 0


class Generate(msgspec.Struct, frozen=True, tag="ask"):
    id: int
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    id: int
    text: str
    special: bool


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    id: int
    tokens: tuple[int, ...]


class Render(msgspec.Struct, frozen=True, tag="render"):
    id: int
    messages: Messages


class PromptTokens(msgspec.Struct, frozen=True, tag="prompt_tokens"):
    id: int
    messages: Messages


class Embed(msgspec.Struct, frozen=True, tag="embed", omit_defaults=True):
    id: int
    texts: tuple[str, ...]
    truncate: bool = False
    """Whether to use the start of a text that is too long."""


class GetInfo(msgspec.Struct, frozen=True, tag="info"):
    id: int


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    id: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    pass


Query: TypeAlias = Tokenize | Detokenize | Render | PromptTokens | Embed | GetInfo | GetStats
"""Frames that need no step, and get one reply."""
ToChild: TypeAlias = Open | Generate | Cancel | Query | Close

Phase: TypeAlias = Literal["open", "load", "warmup", "serve"]


class Entered(msgspec.Struct, frozen=True, tag="phase"):
    """The process enters a phase."""

    phase: Phase
    build: str = ""
    """Native build that will run, for safe mode."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Events of a step for all requests."""

    items: tuple[tuple[int, Event], ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request or query failed.

    Id 0: the whole engine failed, because the model cannot be opened or loaded.
    """

    id: int
    code: str
    message: str
    hint: str
    details: dict[str, Detail]

    @classmethod
    def of(cls, id_: int, error: LocalchatError) -> "Failed":
        """Return the frame that reports an error."""
        details: dict[str, Detail] = {}
        for name, value in error.details.items():
            details[name] = sendable(value) if isinstance(value, str) else value
        return cls(id_, error.code, sendable(error.message), sendable(error.hint), details)

    def error(self) -> LocalchatError:
        """Return the error that the frame reports."""
        return from_wire(self.code, self.message, self.hint, self.details)


class TokensReply(msgspec.Struct, frozen=True, tag="tokens"):
    id: int
    tokens: tuple[int, ...]


class TextReply(msgspec.Struct, frozen=True, tag="text"):
    id: int
    text: str


class VectorsReply(msgspec.Struct, frozen=True, tag="vectors"):
    """Reply with a vector for each text."""

    id: int
    vectors: list[list[float]]
    tokens: tuple[int, ...]
    """Number of tokens of each text."""


class InfoReply(msgspec.Struct, frozen=True, tag="info"):
    id: int
    info: EngineInfo


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    id: int
    stats: EngineStats


class Notice(msgspec.Struct, frozen=True, tag="say"):
    """A sentence for the user."""

    text: str


FromChild: TypeAlias = (
    Entered
    | Events
    | Failed
    | TokensReply
    | TextReply
    | VectorsReply
    | InfoReply
    | StatsReply
    | Notice
)

T = TypeVar("T")


def frame_bytes(body: bytes) -> bytes:
    """Return a frame with this body."""
    return _LENGTH.pack(len(body)) + body


def encode(frame: msgspec.Struct) -> bytes:
    """Encode the body of a frame.

    Raises UsageError for values that cannot be sent: lone surrogates, and integers over 64 bits.
    """
    try:
        return msgspec.msgpack.encode(frame)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise UsageError(f"this cannot be sent to the engine: {error}") from error


class FrameWriter:
    """Writes complete frames. Thread-safe."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.lock = threading.RLock()
        """Lock held while a frame is written."""

    def write(self, frame: msgspec.Struct) -> None:
        """Encode and write a frame. Lone surrogates in its texts are replaced.

        Raises OSError (BrokenPipeError) if the other side is gone.
        """
        try:
            body = msgspec.msgpack.encode(frame)
        except UnicodeEncodeError:
            # An escape of JSON may be half of an emoji, in the call of a tool or in a rendered conversation.
            values = msgspec.to_builtins(frame, builtin_types=(bytes,))
            body = msgspec.msgpack.encode(_sendable_values(values))
        self.send(body)

    def send(self, body: bytes) -> None:
        """Write an encoded frame. Raises OSError (BrokenPipeError) if the other side is gone."""
        with self.lock:
            self._stream.write(frame_bytes(body))
            self._stream.flush()

    def send_at_once(self, body: bytes) -> bool:
        """Write an encoded frame to a pipe if this does not block.

        The frame must be short, the pipe must have room, and no other thread may be writing. Raises OSError.
        """
        if _LENGTH.size + len(body) > select.PIPE_BUF or not self.lock.acquire(blocking=False):
            return False
        try:
            pipe = select.poll()
            pipe.register(self._stream, select.POLLOUT)
            if not pipe.poll(0):
                return False
            self.send(body)
            return True
        finally:
            self.lock.release()


class FrameBuffer(Generic[T]):
    """Divides received bytes into frames. Raises FrameError on incomplete or invalid frames."""

    def __init__(self, types: Any) -> None:  # noqa: ANN401 - a union is no type
        self._decode = msgspec.msgpack.Decoder(types).decode
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[T]:
        """Add bytes, and yield the frames that are complete."""
        self._data += data
        start = 0
        with memoryview(self._data) as view:
            while (body := start + _LENGTH.size) <= len(view):
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes")
                if body + length > len(view):
                    break
                start = body + length
                try:
                    frame: T = self._decode(view[body:start])
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    raise FrameError(f"a frame that cannot be read: {error}") from error
                yield frame
        del self._data[:start]

    def end(self) -> None:
        """Raise FrameError if the bytes end inside a frame."""
        if self._data:
            raise FrameError(
                f"the stream ended inside a frame, after {len(self._data)} bytes of it"
            )


def read_frames(stream: BufferedIOBase, types: Any) -> Iterator[Any]:  # noqa: ANN401 - a union is no type
    """Yield the frames of a stream, of these types. Raises FrameError on incomplete or invalid frames."""
    frames: FrameBuffer[Any] = FrameBuffer(types)
    while data := stream.read1(_READ_BYTES):
        yield from frames.add(data)
    frames.end()
