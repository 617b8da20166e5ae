"""`localchat pull NAME`: fetch a model, and go on where an earlier try stopped."""

from typing import TYPE_CHECKING

import click

from localchat.cli.door import Door
from localchat.cli.options import given_flags

if TYPE_CHECKING:
    from localchat.cli.pull_view import View
    from localchat.library.names import Reference
    from localchat.paths import Paths


@click.command("pull")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print progress as lines of JSON.")
@click.option("--offline/--no-offline", default=None, help="Never use the network.")
@click.option("-q", "--quiet/--no-quiet", default=None, help="Only errors.")
@click.option("--color/--no-color", default=None, help="Colours on a terminal; on.")
@click.pass_context
def command(ctx: click.Context, /, name: str, as_json: bool, **_: object) -> int:
    """Fetch a model, or the rest of it.

    \b
    localchat pull qwen2.5:7b-q4_k_m       a name of the catalogue
    localchat pull qwen2.5:7b              the same: Q4_K_M where nothing is said
    localchat pull hf.co/user/repo:Q8_0    a repository of the Hugging Face hub
    """
    from localchat.cli.pull_view import view_for
    from localchat.cli.terminal import Terminal
    from localchat.errors import LocalchatError
    from localchat.library.catalogue import read_catalogue
    from localchat.library.names import parse
    from localchat.paths import find_paths
    from localchat.settings import from_environment, resolve
    from localchat.settings_file import read_settings

    door = ctx.find_object(Door)
    assert door is not None
    paths = find_paths(door.environ)
    settings, origins = resolve(
        read_settings(paths.settings_file).layer(),
        from_environment(door.environ),
        given_flags(ctx),
    )
    forbidden_by = origins["offline"] if settings.offline else _hub_forbids(door)
    terminal = Terminal(door.environ, quiet=settings.quiet, color=settings.color)
    with view_for(terminal, as_json=as_json) as view:
        try:
            reference = parse(name, read_catalogue(paths))
            if forbidden_by:
                _show_what_is_here(reference, paths, forbidden_by, view)
            else:
                _pull(reference, paths, door, view)
        except LocalchatError as problem:
            view.failed(problem)
            raise
        except KeyboardInterrupt:
            view.stopped(name)
            raise
    return 0


def _pull(reference: "Reference", paths: "Paths", door: Door, view: "View") -> None:
    from localchat.library.hub import hub_for
    from localchat.library.patience import Patience
    from localchat.library.pull import fetch, look_up

    patience = Patience()
    hub = hub_for(door.environ)
    choice = look_up(reference, hub, view.tell, patience)
    fetch(choice, hub, paths.models_dir, view.tell, patience)


def _hub_forbids(door: Door) -> str:
    """The variable that tells every tool of the hub to stay offline; empty where none does."""
    yes = ("1", "on", "true", "yes")
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if door.environ.get(name, "").lower() in yes), "")


def _show_what_is_here(
    reference: "Reference", paths: "Paths", forbidden_by: str, view: "View"
) -> None:
    """Without the network a model that is here whole is enough. Raises NetworkError."""
    from localchat.library.hub import offline
    from localchat.library.manifest import installed
    from localchat.library.names import among
    from localchat.library.telling import Done

    found = among(reference, installed(paths.models_dir))
    if found is None or not found.complete:
        raise offline(reference.name, forbidden_by)
    view.tell(Done(found.manifest.name, str(found.path), found.size_bytes, 0))
