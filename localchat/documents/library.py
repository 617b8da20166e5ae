"""The collections of a user, by name, and what a question gets of them.

A collection that fits is sent whole, in an order that is always the same and before everything else, so that
the next question finds it in the prefix cache. Of a larger one the nearest passages are sent.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.documents.passages import Passage, marked_text, places
from localchat.engine.interface import Engine
from localchat.errors import LocalchatError, UsageError
from localchat.units import tokens as tokens_text

if TYPE_CHECKING:
    from localchat.documents.collection import Collection, Embed

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_MENTION: Final = re.compile(rf"(?<!\S)@({NAME.pattern})(?![\w/-])(?!\.\w)")
_SUFFIX: Final = ".sqlite3"
_SHARE: Final = 0.75
"""Of the context, for a whole collection: the conversation about it needs the rest."""
_MOST_PASSAGES: Final = 8
_PASSAGE_TOKENS: Final = 350
"""Of a passage of full length, for a guess that is rather too high."""
_CHARACTERS_A_TOKEN: Final = 12
"""More than any tokenizer's average: a longer text certainly does not fit."""


class Mentions(NamedTuple):
    """A prompt without the mentions of collections."""

    names: tuple[str, ...]
    text: str


class Excerpt(NamedTuple):
    """What a question gets of one collection."""

    text: str
    """Stands before everything else of the message; empty where an earlier message holds it."""
    label: str
    """What was taken, on one line."""
    whole: bool = False
    """All of the collection."""


class DocumentLibrary:
    """The collections in one folder. Callable from any thread."""

    def __init__(self, folder: Path, embed: "Embed | None" = None) -> None:
        self.folder = folder
        self._embed = embed

    def names(self) -> tuple[str, ...]:
        """All collections, by name."""
        try:
            return tuple(sorted(path.stem for path in self.folder.glob(f"*{_SUFFIX}")))
        except OSError:
            return ()

    def path(self, name: str) -> Path:
        """The file of a collection. Raises UsageError for what cannot be a name."""
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of documents",
                hint="a name begins with a letter and has letters, digits, - and _",
            )
        return self.folder / f"{name}{_SUFFIX}"

    def open(self, name: str, *, create: bool = False) -> "Collection":
        """Open a collection. Raises UsageError, LocalchatError."""
        from localchat.documents.collection import Collection  # sqlite3

        return Collection(self.path(name), create=create)

    def forget(self, name: str) -> None:
        """Delete a collection. Raises UsageError."""
        path = self.path(name)
        if not path.exists():
            raise UsageError(f"there are no documents @{name}", hint="localchat learn --list")
        path.unlink()
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)

    def mentions(self, text: str, spared: Iterable[tuple[int, int]] = ()) -> Mentions:
        """The collections that `@name` in a text means; the words stay, without the sign, unless they begin or
        end a line. `spared`: ranges of characters that are included files."""
        if "@" not in text:
            return Mentions((), text)
        known = self.names()
        ranges = tuple(spared)
        found = [
            mention
            for mention in _MENTION.finditer(text)
            if mention[1] in known and not any(a <= mention.start() < b for a, b in ranges)
        ]
        length = len(text)
        for mention in found:
            shift = len(text) - length
            before = text[: mention.start() + shift]
            after = text[mention.end() + shift :]
            text = _without_sign(before, mention[1], after)
        return Mentions(tuple(dict.fromkeys(mention[1] for mention in found)), text)

    def excerpt(
        self, name: str, question: str, engine: Engine, sent: Sequence[str] = ()
    ) -> Excerpt:
        """What this question gets of a collection, whose changed files are read first. Raises LocalchatError.

        `sent`: the messages before it."""
        with self.open(name) as collection:
            # What was read before is still good if another program is reading, or the disk is full.
            with suppress(LocalchatError):
                collection.learn(embed=self._embed)
            return excerpt_of(collection, question, engine, sent, self._embed)


def excerpt_of(
    collection: "Collection",
    question: str,
    engine: Engine,
    sent: Sequence[str] = (),
    embed: "Embed | None" = None,
) -> Excerpt:
    """See DocumentLibrary.excerpt; nothing is read again."""
    found = collection.summary()
    if not found.files:
        raise UsageError(
            f"@{collection.name} holds no text",
            hint=f"localchat learn DIR --name {collection.name}",
        )
    context = engine.info().context_tokens
    used = _count(engine, "\n".join(sent)) if sent else 0
    if found.length <= context * _SHARE * _CHARACTERS_A_TOKEN:
        whole = _framed(collection.name, collection.passages(), whole=True)
        if any(whole in message for message in sent):
            return Excerpt("", f"@{collection.name}: read above", whole=True)
        count = _count(engine, whole)
        room = int(context * _SHARE) - used
        if count <= room:
            files = "1 file" if found.files == 1 else f"all {found.files} files"
            label = f"@{collection.name}: {files}, {tokens_text(count)}"
            return Excerpt(whole, label, whole=True)
    room = (context - used) // 2
    most = max(1, min(_MOST_PASSAGES, room // _PASSAGE_TOKENS))
    vector = None
    note = ""
    if found.embedding_model and embed is not None:
        try:
            vector = embed(found.embedding_model, [question])[0]
        except LocalchatError as problem:  # the model is gone: its words are still there
            note = f"; by words alone: {problem.message}"
    while True:
        passages = collection.find(question, most, vector)
        told = note
        if not passages:
            passages = collection.beginnings(most)
            told += "; no passage has a word of the question: the beginnings"
        text = _framed(collection.name, passages, whole=False)
        if most == 1 or _count(engine, text) <= room:
            break
        most -= 1  # tables and code take more tokens than the guess
    number = "1 passage" if len(passages) == 1 else f"{len(passages)} passages"
    return Excerpt(text, f"@{collection.name}: {number}: {places(passages)}{told}")


def _framed(name: str, passages: Sequence[Passage], *, whole: bool) -> str:
    """Passages with the request to cite them. The same passages give the same text."""
    what = f"Documents: {name}." if whole else f"Passages from the documents {name}:"
    return (
        f"{what} Each passage stands below its place in square brackets. Answer from them, and after each "
        f"statement cite the place as it is written, for instance {passages[0].mark}. If they do not hold the "
        f"answer, say so.\n\n{marked_text(passages)}\n\n"
    )


def _count(engine: Engine, text: str) -> int:
    try:
        return len(engine.tokenize(text))
    except LocalchatError:  # a remote server that does not count
        return len(text) // 3


def _without_sign(before: str, name: str, after: str) -> str:
    """The text without a mention at the beginning or end of a line; elsewhere its word stays."""
    begins = not before.rpartition("\n")[2].strip()
    if begins:
        return f"{before}{after.lstrip(' ')}"
    ends = not after.partition("\n")[0].strip(" .,;:!?")
    if ends:
        return f"{before.rstrip(' ')}{after}"
    return f"{before}{name}{after}"
