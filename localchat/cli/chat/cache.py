"""Command `localchat cache`: the KV of conversations on the disk."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.group import DefaultGroup
from localchat.cli.output import confirm, print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.errors import ExitCode, LocalchatError
from localchat.sanitize import sanitize_line
from localchat.units import size

if TYPE_CHECKING:
    from localchat.kv_store.store import KVStore, NamespaceSummary

_HEAD = ("MODEL", "SIZE", "LAST USED")


@click.group("cache", cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """Show or clear the KV cache on disk.

    A conversation that is opened again is read back instead of computed. The setting cache_disk_gb bounds it,
    --no-cache-disk does without. What only a deleted conversation had goes with its text, after thirty days.
    Alone it lists them, with the flags of list.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_(app: AppContext, as_json: bool) -> None:
    """List the stored KV cache of each model and build."""
    found = _store(app).summaries()
    if as_json:
        print_json(app.environ, [line._asdict() for line in found])
        return
    print_lines(app.environ, _lines(found))


@command.command("clear")
@click.argument("model", required=False, default="")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def clear(app: AppContext, model: str, yes: bool) -> int:
    """Delete the KV cache of MODEL, or all of it. Conversations stay; their prompts are computed again."""
    store = _store(app)
    held = sum(line.size_bytes for line in store.summaries() if model in ("", line.model))
    question = f"Delete {size(held)} of KV{f' of {model}' if model else ''}?"
    if held and not confirm(question, yes=yes, verb="cache clear"):
        return ExitCode.ERROR
    try:
        freed = store.clear(model)
    except OSError as problem:
        raise LocalchatError(f"cannot delete {store.folder}: {problem.strerror}") from problem
    if model and not held:
        tell(f"localchat: nothing is kept of {model}; localchat cache list names the models")
    else:
        tell(f"deleted {size(freed)}")
    return ExitCode.OK


def _store(app: AppContext) -> "KVStore":
    from localchat.kv_store.store import KVStore  # numpy

    return KVStore(find_paths(app.environ).kv_dir, 0)


def _lines(found: "list[NamespaceSummary]") -> Iterator[str]:
    if not found:
        yield "The disk keeps no KV of conversations."
        return
    rows = (
        (
            sanitize_line(line.model),
            size(line.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(line.used_s)),
        )
        for line in found
    )
    yield from table(_HEAD, rows, right=(1,))
    yield f"{size(sum(line.size_bytes for line in found))} in all"
