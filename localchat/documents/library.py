"""The collections of a user, and the excerpts that are sent with a question.

A collection that fits is sent completely, in a fixed order and before everything else, so that the next
question hits the prefix cache. Of a larger one, the nearest passages are sent.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.documents.passages import Passage, marked_text, places
from localchat.engine.interface import Engine
from localchat.errors import LocalchatError, UsageError
from localchat.suggestions import closest
from localchat.units import counted
from localchat.units import tokens as tokens_text

if TYPE_CHECKING:
    from localchat.documents.collection import Collection

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_MENTION: Final = re.compile(rf"(?<!\S)@({NAME.pattern})(?![\w/-])(?!\.\w)")
_FIRST_MENTION: Final = re.compile(rf"\s*@({NAME.pattern})[,:;.!?]*(?:\s+|$)")
_SUFFIX: Final = ".sqlite3"
_SHARE: Final = 0.75
"""Largest share of the context for a whole collection. The conversation needs the rest."""
_MAX_PASSAGES: Final = 8
_PASSAGE_TOKENS: Final = 350
"""Tokens of a passage of full length, estimated rather too high."""
_CHARACTERS_PER_TOKEN: Final = 12
"""Above any tokenizer's average, so that a longer text certainly does not fit."""


class Mentions(NamedTuple):
    """The mentioned collections, and the prompt without the mentions."""

    names: tuple[str, ...]
    text: str


class Excerpt(NamedTuple):
    """The part of a collection that is sent with a question."""

    text: str
    """Text before everything else of the message, empty if an earlier message has it."""
    label: str
    """Description of the excerpt on one line."""


