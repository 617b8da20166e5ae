"""The documents of a user, for prompts: opened by `@name`, and completed."""

from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.config.paths import find_paths

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.documents.collection import Embed
    from localchat.documents.library import DocumentLibrary


def open_library(app: AppContext, embed: "Embed | None" = None) -> "DocumentLibrary":
    """The documents of this user. `embed`: for those that were learned with an embedding model."""
    from localchat.documents.library import DocumentLibrary

    return DocumentLibrary(find_paths(app.environ).data_dir / "documents", embed)


def completions(ctx: click.Context, incomplete: str, *, sign: str = "") -> "list[CompletionItem]":
    """Collections whose name, after `sign`, begins with `incomplete`."""
    from click.shell_completion import CompletionItem

    app = ctx.find_object(AppContext)
    if app is None:
        return []
    return [
        CompletionItem(f"{sign}{name}", help="documents")
        for name in open_library(app).names()
        if f"{sign}{name}".startswith(incomplete)
    ]
