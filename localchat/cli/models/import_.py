"""Command `localchat import`: links a file, names a checkpoint, or adds a folder."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json
from localchat.cli.streams import tell
from localchat.config.paths import expand_home, find_paths
from localchat.errors import LocalchatError, UsageError, reason
from localchat.sanitize import sanitize_line
from localchat.units import size

How = Literal["hard link", "symbolic link", "copy"]


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

    path = expand_home(path).absolute()
    is_model_folder = is_checkpoint(path) and (name is not None or not any(path.glob("*.gguf")))
    if is_model_folder and not forget:
        if how is not None:
            raise UsageError("a checkpoint is used in place: it takes no --symlink or --copy")
        _import_checkpoint(app, path, path.name if name is None else name, as_json=as_json)
    elif forget or path.is_dir():
        if name is not None or how is not None:
            raise UsageError("a folder is used in place: it takes no name, --symlink or --copy")
        _import_folder(app, path, forget=forget, as_json=as_json)
    else:
        _import_file(app, path, name, cast(How, how or "hard link"), as_json=as_json)


def _import_file(app: AppContext, path: Path, name: str | None, how: How, *, as_json: bool) -> None:
    from localchat.backend_api.registry import choose_for_file
    from localchat.model_files.architecture import model_shape
    from localchat.model_files.open_gguf import read_header
    from localchat.models.gguf_files import plain_stem

    header = read_header(path)
    name = plain_stem(path) if name is None else name
    # Importing a file twice is not an error.
    if _is_imported(app, name, path, as_json=as_json):
        return
    _check_free(app, name)
    linked = link_model(header.parts, find_paths(app.environ).models_dir, name, how)
    record = {
        "name": name,
        "path": str(linked.path),
        "how": linked.how,
        "source": str(path),
        "size_bytes": header.file_bytes,
        "warning": choose_for_file(linked.path).backend.objection(model_shape(header)) or None,
    }
    _announce(app, record, f"a {linked.how}", as_json=as_json)


def _import_checkpoint(app: AppContext, folder: Path, name: str, *, as_json: bool) -> None:
    from localchat.backend_api.registry import choose_for_model
    from localchat.model_files.checkpoint import read_checkpoint
    from localchat.models.aliases import add_alias
    from localchat.models.index import files_of

    checkpoint = read_checkpoint(folder)
    if _is_imported(app, name, folder, as_json=as_json):
        return
    _check_free(app, name)
    add_alias(find_paths(app.environ), name, str(folder))
    backend = choose_for_model(checkpoint, "safetensors").backend
    record = {
        "name": name,
        "path": str(folder),
        "how": "alias",
        "source": str(folder),
        "size_bytes": sum(file.stat().st_size for file in files_of(folder)),
        "warning": backend.objection(checkpoint) or None,
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
    tell(f"localchat: {record['name']} is {path}, {how} ({size(record['size_bytes'])})")
    if record["warning"]:
        tell(f"localchat: it cannot be run: {sanitize_line(record['warning'])}")


def _import_folder(app: AppContext, folder: Path, *, forget: bool, as_json: bool) -> None:
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


class Linked(NamedTuple):
    """A model in the models folder."""

    path: Path
    """The file, or the first part of a split model."""
    how: How


def link_model(files: Sequence[Path], models_dir: Path, name: str, how: How) -> Linked:
    """Link or copy all files of a model to `name`, all or none.

    A hard link that the file system refuses becomes a symbolic one. Raises UsageError if the name is taken,
    LocalchatError.
    """
    targets = list(_targets(len(files), models_dir, name))
    for target in targets:
        if target.exists() or target.is_symlink():
            raise UsageError(
                f"there is a model {name} already: {target}",
                hint=f"give another name, or remove it first: localchat rm {name}",
            )
    created: list[Path] = []
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        if how == "copy":
            _check_free_space(files, models_dir)
        for source, target in zip(files, targets, strict=True):
            how = _link(source.resolve(), target, how)
            created.append(target)
    except BaseException as problem:
        for target in created:
            target.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise LocalchatError(
                f"{name} cannot be put into {models_dir}: {reason(problem)}"
            ) from problem
        raise
    return Linked(targets[0], how)


def _targets(count: int, models_dir: Path, name: str) -> Iterator[Path]:
    if count == 1:
        yield models_dir / f"{name}.gguf"
        return
    for number in range(1, count + 1):
        yield models_dir / f"{name}-{number:05}-of-{count:05}.gguf"


def _link(source: Path, target: Path, how: How) -> How:
    """Create one link or copy, and return its kind."""
    if how == "copy":
        _copy(source, target)
        return how
    if how == "hard link":
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            pass  # another disk or owner, or a file system without hard links
        else:
            return how
    target.symlink_to(source)
    return "symbolic link"


def _copy(source: Path, target: Path) -> None:
    """Copy under a temporary name, then rename."""
    temporary = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_free_space(files: Sequence[Path], folder: Path) -> None:
    needed = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise LocalchatError(
            f"a copy takes {size(needed)}, and {folder} has {size(free)} free",
            hint="without --copy it is a link and takes nothing",
        )
