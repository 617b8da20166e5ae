"""Options `-c` and `--conversation`: find, complete and open saved conversations."""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from localchat.cli.context import app_context
from localchat.config.paths import Paths, find_paths
from localchat.errors import HistoryUnusable, UsageError
from localchat.sanitize import sanitize_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.chat.conversation import Conversation
    from localchat.cli.resolve import Setup
    from localchat.history.store import History

HISTORY_FILE = "history.sqlite3"
_COMPLETED = 50


def open_history(paths: Paths, *, to_read: bool = False) -> "History":
    """Open the history of this user. Raises HistoryUnusable.

    With `to_read`, create no file, and also read one on a disk that is full or read-only.
    """
    from localchat.history.store import History  # imports sqlite3

    path = paths.data_dir / HISTORY_FILE
    if to_read and not path.exists():
        return History.open(None, paths.kv_dir)
    try:
        return History.open(path, paths.kv_dir)
    except HistoryUnusable:
        if to_read:
            # A file that cannot be read either is reported by the first error.
            with suppress(HistoryUnusable):
                return History.open_read_only(path)
        raise


def resumed(ctx: click.Context) -> "Conversation | None":
    """Load the conversation of `--continue` or `--conversation`. None without these flags.

    Raises UsageError, HistoryUnusable.
    """
    conversation_id = ctx.params["conversation"]
    continues_last = ctx.params["continue_last"]
    if not conversation_id and not continues_last:
        return None
    if conversation_id and continues_last:
        raise UsageError("--continue is the last conversation; --conversation names another")
    app = app_context(ctx)
    history = open_history(find_paths(app.environ), to_read=True)
    try:
        if conversation_id:
            return history.load(conversation_id)
        summary = history.last()
        if summary is None:
            raise UsageError("there is no conversation to continue", hint="leave out --continue")
        return history.load(summary.id, as_left=True)
    finally:
        # Closing a database waits up to 40 ms for the disk. The screen should not wait for it.
        threading.Thread(target=history.close, name="close history").start()


def complete(ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
    """Complete ids of conversations, with titles. Return nothing if the history is unreadable."""
    from click.shell_completion import CompletionItem

    app = app_context(ctx)
    paths = find_paths(app.environ)
    with suppress(HistoryUnusable), open_history(paths, to_read=True) as history:
        return [
            CompletionItem(summary.id, help=sanitize_line(summary.title))
            for summary in history.list(_COMPLETED)
            if summary.id.startswith(incomplete)
        ]
    return []


def open_to_record(setup: "Setup") -> "History | None":
    """Open the history to write. None if it is off, or unusable, which only shows a notice."""
    if not setup.settings.history:
        return None
    try:
        history = open_history(setup.paths)
    except HistoryUnusable as problem:
        setup.terminal.notify(f"this conversation is not saved: {problem.message}")
        return None
    if history.notice:
        setup.terminal.print_line(f"localchat: {history.notice}")
    return history


def open_for_session(setup: "Setup") -> "History":
    """Open the history of a session: one in memory if none can be recorded."""
    from localchat.history.store import History

    return open_to_record(setup) or History.open(None)
