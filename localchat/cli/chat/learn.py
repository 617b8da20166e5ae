"""Command `localchat learn`: index documents for `@NAME` in prompts."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import AppContext
from localchat.cli.document_options import complete_documents, open_library
from localchat.cli.options import complete_file
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import Terminal, tell
from localchat.config.paths import expand_home, find_paths
from localchat.documents.folder import MAX_FILES
from localchat.errors import ExitCode, FileMissing, LocalchatError, UsageError
from localchat.units import counted, tokens

if TYPE_CHECKING:
    from localchat.documents.collection import Changes, Collection, Summary
    from localchat.documents.library import DocumentLibrary

_CHARACTERS_PER_TOKEN = 4
"""Estimate for English text. The model counts its own tokens when it is asked."""


@click.command("learn")
@click.argument("sources", metavar="[DIR|FILE]...", nargs=-1, shell_complete=complete_file)
@click.option("--name", metavar="NAME", help="Name for @NAME. Default: that of the folder or file.")
@click.option("--list", "list_", is_flag=True, help="List the indexed documents.")
@click.option(
    "--forget", metavar="NAME", shell_complete=complete_documents, help="Delete indexed documents."
)
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@click.pass_obj
def command(
    app: AppContext,
    /,
    sources: tuple[str, ...],
    name: str | None,
    list_: bool,
    forget: str | None,
    as_json: bool,
) -> int:
    """Index documents, then ask about them with @NAME.

    \b
    localchat learn ~/contracts --name contracts
    localchat "@contracts when does the lease end?"

    The command reads PDF, DOCX, HTML, Markdown and other text. Documents that fit in the model's context are
    sent completely, before the question. From longer ones, the most relevant passages are sent. Answers cite
    [file:page]. Changed files are read again at the next question.
    """
    library = open_library(app)
    if forget is not None:
        library.forget(forget.removeprefix("@"))
        tell(f"localchat: forgot @{forget.removeprefix('@')}")
    elif list_ or not (sources or name):
        return _list(app, library, as_json)
    else:
        return _learn(app, library, sources, name)
    return ExitCode.OK


def _list(app: AppContext, library: "DocumentLibrary", as_json: bool) -> ExitCode:
    summaries: dict[str, Summary] = {}
    code = ExitCode.OK
    for name in library.names():
        # A damaged collection must not hide the others.
        try:
            with library.open(name) as collection:
                summaries[name] = collection.summary()
        except LocalchatError as problem:
            tell(f"localchat: {problem.message}\n  {problem.hint}")
            code = problem.exit_code
    if as_json:
        print_json(app.environ, [_record(name, summary) for name, summary in summaries.items()])
    elif summaries:
        rows = [
            (
                f"@{name}",
                f"{summary.files:,}",
                f"about {_tokens(summary):,}",
                ", ".join(summary.sources),
            )
            for name, summary in summaries.items()
        ]
        print_lines(app.environ, table(("NAME", "FILES", "TOKENS", "FROM"), rows, right=(1, 2)))
    elif code is ExitCode.OK:
        tell("localchat: no documents are indexed yet; localchat learn DIR indexes a folder")
    return code


def _record(name: str, summary: "Summary") -> dict[str, Any]:
    return {
        "name": name,
        "sources": summary.sources,
        "files": summary.files,
        "characters": summary.length,
        "skipped": summary.skipped,
    }


def _tokens(summary: "Summary") -> int:
    return summary.length // _CHARACTERS_PER_TOKEN


def _learn(
    app: AppContext,
    library: "DocumentLibrary",
    sources: Sequence[str],
    name: str | None,
) -> ExitCode:
    """Read the sources, and report what was read. Fails if no file of a kind of document was readable."""
    terminal = Terminal(app.environ)
    locations = [_location(source) for source in sources]
    has_name_flag = name is not None
    name = name.removeprefix("@") if name is not None else _derived_name(locations[0])
    is_new = not library.path(name).exists()
    if is_new and not locations:
        raise UsageError(
            f"there are no documents @{name}", hint=f"localchat learn DIR --name {name}"
        )
    has_text = False
    try:
        with library.open(name, create=True) as collection:
            if not has_name_flag and not is_new:
                _check_same(collection, locations)
            changes = _read(terminal, collection, locations)
            summary = collection.summary()
            has_text = bool(summary.length)
    finally:
        if is_new and not has_text and library.path(name).exists():
            # Nothing was readable, so remove the empty collection.
            library.forget(name)
    if not has_text:
        raise _nothing_readable(sources, summary)
    _report(terminal, name, changes, summary)
    for kind, count in summary.unread_kinds.items():
        terminal.print_line(
            f"localchat: none of the {counted(count, f'{kind} file')} could be read, so @{name} lacks them"
        )
    terminal.notify(_question_hint(app, name))
    if summary.unread_kinds:
        return ExitCode.ERROR
    return ExitCode.OK


def _nothing_readable(sources: Sequence[str], summary: "Summary") -> UsageError:
    """Return the error for sources without any text."""
    names = ", ".join(sources)
    if len(summary.skipped) == 1:
        [(reason, count)] = summary.skipped.items()
        if count == 1:
            return UsageError(f"cannot read {names}: the file {reason}")
        return UsageError(f"cannot read {names}: each of {count:,} files {reason}")
    return UsageError(f"{names} has no readable text{_skipped(summary)}")


def _read(terminal: Terminal, collection: "Collection", locations: Sequence[str]) -> "Changes":
    def progress(done: int, total: int) -> None:
        terminal.progress(f"reading {done + 1:,} of {total:,} files")

    try:
        return collection.learn(locations, progress)
    finally:
        terminal.progress("")


def _report(terminal: Terminal, name: str, changes: "Changes", summary: "Summary") -> None:
    parts = [f"{changes.read:,} read"]
    if changes.unchanged:
        parts.append(f"{changes.unchanged:,} unchanged")
    if changes.removed:
        parts.append(f"{changes.removed:,} removed")
    terminal.print_line(
        f"localchat: @{name}: {counted(summary.files, 'file')}, "
        f"about {tokens(_tokens(summary))} ({', '.join(parts)}){_skipped(summary)}"
    )
    if summary.files + sum(summary.skipped.values()) >= MAX_FILES:
        terminal.print_line(f"localchat: at most {MAX_FILES:,} files of a folder are read")


def _question_hint(app: AppContext, name: str) -> str:
    """Return a hint with a question about the documents.

    If the guide would answer, which refuses documents, the hint leads to other models.
    """
    from localchat.models.onboarding import is_first_run
    from localchat.models.resolve import GUIDE, last_model

    question = f'"@{name} what is it about?"'
    paths = find_paths(app.environ)
    if last_model(paths) in (None, GUIDE) and is_first_run(paths, app.environ):
        return (
            f"ask about it: localchat run lists models that can answer; then localchat {question}"
        )
    return f"ask about it: localchat {question}"


def _skipped(summary: "Summary") -> str:
    """Return `; skipped 1 file, which is a binary file`, or an empty string."""
    if not summary.skipped:
        return ""
    files = counted(sum(summary.skipped.values()), "file")
    if len(summary.skipped) == 1:
        [(reason, count)] = summary.skipped.items()
        pronoun = "each of which"
        if count == 1:
            pronoun = "which"
        return f"; skipped {files}, {pronoun} {reason}"
    reasons = [f"{count:,} ({reason})" for reason, count in summary.skipped.items()]
    return f"; skipped {files}: {', '.join(reasons)}"


def _location(source: str) -> str:
    """Return the absolute path of a source. Raises FileMissing, and UsageError for a URL."""
    if source.startswith(("http://", "https://")):
        raise UsageError(
            f"{source} is a URL, and learn reads files",
            hint=f"curl -L {shlex.quote(source)} > page.html && localchat learn page.html",
        )
    path = expand_home(source).absolute()
    if not path.exists():
        raise FileMissing(f"there is no file or folder {source}")
    if not (path.is_file() or path.is_dir()):
        raise UsageError(
            f"{source} is a pipe or a device",
            hint="learn reads documents again once they change: save the text in a file",
        )
    return str(path.resolve())


def _derived_name(location: str) -> str:
    """Derive a collection name from the last part of a path. Raises UsageError."""
    path = Path(location)
    stem = path.name if path.is_dir() else path.stem
    name = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-").lower()[:40].strip("-")
    if not name or not name[0].isalpha():
        raise UsageError(f"cannot derive a collection name from {location}", hint="use --name NAME")
    return name


def _check_same(collection: "Collection", locations: Sequence[str]) -> None:
    """Raise UsageError for new sources. Only a collection that `--name` names accepts them."""
    # A run that was killed, or that another process has just started, has stored no source yet.
    sources = set(collection.summary().sources)
    if sources and not sources.issuperset(locations):
        raise UsageError(
            f"@{collection.name} contains other documents",
            hint=f"--name {collection.name} adds to them; another name creates a new collection",
        )
