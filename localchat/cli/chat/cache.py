"""Command `localchat cache`: the KV cache of conversations on disk."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.group import DefaultGroup
from localchat.cli.output import confirm, print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.errors import ExitCode, LocalchatError, os_errors_as
from localchat.sanitize import sanitize_line
from localchat.units import moment, size

if TYPE_CHECKING:
    from localchat.kv_store.store import KVStore, NamespaceSummary

_HEAD = ("MODEL", "SIZE", "LAST USED")


@click.group("cache", cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """Show or clear the KV cache on disk.

    The KV of a conversation that you open again is loaded instead of computed. The setting cache_disk_gb limits
    its size, and --no-cache-disk turns it off. KV of a deleted conversation is deleted with its text, after
    thirty days. Without a command, it lists the stored KV and takes the flags of list.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_(app: AppContext, as_json: bool) -> None:
    """List the stored KV cache of each model and build."""
    summaries = _store(app).summaries()
    if as_json:
        print_json(app.environ, [summary._asdict() for summary in summaries])
        return
    print_lines(app.environ, _lines(summaries))


@command.command("clear")
@click.argument("model", required=False, default="")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def clear(app: AppContext, model: str, yes: bool) -> int:
    """Delete the KV cache of MODEL, or all of it. Conversations stay, and their prompts are computed again."""
    store = _store(app)
    stored_bytes = sum(
        summary.size_bytes for summary in store.summaries() if model in ("", summary.model)
    )
    question = f"Delete {size(stored_bytes)} of KV?"
    if model:
        question = f"Delete {size(stored_bytes)} of KV of {model}?"
    if stored_bytes and not confirm(question, yes=yes, verb="cache clear"):
        return ExitCode.ERROR
    with os_errors_as(LocalchatError, f"cannot delete {store.folder}"):
        freed = store.clear(model)
    if model and not stored_bytes:
        tell(f"localchat: no KV of {model} is stored; localchat cache list shows the models")
    else:
        tell(f"deleted {size(freed)}")
    return ExitCode.OK


def _store(app: AppContext) -> "KVStore":
    from localchat.kv_store.store import KVStore  # imports numpy

    return KVStore(find_paths(app.environ).kv_dir, 0)


def _lines(summaries: "list[NamespaceSummary]") -> Iterator[str]:
    if not summaries:
        yield "No KV of conversations is stored on disk."
        return
    rows = (
        (
            sanitize_line(summary.model),
            size(summary.size_bytes),
            moment(summary.used_s),
        )
        for summary in summaries
    )
    yield from table(_HEAD, rows, right=(1,))
    yield f"{size(sum(summary.size_bytes for summary in summaries))} in all"
