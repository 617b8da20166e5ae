"""Pictures and recordings that a text names: `@chart.png`, or the path of one that was dropped or typed."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from localchat.chat.conversation import Question
from localchat.config.paths import expand_home
from localchat.engine.attachments import join_parts, read_media
from localchat.engine.request import Attachment
from localchat.media.binary_kind import unreadable_medium
from localchat.media.decode import check_format
from localchat.media.format import HEAD_BYTES, media_format
from localchat.session.file_mentions import unquoted

_WORD: Final = re.compile(r"""(?<!\S)(@?)("[^"\n]+"|'[^'\n]+'|(?:\\.|[^\s"'\\])+)(?!\S)""")
_PATH_STARTS: Final = ("/", "./", "../", "~/", "file:")
_MAX_DROPPED: Final = 8192
"""Characters of a paste that may be the paths of dropped files."""


def with_named_media(text: str, names: Iterable[str] = ()) -> Question:
    """Replace names of pictures and recordings by the files. Raises UsageError for an unusable file.

    A name counts after `@`, as a path with a slash, or if it is one of `names`. It must be an existing file
    whose content is a picture or a recording. Other words stay, but not the `@name` of a picture in a format
    that cannot be read.
    """
    parts: list[str | Attachment] = []
    allowed = {name for name in names if media_path(name) is not None}
    pattern = _WORD
    if spaced := [re.escape(name) for name in allowed if " " in name]:
        pattern = re.compile(rf"(?<!\S)(@?)({'|'.join(spaced)})(?!\S)|{_WORD.pattern}")
    end = 0
    for match in pattern.finditer(text):
        sign, name = (group for group in match.groups() if group is not None)
        if name not in allowed:
            name = unquoted(name)
        if not (sign or name in allowed or name.startswith(_PATH_STARTS)):
            continue
        path = media_path(name)
        if path is not None:
            parts += [text[end : match.start()], read_media(path)]
            end = match.end()
        elif sign:
            _check_readable(name)
    if not parts:
        return Question(text)
    content = join_parts([*parts, text[end:]], "")
    # The words around a name keep one space.
    return Question(content.text, (), content.attachments).stripped()


def dropped_media(paste: str) -> list[Path]:
    """Return the files of a paste that is nothing but paths of pictures and recordings.

    Terminals paste the paths of dropped files, quoted or with escaped spaces.
    """
    text = paste.strip()
    if not text or len(text) > _MAX_DROPPED or not text.startswith((*_PATH_STARTS, "'", '"')):
        return []
    whole = media_path(text)  # some terminals do not quote a space
    if whole is not None:
        return [whole]
    try:
        names = shlex.split(text)
    except ValueError:
        return []
    paths = [path for name in names if (path := media_path(name)) is not None]
    if len(paths) < len(names):
        return []
    return paths


def media_path(name: str) -> Path | None:
    """Return the path of a name if its content is a picture or a recording. Never raises."""
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    if media_format(_head(name)) is None:
        return None
    return expand_home(name)


def _head(name: str) -> bytes:
    """Return the start of a file, or nothing if it cannot be read."""
    try:
        path = expand_home(name)
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def _check_readable(name: str) -> None:
    """Raise UsageError for a picture or recording whose format cannot be read."""
    head = _head(name)
    if unreadable_medium(name, head):
        check_format(head, Path(name).name)
