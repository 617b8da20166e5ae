"""Command `localchat learn`: reads documents, which `@NAME` in a prompt then means."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import AppContext
from localchat.cli.document_options import completions, open_library
from localchat.cli.options import complete_file
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.preset_options import read_presets
from localchat.cli.streams import Terminal, tell
from localchat.config.paths import expand_home, find_paths
from localchat.documents.folder import MAX_FILES
from localchat.errors import ExitCode, FileMissing, UsageError
from localchat.units import counted, tokens

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.documents.collection import Changes, Collection, Embed, Summary
    from localchat.documents.library import DocumentLibrary

_CHARACTERS_A_TOKEN = 4
"""Of English text; the model's own count is made when it is asked."""


def _complete(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    return completions(ctx, incomplete)


@click.command("learn")
@click.argument("sources", metavar="[DIR|FILE|URL]...", nargs=-1, shell_complete=complete_file)
@click.option("--name", metavar="NAME", help="Name for @NAME. Default: that of the folder or file.")
@click.option(
    "--embed",
    metavar="MODEL",
    help="Embedding model that also finds passages. Default: search by words only.",
)
@click.option("--list", "list_", is_flag=True, help="List the indexed documents.")
@click.option(
    "--forget", metavar="NAME", shell_complete=_complete, help="Delete indexed documents."
)
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@click.pass_obj
def command(
    app: AppContext,
    /,
    sources: tuple[str, ...],
    name: str | None,
    embed: str | None,
    list_: bool,
    forget: str | None,
    as_json: bool,
) -> int:
    """Index documents, then ask about them with @NAME.

    \b
    localchat learn ~/contracts --name contracts
    localchat "@contracts when does the lease end?"

    Reads PDF, DOCX, HTML, Markdown and other text. What fits into the model's context is sent whole, before
    the question; of more, the passages nearest to the question. Answers cite [file:page]. Changed files are
    read again with the next question, URLs with the next learn.
    """
    library = open_library(app)
    if forget is not None:
        library.forget(forget.removeprefix("@"))
        tell(f"localchat: forgot @{forget.removeprefix('@')}")
    elif list_ or not (sources or name):
        _list(app, library, as_json)
    else:
        return _learn(app, library, sources, name, embed)
    return ExitCode.OK


def _list(app: AppContext, library: "DocumentLibrary", as_json: bool) -> None:
    found: dict[str, Summary] = {}
    for name in library.names():
        with library.open(name) as collection:
            found[name] = collection.summary()
    if as_json:
        print_json(app.environ, [_record(name, one) for name, one in found.items()])
    elif found:
        rows = [
            (f"@{name}", f"{one.files:,}", _about_tokens(one), ", ".join(one.sources))
            for name, one in found.items()
        ]
        print_lines(app.environ, table(("NAME", "FILES", "TOKENS", "FROM"), rows, right=(1, 2)))
    else:
        tell("localchat: nothing was learned yet; localchat learn DIR")


def _record(name: str, one: "Summary") -> dict[str, Any]:
    return {
        "name": name,
        "sources": one.sources,
        "files": one.files,
        "characters": one.length,
        "skipped": one.skipped,
        "embedding_model": one.embedding_model or None,
    }


def _about_tokens(one: "Summary") -> str:
    return f"about {_tokens(one):,}"


def _tokens(one: "Summary") -> int:
    return one.length // _CHARACTERS_A_TOKEN


# ---------------------------------------------------------------------------- reading


def _learn(
    app: AppContext,
    library: "DocumentLibrary",
    sources: Sequence[str],
    name: str | None,
    embed: str | None,
) -> int:
    """Read the sources. Return an exit code: an error if no file of a kind could be read."""
    from localchat.documents.collection import is_url

    terminal = Terminal(app.environ)
    places = [_place(source) for source in sources]
    if any(is_url(place) for place in places) and _is_offline(app):
        raise UsageError("a URL is fetched from the network, and offline is set")
    chosen = name.removeprefix("@") if name is not None else _name_of(places[0])
    is_new = not library.path(chosen).exists()
    if chosen in read_presets(app):
        raise UsageError(f"there is a preset @{chosen} already", hint="--name gives another name")
    if is_new and not places:
        raise UsageError(
            f"there are no documents @{chosen}", hint=f"localchat learn DIR --name {chosen}"
        )
    done = False
    try:
        with library.open(chosen, create=True) as collection:
            if name is None and not is_new:
                _check_same(collection, places)
            changes = _read(app, terminal, collection, places, embed)
            found = collection.summary()
            unread = collection.unread_kinds()
            done = bool(found.length)
    finally:
        if is_new and not done and library.path(chosen).exists():
            # Nothing was readable, so remove the empty collection.
            library.forget(chosen)
    if not found.length:
        raise _nothing_readable(sources, found)
    _report(terminal, chosen, changes, found)
    terminal.notify(_how_to_ask(app, chosen))
    for kind in unread:
        if kind.files == 1:
            sentence = f"the only {kind.kind} file could not be read: it {kind.reason}"
        else:
            sentence = f"none of {kind.files:,} {kind.kind} files could be read: each {kind.reason}"
        terminal.print_line(f"localchat: {sentence}")
    return ExitCode.ERROR if unread else ExitCode.OK


def _nothing_readable(sources: Sequence[str], found: "Summary") -> UsageError:
    """Return the error for sources of which no file has text."""
    places = ", ".join(sources)
    if len(found.skipped) == 1:
        [(reason, count)] = found.skipped.items()
        if count == 1:
            return UsageError(f"cannot read {places}: the file {reason}")
        return UsageError(f"cannot read {places}: each of {count:,} files {reason}")
    return UsageError(f"{places} has no text that can be read{_skipped(found)}")


def _read(
    app: AppContext,
    terminal: Terminal,
    collection: "Collection",
    places: Sequence[str],
    embed: str | None,
) -> "Changes":
    from localchat.documents.web import fetch

    def progress(done: int, total: int) -> None:
        terminal.progress(f"reading {done + 1:,} of {total:,} files")

    try:
        return collection.learn(
            places,
            fetch=None if _is_offline(app) else fetch,
            embed=embedder(app),
            embedding_model=_model_word(embed),
            progress=progress,
        )
    finally:
        terminal.progress("")


def _model_word(word: str | None) -> str | None:
    """The word of a model, which holds in every folder: the path of a file is absolute."""
    if word is None or not expand_home(word).is_file():
        return word
    return str(expand_home(word).absolute())


def _report(terminal: Terminal, name: str, changes: "Changes", found: "Summary") -> None:
    parts = [f"{changes.read:,} read"]
    parts += [f"{changes.unchanged:,} unchanged"] if changes.unchanged else []
    parts += [f"{changes.removed:,} removed"] if changes.removed else []
    terminal.print_line(
        f"localchat: @{name}: {counted(found.files, 'file')}, "
        f"about {tokens(_tokens(found))} ({', '.join(parts)}){_skipped(found)}"
    )
    if found.files + sum(found.skipped.values()) >= MAX_FILES:
        terminal.print_line(f"localchat: at most {MAX_FILES:,} files of a folder are read")


def _how_to_ask(app: AppContext, name: str) -> str:
    """A question about the documents, and a model for it if there is the guide alone, which refuses them."""
    from localchat.models.onboarding import is_first_run

    question = f'"@{name} what is it about?"'
    if is_first_run(find_paths(app.environ), app.environ):
        return (
            f"ask about it: localchat run lists models that can answer; then localchat {question}"
        )
    return f"ask about it: localchat {question}"


def _skipped(found: "Summary") -> str:
    """Return `; skipped 3 files: 2 (is a binary file), 1 (has no text)`; empty if none was."""
    if not found.skipped:
        return ""
    reasons = [f"{count:,} ({reason})" for reason, count in found.skipped.items()]
    return f"; skipped {counted(sum(found.skipped.values()), 'file')}: {', '.join(reasons)}"


def _place(source: str) -> str:
    """The absolute path or the URL of a source. Raises FileMissing."""
    from localchat.documents.collection import is_url

    if is_url(source):
        return source
    path = expand_home(source).absolute()
    if not path.exists():
        raise FileMissing(f"there is no file or folder {source}")
    return str(path.resolve())


def _name_of(place: str) -> str:
    """A name from a path or URL: its last part, in the letters of a name. Raises UsageError."""
    last = (
        place.rstrip("/").rpartition("/")[2].rpartition("?")[0]
        or place.rstrip("/").rpartition("/")[2]
    )
    stem = last if Path(place).is_dir() else Path(last).stem
    name = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-").lower()[:40].strip("-")
    if not name or not name[0].isalpha():
        raise UsageError(
            f"cannot derive a collection name from {place}", hint="give one: --name NAME"
        )
    return name


def _check_same(collection: "Collection", places: Sequence[str]) -> None:
    """Refuse to mix in other documents without a name that was asked for. Raises UsageError."""
    others = set(places) - set(collection.summary().sources)
    if others:
        raise UsageError(
            f"@{collection.name} holds other documents",
            hint=f"--name {collection.name} adds to them; another name keeps them apart",
        )


def _is_offline(app: AppContext) -> bool:
    from localchat.cli.resolve import Inputs

    return Inputs(app, {}).settings().settings.offline


# ---------------------------------------------------------------------------- for prompts


def embedder(app: AppContext) -> "Embed":
    """Embeds texts with a model of this machine, or with a server that has it loaded."""

    def embed(model: str, texts: Sequence[str]) -> list[list[float]]:
        from localchat.cli.resolve import Inputs, open_engine, resolve_inputs

        terminal = Terminal(app.environ, quiet=True)
        engine = open_engine(resolve_inputs(Inputs(app, {}, model), terminal), "documents", _silent)
        try:
            return list(engine.embed(texts, truncate=True))
        finally:
            engine.close()

    return embed


def _silent(sentence: str) -> None:
    """Nobody asked about this engine."""
