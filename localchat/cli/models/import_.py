"""Command `localchat import`: names a model, or adds a folder of models."""

from pathlib import Path
from typing import Literal

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.cli.streams import tell
from localchat.config.paths import expand_home, find_paths
from localchat.errors import UsageError
from localchat.sanitize import sanitize_line
from localchat.units import size


@click.command("import")
@click.argument("source", metavar="PATH|MODEL", shell_complete=complete_model)
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--forget", is_flag=True, help="Stop using this folder.")
@click.pass_obj
def command(app: AppContext, source: str, name: str | None, forget: bool) -> None:
    """Add a model file or a folder, or give a model another name.

    A GGUF file, or a folder of safetensors, gets an alias and stays where it is. So does a model of `localchat
    list`: after another pull of it, the alias names the new files. Another folder is added to those that are
    searched for models. `localchat rm NAME` removes an alias alone.
    """
    from localchat.model_files.checkpoint import is_checkpoint

    path = expand_home(source).absolute()
    is_model_folder = is_checkpoint(path) and (name is not None or not any(path.glob("*.gguf")))
    if forget or (path.is_dir() and not is_model_folder):
        if name is not None:
            raise UsageError("a folder of models takes no name")
        _import_folder(app, path, forget=forget)
    elif name is not None and not path.exists():
        _name_model(app, source, name)
    else:
        _import_file(app, path, name)


def _name_model(app: AppContext, source: str, name: str) -> None:
    """Make `name` an alias of a model. Replaces another alias of this name."""
    from localchat.models.aliases import add_alias, check_name, read_aliases
    from localchat.models.index import read_index
    from localchat.models.resolve import IN_COMMAND, locate

    paths = find_paths(app.environ)
    check_name(name)
    model = locate(source, paths, IN_COMMAND, app.environ)
    target = read_aliases(paths).aliases.get(source, model.word)
    existing = read_index(paths, app.environ).find(name)
    if existing is not None and existing.kind != "alias":
        raise UsageError(f"there is a model {existing.name} already", hint="choose another name")
    add_alias(paths, name, target)
    tell(f"localchat: {name} is now an alias of {sanitize_line(target)}")


def _import_file(app: AppContext, path: Path, name: str | None) -> None:
    """Make a name an alias of a file or a checkpoint. Importing it twice is not an error."""
    from localchat.backend_api.registry import choose_for_model
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.aliases import add_alias, remove_alias
    from localchat.models.gguf_files import plain_stem, split_parts
    from localchat.models.index import files_of, read_index

    summary = read_summary(path)
    kind: Literal["gguf", "safetensors"] = "safetensors"
    if not path.is_dir():
        kind = "gguf"
        path = split_parts(path)[0]
    name = name or (plain_stem(path) if kind == "gguf" else path.name)
    paths = find_paths(app.environ)
    existing = read_index(paths, app.environ).find(name)
    outcome = "used in place"
    if existing is None:
        add_alias(paths, name, str(path))
    elif existing.kind == "alias" and existing.path is None:
        # The file behind the alias has moved.
        remove_alias(paths, existing.name)
        add_alias(paths, name, str(path))
    elif existing.path is not None and existing.path.samefile(path):
        outcome = "imported already"
    else:
        raise UsageError(
            f"there is a model {existing.name} already ({existing.origin})",
            hint="give another name after the path",
        )
    size_bytes = sum(file.stat().st_size for file in files_of(path))
    tell(f"localchat: {name} is {sanitize_line(str(path))}, {outcome} ({size(size_bytes)})")
    if objection := choose_for_model(summary, kind).backend.objection(summary):
        tell(f"localchat: it cannot be run: {sanitize_line(objection)}")


def _import_folder(app: AppContext, folder: Path, *, forget: bool) -> None:
    from localchat.models.aliases import add_folder, remove_folder
    from localchat.models.external.discovery import find_external_models
    from localchat.models.external.stores import FOLDER

    paths = find_paths(app.environ)
    shown = sanitize_line(str(folder))
    if forget:
        if not remove_folder(paths, folder):
            raise UsageError(f"{folder} is not one of the added folders")
        tell(f"localchat: stopped using folder {shown}; its files stay")
        return
    add_folder(paths, folder)
    models = [
        model
        for model in find_external_models(app.environ, origins=(FOLDER,)).models
        if model.path is not None and model.path.is_relative_to(folder)
    ]
    tell(f"localchat: added folder {shown}; models in it: {len(models)}")
    for model in models:
        tell(f"  {sanitize_line(model.name)}")
