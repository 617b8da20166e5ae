"""Command `localchat history`: list, search, show and export saved conversations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localchat.atomic import write_text
from localchat.chat import ID_DIGITS
from localchat.cli.chat.conversation_options import open_history
from localchat.cli.chat.run import complete_conversation
from localchat.cli.context import AppContext, app_context
from localchat.cli.group import DefaultGroup
from localchat.cli.output import confirm, print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import expand_home, find_paths
from localchat.errors import ExitCode, LocalchatError, UsageError, os_errors_as
from localchat.sanitize import sanitize_line
from localchat.units import counted, moment

if TYPE_CHECKING:
    from localchat.history.queries import ConversationSummary, SearchHit
    from localchat.history.store import History

_LIMIT = click.IntRange(1, 1_000_000_000)
"""Range that fits into SQLite's integers."""
_EPILOG = "localchat -c continues the last conversation, --conversation ID any other."


@click.group("history", epilog=_EPILOG, cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """List, search, show and export conversations.

    Without a command, it lists the conversations and takes the flags of list. You can shorten an ID to its
    first digits, as long as they are unique.
    """


@command.command("list", epilog=_EPILOG)
@click.option("-n", "--limit", type=_LIMIT, default=20, show_default=True, metavar="N")
@click.option("--all", "everything", is_flag=True, help="List all conversations.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def list_(ctx: click.Context, /, limit: int, everything: bool, as_json: bool) -> None:
    """List the conversations, newest first."""
    app = app_context(ctx)
    with _opened(app) as history:
        # One row more than shown tells whether there are more.
        max_rows = -1 if everything else limit + 1
        rows = history.list(max_rows)
    has_more = not everything and len(rows) > limit
    if has_more:
        rows = rows[:limit]
    if as_json:
        print_json(app.environ, [row._asdict() for row in rows])
    else:
        _print_rows(app, rows)
    has_limit_flag = ctx.get_parameter_source("limit") is ParameterSource.COMMANDLINE
    if has_more and not has_limit_flag:
        tell(f"localchat: showing the newest {limit}; --all lists all of them")


def _print_rows(app: AppContext, rows: "Sequence[ConversationSummary]") -> None:
    if not rows:
        tell("localchat: there are no conversations yet")
        return
    cells = [
        (row.id[:ID_DIGITS], moment(row.updated_s), str(row.messages), row.title) for row in rows
    ]
    print_lines(app.environ, table(("ID", "LAST", "MESSAGES", "TITLE"), cells, right=(2,)))


@command.command("search")
@click.argument("words", nargs=-1, required=True)
@click.option("-n", "--limit", type=_LIMIT, default=20, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def search(app: AppContext, words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Find conversations by their text.

    All words must occur in one message, each as the beginning of a word. Text in double quotes must occur as it
    is. The exit code is 1 if nothing is found.
    """
    with _opened(app) as history:
        hits = history.search(" ".join(words), limit + 1)
    has_more = len(hits) > limit
    hits = hits[:limit]
    if as_json:
        print_json(app.environ, [_hit_record(hit) for hit in hits])
    else:
        print_lines(app.environ, _hit_lines(hits))
    if has_more:
        tell(f"localchat: there are more than {limit} matches; -n shows more")
    if not hits:
        raise LocalchatError(f"no conversation contains {' '.join(words)!r}")


@command.command("show")
@click.argument("id_", metavar="ID", shell_complete=complete_conversation)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the metrics.")
@click.pass_obj
def show(app: AppContext, id_: str, as_json: bool) -> None:
    """Show a conversation as text, or with --json every message with its metrics."""
    from localchat.chat.export import as_data, as_markdown

    with _opened(app) as history:
        conversation = history.load(id_)
    if as_json:
        print_json(app.environ, as_data(conversation, tree=False))
    else:
        print_lines(app.environ, as_markdown(conversation).splitlines())


@command.command("export")
@click.argument("id_", metavar="ID", shell_complete=complete_conversation)
@click.option("-o", "--output", metavar="FILE", help="File to write. Default: stdout.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON with all branches and metrics.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.pass_obj
def export(app: AppContext, id_: str, output: str | None, as_json: bool, force: bool) -> None:
    """Write a conversation as Markdown or JSON.

    The format of a FILE that ends in .json is JSON, even without --json.
    """
    from localchat.chat.export import as_json_text, as_markdown

    with _opened(app) as history:
        conversation = history.load(id_)
    wants_json = as_json or (output or "").endswith(".json")
    text = as_json_text(conversation) if wants_json else as_markdown(conversation, embed=True)
    if output is None:
        print_lines(app.environ, text.rstrip("\n").splitlines())
        return
    path = expand_home(output)
    if path.exists() and not force:
        raise UsageError(f"{path} already exists", hint="--force replaces it")
    with os_errors_as(LocalchatError, f"cannot write {path}"):
        write_text(path, text)


@command.command("rename")
@click.argument("id_", metavar="ID", shell_complete=complete_conversation)
@click.argument("title", nargs=-1, required=True)
@click.pass_obj
def rename(app: AppContext, id_: str, title: tuple[str, ...]) -> None:
    """Give a conversation another title."""
    with _opened(app) as history:
        history.rename(id_, " ".join(title))


@command.command("rm")
@click.argument(
    "ids", metavar="ID...", nargs=-1, required=True, shell_complete=complete_conversation
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def remove(app: AppContext, ids: tuple[str, ...], yes: bool) -> int:
    """Remove conversations. They can be restored for thirty days."""
    with _opened(app) as history:
        # Look up all ids first, so that a wrong one removes nothing.
        summaries = [history.summary(id_) for id_ in ids]
        for summary in summaries:
            question = f"Remove {summary.title!r} ({counted(summary.messages, 'message')})?"
            if not confirm(question, yes=yes, verb="history rm"):
                return ExitCode.ERROR
            history.delete(summary.id)
            undo = f"localchat history restore {summary.id[:ID_DIGITS]}"
            tell(f"removed {sanitize_line(summary.title)!r}; to restore it: {undo}")
    return ExitCode.OK


@command.command("restore")
@click.argument("id_", metavar="ID")
@click.pass_obj
def restore(app: AppContext, id_: str) -> None:
    """Restore a removed conversation. The first digits of its ID suffice."""
    with _opened(app) as history:
        summary = history.summary(history.restore(id_))
        tell(f"restored {sanitize_line(summary.title)!r} ({counted(summary.messages, 'message')})")


@contextmanager
def _opened(app: AppContext) -> "Iterator[History]":
    with open_history(find_paths(app.environ), to_read=True) as history:
        if history.notice:
            tell(f"localchat: {history.notice}")
        yield history


def _hit_lines(hits: "list[SearchHit]") -> Iterator[str]:
    for hit in hits:
        summary = hit.summary
        title = sanitize_line(summary.title)
        yield f"{summary.id[:ID_DIGITS]}  {moment(summary.updated_s)}  {title}"
        if hit.node_id is not None:
            yield f"    {sanitize_line(hit.snippet)}"


def _hit_record(hit: "SearchHit") -> dict[str, Any]:
    return {
        **hit.summary._asdict(),
        "message": hit.node_id,
        "snippet": hit.snippet,
        "marks": [list(mark) for mark in hit.marks],
    }
