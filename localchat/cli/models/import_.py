"""Command `localchat import`: names a model file or a checkpoint, or adds a folder."""

from pathlib import Path
from typing import Any, Literal

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json
from localchat.cli.streams import tell
from localchat.config.paths import expand_home, find_paths
from localchat.errors import UsageError
from localchat.sanitize import sanitize_line
from localchat.units import size


@click.command("import")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--forget", is_flag=True, help="Stop using this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, path: Path, name: str | None, forget: bool, as_json: bool) -> None:
    """Add a model file under a name, or all models of a folder.

    A GGUF file, or a folder of safetensors, gets an alias and stays where it is. Another folder is added to
    those that are searched for models.
    """
    from localchat.model_files.checkpoint import is_checkpoint

    path = expand_home(path).absolute()
    is_model_folder = is_checkpoint(path) and (name is not None or not any(path.glob("*.gguf")))
    if forget or (path.is_dir() and not is_model_folder):
        if name is not None:
            raise UsageError("a folder of models takes no name")
        _import_folder(app, path, forget=forget, as_json=as_json)
    else:
        _import_model(app, path, name, as_json=as_json)


def _import_model(app: AppContext, path: Path, name: str | None, *, as_json: bool) -> None:
    from localchat.backend_api.registry import choose_for_model
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.aliases import add_alias
    from localchat.models.gguf_files import plain_stem, split_parts
    from localchat.models.index import files_of

    summary = read_summary(path)
    kind: Literal["gguf", "safetensors"] = "safetensors"
    if not path.is_dir():
        kind = "gguf"
        path = split_parts(path)[0]
    name = name or (plain_stem(path) if kind == "gguf" else path.name)
    # Importing a model twice is not an error.
    if _is_imported(app, name, path, as_json=as_json):
        return
    _check_free(app, name)
    add_alias(find_paths(app.environ), name, str(path))
    record = {
        "name": name,
        "path": str(path),
        "how": "alias",
        "source": str(path),
        "size_bytes": sum(file.stat().st_size for file in files_of(path)),
        "warning": choose_for_model(summary, kind).backend.objection(summary) or None,
    }
    _announce(app, record, "used in place", as_json=as_json)


def _is_imported(app: AppContext, name: str, path: Path, *, as_json: bool) -> bool:
    """Return True, and announce it, if the name already means this file or folder."""
    from localchat.models.index import read_index

    model = read_index(find_paths(app.environ), app.environ).find(name)
    if model is None or model.path is None or not model.path.samefile(path):
        return False
    record = {
        "name": model.name,
        "path": str(model.path),
        "how": "already imported",
        "source": str(path),
        "size_bytes": model.size_bytes,
        "warning": model.trouble or None,
    }
    _announce(app, record, "imported already", as_json=as_json)
    return True


def _check_free(app: AppContext, name: str) -> None:
    """Raise UsageError for an invalid name, or one that another model has."""
    from localchat.models.aliases import check_name
    from localchat.models.index import read_index

    check_name(name)
    model = read_index(find_paths(app.environ), app.environ).find(name)
    if model is not None:
        raise UsageError(
            f"there is a model {model.name} already ({model.origin})",
            hint="give another name after the path",
        )


def _announce(app: AppContext, record: dict[str, Any], how: str, *, as_json: bool) -> None:
    if as_json:
        print_json(app.environ, record)
        return
    path = sanitize_line(record["path"])
    name = sanitize_line(record["name"])
    tell(f"localchat: {name} is {path}, {how} ({size(record['size_bytes'])})")
    if record["warning"]:
        tell(f"localchat: it cannot be run: {sanitize_line(record['warning'])}")


def _import_folder(app: AppContext, folder: Path, *, forget: bool, as_json: bool) -> None:
    from localchat.models.aliases import add_folder, remove_folder
    from localchat.models.external.discovery import find_external_models
    from localchat.models.external.stores import FOLDER

    paths = find_paths(app.environ)
    shown = sanitize_line(str(folder))
    if forget:
        if not remove_folder(paths, folder):
            raise UsageError(f"{folder} is not one of the added folders")
        if as_json:
            print_json(app.environ, {"folder": str(folder), "models": []})
        else:
            tell(f"localchat: stopped using folder {shown}; its files stay")
        return
    add_folder(paths, folder)
    models = [
        model
        for model in find_external_models(app.environ, origins=(FOLDER,)).models
        if model.path is not None and model.path.is_relative_to(folder)
    ]
    if as_json:
        names = [{"name": model.name, "path": str(model.path)} for model in models]
        print_json(app.environ, {"folder": str(folder), "models": names})
        return
    tell(f"localchat: added folder {shown}; models in it: {len(models)}")
    for model in models:
        tell(f"  {sanitize_line(model.name)}")
