"""Documents of a user: open the library, and complete `@name` in prompts."""

from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext, app_context
from localchat.config.paths import find_paths

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.documents.library import DocumentLibrary


def open_library(app: AppContext) -> "DocumentLibrary":
    """Open the documents of this user."""
    from localchat.documents.library import DocumentLibrary

    return DocumentLibrary(find_paths(app.environ).data_dir / "documents")


def complete_documents(
    ctx: click.Context, param: click.Parameter, incomplete: str, *, sign: str = ""
) -> "list[CompletionItem]":
    """Complete names of collections after `sign`."""
    from click.shell_completion import CompletionItem

    app = app_context(ctx)
    return [
        CompletionItem(f"{sign}{name}", help="documents")
        for name in open_library(app).names()
        if f"{sign}{name}".startswith(incomplete)
    ]
