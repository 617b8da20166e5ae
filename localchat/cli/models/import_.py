"""Command `localchat import`: links a file, names a checkpoint, or adds a folder."""

from pathlib import Path
from typing import Any, cast

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
@click.option("--symlink", "how", flag_value="symbolic link", help="Link by path, not by file.")
@click.option("--copy", "how", flag_value="copy", help="Copy the file instead of linking it.")
@click.option("--forget", is_flag=True, help="Stop using this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    app: AppContext, path: Path, name: str | None, how: str | None, forget: bool, as_json: bool
) -> None:
    """Add a model file under a name, or all models of a folder.

    A file gets a link in the models folder and is not copied: a hard link, which outlives the file, or a
    symbolic one where that is impossible. A folder is added to those that are searched, and its models stay in
    it; a folder of safetensors is a model itself, and is used in place.
    """
    from localchat.model_files.checkpoint import is_checkpoint

    given = expand_home(path).absolute()
    alone = is_checkpoint(given) and (name is not None or not any(given.glob("*.gguf")))
    if alone and not forget:
        if how is not None:
            raise UsageError("a checkpoint is used in place: it takes no --symlink or --copy")
        _checkpoint(app, given, given.name if name is None else name, as_json=as_json)
    elif forget or given.is_dir():
        if name is not None or how is not None:
            raise UsageError("a folder is used in place: it takes no name, --symlink or --copy")
        _folder(app, given, forget=forget, as_json=as_json)
    else:
        _file(app, given, name, how or "hard link", as_json=as_json)


def _file(app: AppContext, path: Path, name: str | None, how: str, *, as_json: bool) -> None:
    from localchat.backend_api.registry import choose_for_file
    from localchat.model_files.architecture import model_shape
    from localchat.model_files.open_gguf import read_header
    from localchat.models.gguf_files import plain_stem
    from localchat.models.link import How, link_model

    header = read_header(path)
    chosen = plain_stem(path) if name is None else name
    paths = find_paths(app.environ)
    if _is_imported(app, chosen, path, as_json=as_json):
        return
    _check_free(app, chosen)
    linked = link_model(header.parts, paths.models_dir, chosen, cast(How, how))
    record = {
        "name": chosen,
        "path": str(linked.path),
        "how": linked.how,
        "source": str(path),
        "size_bytes": header.file_bytes,
        "warning": choose_for_file(linked.path).backend.objection(model_shape(header)) or None,
    }
    _announce(app, record, f"a {linked.how}", as_json=as_json)


def _checkpoint(app: AppContext, folder: Path, name: str, *, as_json: bool) -> None:
    from localchat.backend_api.registry import choose_for_model
    from localchat.model_files.checkpoint import read_checkpoint
    from localchat.models.aliases import add_alias
    from localchat.models.index import files_of

    found = read_checkpoint(folder)
    if _is_imported(app, name, folder, as_json=as_json):
        return
    _check_free(app, name)
    add_alias(find_paths(app.environ), name, str(folder))
    record = {
        "name": name,
        "path": str(folder),
        "how": "alias",
        "source": str(folder),
        "size_bytes": sum(file.stat().st_size for file in files_of(folder)),
        "warning": choose_for_model(found, "safetensors").backend.objection(found) or None,
    }
    _announce(app, record, "used in place", as_json=as_json)


def _is_imported(app: AppContext, name: str, path: Path, *, as_json: bool) -> bool:
    """Whether the name means this file or folder already, which is then said."""
    from localchat.models.index import read_index

    there = read_index(find_paths(app.environ), app.environ).find(name)
    if there is None or there.path is None or not there.path.samefile(path):
        return False
    record = {
        "name": there.name,
        "path": str(there.path),
        "how": "already imported",
        "source": str(path),
        "size_bytes": there.size_bytes,
        "warning": there.trouble or None,
    }
    _announce(app, record, "imported already", as_json=as_json)
    return True


def _check_free(app: AppContext, name: str) -> None:
    """Raise UsageError for an invalid name, or one that another model has."""
    from localchat.models.aliases import check_name
    from localchat.models.index import read_index

    check_name(name)
    there = read_index(find_paths(app.environ), app.environ).find(name)
    if there is not None:
        raise UsageError(
            f"there is a model {there.name} already ({there.origin})",
            hint="give another name after the path",
        )


def _announce(app: AppContext, record: dict[str, Any], how: str, *, as_json: bool) -> None:
    if as_json:
        print_json(app.environ, record)
        return
    place = sanitize_line(record["path"])
    tell(f"localchat: {record['name']} is {place}, {how} ({size(record['size_bytes'])})")
    if record["warning"]:
        tell(f"localchat: it cannot be run: {sanitize_line(record['warning'])}")


def _folder(app: AppContext, folder: Path, *, forget: bool, as_json: bool) -> None:
    from localchat.models.aliases import add_folder, remove_folder
    from localchat.models.external.discovery import find_external_models
    from localchat.models.external.stores import FOLDER

    paths = find_paths(app.environ)
    if forget:
        if not remove_folder(paths, folder):
            raise UsageError(f"{folder} is not one of the added folders")
        if as_json:
            print_json(app.environ, {"folder": str(folder), "models": []})
        else:
            tell(f"localchat: stopped using folder {folder}; its files stay")
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
    tell(f"localchat: added folder {folder}; models in it: {len(models)}")
    for model in models:
        tell(f"  {model.name}")
