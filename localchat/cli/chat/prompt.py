"""Parts of a prompt: files, stdin and the words of the command, in this order.

Pictures, recordings and long texts come first, so that a second question about them hits the prefix cache.
"""

import select
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from localchat.chat.conversation import Inclusion, Question
from localchat.cli.context import Notify
from localchat.config.paths import MAX_INPUT_BYTES, expand_home, open_input
from localchat.engine.attachments import attached_sentence, make_attachment, moved
from localchat.engine.request import Attachment
from localchat.errors import ContextExceeded, FileMissing, UsageError
from localchat.media.binary_kind import binary_kind, is_svg
from localchat.media.format import HEAD_BYTES, media_format
from localchat.sanitize import sanitize_line, utf16_text
from localchat.session.file_mentions import mentioned_files, missing_paths, unquoted
from localchat.session.named_media import with_named_media

_STDIN_NOTICE_S = 3.0
"""Time without input after which a notice says that stdin is read."""


def join_parts(parts: Sequence[str]) -> str:
    """Join the parts that are not blank, with a blank line between."""
    stripped = [*(part.rstrip("\n") for part in parts[:-1]), *parts[-1:]]
    return "\n\n".join(part for part in stripped if part.strip())


class PromptPart(NamedTuple):
    """Text, pictures and recordings of files or of stdin."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the texts."""


def prompt_of(parts: Sequence[PromptPart], question: Question) -> Question:
    """Return a question with files and stdin before its words."""
    words = question.text
    text = join_parts([*(part.text for part in parts), words])
    included = text.removesuffix(words)
    first = tuple(item for part in parts for item in part.attachments)
    attachments = (*first, *moved(question.attachments, len(included)))
    if not words.strip() or not included:
        return Question(text, (), attachments)
    label = ", ".join(label for part in parts for label in part.labels)
    inclusion = Inclusion(label, 0, len(included.rstrip("\n")))
    return Question(text, (inclusion,), attachments)


def with_named_files(
    words: str,
    notify: Notify,
    *,
    parts: Sequence[PromptPart] = (),
    names: Iterable[str] = (),
    documents: Collection[str] = (),
) -> Question:
    """Return a question with other parts, the files that its words name, and the words.

    Words of several lines name only pictures and recordings, because they may be the output of a command.
    `names`: see with_named_media. `documents`: names that are not files. Raises UsageError.
    """
    question = with_named_media(words, names)
    for item in question.attachments:
        notify(attached_sentence(item))
    if "\n" in question.text:
        return prompt_of(parts, question)
    for name in missing_paths(question.text, Path()):
        notify(f"there is no file {sanitize_line(name)}, so the name is sent as text")
    names = mentioned_files(question.text, Path())
    mentioned = [unquoted(name) for name in names if name not in documents]
    files = read_files(mentioned, notify, headed=True)
    for name in mentioned:
        notify(f"{sanitize_line(name)} is attached")
    return prompt_of((*parts, files), question)


def read_stdin(notify: Notify) -> PromptPart:
    """Read piped input; empty for a terminal or a closed stdin."""
    stream = sys.stdin
    if stream is None or stream.closed or stream.isatty():
        return PromptPart()
    _notify_waiting(stream.buffer, notify)
    data = _bounded(stream.buffer, "stdin")
    if media_format(data[:HEAD_BYTES]) is not None:
        return PromptPart("", (make_attachment(data, "stdin"),))
    if (wide := utf16_text(data)) is not None:
        return PromptPart(wide, labels=("stdin",))
    if b"\0" in data:
        raise UsageError(
            f"stdin is {binary_kind('', data[:HEAD_BYTES])}",
            hint="pipe text, a picture or a recording; -f also reads PDF, DOCX and HTML",
        )
    text = _decoded(data, "stdin", notify)
    if not text.strip():
        return PromptPart(text)
    return PromptPart(text, labels=("stdin",))


def read_files(names: Sequence[str], notify: Notify, *, headed: bool = False) -> PromptPart:
    """Read files. The texts of several files, or all with `headed`, have their names as headings."""
    contents = [(name, _read_file(name, notify)) for name in names]
    attachments = tuple(item for _, item in contents if isinstance(item, Attachment))
    texts = [(name, text) for name, text in contents if isinstance(text, str)]
    labels = tuple(name for name, _ in texts)
    if len(texts) == 1 and not headed:
        return PromptPart(texts[0][1], attachments, labels)
    sections = [f"{name}:\n\n{text}" for name, text in texts]
    return PromptPart(join_parts([*sections, ""]), attachments, labels)


def _read_file(name: str, notify: Notify) -> str | Attachment:
    path = expand_home(name)
    if path.is_dir():
        raise UsageError(
            f"{name} is a folder",
            hint="-f takes a file and can be given several times; localchat learn reads a folder",
        )
    try:
        with open_input(path) as file:
            data = _bounded(file, name)
    except FileNotFoundError as problem:
        hint = "stdin needs no flag; it comes first" if name == "-" else ""
        raise FileMissing(f"there is no file {name}", hint=hint) from problem
    except OSError as problem:
        raise UsageError(f"{name} cannot be read: {problem.strerror}") from problem
    if media_format(data[:HEAD_BYTES]) is not None:
        return make_attachment(data, path.name)
    from localchat.documents.pages import kind_of, marked_text

    if kind_of(name, data[:8192]) in ("pdf", "docx", "html"):
        return marked_text(name, data)
    if (wide := utf16_text(data)) is not None:
        return wide
    if b"\0" in data:
        raise UsageError(
            f"{name} is {binary_kind(name, data[:HEAD_BYTES])}",
            hint="-f takes text, PDF, DOCX and HTML files, pictures (PNG, JPEG, WebP, GIF, BMP, TIFF) and "
            "recordings (WAV, MP3, FLAC, Ogg)",
        )
    text = _decoded(data, name, notify)
    if not text.strip():
        notify(f"{name} is empty")
    if is_svg(data):
        notify(f"{name} is an SVG drawing: its source is sent as text")
    return text


def _bounded(stream: BinaryIO, name: str) -> bytes:
    data = stream.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ContextExceeded(
            f"{name} is larger than the limit of {MAX_INPUT_BYTES:,} bytes",
            hint="shorten the input",
            limit_bytes=MAX_INPUT_BYTES,
        )
    return data


def _decoded(data: bytes, name: str, notify: Notify) -> str:
    """Decode UTF-8. Replace invalid bytes with a notice, so that a pipeline continues."""
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
    """Decode the words of the command line, which may be invalid in the system's encoding."""
    return _decoded(words.encode("utf-8", "surrogateescape"), "the prompt", notify)


def _notify_waiting(stream: BinaryIO, notify: Notify) -> None:
    """Print a notice if stdin stays silent. An open pipe without a writer looks like a hang."""
    try:
        ready, _, _ = select.select([stream], [], [], _STDIN_NOTICE_S)
    except (OSError, ValueError):
        return  # a stream without a descriptor never blocks
    if not ready:
        notify("waiting for stdin to end (Ctrl+C stops; </dev/null gives none)")