class DocumentLibrary:
    """The collections in one folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> tuple[str, ...]:
        """Return the names of all collections, sorted."""
        try:
            return tuple(sorted(path.stem for path in self.folder.glob(f"*{_SUFFIX}")))
        except OSError:
            return ()

    def path(self, name: str) -> Path:
        """Return the path of a collection. Raises UsageError for an invalid name."""
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of documents",
                hint="a name begins with a letter and has letters, digits, - and _",
            )
        return self.folder / f"{name}{_SUFFIX}"

    def open(self, name: str, *, create: bool = False) -> "Collection":
        """Open a collection. Raises UsageError, LocalchatError."""
        # This imports sqlite3.
        from localchat.documents.collection import Collection

        return Collection(self.path(name), create=create)

    def forget(self, name: str) -> None:
        """Delete a collection. Raises UsageError."""
        path = self.path(name)
        if not path.exists():
            raise UsageError(f"there are no documents @{name}", hint="localchat learn --list")
        path.unlink()
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)

    def mentions(self, text: str, spared: Iterable[tuple[int, int]] = ()) -> Mentions:
        """Find the collections that a text mentions as `@name`.

        Mentions at the start or end of a line are removed. Elsewhere only the sign is removed. spared: ranges
        of characters that are included files.
        """
        if "@" not in text:
            return Mentions((), text)
        names = self.names()
        ranges = tuple(spared)
        mentions = [
            mention
            for mention in _MENTION.finditer(text)
            if mention[1] in names
            and not any(start <= mention.start() < end for start, end in ranges)
        ]
        length = len(text)
        for mention in mentions:
            shift = len(text) - length
            before = text[: mention.start() + shift]
            after = text[mention.end() + shift :]
            text = _without_sign(before, mention[1], after)
        return Mentions(tuple(dict.fromkeys(mention[1] for mention in mentions)), text)

    def check_first_mention(self, text: str, *, strict: bool = False) -> None:
        """Raise UsageError if a text starts with an unknown name that resembles a collection's.

        With `strict`, as on the command line, every unknown name is an error, unless the line ends there, as
        pasted code such as `@property` does.
        """
        match = _FIRST_MENTION.match(text)
        names = self.names()
        if match is None or match[1] in names:
            return
        near = closest(match[1], names, min_similarity=0.6)
        if near or (strict and self.unknown_first_mention(text)):
            message = f"there are no documents @{match[1]}"
            if near:
                message += f"; did you mean @{near[0]}?"
            raise UsageError(
                message,
                hint=f"localchat learn --list shows them. To send the name as text, write @@{match[1]}",
            )

    def unknown_first_mention(self, text: str) -> str:
        """Return the unknown name at the start of a text. Empty for none, and before a line break."""
        match = _FIRST_MENTION.match(text)
        if match is None or match[1] in self.names() or "\n" in match[0]:
            return ""
        return match[1]

    def excerpt(
        self, name: str, question: str, engine: Engine, sent: Sequence[str] = ()
    ) -> Excerpt:
        """Return the excerpt for a question. Changed files are read first. Raises LocalchatError.

        sent: the earlier messages.
        """
        with self.open(name) as collection:
            # If another program is reading or the disk is full, the earlier text is still good.
            with suppress(LocalchatError):
                collection.learn()
            return excerpt_of(collection, question, engine, sent)


def excerpt_of(
    collection: "Collection",
    question: str,
    engine: Engine,
    sent: Sequence[str] = (),
) -> Excerpt:
    """Return the excerpt for a question without reading files again. See DocumentLibrary.excerpt."""
    summary = collection.summary()
    if not summary.files:
        raise UsageError(
            f"@{collection.name} has no text",
            hint=f"localchat learn DIR --name {collection.name}",
        )
    context = engine.info().context_tokens
    used = _count(engine, "\n".join(sent)) if sent else 0
    if summary.length <= context * _SHARE * _CHARACTERS_PER_TOKEN:
        text = _framed(collection.name, collection.passages(), complete=True)
        if any(text in message for message in sent):
            return Excerpt("", f"@{collection.name}: read above")
        count = _count(engine, text)
        room = int(context * _SHARE) - used
        if count <= room:
            files = "1 file" if summary.files == 1 else f"all {summary.files} files"
            label = f"@{collection.name}: {files}, {tokens_text(count)}"
            return Excerpt(text, label)
    room = (context - used) // 2
    limit = max(1, min(_MAX_PASSAGES, room // _PASSAGE_TOKENS))
    while True:
        passages = collection.find(question, limit)
        remark = ""
        if not passages:
            passages = collection.beginnings(limit)
            remark = "; no passage has a word of the question, so it is the start of each file"
        text = _framed(collection.name, passages, complete=False)
        if limit == 1 or _count(engine, text) <= room:
            break
        # Tables and code take more tokens than estimated.
        limit -= 1
    number = counted(len(passages), "passage")
    return Excerpt(text, f"@{collection.name}: {number}: {places(passages)}{remark}")


def _framed(name: str, passages: Sequence[Passage], *, complete: bool) -> str:
    """Return the passages with the instruction to cite them. Equal passages give equal texts."""
    title = f"Documents: {name}." if complete else f"Passages from the documents {name}:"
    return (
        f"{title} Each passage stands below its place in square brackets. Answer from them, and after each "
        f"statement cite the place as it is written, for instance {passages[0].mark}. If they do not hold the "
        f"answer, say so.\n\n{marked_text(passages)}\n\n"
    )


def _count(engine: Engine, text: str) -> int:
    try:
        return len(engine.tokenize(text))
    except LocalchatError:
        # Some remote servers cannot tokenize.
        return len(text) // 3


def _without_sign(before: str, name: str, after: str) -> str:
    """Remove a mention at the start or end of a line, and only its sign elsewhere."""
    starts_line = not before.rpartition("\n")[2].strip()
    if starts_line:
        return f"{before}{after.lstrip(' ')}"
    ends_line = not after.partition("\n")[0].strip(" .,;:!?")
    if ends_line:
        return f"{before.rstrip(' ')}{after}"
    return f"{before}{name}{after}"
