"""The text of a prompt: files, then stdin, then the words of the command, a blank line between.

This order makes a long text the beginning of the prompt, so that a second question on the same text finds
it in the prefix cache.
"""

import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from localchat.errors import ContextExceeded, FileMissing, UsageError

MAX_INPUT_BYTES = 256 * 2**20
_PATIENCE_S = 3.0

Notify = Callable[[str], None]


def join_parts(parts: Sequence[str]) -> str:
    """The parts that hold anything, a blank line between."""
    kept = [part.rstrip("\n") for part in parts[:-1]] + list(parts[-1:])
    return "\n\n".join(part for part in kept if part.strip())


def read_stdin(notify: Notify) -> str:
    """What is piped in, or nothing: a terminal, an empty or a closed stdin are no stdin."""
    stream = sys.stdin
    if stream is None or stream.closed or stream.isatty():
        return ""
    _mention_waiting(stream.buffer, notify)
    return _decoded(_bounded(stream.buffer, "stdin"), "stdin", notify)


def read_files(names: Sequence[str], notify: Notify) -> str:
    """The text of the files: of one as it is, of several each under its name."""
    texts = [_read_file(name, notify) for name in names]
    if len(texts) == 1:
        return texts[0]
    headed = [f"{name}:\n\n{text}" for name, text in zip(names, texts, strict=True)]
    return join_parts([*headed, ""])


def _read_file(name: str, notify: Notify) -> str:
    path = Path(name)
    if path.is_dir():
        raise UsageError(
            f"{name} is a folder", hint="-f takes a text file; it can be given several times"
        )
    try:
        with path.open("rb") as file:
            data = _bounded(file, name)
    except FileNotFoundError as problem:
        hint = "stdin needs no flag: what is piped in comes first" if name == "-" else ""
        raise FileMissing(f"there is no file {name}", hint=hint) from problem
    except OSError as problem:
        raise UsageError(f"{name} cannot be read: {problem.strerror}") from problem
    if b"\0" in data:
        raise UsageError(
            f"{name} is no text: it holds bytes of zero",
            hint="-f takes text files; iconv -f utf-16 -t utf-8 turns UTF-16 into UTF-8",
        )
    return _decoded(data, name, notify)


def _bounded(stream: BinaryIO, name: str) -> bytes:
    data = stream.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ContextExceeded(
            f"{name} holds more than {MAX_INPUT_BYTES:,} bytes, the most that is read",
            hint="shorten the input",
            limit_bytes=MAX_INPUT_BYTES,
        )
    return data


def _decoded(data: bytes, name: str, notify: Notify) -> str:
    """UTF-8; what is not is replaced and said, so that a pipeline goes on."""
    text = data.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as problem:
            notify(
                f"{name} is not UTF-8 (first at byte {problem.start:,}): "
                "each unreadable byte became a replacement character"
            )
    return text.replace("\r\n", "\n")


def decoded_words(words: str, notify: Notify) -> str:
    """The prompt of the command line, whose bytes the system may not have been able to decode."""
    return _decoded(words.encode("utf-8", "surrogateescape"), "the prompt", notify)


def _mention_waiting(stream: BinaryIO, notify: Notify) -> None:
    """Say that stdin is awaited when nothing comes: an open pipe that nobody writes to looks like a hang."""
    try:
        ready, _, _ = select.select([stream], [], [], _PATIENCE_S)
    except (OSError, ValueError):
        return  # a stream without a descriptor never blocks
    if not ready:
        notify("waiting for stdin to end (Ctrl+C stops; </dev/null gives none)")
